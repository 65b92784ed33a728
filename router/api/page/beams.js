// Beam search as it grows: a column for each token, lines to what it continues, and the way of the best answer through them.

import { visible } from "./card.js";
import { make, makeSvg, oncePerFrame, say } from "./dom.js";

const COLUMN = 96;
const ROW = 30;
const BOX = { width: 66, height: 22 };
const MOST_LETTERS = 7;
const GAP = 0.4; // rows between those that go on and those that are complete
const LEGEND = ["best", "going on", "complete", "dropped"];

export class Beams {
  constructor(width) {
    this.width = width;
    this.columns = []; // of nodes: {id, score, parent, heirs, kept, parts}
    this.live = [];
    this.kept = []; // complete, best first
    this.told = []; // the best answer's token ids
    this.way = []; // and its nodes
    this.rows = width;
    this.edges = makeSvg("g", { class: "edges" });
    this.nodes = makeSvg("g", {});
    this.svg = makeSvg("svg", { role: "img" });
    this.svg.append(this.edges, this.nodes);
    this.view = make("div", { className: "view", tabIndex: 0 }, this.svg);
    this.facts = make("span", {});
    const legend = LEGEND.map((kind) => make("span", { className: kind.replace(" ", "-") }, kind));
    this.element = make("figure", { className: "beams" }, this.view, make("figcaption", { className: "muted" }, this.facts, ...legend));
    this.scroll = oncePerFrame(() => {
      const following = this.view.scrollLeft + this.view.clientWidth > this.view.scrollWidth - COLUMN;
      return () => following && (this.view.scrollLeft = this.view.scrollWidth);
    });
    this.#tell();
  }

  // What a step made of the beams.
  grow({ live, complete }) {
    const parents = this.live;
    const column = this.columns.length;
    this.live = live.map((beam, row) => this.#add(beam, parents, column, row));
    const below = live.length && live.length + GAP;
    const ended = complete.map((beam, row) => this.#add(beam, parents, column, below + row));
    this.columns.push([...this.live, ...ended]);
    for (const node of ended) {
      node.kept = true;
      node.parts.forEach(({ classList }) => classList.add("complete"));
    }
    this.kept = [...this.kept, ...ended].sort((one, other) => other.score - one.score);
    const worse = this.kept.splice(this.width);
    for (const node of worse) node.kept = false;
    [...parents, ...worse].forEach(drop);
    this.rows = Math.max(this.rows, complete.length && below + complete.length);
    this.#draw();
    this.#follow();
  }

  // The best answer's next token is certain.
  settle(id) {
    this.told.push(id);
    this.#follow();
  }

  // Nothing grows any more; what was complete is what is left.
  finish() {
    if (!this.kept.length) return;
    const left = this.live;
    this.live = [];
    left.forEach(drop);
    this.#tell();
  }

  #add({ parent, id, text, score }, parents, column, row) {
    const [x, y] = [column * COLUMN, row * ROW];
    const group = makeSvg("g", { class: "beam", transform: `translate(${x} ${y + (ROW - BOX.height) / 2})` });
    const label = makeSvg("text", { x: BOX.width / 2, y: BOX.height / 2 });
    const shown = [...visible(text)];
    label.textContent = shown.length > MOST_LETTERS ? `${shown.slice(0, MOST_LETTERS - 1).join("")}…` : shown.join("");
    const title = makeSvg("title", {});
    title.textContent = `${shown.join("")} · score ${score === null ? "−∞" : score.toFixed(3).replace("-", "−")}`;
    group.append(title, makeSvg("rect", { ...BOX, rx: 6 }), label);
    this.nodes.append(group);
    const node = { id, score: score ?? -Infinity, parent: parents[parent] ?? null, heirs: 0, kept: false, row, parts: [group] };
    if (node.parent) {
      node.parent.heirs += 1;
      const [from, to] = [x - COLUMN + BOX.width, y + ROW / 2];
      const middle = (from + x) / 2;
      const start = node.parent.row * ROW + ROW / 2;
      const edge = makeSvg("path", { d: `M${from} ${start}C${middle} ${start} ${middle} ${to} ${x} ${to}` });
      this.edges.append(edge);
      node.parts.push(edge);
    }
    return node;
  }

  // The way of the best answer, as far as both its tokens and the beams are known.
  #follow() {
    while (this.way.length < Math.min(this.told.length, this.columns.length)) {
      const at = this.way.length;
      const parent = this.way.at(-1) ?? null;
      const next = this.columns[at].find((node) => node.parent === parent && node.id === this.told[at]);
      if (!next) return;
      this.way.push(next);
      next.parts.forEach(({ classList }) => classList.add("best"));
    }
  }

  #draw() {
    this.scroll();
    const { svg } = this;
    svg.setAttribute("width", this.columns.length * COLUMN - COLUMN + BOX.width + 2);
    svg.setAttribute("height", this.rows * ROW);
    this.#tell();
  }

  #tell() {
    const [steps, complete] = [this.columns.length, this.kept.length];
    const text = `${this.width} beams · ${steps} step${steps === 1 ? "" : "s"} · ${complete} complete`;
    say(this.facts, text);
    this.svg.setAttribute("aria-label", text);
  }
}

// Nothing comes of it: neither does a beam go on from it nor is it kept. Then nothing may come of what it went on from.
function drop(node) {
  for (let at = node; at && !at.heirs && !at.kept && !at.dropped; at = at.parent) {
    at.dropped = true;
    at.parts.forEach(({ classList }) => classList.add("dropped"));
    if (at.parent) at.parent.heirs -= 1;
  }
}
