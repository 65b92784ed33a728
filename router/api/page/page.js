// The page: takes what somebody writes, sends it, shows what comes. Nothing of it is kept anywhere but on the screen.

import { Answer } from "./answer.js";
import { Problem, events, key, pieces, request, watched } from "./api.js";
import { Beams } from "./beams.js";
import { Card } from "./card.js";
import { curl, python } from "./code.js";
import { $, make, oncePerFrame, say } from "./dom.js";
import { Images, content, picture, shortened } from "./images.js";
import { Knobs } from "./knobs.js";
import { Live } from "./live.js";

const NEAR = 120; // pixels that a text's end may be out of sight while the view still follows it
const narrow = matchMedia("(max-width: 40rem)");
const touch = matchMedia("(pointer: coarse)");

const knobs = new Knobs($("parameters"));
const card = new Card($("card"), { choose: goOn, why: whyNot, said: (text) => say($("said"), text) });
const images = new Images($("images"), $("image-files"), {
  sent: () => chat.reduce((count, turn) => count + turn.images.length, 0),
  refuse: fail,
});
const live = new Live({ known, denied });

const drafts = { completion: $("prompt").value, chat: "" }; // what stands in the box, by mode
let model = "";
let mode = "completion";
let chat = []; // turns: {prompt, images, answers, picked, element}
let last = null; // the request that was sent last
let denial = null; // the key that was refused
let running = null; // {abort, ended}: the stream under way

// Sending

function input() {
  const said = $("prompt").value;
  return { mode, model, prompt: said, messages: mode === "chat" ? messages(content(said, images.urls)) : null };
}

// Of the chat so far, with what is said next.
function messages(next, turns = chat) {
  const system = $("system").value.trim();
  const said = turns.flatMap(({ prompt, images: shown, answers, picked }) => [
    { role: "user", content: content(prompt, shown) },
    { role: "assistant", content: answers[picked].text },
  ]);
  return [...(system ? [{ role: "system", content: system }] : []), ...said, { role: "user", content: next }];
}

async function send() {
  await images.added;
  if (running) return;
  const values = knobs.values();
  const text = $("prompt").value;
  if (!values || !(text || (mode === "chat" && images.urls.length))) return;
  const asked = request(input(), values);
  const shown = mode === "chat" ? images.take() : [];
  const turn = newTurn(text, shown, asked.body.n ?? 1, asked.body.num_beams ? "Beam" : "Sample");
  if (mode === "chat") {
    chat.push(turn);
    $("prompt").value = "";
    $("chat").append(turn.element);
    reveal(turn);
  } else {
    $("completion").replaceChildren(turn.element);
  }
  await stream(asked, turn, turn.answers);
}

// Somebody wants another token there: the answer goes on from it.
async function goOn(answer, index, alternative) {
  const values = knobs.values();
  const turn = answer.turn;
  if (!values) return;
  await stop();
  const begun = answer.before(index) + alternative.token;
  const later = turn.mode === "chat" ? chat.splice(chat.indexOf(turn) + 1) : [];
  for (const { element } of later) element.remove();
  if (turn.mode === "chat") pick(turn, answer);
  const before = turn.mode === "chat" ? messages(content(turn.prompt, turn.images), chat.slice(0, chat.indexOf(turn))) : [];
  const asked = request(
    {
      mode: turn.mode,
      model,
      prompt: turn.prompt + begun,
      messages: [...before, { role: "assistant", content: begun }],
      continued: true,
    },
    values,
  );
  const { beams } = turn;
  const taken = answer.rewind(index, alternative);
  answer.body.focus({ preventScroll: true });
  if (!(await stream(asked, turn, [answer])) || answer.count) return;
  answer.restore(taken); // nothing came: all is as it was
  showBeams(turn, beams);
  chat.push(...later);
  $("chat").append(...later.map(({ element }) => element));
}

function whyNot(answer, { token }) {
  if (answer.thoughts) return "Reasoning can't be gone on from.";
  if ($("grammar").value) return "With a grammar, answers can't be gone on from.";
  return token.includes("\uFFFD") ? "This is a part of a character." : "";
}

