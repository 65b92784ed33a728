// Talks to the server: bodies of requests, server-sent events, errors. Knows nothing of the page but the key's place.

const KEY = "penstock-key"; // in sessionStorage: gone with the tab

export const key = {
  get: () => sessionStorage.getItem(KEY) ?? "",
  set: (text) => (text ? sessionStorage.setItem(KEY, text) : sessionStorage.removeItem(KEY)),
};

// What the server refused. `parameter` is the field that it blames, if any.
export class Problem extends Error {
  constructor(status, message, parameter = null) {
    super(message);
    this.status = status;
    this.parameter = parameter;
  }
}

// The request that these values ask for: where to, and the body. Neutral values are left out, so that the code stays short.
export function request({ mode, model, prompt, messages, continued }, values) {
  const chat = mode === "chat";
  const { top } = values;
  const text = chat ? { messages } : { prompt };
  const shown = chat ? { logprobs: true, top_logprobs: top } : { logprobs: top };
  const more = continued && chat ? { continue_final_message: true, add_generation_prompt: false } : {};
  const streamed = { stream: true, stream_options: { include_usage: true } };
  const body = { ...(model && { model }), ...text, ...more, ...values.parameters, ...shown, ...streamed };
  if (continued) delete body.n;
  return { path: chat ? "v1/chat/completions" : "v1/completions", body };
}

// The same for /generate_stream, which also tells the beams of each step; null where its answer could not be asked for there.
export function watched({ path, body }) {
  if (path !== "v1/completions" || !body.num_beams) return null;
  const { model, prompt, max_tokens, n, logprobs, stream, stream_options, response_format, structured_outputs, ...more } = body;
  const schema = response_format?.json_schema?.schema;
  const grammar = schema ? { type: "json", value: schema } : { type: "regex", value: structured_outputs?.regex };
  if (!grammar.value && (response_format || structured_outputs)) return null;
  if (!more.temperature) for (const name of ["temperature", "top_p", "top_k", "min_p"]) delete more[name]; // it would draw
  const asked = { max_new_tokens: max_tokens, num_return_sequences: n ?? 1, top_n_tokens: logprobs, details: true, stream_beams: true };
  return { path: "generate_stream", body: { inputs: prompt, parameters: { ...more, ...asked, ...(grammar.value && { grammar }) } } };
}

// Events of a stream, parsed, until [DONE] or the details, or, where nothing was asked, the end. Raises Problem.
export async function* events(path, { body, signal } = {}) {
  const headers = { Accept: "text/event-stream" };
  if (key.get()) headers.Authorization = `Bearer ${key.get()}`;
  if (body) headers["Content-Type"] = "application/json";
  const response = await fetch(path, { method: body ? "POST" : "GET", headers, body: body && JSON.stringify(body), signal });
  if (!response.ok) throw await problem(response);
  for await (const line of lines(response.body)) {
    if (!line.startsWith("data:")) continue;
    const data = line.slice(5).trim();
    if (data === "[DONE]") return;
    const event = JSON.parse(data);
    if (event.error) throw told(response.status, event);
    yield event;
    if (event.details) return;
  }
  if (body) throw new Error("it ended before the answer did"); // a proxy may end it without a word
}

async function* lines(stream) {
  let rest = "";
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const parts = (rest + value).split("\n");
      rest = parts.pop();
      yield* parts;
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

async function problem(response) {
  let body = null;
  try {
    body = await response.json();
  } catch {
    // a proxy's error page, perhaps
  }
  return told(response.status, body);
}

function told(status, body) {
  const error = body?.error;
  const message = typeof error === "string" ? error : error?.message;
  const named = /`(\w+)`/.exec(message ?? ""); // TGI's errors name the field in their text only
  return new Problem(status, message ?? `The server answered with status ${status}.`, error?.param ?? named?.[1] ?? null);
}

// What an event adds to choices, each in parts: text, and tokens with their alternatives. All APIs' shapes come out the same.
export function pieces({ choices, token, top_tokens, details }) {
  if (!token) return (choices ?? []).map((choice) => ({ ...choice, parts: added(choice) }));
  const reason = { eos_token: "stop", stop_sequence: "stop" }[details?.finish_reason] ?? details?.finish_reason;
  const best = { index: 0, finish_reason: reason, score: details?.score, parts: [native(token, top_tokens)] };
  const others = (details?.best_of_sequences ?? []).map(({ tokens, top_tokens: tops, finish_reason, score }, i) => ({
    index: i + 1,
    finish_reason: finish_reason === "length" ? "length" : "stop",
    score,
    parts: tokens.map((one, at) => native(one, tops?.[at])),
  }));
  return [best, ...others];
}

function native({ text, logprob, special }, tops = []) {
  const top = tops.map((other) => ({ token: other.text, logprob: other.logprob }));
  return { text: special ? "" : text, thought: false, tokens: [{ token: text, logprob, top }] };
}

function added(choice) {
  if (choice.delta) {
    const { content, reasoning_content, reasoning, tool_calls } = choice.delta;
    const thought = reasoning_content ?? reasoning ?? "";
    const tokens = (choice.logprobs?.content ?? []).map(({ token, logprob, top_logprobs }) => ({
      token,
      logprob,
      top: (top_logprobs ?? []).map((other) => ({ token: other.token, logprob: other.logprob })),
    }));
    const calls = (tool_calls ?? []).map((call) => (call.function?.name ?? "") + (call.function?.arguments ?? "")).join("");
    const said = (content ?? "") + calls;
    // Where reasoning ends, a chunk may have some of both.
    const before = thought ? [{ text: thought, thought: true, tokens: said ? [] : tokens }] : [];
    return said || !thought ? [...before, { text: said, thought: false, tokens }] : before;
  }
  const found = choice.logprobs;
  const tokens = (found?.tokens ?? []).map((token, i) => ({
    token,
    logprob: found.token_logprobs[i],
    top: Object.entries(found.top_logprobs?.[i] ?? {})
      .map(([other, logprob]) => ({ token: other, logprob }))
      .sort((one, other) => other.logprob - one.logprob), // numbers came first
  }));
  return [{ text: choice.text ?? "", thought: false, tokens }];
}
