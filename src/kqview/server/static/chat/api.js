// The requests of the page.

import { Client } from "../client.js";
import { follow, readEvents } from "../events.js";

export const client = new Client("kqview-key");

const get = (path) => client.get(path);
const at = encodeURIComponent;

export const fetchConfig = () => get("config");
export const fetchModels = async () => (await get("models")).models;
export const fetchSessions = async () => (await get("chat/sessions")).sessions;
export const fetchSession = (id) => get(`chat/sessions/${at(id)}`);
export const deleteSession = (id) => client.call(`chat/sessions/${at(id)}`, { method: "DELETE" });
// What an admin may do with a model: "load", "unload", "pin" or "unpin".
export const manage = (model, what) => client.post(`models/${at(model)}/${what}`, {});
export const cancel = (requestId) => client.post(`cancel/${at(requestId)}`, {});
// The prompt as the model saw it: {ids, texts}.
export const fetchPrompt = (requestId) => get(`generate/${at(requestId)}/prompt`);

// Calls on(event, data) for each frame of an answer.
export async function generate(request, requestId, signal, on) {
  const headers = { "X-Request-Id": requestId };
  const reply = await client.post("generate", request, { headers, signal });
  for await (const { event, data } of readEvents(reply.body)) on(event, JSON.parse(data));
}

// The attention of one token, at the path that its frame names: {shape, values}, with values as
// bits of float16.
export async function fetchRow(path) {
  const reply = await client.call(path.replace(/^\//, ""));
  const shape = reply.headers.get("X-Attention-Shape").split(",").map(Number);
  return { shape, values: new Uint16Array(await reply.arrayBuffer()) };
}

// Calls on.event({event, data}) for what happens in the server and on.state(isListening), until
// *signal* aborts.
export const listen = (signal, on) => follow(() => client.call("events", { signal }), signal, on);

// A new id, also where the page was not loaded over HTTPS.
export function newId() {
  const bytes = crypto.getRandomValues(new Uint8Array(16));
  return Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join("");
}
