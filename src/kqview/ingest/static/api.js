// The receiver's read API. A key, where the receiver wants one, is kept for the tab only.

import { readEvents } from "./events.js";

const KEY = "kqview-traces-key";

export class KeyNeeded extends Error {}

export const key = {
  get: () => sessionStorage.getItem(KEY) ?? "",
  set: (value) => sessionStorage.setItem(KEY, value),
};

async function get(path, options = {}) {
  const headers = key.get() ? { "X-API-Key": key.get() } : {};
  let reply;
  try {
    reply = await fetch(path, { ...options, headers });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Error("The receiver does not answer.");
  }
  if (reply.status === 401) throw new KeyNeeded("This receiver shows traces to whoever has a key.");
  if (reply.status === 403) throw new KeyNeeded(await refusal(reply));
  if (!reply.ok) throw new Error(await refusal(reply));
  return reply;
}

async function refusal(reply) {
  const text = await reply.text();
  try {
    return JSON.parse(text).error ?? text;
  } catch {
    return text || `The receiver answered ${reply.status}.`;
  }
}

// One page of the list: {traces, next_cursor}.
export async function fetchTraces({ search, model, mod }, cursor, signal) {
  const given = Object.entries({ search, model, mod, cursor }).filter(([, value]) => value);
  const reply = await get(`v1/traces?${new URLSearchParams(given)}`, { signal });
  return reply.json();
}

// What lists can be filtered by: {models, mods}.
export async function fetchValues(signal) {
  return (await get("v1/values", { signal })).json();
}

// A trace: {text, payload}, as it is stored.
export async function fetchTrace(id, signal) {
  const text = await (await get(`v1/traces/${encodeURIComponent(id)}`, { signal })).text();
  return { text, payload: JSON.parse(text) };
}

const AGAIN_MS = [1000, 2000, 5000, 10_000]; // between attempts to listen

// Calls on.trace() for each trace that arrives and on.state(isListening), until *signal* aborts.
// Not an EventSource, which cannot send a key.
export async function listen(signal, on) {
  for (let n_failed = 0; !signal.aborted; n_failed++) {
    try {
      const reply = await get("v1/stream", { signal });
      on.state(true);
      n_failed = 0;
      for await (const { data } of readEvents(reply.body)) on.trace(data);
    } catch (error) {
      if (signal.aborted || error instanceof KeyNeeded) return;
    }
    if (signal.aborted) return;
    on.state(false);
    await new Promise((resolve) =>
      setTimeout(resolve, AGAIN_MS[Math.min(n_failed, AGAIN_MS.length - 1)]),
    );
  }
}
