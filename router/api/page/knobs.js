// The parameters of a request: their controls, their values, and which of them a server's error blames.

import { $, make } from "./dom.js";

// `off`: the value that asks for nothing, and is not sent.
const KNOBS = [
  { name: "max_tokens", group: "answer", label: "Most tokens", min: 1, max: 1024, step: 1, value: 200 },
  { name: "n", group: "answer", label: "Samples", hint: "side by side", min: 1, max: 16, step: 1, value: 1, off: 1 },
  { name: "num_beams", group: "answer", label: "Beams", hint: "1: none", min: 1, max: 8, step: 1, value: 1, off: 1 },
  { name: "length_penalty", group: "answer", label: "Length penalty", hint: "0: none", min: -2, max: 4, step: 0.1, value: 1, off: 1, open: true },
  { name: "top", group: "answer", label: "Alternatives", min: 0, max: 5, step: 1, value: 5 },
  { name: "temperature", group: "sampling", label: "Temperature", hint: "0: greedy", min: 0, max: 2, step: 0.05, value: 0.8 },
  { name: "top_p", group: "sampling", label: "Top-p", min: 0.01, max: 1, step: 0.01, value: 1, off: 1 },
  { name: "top_k", group: "sampling", label: "Top-k", hint: "0: off", min: 0, max: 200, step: 1, value: 0, off: 0, open: true },
  { name: "min_p", group: "sampling", label: "Min-p", min: 0, max: 1, step: 0.01, value: 0, off: 0 },
  { name: "seed", group: "sampling", label: "Seed", hint: "empty: another each time", min: 0, max: Number.MAX_SAFE_INTEGER, step: 1, value: "", off: "" },
  { name: "repetition_penalty", group: "penalties", label: "Repetition", hint: "1: off", min: 0.5, max: 2, step: 0.05, value: 1, off: 1, open: true },
  { name: "frequency_penalty", group: "penalties", label: "Frequency", min: -2, max: 2, step: 0.1, value: 0, off: 0 },
  { name: "presence_penalty", group: "penalties", label: "Presence", min: -2, max: 2, step: 0.1, value: 0, off: 0 },
];
const BLAMED = { max_new_tokens: "max_tokens", best_of: "n", num_return_sequences: "n", top_n_tokens: "top", top_logprobs: "top", logprobs: "top" };
const EXAMPLES = {
  json_schema: `{
  "type": "object",
  "properties": {
    "name": {"type": "string"},
    "age": {"type": "integer"}
  },
  "required": ["name", "age"]
}`,
  regex: "(yes|no), because [a-z ]{10,60}\\.",
  choice: "yes\nno\nperhaps",
  grammar: `start: "The " animal " is " colour "."
animal: "cat" | "dog"
colour: "grey" | "brown" | "black"`,
};
const SOURCES = { json_schema: "Schema", regex: "Regular expression", choice: "Lines", grammar: "Grammar in Lark's notation" };

