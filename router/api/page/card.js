// The card of a token: how probable it was, and what else might have stood there. Shown at the pointer, at a tap, at the keyboard.

import { make } from "./dom.js";

const SLOW = 120; // milliseconds before it goes away, so that the pointer can reach it

export const percent = (logprob) => {
  const share = Math.exp(logprob) * 100;
  if (share >= 99.95) return "100 %";
  if (share >= 0.1) return `${share.toFixed(1)} %`;
  return "< 0.1 %";
};

const signed = (number) => number.toFixed(3).replace(/^-(?=0\.000$)/, "").replace("-", "−");

// Spaces and line ends that can be seen.
export const visible = (text) => text.replaceAll(" ", "␣").replaceAll("\n", "↵").replaceAll("\t", "⇥") || "∅";

export class Card {
  // `choose(answer, index, alternative)`: somebody wants to go on from there. `why(answer, alternative)`: why nobody can, or "".
  constructor(element, { choose, why, said }) {
    this.element = element;
    this.choose = choose;
    this.why = why;
    this.said = said;
    this.span = null;
    this.pinned = false;
    element.addEventListener("pointerenter", () => clearTimeout(this.timer));
    element.addEventListener("pointerleave", () => this.#later());
    element.addEventListener("keydown", (event) => this.#key(event));
    document.addEventListener("pointerdown", (event) => {
      if (!element.contains(event.target) && !event.target.closest?.(".token")) this.hide();
    });
    document.addEventListener("scroll", () => (this.pinned ? this.#place() : this.hide()), { passive: true, capture: true });
    addEventListener("resize", () => this.hide());
  }

  // The tokens of this answer show it.
  serve(answer) {
    const { body } = answer;
    const token = (event) => event.target.closest(".token");
    body.addEventListener("pointerover", (event) => {
      if (event.pointerType === "mouse" && token(event) && !this.pinned) this.show(answer, token(event));
    });
    body.addEventListener("pointerout", () => this.#later());
    body.addEventListener("click", (event) => {
      if (!token(event) || String(getSelection())) return;
      this.show(answer, token(event), true);
    });
    body.addEventListener("keydown", (event) => this.#walk(answer, event));
    body.addEventListener("blur", (event) => this.element.contains(event.relatedTarget) || this.hide());
  }

  show(answer, span, pinned = false) {
    clearTimeout(this.timer);
    const index = Number(span.dataset.index);
    const found = answer.tokens[index];
    if (!found || found.logprob === null) return this.hide();
    this.span?.classList.remove("shown");
    Object.assign(this, { span, answer, pinned });
    span.classList.add("shown");
    this.element.replaceChildren(...this.#content(answer, index, found));
    this.element.hidden = false;
    this.#place();
  }

  hide() {
    clearTimeout(this.timer);
    this.element.hidden = true;
    this.pinned = false;
    this.span?.classList.remove("shown");
    this.span = null;
  }

  #later() {
    if (this.pinned) return;
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.hide(), SLOW);
  }

  #content(answer, index, found) {
    const bits = -found.logprob / Math.LN2;
    const head = make("p", { className: "token-head" }, make("code", {}, visible(found.token)), make("b", {}, percent(found.logprob)));
    const sub = make("p", { className: "muted" }, `log-probability ${signed(found.logprob)} · ${bits.toFixed(bits < 10 ? 1 : 0)} bits`);
    const others = [...found.top].sort((one, other) => other.logprob - one.logprob);
    if (!others.some(({ token }) => token === found.token)) others.push(found);
    if (others.length < 2) return [head, sub];
    const list = make("ul", {}, ...others.map((other) => make("li", {}, this.#alternative(answer, index, found, other))));
    const hint = this.why(answer, others[0]) || "Choose one, and the answer goes on from there.";
    return [head, sub, list, make("p", { className: "muted hint" }, hint)];
  }

  #alternative(answer, index, found, other) {
    const taken = other.token === found.token;
    const button = make("button", { type: "button", className: taken ? "taken" : "" });
    button.append(make("i"), make("code", {}, visible(other.token)), make("span", {}, percent(other.logprob)));
    button.style.setProperty("--share", Math.exp(other.logprob).toFixed(4));
    button.disabled = taken || this.why(answer, other) !== "";
    if (taken) button.setAttribute("aria-label", `${other.token}, ${percent(other.logprob)}, taken`);
    button.addEventListener("click", () => {
      this.hide();
      this.choose(answer, index, other);
    });
    return button;
  }

  #place() {
    const { style, offsetWidth: width, offsetHeight: height } = this.element;
    const [first] = this.span.getClientRects();
    if (!first) return;
    const left = Math.max(8, Math.min(first.left - 12, innerWidth - width - 8));
    const below = first.bottom + 6;
    const top = below + height > innerHeight - 8 && first.top - height - 6 > 0 ? first.top - height - 6 : below;
    style.setProperty("left", `${left}px`);
    style.setProperty("top", `${top}px`);
  }

  // From token to token.
  #walk(answer, event) {
    const last = answer.tokens.length - 1;
    const to = { ArrowRight: answer.at + 1, ArrowLeft: answer.at - 1, Home: 0, End: last }[event.key];
    if (event.key === "Escape" && !this.element.hidden) {
      event.stopPropagation(); // it would stop the stream, too
      return this.hide();
    }
    if (event.key === "Enter" || event.key === "ArrowDown") {
      const button = this.element.hidden ? null : this.element.querySelector("button:enabled");
      if (button) {
        event.preventDefault();
        this.pinned = true;
        button.focus();
      }
      return undefined;
    }
    if (to === undefined || last < 0 || event.ctrlKey || event.metaKey || event.altKey) return undefined;
    event.preventDefault();
    answer.at = Math.max(0, Math.min(last, to));
    const span = answer.body.children[answer.at];
    span.scrollIntoView({ block: "nearest" });
    this.show(answer, span, true);
    const { token, logprob, top } = answer.tokens[answer.at];
    if (logprob === null) return this.said(token);
    const others = top.filter((other) => other.token !== token).slice(0, 3);
    const rest = others.map((other) => `${other.token} ${percent(other.logprob)}`).join(", ");
    return this.said(`${token} ${percent(logprob)}${rest ? `; otherwise ${rest}` : ""}`);
  }

  // Inside the card.
  #key(event) {
    if (event.key === "Escape") {
      event.stopPropagation();
      const { answer } = this;
      this.hide();
      answer.body.focus();
    }
    const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (!step) return;
    event.preventDefault();
    const buttons = [...this.element.querySelectorAll("button:enabled")];
    const at = buttons.indexOf(document.activeElement) + step;
    if (at < 0) this.answer.body.focus();
    else buttons[Math.min(at, buttons.length - 1)].focus();
  }
}
