// The routes of openapi.json as a page: what each field means, its type, default and an example;
// and the messages of streams and WebSockets, drawn between client and server in their order.

import { facts, html } from "./dom.js";

let api;

const named = (reference) => reference.split("/").pop();
const resolved = (schema) => (schema.$ref ? api.components.schemas[named(schema.$ref)] : schema);

// A schema in a few words.
function shown(schema) {
  if (schema.$ref) return shown(resolved(schema));
  if (schema.anyOf) {
    const kinds = new Set(schema.anyOf.map(shown));
    return [...kinds].filter((kind) => kind !== "null").join(" or ");
  }
  if (schema.enum) {
    const values = schema.enum.map((value) => JSON.stringify(value));
    return values.filter((value) => value !== "null").join(" | ");
  }
  if (schema.type === "array") return `list of ${shown(schema.items || {})}`;
  return schema.title || schema.type || "any";
}

// Words between `` or ` in a docstring are code.
function worded(text) {
  return text
    .split(/``?([^`]+)``?/)
    .map((part, i) => (i % 2 ? html`<code>${part}</code>` : part));
}

// Schemas of objects in a schema, those of a list's elements included.
function objects(schema) {
  const found = resolved(schema);
  if (found.properties) return [found];
  return [...(found.anyOf ?? []), found.items].filter(Boolean).flatMap(objects);
}

// A part whose inside is made when it is opened: there are thousands of fields.
function lazy(kind, summary, make) {
  const body = html`<div class="inside"></div>`;
  const fill = () => body.childElementCount || body.append(html`${make()}`);
  return html`<details class=${kind} @toggle=${fill}><summary>${summary}</summary>${body}</details>`;
}

const fieldList = (rows) => html`<dl class="fields">${facts(rows)}</dl>`;

function fields(schema) {
  const found = objects(schema);
  if (found.length > 1) return found.map(inner);
  return found.length === 1 && fieldsOf(found[0]);
}

const fieldsOf = (found) =>
  fieldList(Object.entries(found.properties).map(([name, one]) => field(name, one, found)));

function field(name, one, { required }) {
  const known = [shown(one)];
  const value = (example) => html`<code>${JSON.stringify(example)}</code>`;
  if (required?.includes(name)) known.push(", required");
  if (one.default !== null && one.default !== undefined) {
    known.push(", default ", value(one.default));
  }
  const about = one.description ?? "";
  if (one.examples && !/such as|Always|Has to be/.test(about)) {
    known.push(", such as ", value(one.examples[0]));
  }
  return [
    html`<code>${name}</code><span class="note">${known}</span>`,
    [worded(about), objects(one).map(inner)],
  ];
}

const inner = (found) =>
  lazy("inner", `Fields of ${found.title}`, () => [
    html`<p class="note">${worded(found.description ?? "")}</p>`,
    fieldsOf(found),
  ]);

const parameters = (list) =>
  fieldList(
    list.map(({ name, in: where, description }) => [
      html`<code>${name}</code><span class="note">in the ${where}</span>`,
      worded(description),
    ]),
  );

// JSON on several lines, but lists of numbers on one.
const indented = (value) =>
  JSON.stringify(value, undefined, 2).replace(/\[[\d,\s]+\]/g, (list) =>
    list.replace(/\s+/g, " ").replace("[ ", "[").replace(" ]", "]"),
  );

const example = (text) =>
  html`<pre tabindex="0" role="group" aria-label="Example"><code>${text}</code></pre>`;
const json = (value) => example(indented(value));

// Messages as arrows between two lines, the client's and the server's.
function sequence(messages, isSocket) {
  const rows = messages.map(({ from, about, event, data, binary, text, schema }) => {
    const kind = binary ? "binary frame" : isSocket ? "text frame" : event;
    const heading = html`
      <span class="unseen">${from === "client" ? "To the server: " : "To the client: "}</span>
      <span class="about">${about}</span>
      <span class="badge">${kind}</span>
      <span class="arrow" aria-hidden="true"></span>
    `;
    const content = binary
      ? html`<p class="still">${heading}</p><p class="note">${binary}</p>`
      : lazy(undefined, heading, () => [data ? json(data) : example(text), schema && fields(schema)]);
    return html`<li class=${binary ? `${from} binary` : from}>${content}</li>`;
  });
  return html`<div class="sequence">
    <p class="ends" aria-hidden="true"><span>Client</span><span>Server</span></p>
    <ol>${rows}</ol>
  </div>`;
}

function failures(responses) {
  const found = Object.entries(responses)
    .filter(([status]) => status >= "400")
    .map(([status, { $ref }]) => [status, api.components.responses[named($ref)]]);
  if (found.length === 0) return undefined;
  const [, first] = found[0];
  const { example: body, schema } = first.content["application/json"];
  const rows = found.map(([status, { description }]) => [html`<code>${status}</code>`, description]);
  return lazy("inner", "Failures", () => [fieldList(rows), json(body), fields(schema)]);
}

function route(method, path, operation) {
  const name = `${method} ${path}`;
  const line = html`
    <span class="method">${method}</span>
    <code>${path}</code>
    <span class="about">${operation.summary}</span>
  `;
  const made = lazy("route", line, () => parts(operation, name));
  made.id = name;
  return made;
}

function parts(operation, name) {
  const made = [];
  const heading = (text) => made.push(html`<h3>${text}</h3>`);
  if (operation.parameters) {
    heading("Parameters");
    made.push(parameters(operation.parameters));
  }
  const asked = operation.requestBody?.content["application/json"];
  if (asked) {
    heading("Request");
    if (asked.example) made.push(json(asked.example));
    if (asked.schema) made.push(fields(asked.schema));
  }
  const replied = Object.entries(operation.responses ?? {}).find(([status]) => status < "300")?.[1].content ?? {};
  if (replied["application/json"]?.schema) {
    heading("Reply");
    made.push(json(replied["application/json"].example), fields(replied["application/json"].schema));
  }
  if (operation["x-events"]) {
    heading("Server-Sent Events");
    const ask = { from: "client", about: asked?.example ? "The request" : name, event: "HTTP", data: asked?.example ?? {} };
    made.push(sequence([ask, ...operation["x-events"]], false));
  }
  if (operation.messages) {
    heading("Messages");
    made.push(sequence(operation.messages, true));
  }
  return [...made, failures(operation.responses ?? {})];
}

// Shows the routes whose path or summary has *text*.
function filter(groups, text) {
  const words = text.toLowerCase().split(/\s+/).filter(Boolean);
  let n = 0;
  for (const [section, boxes] of groups) {
    for (const box of boxes) {
      const line = box.querySelector("summary").textContent.toLowerCase();
      box.hidden = !words.every((word) => line.includes(word));
    }
    section.hidden = boxes.every((box) => box.hidden);
    n += boxes.filter((box) => !box.hidden).length;
  }
  document.getElementById("n-found").textContent = words.length > 0 ? `${n} found` : "";
}

// Opens the route that the address names, such as docs#POST /v1/messages.
function openNamed() {
  const box = document.getElementById(decodeURIComponent(location.hash.slice(1)));
  if (box?.tagName !== "DETAILS") return;
  box.open = true;
  box.scrollIntoView();
}

async function show() {
  api = await fetch("openapi.json").then((reply) => reply.json());
  const tags = new Map();
  const add = (tag, box) => tags.set(tag, [...(tags.get(tag) || []), box]);
  for (const [path, methods] of Object.entries(api.paths)) {
    for (const [method, operation] of Object.entries(methods)) {
      add(operation.tags[0], route(method.toUpperCase(), path, operation));
    }
  }
  for (const [path, socket] of Object.entries(api["x-websockets"])) {
    add(socket.tag, route("WS", path, socket));
  }
  const groups = [...tags].map(([tag, boxes]) => [
    html`<section aria-labelledby=${`tag-${tag}`}><h2 id=${`tag-${tag}`}>${tag}</h2>${boxes}</section>`,
    boxes,
  ]);
  document.getElementById("routes").replaceChildren(...groups.map(([section]) => section));
  document.getElementById("tags").replaceChildren(
    ...[...tags.keys()].map((tag) => html`<a href=${`#tag-${tag}`}>${tag}</a>`),
  );
  const find = document.getElementById("find");
  find.addEventListener("input", () => filter(groups, find.value));
  filter(groups, find.value);
  openNamed();
  addEventListener("hashchange", openNamed);
}

show().catch((error) => {
  document.getElementById("routes").textContent = error.message;
});