export class Knobs {
  constructor(form) {
    this.form = form;
    for (const knob of KNOBS) form.querySelector(`[data-group=${knob.group}]`).append(row(knob));
    $("grammar").addEventListener("change", () => this.#grammar(true));
    form.addEventListener("input", (event) => {
      if (event.target.dataset.knob === "num_beams") this.#beams(true);
      event.target.removeAttribute("aria-invalid");
      event.target.setCustomValidity?.("");
    });
    form.addEventListener("reset", () =>
      setTimeout(() => {
        this.#grammar(false);
        this.#beams(false);
        form.querySelectorAll("[type=range]").forEach(fill);
      }),
    );
    form.addEventListener("submit", (event) => event.preventDefault());
    this.#beams(false);
  }

  // The operator's limits.
  limit({ choices, beams, top_tokens, max_total_tokens }) {
    for (const [name, most] of [["n", choices], ["num_beams", beams], ["top", top_tokens], ["max_tokens", max_total_tokens - 1]]) {
      if (most < 0) continue;
      for (const input of document.querySelectorAll(`[data-knob=${name}]`)) {
        input.max = String(most);
        if (Number(input.value) > most) input.value = String(most);
        if (input.type === "range") fill(input);
      }
    }
  }

  // Everything as the API wants it, or null, and the browser shows what is wrong.
  values() {
    for (const blamed of this.form.querySelectorAll("[aria-invalid]")) blamed.removeAttribute("aria-invalid");
    const form = grammar($("grammar").value, $("grammar-source"));
    if (form === null || !this.form.reportValidity()) {
      $("knobs").open = true;
      this.form.reportValidity();
      return null;
    }
    const parameters = {};
    for (const { name, off } of KNOBS) {
      const text = $(name).value;
      if (name !== "top" && !$(name).parentElement.hidden && text !== "" && Number(text) !== off) parameters[name] = Number(text);
    }
    const stop = $("stop").value.split("\n").filter(Boolean).map(unescaped);
    if (stop.length) parameters.stop = stop;
    if ($("priority").value !== "normal") parameters.priority = $("priority").value;
    return { parameters: { ...parameters, ...form }, top: Number($("top").value), grammar: $("grammar").value };
  }

  // Marks the control of a field that the server refused. Says whether there is one.
  blame(field) {
    const input = $(BLAMED[field] ?? field) ?? (/response_format|structured|guided|grammar/.test(field) ? $("grammar-source") : null);
    if (!input || !this.form.contains(input)) return;
    $("knobs").open = true;
    input.setAttribute("aria-invalid", "true");
  }

  // Most who search beams want the most probable text: nothing is drawn then, until somebody pulls the temperature up again.
  #beams(chosen) {
    const searched = Number($("num_beams").value) > 1;
    $("length_penalty").parentElement.hidden = $("length_penalty").disabled = !searched; // else it could be wrong unseen
    if (chosen && searched !== this.searched) {
      const { min, value } = KNOBS.find(({ name }) => name === "temperature");
      for (const input of document.querySelectorAll("[data-knob=temperature]")) {
        input.value = searched ? min : value;
        if (input.type === "range") fill(input);
      }
    }
    this.searched = searched;
  }

  #grammar(chosen) {
    const kind = $("grammar").value;
    const source = $("grammar-source");
    $("grammar-row").hidden = !(kind in EXAMPLES);
    $("grammar-label").textContent = SOURCES[kind] ?? "";
    if (chosen && (!source.value || Object.values(EXAMPLES).includes(source.value))) source.value = EXAMPLES[kind] ?? "";
    source.setCustomValidity("");
  }
}

// A number to type, and a slider for those who would rather pull.
function row({ name, label, hint, min, max, step, value, open }) {
  const typed = { type: "number", id: name, min, max: open ? "" : max, step: step < 1 ? 0.01 : 1 };
  const number = make("input", { ...typed, autocomplete: "off", inputMode: "decimal" });
  number.setAttribute("value", value); // the default, for a reset
  number.dataset.knob = name;
  const title = make("label", { htmlFor: name }, label);
  if (hint) title.append(" ", make("small", {}, hint));
  if (name === "seed") return make("div", { className: "knob" }, title, number);
  const range = make("input", { type: "range", min, max, step, tabIndex: -1 });
  range.setAttribute("value", value);
  range.setAttribute("aria-hidden", "true");
  range.dataset.knob = name;
  range.addEventListener("input", () => (number.value = range.value));
  number.addEventListener("input", () => (range.value = number.value));
  for (const input of [range, number]) input.addEventListener("input", () => fill(range));
  fill(range);
  return make("div", { className: "knob pulled" }, title, number, range);
}

// How far a slider is pulled, for its colour.
function fill(range) {
  range.style.setProperty("--at", (range.value - range.min) / (range.max - range.min));
}

function grammar(kind, source) {
  if (kind === "json_object") return { response_format: { type: "json_object" } };
  if (kind === "choice") return { structured_outputs: { choice: source.value.split("\n").filter(Boolean) } };
  if (kind === "regex" || kind === "grammar") return { structured_outputs: { [kind]: source.value } };
  if (kind !== "json_schema") return {};
  try {
    return { response_format: { type: "json_schema", json_schema: { name: "answer", schema: JSON.parse(source.value), strict: true } } };
  } catch (error) {
    source.setCustomValidity(`This is no JSON: ${error.message}`);
    return null;
  }
}

const unescaped = (text) => text.replace(/\\([nt\\])/g, (_, letter) => ({ n: "\n", t: "\t", "\\": "\\" })[letter]);