// Says what went wrong, if anything did.
async function stream(asked, turn, answers) {
  const abort = new AbortController();
  let ended;
  running = { abort, ended: new Promise((resolve) => (ended = resolve)) };
  last = asked;
  const told = watched(asked) ?? asked;
  card.hide();
  showBeams(turn, told === asked ? null : new Beams(asked.body.num_beams));
  fail("");
  busy(true);
  const open = new Set(answers);
  const follow = oncePerFrame(() => {
    const near = below(turn) < NEAR;
    return () => near && reveal(turn);
  });
  let problem = null;
  try {
    for await (const event of events(told.path, { body: told.body, signal: abort.signal })) {
      follow();
      if (event.usage) note(turn, event.usage);
      if (event.details) note(turn, { prompt_tokens: event.details.input_length });
      if (event.live) turn.beams?.grow(event);
      if (event.token) turn.beams?.settle(event.token.id);
      for (const { index, parts, finish_reason, score } of pieces(event)) {
        const answer = answers[index];
        if (!answer) continue; // more than was asked for
        for (const part of parts) answer.push(part);
        if (finish_reason) {
          answer.finish(finish_reason, score);
          open.delete(answer);
        }
      }
    }
  } catch (error) {
    problem = error.name === "AbortError" ? null : error;
  }
  const end = problem ? "failed" : abort.signal.aborted ? "stopped" : "there is no other"; // beams may find fewer
  for (const answer of open) answer.finish(end);
  turn.beams?.finish();
  running = null;
  busy(false);
  ended();
  if (problem) refused(problem, turn);
  else say($("said"), answers.map((answer) => `${answer.name}: ${answer.facts.textContent}`).join(". "));
  return problem;
}

async function stop() {
  running?.abort.abort();
  await running?.ended;
}

// Nothing came: the text goes back to where it was written.
function refused(problem, turn) {
  fail(problem instanceof Problem ? problem.message : `The connection to the server broke: ${problem.message}`);
  if (problem.status === 401) askForKey();
  knobs.blame(problem.parameter ?? "");
  if (turn.answers.some(({ tokens }) => tokens.length)) return;
  turn.element.remove();
  if (turn.mode === "chat") {
    chat = chat.filter((other) => other !== turn);
    if (mode === "chat") $("prompt").value ||= turn.prompt;
    else drafts.chat ||= turn.prompt;
    if (!images.urls.length) images.put(turn.images);
  }
}

// Showing

function newTurn(prompt, shown, count, name) {
  const answers = Array.from({ length: count }, (_, i) => new Answer(count === 1 ? "Answer" : `${name} ${i + 1}`));
  const columns = make("div", { className: "answers" }, ...answers.map(({ element }) => element));
  columns.dataset.count = String(count);
  const element = make("section", { className: "turn" }, columns);
  const notes = make("p", { className: "notes muted" });
  element.append(notes);
  const turn = { prompt, images: shown, answers, element, notes, picked: 0, mode };
  if (mode === "chat") element.prepend(make("p", { className: "user" }, ...shown.map(picture), prompt));
  for (const answer of answers) {
    answer.turn = turn;
    card.serve(answer);
    if (mode === "chat" && count > 1) addPick(turn, answer);
  }
  return turn;
}

// Those of a search that begins; null: none can be seen.
function showBeams(turn, beams) {
  turn.beams?.element.remove();
  turn.beams = beams;
  if (beams) turn.notes.before(beams.element);
}

function note(turn, { prompt_tokens: count, prompt_tokens_details: details }) {
  const found = details?.cached_tokens ?? 0;
  say(turn.notes, `prompt of ${count} token${count === 1 ? "" : "s"}${found ? `, ${found} of them from the cache` : ""}`);
}

// Of several answers in a chat, one is what the model will have said.
function addPick(turn, answer) {
  answer.pick = make("button", { type: "button", className: "quiet pick" }, "Go on with this");
  answer.pick.addEventListener("click", () => pick(turn, answer));
  answer.head.append(answer.pick);
  if (answer === turn.answers[turn.picked]) pick(turn, answer);
}

function pick(turn, answer) {
  turn.picked = turn.answers.indexOf(answer);
  for (const other of turn.answers) {
    other.element.classList.toggle("picked", Boolean(other.pick) && other === answer);
    other.pick?.setAttribute("aria-pressed", String(other === answer));
  }
}

function busy(is) {
  say($("run"), is ? "Stop" : mode === "chat" ? "Send" : "Run");
  document.body.classList.toggle("busy", is);
  if (is) say($("said"), "The model writes.");
}

function fail(text) {
  say($("problem"), text);
  $("problem").hidden = !text;
}

// How many pixels of it are out of sight, below; in a chat, what is written next covers the lower end of the screen.
function below({ element, mode }) {
  const edge = mode === "chat" ? $("composer").getBoundingClientRect().top : innerHeight;
  return element.getBoundingClientRect().bottom - edge + 12;
}

function reveal(turn) {
  const hidden = below(turn);
  if (hidden > 0) scrollBy({ top: hidden, behavior: "instant" });
}

