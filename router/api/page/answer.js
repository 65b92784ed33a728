// One answer: a column with its tokens, coloured by how probable they were, and what is known of its speed.

import { make, say } from "./dom.js";

const MOST_BITS = 7; // of surprise: from here on the colour stays the same
const ENDS = { stop: "finished", length: "cut at the most tokens", tool_calls: "calls a tool", content_filter: "filtered" };

export class Answer {
  constructor(name) {
    this.tokens = []; // {text, token, logprob, top, thought, given}
    this.name = name;
    this.title = make("h3", {}, name);
    this.body = make("div", { className: "text", tabIndex: 0 });
    this.body.setAttribute("role", "group");
    this.body.setAttribute("aria-label", `${name}. Arrow keys go from token to token.`);
    this.facts = make("p", { className: "facts muted" });
    this.head = make("header", {}, this.title);
    this.element = make("article", { className: "answer" }, this.head, this.body, this.facts);
    this.at = -1; // the token that the keyboard is at
    this.begin();
  }

  // A stream begins, or another that goes on here.
  begin() {
    this.asked = performance.now();
    this.first = this.last = 0;
    this.count = 0; // tokens of this stream
    this.end = "";
    this.score = null; // where beams were searched
    this.element.setAttribute("aria-busy", "true");
    say(this.facts, "waiting for the first token");
  }

  // What it says, without its reasoning: so much of it goes back in a chat.
  get text() {
    return this.tokens.map(({ text, thought }) => (thought ? "" : text)).join("");
  }

  get thoughts() {
    return this.tokens.some(({ thought }) => thought);
  }

  // What came for it in one event. A token's text may come late, with a later token: then it is that one's.
  push({ text, thought, tokens }) {
    if (!text && !tokens.length) return;
    const joined = tokens.map(({ token }) => token).join("") === text;
    const shown = tokens.map((token, i) => ({ ...token, thought, text: joined ? token.token : i === tokens.length - 1 ? text : "" }));
    for (const token of shown.length ? shown : [{ text, token: "", logprob: null, top: [], thought }]) this.#add(token);
    if (!tokens.length) return;
    this.last = performance.now();
    this.first ||= this.last;
    this.count += tokens.length;
    this.#tell();
  }

  finish(reason, score = null) {
    this.score = score;
    this.end = ENDS[reason] ?? reason;
    if (this.end === ENDS.stop && this.tokens.at(-1)?.text === "") this.body.lastElementChild.classList.add("end");
    this.element.setAttribute("aria-busy", "false");
    this.#tell();
  }

  // Keeps what stands before token `index`, and puts another in its place. Says what `restore` needs.
  rewind(index, alternative) {
    const { top } = this.tokens[index];
    const { end, score, count, asked, first, last } = this;
    const taken = { index, tokens: this.#cut(index), end, score, count, asked, first, last };
    this.begin();
    this.#add({ text: alternative.token, ...alternative, top, given: true });
    return taken;
  }

  // As it was before it was rewound.
  restore({ index, tokens, ...rest }) {
    this.#cut(index);
    for (const token of tokens) this.#add(token);
    Object.assign(this, rest);
    this.finish(this.end, this.score);
  }

  // Takes away the tokens from `index` on.
  #cut(index) {
    [...this.body.children].slice(index).forEach((span) => span.remove());
    this.at = -1;
    return this.tokens.splice(index);
  }

  // The text before a token, as its model wrote it: held back parts of characters included, where there are none missing.
  before(index) {
    const tokens = this.tokens.slice(0, index);
    const shown = tokens.map(({ text }) => text).join("");
    const written = tokens.map(({ token }) => token).join("");
    return written.startsWith(shown) && !written.includes("\uFFFD") ? written : shown;
  }

  #add(token) {
    const word = token.text.trimStart() || token.text; // a space before it stays plain
    const space = token.text.slice(0, token.text.length - word.length);
    const parts = Object.entries({ space, word }).map(([className, text]) => make("span", { className }, text));
    const span = make("span", { className: "token" }, ...parts);
    if (token.logprob !== null && token.logprob !== undefined) {
      const surprise = Math.min(1, -token.logprob / Math.LN2 / MOST_BITS);
      span.style.setProperty("--surprise", surprise.toFixed(3));
    }
    if (token.thought) span.classList.add("thought");
    if (token.given) span.classList.add("given");
    span.dataset.index = String(this.tokens.length);
    this.tokens.push(token);
    this.body.append(span);
  }

  #tell() {
    const { first, last, asked, count } = this;
    const parts = [];
    if (this.end) parts.push(this.end);
    if (this.score !== null) parts.push(`score ${this.score.toFixed(3).replace("-", "−")}`);
    parts.push(`${count} token${count === 1 ? "" : "s"}`);
    if (count > 1 && last > first && this.score === null) parts.push(`${Math.round(((count - 1) / (last - first)) * 1000)} a second`);
    if (first) parts.push(`first after ${Math.round(first - asked)} ms`);
    say(this.facts, parts.join(" · "));
  }
}
