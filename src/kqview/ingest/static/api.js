// The receiver's read API.

import { Client } from "./client.js";
import { follow } from "./events.js";

export const client = new Client("kqview-traces-key", "receiver");

// One page of the list: {traces, next_cursor}.
export function fetchTraces({ search, model, mod }, cursor, signal) {
  const given = Object.entries({ search, model, mod, cursor }).filter(([, value]) => value);
  return client.get(`v1/traces?${new URLSearchParams(given)}`, signal);
}

// What lists can be filtered by: {models, mods}.
export const fetchValues = (signal) => client.get("v1/values", signal);

// A trace: {text, payload}, as it is stored.
export async function fetchTrace(id, signal) {
  const text = await (await client.call(`v1/traces/${encodeURIComponent(id)}`, { signal })).text();
  return { text, payload: JSON.parse(text) };
}

// Calls on.event() for each trace that arrives and on.state(isListening), until *signal* aborts.
export const listen = (signal, on) => follow(() => client.call("v1/stream", { signal }), signal, on);
