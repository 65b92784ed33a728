// A request as code that somebody can paste: for a shell, and for OpenAI's Python client.

const OPENAI = new Set(
  ("model messages prompt max_tokens n temperature top_p frequency_penalty presence_penalty seed stop logprobs top_logprobs " +
    "response_format stream stream_options").split(" "),
);

export function curl({ path, body }, url, withKey) {
  const quoted = JSON.stringify(body, null, 2).replaceAll("'", "'\\''");
  const key = withKey ? ` \\\n     -H "Authorization: Bearer $PENSTOCK_API_KEY"` : "";
  return `curl -N ${url}${path} \\\n     -H 'Content-Type: application/json'${key} \\\n     -d '${quoted}'\n`;
}

export function python({ path, body }, url, withKey) {
  const chat = "messages" in body;
  const known = ([name]) => OPENAI.has(name) && (chat || name !== "response_format"); // completions have none there
  const own = Object.entries(body).filter(known);
  const extra = Object.entries(body).filter((entry) => !known(entry));
  const given = own.map(([name, value]) => `    ${name}=${literal(value, 1)},`);
  if (extra.length) given.push(`    extra_body=${literal(Object.fromEntries(extra), 1)},`);
  const key = withKey ? `os.environ["PENSTOCK_API_KEY"]` : `"-"`;
  const text = chat ? "chunk.choices[0].delta.content" : "chunk.choices[0].text";
  return `${withKey ? "import os\n\n" : ""}from openai import OpenAI

client = OpenAI(base_url="${url}v1", api_key=${key})
stream = client.${chat ? "chat.completions" : "completions"}.create(
${given.join("\n")}
)
for chunk in stream:
    if chunk.choices:
        print(${text} or "", end="", flush=True)
`;
}

function literal(value, depth) {
  const inner = "    ".repeat(depth + 1);
  const outer = "    ".repeat(depth);
  if (value === null) return "None";
  if (typeof value === "boolean") return value ? "True" : "False";
  if (typeof value !== "object") return JSON.stringify(value);
  if (Array.isArray(value)) {
    if (!value.length) return "[]";
    const flat = value.every((one) => typeof one !== "object");
    if (flat) return `[${value.map((one) => literal(one, depth)).join(", ")}]`;
    return `[\n${value.map((one) => `${inner}${literal(one, depth + 1)},\n`).join("")}${outer}]`;
  }
  const entries = Object.entries(value);
  const flat = entries.length < 4 && entries.every(([, one]) => typeof one !== "object");
  const pair = ([name, one]) => `${JSON.stringify(name)}: ${literal(one, depth + 1)}`;
  if (flat) return `{${entries.map(pair).join(", ")}}`;
  return `{\n${entries.map((entry) => `${inner}${pair(entry)},\n`).join("")}${outer}}`;
}
