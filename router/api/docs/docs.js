// Shows /openapi.json, and sends what is written into its forms. No library, and no text becomes markup.

const $ = (id) => document.getElementById(id);

function make(tag, attributes = {}, ...children) {
  const element = Object.assign(document.createElement(tag), attributes);
  element.append(...children);
  return element;
}

function headers() {
  return $("key").value ? { Authorization: `Bearer ${$("key").value}` } : {};
}

function resolve(schema, root) {
  const name = schema?.$ref?.split("/").pop();
  return name ? { ...root.components.schemas[name], name } : schema;
}

// A type in a few words.
function words(schema, root) {
  if (!schema) return "";
  if (schema.$ref) return schema.$ref.split("/").pop();
  if (schema.anyOf) return schema.anyOf.map((each) => words(each, root)).join(" | ");
  if (schema.enum) return schema.enum.map((value) => JSON.stringify(value)).join(" | ");
  if ("const" in schema) return JSON.stringify(schema.const);
  if (schema.type === "array") return `[${words(schema.items, root) || "any"}]`;
  if (schema.type === "object" && schema.additionalProperties) return `{name: ${words(schema.additionalProperties, root) || "any"}}`;
  return schema.type ?? "any";
}

// Names of types that a schema mentions, itself or in lists and alternatives.
function mentioned(schema) {
  if (!schema) return [];
  if (schema.$ref) return [schema];
  return [...(schema.anyOf ?? []), schema.items].filter(Boolean).flatMap(mentioned);
}

function fields(schema, root, depth = 0) {
  const found = resolve(schema, root);
  const box = make("div");
  if (found.description) box.append(make("p", { textContent: found.description }));
  const table = make("table");
  for (const [name, type] of Object.entries(found.properties ?? {})) {
    const needed = found.required?.includes(name) ? " (needed)" : "";
    table.append(make("tr", {}, make("td", {}, make("code", { textContent: name })), make("td", { className: "type", textContent: words(type, root) + needed }), make("td", { textContent: type.description ?? "" })));
  }
  if (table.children.length) box.append(table);
  const inner = found.properties ? Object.values(found.properties).flatMap(mentioned) : mentioned(found);
  if (depth < 5) {
    for (const name of new Set(inner.map((each) => each.$ref))) {
      const details = make("details", {}, make("summary", { textContent: name.split("/").pop() }));
      details.addEventListener("toggle", () => details.children.length < 2 && details.append(fields({ $ref: name }, root, depth + 1)));
      box.append(details);
    }
  }
  return box;
}

const EXAMPLES = {
  messages: [{ role: "user", content: "Hello" }],
  prompt: "Once upon a time",
  inputs: "Once upon a time",
  input: "Hello",
  tokens: [1, 2, 3],
  instances: [{ inputs: "Once upon a time" }],
};

// What is needed, with a value that may be sent as it is.
function example(schema, root) {
  const found = resolve(schema, root);
  if (found.anyOf) return example(found.anyOf[0], root);
  const names = Object.keys(found.properties ?? {});
  const needed = found.required?.length ? found.required : names.filter((name) => name === "inputs");
  return Object.fromEntries(needed.map((name) => [name, EXAMPLES[name] ?? ""]));
}

async function send(method, path, body, out) {
  out.textContent = "…";
  try {
    const options = { method, headers: { ...headers(), ...(body === undefined ? {} : { "Content-Type": "application/json" }) }, body };
    const answer = await fetch(`.${path}`, options); // a proxy may serve all of this under a path of its own
    out.textContent = `${answer.status} ${answer.statusText}\n`;
    for (const [name, value] of answer.headers) out.append(`${name}: ${value}\n`);
    out.append("\n");
    const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
    let text = "";
    for (let part = await reader.read(); !part.done; part = await reader.read()) {
      text += part.value;
      out.append(part.value);
    }
    if (answer.headers.get("Content-Type")?.startsWith("application/json") && text) {
      out.textContent = out.textContent.slice(0, -text.length) + JSON.stringify(JSON.parse(text), null, 2);
    }
  } catch (error) {
    out.append(`\n${error}`);
  }
}

function form(method, path, operation, root) {
  const out = make("pre", { hidden: true });
  const body = operation.requestBody?.content["application/json"].schema;
  const area = body && make("textarea", { rows: 6, spellcheck: false, value: JSON.stringify(example(body, root), null, 2) });
  const where = make("input", { value: path, size: 40 });
  const box = make("form", {}, ...(operation.parameters ? [where] : []), ...(area ? [area] : []), make("button", { textContent: "Send" }), out);
  box.addEventListener("submit", (event) => {
    event.preventDefault();
    out.hidden = false;
    send(method.toUpperCase(), where.value, area?.value, out);
  });
  return box;
}

function route(method, path, operation, root) {
  const details = make("details", { id: operation.operationId });
  details.append(
    make(
      "summary",
      {},
      make("span", { className: `method ${method}`, textContent: method.toUpperCase() }),
      make("span", { className: "path", textContent: path }),
      operation.summary,
    ),
  );
  const fill = () => {
    if (!details.open || details.children.length > 1) return;
    const body = operation.requestBody?.content["application/json"].schema;
    if (body) details.append(make("h3", { textContent: "Body" }), fields(body, root));
    details.append(make("h3", { textContent: "Try it" }), form(method, path, operation, root), make("h3", { textContent: "Answers" }));
    for (const [status, answer] of Object.entries(operation.responses)) {
      const inside = make("details", {}, make("summary", { textContent: `${status}: ${answer.description}` }));
      for (const [kind, content] of Object.entries(answer.content ?? {})) {
        inside.append(make("p", {}, make("code", { textContent: kind }), ` ${words(content.schema, root)}`));
        if (content.schema.description) inside.append(make("p", { textContent: content.schema.description }));
        inside.append(fields(content.schema.properties?.data?.contentSchema ?? content.schema, root));
      }
      details.append(inside);
    }
  };
  details.addEventListener("toggle", fill);
  return details;
}

async function show() {
  const answer = await fetch("openapi.json", { headers: headers() });
  if (answer.status === 401) {
    $("about").textContent = "This server asks for an API key.";
    return;
  }
  if (!answer.ok) throw new Error(`The server answered with status ${answer.status}.`);
  const root = await answer.json();
  $("about").textContent = `${root.info.description} Version ${root.info.version}.`;
  const groups = {};
  for (const [path, methods] of Object.entries(root.paths)) {
    for (const [method, operation] of Object.entries(methods)) {
      (groups[operation.tags[0]] ??= []).push(route(method, path, operation, root));
    }
  }
  $("routes").replaceChildren(...Object.entries(groups).flatMap(([tag, routes]) => [make("h2", { textContent: tag }), ...routes]));
}

function begin() {
  show().catch((error) => ($("about").textContent = `There is no description: ${error.message}`));
}

$("access").addEventListener("submit", (event) => {
  event.preventDefault();
  begin();
});
begin();
