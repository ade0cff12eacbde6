// The routes of openapi.json as a page: what each field means, its type and default, an example of
// each request, and the messages of streams and WebSockets in their order.

import { element } from "./dom.js";

// A schema in a few words.
function shown(schema, all) {
  if (schema.$ref) return shown(all[schema.$ref.split("/").pop()], all);
  if (schema.anyOf) {
    const kinds = new Set(schema.anyOf.map((one) => shown(one, all)));
    return [...kinds].filter((kind) => kind !== "null").join(" or ");
  }
  if (schema.enum) {
    const values = schema.enum.map((value) => JSON.stringify(value));
    return values.filter((value) => value !== "null").join(" | ");
  }
  if (schema.type === "array") return `list of ${shown(schema.items || {}, all)}`;
  return schema.title || schema.type || "any";
}

// Words between `` or ` in a docstring are code.
function worded(text) {
  return text
    .split(/``?([^`]+)``?/)
    .map((part, i) => (i % 2 ? element("code", {}, part) : part));
}

function fields(schema, all) {
  const found = schema.$ref ? all[schema.$ref.split("/").pop()] : schema;
  const rows = Object.entries(found.properties ?? {}).map(([name, one]) => {
    const facts = [shown(one, all)];
    if (found.required?.includes(name)) facts.push("required");
    else if (one.default !== null && one.default !== undefined) {
      facts.push(`default ${JSON.stringify(one.default)}`);
    }
    const about = one.description ?? all[one.$ref?.split("/").pop()]?.description;
    return element(
      "div",
      {},
      element("dt", {}, element("code", {}, name), element("span", { class: "note" }, facts.join(", "))),
      element("dd", {}, about && worded(about)),
    );
  });
  return element("dl", { class: "fields" }, rows);
}

// JSON on several lines, but lists of numbers on one.
const indented = (value) =>
  JSON.stringify(value, undefined, 2).replace(/\[[\d,\s]+\]/g, (list) =>
    list.replace(/\s+/g, " ").replace("[ ", "[").replace(" ]", "]"),
  );

const json = (value) =>
  element(
    "pre",
    { tabindex: 0, role: "group", "aria-label": "Example" },
    element("code", {}, indented(value)),
  );

// Messages between client and server, each an arrow to whoever gets it.
function exchange(messages, isSocket) {
  const rows = messages.map(({ from, about, event, data, binary }) =>
    element(
      "li",
      { class: from },
      element(
        "p",
        {},
        element("strong", {}, from === "client" ? "Client → server" : "Server → client"),
        element("span", { class: "badge" }, isSocket ? (binary ? "binary" : "text") : event),
        about,
      ),
      binary ? element("p", { class: "binary" }, binary) : json(data),
    ),
  );
  return element("ol", { class: "exchange" }, rows);
}

function failures(responses) {
  const found = Object.entries(responses).filter(([status]) => status >= "400");
  if (found.length === 0) return [];
  const [, first] = found[0];
  const rows = found.map(([status, { description }]) =>
    element(
      "div",
      {},
      element("dt", {}, element("code", {}, status)),
      element("dd", {}, description),
    ),
  );
  return [
    element("h3", {}, "Failures"),
    element("dl", { class: "fields" }, rows),
    json(first.content["application/json"].example),
  ];
}

// What is inside is made when it is opened: there are hundreds of fields.
function route(method, path, operation, all) {
  const body = element("div", { class: "route" });
  const box = element(
    "details",
    { ontoggle: () => body.childElementCount || body.append(...parts(operation, all)) },
    element(
      "summary",
      {},
      element("span", { class: "method" }, method),
      element("code", {}, path),
      element("span", { class: "about" }, operation.summary),
    ),
    body,
  );
  return box;
}

function parts(operation, all) {
  const made = [];
  const heading = (text) => made.push(element("h3", {}, text));
  const asked = operation.requestBody?.content["application/json"];
  if (asked) {
    heading("Request");
    if (asked.example) made.push(json(asked.example));
    if (asked.schema) made.push(fields(asked.schema, all));
  }
  const replied = operation.responses?.["200"]?.content ?? {};
  if (replied["application/json"]?.schema) {
    heading("Reply");
    made.push(fields(replied["application/json"].schema, all));
  }
  if (operation["x-events"]) {
    heading("Server-Sent Events");
    made.push(exchange(operation["x-events"], false));
  } else if (replied["text/event-stream"]) {
    made.push(element("p", { class: "note" }, "Replies with Server-Sent Events."));
  }
  if (operation.messages) {
    heading("Messages");
    made.push(exchange(operation.messages, true));
  }
  made.push(...failures(operation.responses ?? {}));
  return made;
}

async function show() {
  const api = await fetch("openapi.json").then((reply) => reply.json());
  const all = api.components.schemas;
  const groups = new Map();
  const add = (tag, box) => groups.set(tag, [...(groups.get(tag) || []), box]);
  for (const [path, methods] of Object.entries(api.paths)) {
    for (const [method, operation] of Object.entries(methods)) {
      add(operation.tags[0], route(method.toUpperCase(), path, operation, all));
    }
  }
  for (const [path, socket] of Object.entries(api["x-websockets"])) {
    add(socket.tag, route("WS", path, socket, all));
  }
  const sections = [...groups].flatMap(([tag, boxes]) => [element("h2", {}, tag), ...boxes]);
  document.getElementById("routes").replaceChildren(...sections);
}

show().catch((error) => {
  document.getElementById("routes").textContent = error.message;
});
