// The start page: what is running, and one generation whose attention can be looked into, with the
// program that does the same.

import { Client } from "./client.js";
import { codeExamples } from "./code_examples.js";
import { facts, milliseconds } from "./dom.js";
import { readEvents } from "./events.js";
import { AttentionView } from "./attention_view.js";
import { Row } from "./rows.js";

const client = new Client("kqview-key"); // the key of the chat page
const PATH = "api/extra/generate/stream";

const $ = (id) => document.getElementById(id);
const view = new AttentionView({ onchange: () => showCode() });
$("try").append(view.node);
$("key").value = client.key;

async function showStatus() {
  const health = await fetch("health").then((reply) => reply.json());
  if (health.status !== "ok") {
    $("status").textContent = `The server is not accepting requests: ${health.status}.`;
    $("status").className = "bad";
    return;
  }
  $("status").textContent = `Running: ${health.model}`;
  $("key-row").hidden = !client.key;
  let info;
  try {
    info = await client.get("api/v1/model/info");
  } catch (error) {
    if (!error.status) throw error;
    if (error.status === 401) $("key-row").hidden = false;
    return;
  }
  longest = info.context_length;
  const known = {
    Architecture: info.architecture,
    "Layers × heads": `${info.num_layers} × ${info.num_attention_heads}`,
    Context: `${info.context_length.toLocaleString("en")} tokens`,
    Vocabulary: `${info.vocab_size.toLocaleString("en")} tokens`,
  };
  $("facts").replaceChildren(...facts(Object.entries(known)));
  $("facts").hidden = false;
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
    const { tokens } = await client.post("api/v1/tokenize", {
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
    const reply = await client.post(PATH, asked);
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
  client.key = $("key").value;
  showStatus();
});
showStatus().catch((error) => {
  $("status").textContent = `The server does not answer: ${error.message}`;
  $("status").className = "bad";
});
