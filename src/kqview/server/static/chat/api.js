// The requests of the page. A key, where the server wants one, is kept for the tab only.

import { readEvents } from "../events.js";

const KEY = "kqview-key";

export const key = {
  get: () => sessionStorage.getItem(KEY) ?? "",
  set: (value) => sessionStorage.setItem(KEY, value.trim()),
};

// What the server refused or reported; `code` is what a client shows.
export class ApiError extends Error {
  constructor(code, message, status) {
    super(message);
    this.code = code;
    this.needsKey = status === 401 || status === 403;
  }

  // Of the data of an error frame, or the body of a refused request.
  static of(body, status) {
    const error = body?.error?.message ? body.error : body;
    const text = typeof body?.error === "string" ? body.error : error?.message;
    return new ApiError(
      error?.code ?? body?.error_code ?? `HTTP_${status}`,
      text || `The server responded with status ${status}.`,
      status,
    );
  }
}

async function call(path, { json, headers = {}, ...options } = {}) {
  const sent = { ...headers };
  if (key.get()) sent["X-Api-Key"] = key.get();
  if (json !== undefined) sent["Content-Type"] = "application/json";
  let reply;
  try {
    const body = json === undefined ? undefined : JSON.stringify(json);
    reply = await fetch(path, { ...options, headers: sent, body });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("OFFLINE", "The server does not answer.");
  }
  if (reply.ok) return reply;
  throw ApiError.of(await reply.json().catch(() => undefined), reply.status);
}

const get = async (path, signal) => (await call(path, { signal })).json();
const post = (path, json, more = {}) => call(path, { method: "POST", json, ...more });
const at = encodeURIComponent;

export const fetchConfig = () => get("config");
export const fetchModels = async () => (await get("models")).models;
export const fetchSessions = async () => (await get("chat/sessions")).sessions;
export const fetchSession = (id) => get(`chat/sessions/${at(id)}`);
export const deleteSession = (id) => call(`chat/sessions/${at(id)}`, { method: "DELETE" });
// What an admin may do with a model: "load", "unload", "pin" or "unpin".
export const manage = (model, what) => post(`models/${at(model)}/${what}`, {});
export const cancel = (requestId) => post(`cancel/${at(requestId)}`, {});
// The prompt as the model saw it: {ids, texts}.
export const fetchPrompt = (requestId, signal) => get(`generate/${at(requestId)}/prompt`, signal);

// Calls on(event, data) for each frame of an answer.
export async function generate(request, requestId, signal, on) {
  const headers = { "X-Request-Id": requestId };
  const reply = await post("generate", request, { headers, signal });
  for await (const { event, data } of readEvents(reply.body)) on(event, JSON.parse(data));
}

// The attention of one token, at the path that its frame names: {shape, values}, with values as
// bits of float16.
export async function fetchRow(path, signal) {
  const reply = await call(path.replace(/^\//, ""), { signal });
  const shape = reply.headers.get("X-Attention-Shape").split(",").map(Number);
  return { shape, values: new Uint16Array(await reply.arrayBuffer()) };
}

const AGAIN_MS = [500, 1000, 2000, 5000]; // between attempts to listen

// Calls on.event(name, data) for what happens in the server and on.state(isListening), until
// *signal* aborts.
export async function listen(signal, on) {
  for (let nFailed = 0; !signal.aborted; nFailed++) {
    try {
      const reply = await call("events", { signal });
      on.state(true);
      nFailed = 0;
      for await (const { event, data } of readEvents(reply.body)) on.event(event, JSON.parse(data));
    } catch (error) {
      if (signal.aborted || error.needsKey) return;
    }
    if (signal.aborted) return;
    on.state(false);
    await new Promise((done) => setTimeout(done, AGAIN_MS[Math.min(nFailed, AGAIN_MS.length - 1)]));
  }
}

// A new id, also where the page was not loaded over HTTPS.
export function newId() {
  const bytes = crypto.getRandomValues(new Uint8Array(16));
  return Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join("");
}
