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

// Events of a stream, parsed, until [DONE] or the end. Raises Problem.
export async function* events(path, { body, signal } = {}) {
  const headers = { Accept: "text/event-stream" };
  if (key.get()) headers.Authorization = `Bearer ${key.get()}`;
  if (body) headers["Content-Type"] = "application/json";
  const response = await fetch(path, { method: body ? "POST" : "GET", headers, body: body && JSON.stringify(body), signal });
  if (!response.ok) throw await problem(response);
  for await (const line of lines(response.body)) {
    if (!line.startsWith("data:")) continue;
    const data = line.slice(5).trimStart();
    if (data === "[DONE]") return;
    const event = JSON.parse(data);
    if (event.error) throw told(response.status, event);
    yield event;
  }
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
  return new Problem(status, message ?? `The server answered with status ${status}.`, error?.param ?? null);
}

// What a chunk adds to one choice, in parts: text, and tokens with their alternatives. Both APIs' shapes come out the same.
export function added(choice) {
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
    top: Object.entries(found.top_logprobs?.[i] ?? {}).map(([other, logprob]) => ({ token: other, logprob })),
  }));
  return [{ text: choice.text ?? "", thought: false, tokens }];
}
