// The routes of openapi.json as a page: every field of a request with its type.
"use strict";

function element(name, text, className) {
  const made = document.createElement(name);
  if (text !== undefined) made.textContent = text;
  if (className) made.className = className;
  return made;
}

// A schema in a few words.
function shown(schema, all) {
  if (schema.$ref) return shown(all[schema.$ref.split("/").pop()], all);
  if (schema.anyOf) {
    return [...new Set(schema.anyOf.map((one) => shown(one, all)))].filter((t) => t !== "null").join(" or ");
  }
  if (schema.enum) return schema.enum.map((v) => JSON.stringify(v)).filter((v) => v !== "null").join(" | ");
  if (schema.type === "array") return `list of ${shown(schema.items || {}, all)}`;
  return schema.title || schema.type || "any";
}

function fields(schema, all) {
  const found = schema.$ref ? all[schema.$ref.split("/").pop()] : schema;
  const table = element("table");
  for (const [name, one] of Object.entries(found.properties || {})) {
    const row = element("tr");
    const head = element("th");
    head.append(element("code", name));
    row.append(head, element("td", shown(one, all)));
    if ((found.required || []).includes(name)) row.append(element("td", "required"));
    table.append(row);
  }
  return table;
}

function route(method, path, operation, all) {
  const box = element("details");
  const line = element("summary");
  const name = element("code", path);
  line.append(element("span", method, "method"), name, element("span", operation.summary, "about"));
  box.append(line);
  const body = operation.requestBody?.content["application/json"]?.schema;
  if (body) box.append(element("h3", "Request"), fields(body, all));
  const reply = operation.responses?.["200"]?.content?.["application/json"]?.schema;
  if (reply) box.append(element("h3", "Reply"), fields(reply, all));
  if (operation.responses?.["200"]?.content?.["text/event-stream"]) {
    box.append(element("p", "Replies with Server-Sent Events.", "note"));
  }
  return box;
}

async function show() {
  const api = await fetch("openapi.json").then((r) => r.json());
  const all = api.components.schemas;
  const groups = new Map();
  const add = (tag, box) => groups.set(tag, [...(groups.get(tag) || []), box]);
  for (const [path, methods] of Object.entries(api.paths)) {
    for (const [method, operation] of Object.entries(methods)) {
      add(operation.tags[0], route(method.toUpperCase(), path, operation, all));
    }
  }
  for (const [path, socket] of Object.entries(api["x-websockets"])) {
    add(socket.tag, route("WS", path, { summary: socket.summary }, all));
  }
  const sections = [...groups].flatMap(([tag, boxes]) => [element("h2", tag), ...boxes]);
  document.getElementById("routes").replaceChildren(...sections);
}

show().catch((error) => { document.getElementById("routes").textContent = error.message; });
