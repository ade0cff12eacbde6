// The routes of openapi.json as a page: what each field means, its type, default and an example;
// and the messages of streams and WebSockets, drawn between client and server in their order.

import { element } from "./dom.js";

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
    .map((part, i) => (i % 2 ? element("code", {}, part) : part));
}

// Schemas of objects in a schema, those of a list's elements included.
function objects(schema) {
  const found = resolved(schema);
  if (found.properties) return [found];
  return [...(found.anyOf ?? []), found.items].filter(Boolean).flatMap(objects);
}

// A part whose inside is made when it is opened: there are thousands of fields.
function lazy(attributes, summary, make) {
  const body = element("div", { class: "inside" });
  return element(
    "details",
    { ...attributes, ontoggle: () => body.childElementCount || body.append(...[make()].flat()) },
    element("summary", {}, summary),
    body,
  );
}

function fields(schema) {
  const found = objects(schema);
  if (found.length > 1) return found.map(inner);
  return found.length === 1 && fieldsOf(found[0]);
}

function fieldsOf(found) {
  const rows = Object.entries(found.properties).map(([name, one]) => field(name, one, found));
  return element("dl", { class: "fields" }, rows);
}

function field(name, one, { required }) {
  const facts = [shown(one)];
  const value = (example) => element("code", {}, JSON.stringify(example));
  if (required?.includes(name)) facts.push("required");
  if (one.default !== null && one.default !== undefined) {
    facts.push(["default ", value(one.default)]);
  }
  const about = one.description ?? "";
  if (one.examples && !/such as|Always|Has to be/.test(about)) {
    facts.push(["such as ", value(one.examples[0])]);
  }
  return element(
    "div",
    {},
    element(
      "dt",
      {},
      element("code", {}, name),
      element("span", { class: "note" }, facts.flatMap((fact, i) => (i ? [", ", fact] : [fact])).flat()),
    ),
    element("dd", {}, worded(about), objects(one).map(inner)),
  );
}

const inner = (found) =>
  lazy({ class: "inner" }, `Fields of ${found.title}`, () => [
    element("p", { class: "note" }, worded(found.description ?? "")),
    fieldsOf(found),
  ]);

function parameters(list) {
  const rows = list.map(({ name, in: where, description }) =>
    element(
      "div",
      {},
      element("dt", {}, element("code", {}, name), element("span", { class: "note" }, `in the ${where}`)),
      element("dd", {}, worded(description)),
    ),
  );
  return element("dl", { class: "fields" }, rows);
}

// JSON on several lines, but lists of numbers on one.
const indented = (value) =>
  JSON.stringify(value, undefined, 2).replace(/\[[\d,\s]+\]/g, (list) =>
    list.replace(/\s+/g, " ").replace("[ ", "[").replace(" ]", "]"),
  );

const example = (text) =>
  element(
    "pre",
    { tabindex: 0, role: "group", "aria-label": "Example" },
    element("code", {}, text),
  );
const json = (value) => example(indented(value));

// Messages as arrows between two lines, the client's and the server's.
function sequence(messages, isSocket) {
  const rows = messages.map(({ from, about, event, data, binary, text, schema }) => {
    const kind = binary ? "binary frame" : isSocket ? "text frame" : event;
    const heading = [
      element("span", { class: "unseen" }, from === "client" ? "To the server: " : "To the client: "),
      element("span", { class: "about" }, about),
      element("span", { class: "badge" }, kind),
      element("span", { class: "arrow", "aria-hidden": "true" }),
    ];
    const attributes = { class: `${from}${binary ? " binary" : ""}` };
    if (binary) {
      return element("li", attributes, element("p", { class: "still" }, heading), element("p", { class: "note" }, binary));
    }
    return element(
      "li",
      attributes,
      lazy({}, heading, () => [data ? json(data) : example(text), schema && fields(schema)].flat().filter(Boolean)),
    );
  });
  return element(
    "div",
    { class: "sequence" },
    element("p", { class: "ends", "aria-hidden": "true" }, element("span", {}, "Client"), element("span", {}, "Server")),
    element("ol", {}, rows),
  );
}

function failures(responses) {
  const found = Object.entries(responses)
    .filter(([status]) => status >= "400")
    .map(([status, { $ref }]) => [status, api.components.responses[named($ref)]]);
  if (found.length === 0) return [];
  const [, first] = found[0];
  const { example: body, schema } = first.content["application/json"];
  const rows = found.map(([status, { description }]) =>
    element(
      "div",
      {},
      element("dt", {}, element("code", {}, status)),
      element("dd", {}, description),
    ),
  );
  return [
    lazy({ class: "inner" }, "Failures", () => [
      element("dl", { class: "fields" }, rows), json(body), fields(schema),
    ].flat().filter(Boolean)),
  ];
}

function route(method, path, operation) {
  return lazy(
    { class: "route", id: `${method} ${path}` },
    [
      element("span", { class: "method" }, method),
      element("code", {}, path),
      element("span", { class: "about" }, operation.summary),
    ],
    () => parts(operation, `${method} ${path}`),
  );
}

function parts(operation, name) {
  const made = [];
  const heading = (text) => made.push(element("h3", {}, text));
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
  return [...made, ...failures(operation.responses ?? {})].flat().filter(Boolean);
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
    element("section", { "aria-labelledby": `tag-${tag}` }, element("h2", { id: `tag-${tag}` }, tag), boxes),
    boxes,
  ]);
  document.getElementById("routes").replaceChildren(...groups.map(([section]) => section));
  document.getElementById("tags").replaceChildren(
    ...[...tags.keys()].map((tag) => element("a", { href: `#tag-${tag}` }, tag)),
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