function known({ ready, limits, model: name }) {
  model = name;
  say($("model"), name);
  document.title = `${name} · penstock`;
  if (ready) knobs.limit(limits);
  images.most = limits.images;
  showChooser();
}

// Where there may be images: the model sees them, and a completion has no place for one.
function showChooser() {
  $("image-add").hidden = mode !== "chat" || !images.most;
  $("images").hidden = mode !== "chat" || !images.urls.length;
}

// Modes

function enter(next) {
  drafts[mode] = $("prompt").value;
  mode = next;
  const isChat = next === "chat";
  card.hide();
  document.body.dataset.mode = next;
  $("chat").hidden = !isChat;
  $("completion").hidden = isChat;
  $("system-row").hidden = !isChat;
  if (isChat) $("chat").after($("problem"), $("composer"));
  else $("completion").before($("composer"), $("problem"));
  $("prompt").value = drafts[next];
  $("prompt").rows = isChat ? 2 : 3;
  $("prompt").placeholder = isChat ? "Say something" : "A text for the model to go on with";
  say($("prompt-label"), isChat ? "Your message" : "Prompt");
  say($("hint"), touch.matches ? "" : isChat ? "Enter sends, Shift+Enter starts a new line" : "Ctrl+Enter");
  showChooser();
  busy(Boolean(running));
}

// Dialogs

function showCode() {
  const values = knobs.values();
  if (!values) return;
  const asked = shortened($("prompt").value || images.urls.length || !last ? request(input(), values) : last);
  const language = document.querySelector("[name=language]:checked").value;
  const url = new URL(".", document.baseURI).href;
  say($("code-text"), (language === "curl" ? curl : python)(asked, url, Boolean(key.get())));
  say($("code-said"), "");
  if (!$("code").open) $("code").showModal();
}

// The clipboard is only for pages that came by HTTPS or from this machine; elsewhere what is selected can still be copied.
async function copy() {
  const text = $("code-text");
  getSelection().selectAllChildren(text);
  try {
    await navigator.clipboard.writeText(text.textContent);
    say($("code-said"), "Copied.");
  } catch {
    say($("code-said"), document.execCommand("copy") ? "Copied." : "Selected: copy it with Ctrl+C.");
  }
}

// Once for each key: who closes the dialog wants something else first.
function denied() {
  if (denial !== key.get()) askForKey();
  denial = key.get();
}

function askForKey() {
  if ($("key").open) return;
  $("key-text").value = key.get();
  $("key").showModal();
}

function keep(text) {
  key.set(text.trim());
  $("key").close();
  live.again();
}

// Pictures among what is pasted or dropped; the rest goes where it went.
function take(event, { files }) {
  const pictures = [...files].filter(({ type }) => type.startsWith("image/"));
  if (!pictures.length || !images.most || mode !== "chat") return;
  event.preventDefault();
  images.add(pictures);
}

// What is pressed and typed

$("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  if (running) stop();
  else send();
});
$("prompt").addEventListener("keydown", (event) => {
  const sends = mode === "chat" && !touch.matches ? !event.shiftKey : event.ctrlKey || event.metaKey;
  if (event.key !== "Enter" || !sends || event.isComposing) return;
  event.preventDefault();
  if (!running) send();
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && running && !document.querySelector("dialog[open]")) stop();
});
$("image-add").addEventListener("click", () => images.choose());
$("prompt").addEventListener("paste", (event) => take(event, event.clipboardData));
$("composer").addEventListener("dragover", (event) => images.most && mode === "chat" && event.preventDefault());
$("composer").addEventListener("drop", (event) => take(event, event.dataTransfer));
for (const radio of document.querySelectorAll("[name=mode]")) {
  radio.addEventListener("change", () => enter(radio.value));
}
$("clear").addEventListener("click", async () => {
  await stop();
  card.hide();
  if (mode === "chat") {
    chat = [];
    images.put([]);
  }
  $(mode).replaceChildren();
  fail("");
  $("prompt").focus();
});
$("colours").addEventListener("change", () => document.body.classList.toggle("plain", !$("colours").checked));
$("code-open").addEventListener("click", showCode);
$("code-copy").addEventListener("click", copy);
$("code-close").addEventListener("click", () => $("code").close());
for (const radio of document.querySelectorAll("[name=language]")) radio.addEventListener("change", showCode);
$("key-open").addEventListener("click", askForKey);
$("key-forget").addEventListener("click", () => keep(""));
$("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  keep($("key-text").value);
});
for (const part of ["live", "knobs"]) $(part).open = !narrow.matches;
enter(mode);
