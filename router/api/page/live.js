// Watches the batch: one snapshot a second, while the page is looked at.

import { events } from "./api.js";
import { $, makeSvg, say } from "./dom.js";

const SECONDS = 60; // of history, in this page only
const [LEAST_WAIT, MOST_WAIT] = [1000, 8000]; // milliseconds before another try

const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const compact = new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 1 });
const count = (number) => (number < 10000 ? whole : compact).format(number);

class Line {
  constructor(svg) {
    this.values = [];
    this.area = makeSvg("path", { class: "area" });
    this.stroke = makeSvg("path", { class: "stroke", "vector-effect": "non-scaling-stroke" });
    svg.append(makeSvg("path", { class: "ground", "vector-effect": "non-scaling-stroke", d: "M0,23.5H59" }), this.area, this.stroke);
  }

  push(value) {
    this.values = [...this.values, value].slice(-SECONDS);
    const most = Math.max(1e-9, ...this.values);
    const start = SECONDS - this.values.length;
    const points = this.values.map((one, i) => `${start + i},${(22.5 - (one / most) * 20).toFixed(2)}`);
    this.stroke.setAttribute("d", `M${points.join("L")}`);
    this.area.setAttribute("d", `M${start},24L${points.join("L")}L${SECONDS - 1},24Z`);
  }
}

export class Live {
  // `known(stats)`: the first snapshot of a connection, and each one after the readiness has changed. `denied()`: a key is needed.
  constructor({ known, denied }) {
    this.known = known;
    this.denied = denied;
    this.rate = new Line($("live-rate-line"));
    this.step = new Line($("live-step-line"));
    this.wake = () => {};
    document.addEventListener("visibilitychange", () => this.again());
    addEventListener("pagehide", () => this.abort?.abort());
    this.#run();
  }

  // Another try, at once: there is a key now, or somebody looks again.
  again() {
    this.abort?.abort();
    this.wake();
  }

  async #run() {
    let wait = LEAST_WAIT;
    for (;;) {
      if (!document.hidden) {
        try {
          for await (const stats of this.#events()) {
            this.#show(stats);
            wait = LEAST_WAIT;
          }
        } catch (error) {
          this.#lost(error);
        }
      }
      const last = document.hidden ? 2 ** 31 - 1 : wait;
      await new Promise((resolve) => {
        this.wake = resolve;
        setTimeout(resolve, last);
      });
      wait = Math.min(wait * 2, MOST_WAIT);
    }
  }

  #events() {
    this.abort = new AbortController();
    this.before = null;
    this.ready = null;
    return events("stats", { signal: this.abort.signal });
  }

  #lost(error) {
    if (error.name === "AbortError") return;
    if (error.status === 401) {
      this.#state("denied", "needs a key");
      this.denied();
    } else {
      this.#state("lost", "no connection");
    }
  }

  #state(state, text) {
    $("state").dataset.state = state;
    say($("state"), text);
  }

  #show(stats) {
    this.#state(stats.ready ? "ready" : "wait", stats.stage);
    if (this.ready !== stats.ready) this.known(stats);
    this.ready = stats.ready;
    this.#requests(stats);
    this.#pages(stats.pages);
    this.#rates(stats);
  }

  #requests({ requests, prompt_budget }) {
    for (const name of ["running", "waiting", "paused"]) say($(`live-${name}`), count(requests[name]));
    say($("live-budget"), prompt_budget.tokens ? `${count(prompt_budget.used)} of ${count(prompt_budget.tokens)}` : "–");
  }

  #pages({ total, held, cached, free }) {
    const bar = $("live-pages");
    for (const [name, value] of Object.entries({ held, cached, free })) say($(`live-${name}`), count(value));
    bar.style.setProperty("--held", total ? held / total : 0);
    bar.style.setProperty("--cached", total ? cached / total : 0);
    bar.setAttribute("aria-label", `Of ${total} pages ${held} are held by requests, ${cached} cached, ${free} free`);
  }

  // Two snapshots make a rate.
  #rates({ time, counted }) {
    const before = this.before;
    if (before && time - before.time < 0.5) return;
    this.before = { time, ...counted };
    if (!before) return;
    const since = (name) => counted[name] - before[name];
    const seconds = time - before.time;
    const rate = since("generated_tokens") / seconds;
    const steps = since("steps");
    const milliseconds = steps ? (since("step_seconds") / steps) * 1000 : 0;
    const found = since("cached_prompt_tokens");
    const prompts = since("prompt_tokens") + found;
    say($("live-rate"), count(rate));
    say($("live-brief"), `${count(rate)} tokens a second · ${$("live-running").textContent} running`);
    say($("live-step"), steps ? milliseconds.toFixed(milliseconds < 9.95 ? 1 : 0) : "–");
    say($("live-prompts"), count(prompts / seconds));
    say($("live-hits"), prompts ? `${Math.round((found / prompts) * 100)} %` : "–");
    this.rate.push(rate);
    this.step.push(milliseconds);
  }
}
