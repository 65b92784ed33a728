// Makes elements. Text goes in as text only: nothing that comes from a server or a person is ever read as markup.

const SVG = "http://www.w3.org/2000/svg";

export const $ = (id) => document.getElementById(id);

export function make(tag, properties = {}, ...children) {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children);
  return element;
}

export function makeSvg(tag, attributes) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  return element;
}

// A new text only if it is one, so that a reader in between loses no selection.
export function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

// Looks at once, and does what comes of it before the next picture is drawn; what is asked for in between is done by that, too.
// A look lays the page out, which takes long where a text is long: once for each token, and the page stands still.
export function oncePerFrame(look) {
  let waits = false;
  return () => {
    if (waits) return;
    waits = true;
    const act = look();
    requestAnimationFrame(() => {
      waits = false;
      act();
    });
  };
}
