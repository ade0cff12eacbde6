// The start page: what is running, and one generation whose attention can be looked into, with the
// program that does the same.

import { codeExamples } from "./code_examples.js";
import { element, milliseconds } from "./dom.js";
import { readEvents } from "./events.js";
import { AttentionView } from "./attention_view.js";
import { Row } from "./rows.js";

const KEY = "kqview-key"; // kept for the tab only, as the chat page does
const PATH = "api/extra/generate/stream";

const $ = (id) => document.getElementById(id);
const view = new AttentionView({ onchange: () => showCode() });
$("try").append(view.node);
$("key").value = sessionStorage.getItem(KEY) ?? "";

function headers() {
  const key = $("key").value;
  return { "Content-Type": "application/json", ...(key && { "X-Api-Key": key }) };
}

async function showStatus() {
  const health = await fetch("health").then((reply) => reply.json());
  if (health.status !== "ok") {
    $("status").textContent = `The server is not accepting requests: ${health.status}.`;
    $("status").className = "bad";
    return;
  }
  $("status").textContent = `Running: ${health.model}`;
  const reply = await fetch("api/v1/model/info", { headers: headers() });
  $("key-row").hidden = reply.status !== 401 && !$("key").value;
  if (!reply.ok) return;
  const info = await reply.json();
  longest = info.context_length;
  const facts = {
    Architecture: info.architecture,
    "Layers × heads": `${info.num_layers} × ${info.num_attention_heads}`,
    Context: `${info.context_length.toLocaleString("en")} tokens`,
    Vocabulary: `${info.vocab_size.toLocaleString("en")} tokens`,
  };
  $("facts").replaceChildren(
    ...Object.entries(facts).map(([name, value]) =>
      element("div", {}, element("dt", {}, name), element("dd", {}, value)),
    ),
  );
  $("facts").hidden = false;
}

async function post(path, body) {
  const reply = await fetch(path, {
    method: "POST",
    headers: headers(),
    body: JSON.stringify(body),
  });
  if (reply.ok) return reply;
  const refusal = await reply.json().catch(() => ({}));
  throw new Error(refusal.error ?? `The server responded with status ${reply.status}.`);
}

let seed;
let longest; // prompt, in tokens

// The request for what the form says; its seed makes a program generate the same text again.
function request() {
  return {
    prompt: $("prompt").value,
    sampler_seed: seed,
    max_length: $("n").valueAsNumber || 48,
    output_attentions: true,
    attention_format: "per_layer",
    attention_values: "probs",
    dtype: "float16",
  };
}

async function generate(event) {
  event.preventDefault();
  const button = $("form").querySelector("button");
  button.disabled = true;
  seed = Math.floor(Math.random() * 2 ** 31);
  try {
    const asked = request();
    const { tokens } = await post("api/v1/tokenize", {
      text: asked.prompt,
      add_special_tokens: true,
    }).then((reply) => reply.json());
    if (tokens.length > longest) {
      // The server would leave out its beginning, and columns would be other tokens than those
      // shown.
      throw new Error(`The prompt has ${tokens.length} tokens, the limit is ${longest}; shorten it.`);
    }
    view.begin(tokens.map(({ text }) => text));
    const began = performance.now();
    const reply = await post(PATH, asked);
    for await (const { data } of readEvents(reply.body)) {
      const one = JSON.parse(data);
      if (one.type === "error") throw new Error(one.error);
      if (one.type === "token") view.add(one.token.text, rowOf(one.attention));
    }
    view.end(milliseconds(performance.now() - began));
    showCode();
  } catch (error) {
    view.fail(error.message);
  } finally {
    button.disabled = false;
  }
}

function rowOf({ shape, data }) {
  const bytes = Uint8Array.from(atob(data), (c) => c.charCodeAt(0));
  return new Row(shape, new Uint16Array(bytes.buffer));
}

// The request of the page for the layer and head that are shown.
function showCode() {
  if (!view.isWhole) return;
  const narrowed = request();
  if (view.layer !== undefined) narrowed.attention_layers = [view.layer];
  if (view.head !== undefined) narrowed.attention_heads = [view.head];
  const address = new URL(PATH, document.baseURI).href;
  const before = $("code").querySelector(".examples");
  const examples = codeExamples(address, narrowed, Boolean($("key").value), before?.dataset.chosen);
  if (before) before.replaceWith(examples);
  else $("code").append(examples);
  $("code").hidden = false;
}

$("form").addEventListener("submit", generate);
$("key").addEventListener("change", () => {
  sessionStorage.setItem(KEY, $("key").value.trim());
  showStatus();
});
showStatus().catch((error) => {
  $("status").textContent = `The server does not answer: ${error.message}`;
  $("status").className = "bad";
});
