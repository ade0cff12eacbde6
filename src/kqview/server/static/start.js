// The start page: what is running, and one generation whose attention is drawn as it comes.
"use strict";

const $ = (id) => document.getElementById(id);

async function showStatus() {
  const health = await fetch("health").then((r) => r.json());
  if (health.status !== "ok") {
    $("status").textContent = `The server takes no requests: ${health.status}.`;
    $("status").className = "bad";
    return;
  }
  $("status").textContent = `Running: ${health.model}`;
  const reply = await fetch("api/v1/model/info", { headers: keyHeaders() });
  if (reply.status === 401) {
    $("key-row").hidden = false;
    return;
  }
  const info = await reply.json();
  const rows = [
    ["Architecture", info.architecture],
    ["Layers × heads", `${info.num_layers} × ${info.num_attention_heads}`],
    ["Context", `${info.context_length} tokens`],
    ["Vocabulary", `${info.vocab_size} tokens`],
  ];
  $("facts").replaceChildren(...rows.map(([name, value]) => {
    const row = document.createElement("tr");
    const head = document.createElement("th");
    const cell = document.createElement("td");
    head.textContent = name;
    cell.textContent = value;
    row.append(head, cell);
    return row;
  }));
  $("facts").hidden = false;
}

function keyHeaders() {
  const key = $("key").value;
  return key ? { "X-Api-Key": key } : {};
}

// Server-Sent Events over POST: the objects of their data lines.
async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (line.startsWith("data: ")) yield JSON.parse(line.slice(6));
    }
  }
}

function decoded(attention) {
  const bytes = Uint8Array.from(atob(attention.data), (c) => c.charCodeAt(0));
  return new Float32Array(bytes.buffer);
}

function draw(rows) {
  const canvas = $("rows");
  canvas.width = Math.max(...rows.map((row) => row.length));
  canvas.height = rows.length;
  const context = canvas.getContext("2d");
  const image = context.createImageData(canvas.width, canvas.height);
  rows.forEach((row, y) => {
    const most = Math.max(...row) || 1;
    row.forEach((value, x) => {
      const at = 4 * (y * canvas.width + x);
      image.data.set([20, 60, 160, Math.round(255 * Math.sqrt(value / most))], at);
    });
  });
  context.putImageData(image, 0, 0);
  canvas.hidden = $("caption").hidden = false;
}

async function generate(event) {
  event.preventDefault();
  const button = $("form").querySelector("button");
  button.disabled = true;
  $("text").className = "";
  try {
    const prompt = $("prompt").value;
    const given = document.createElement("span");
    given.className = "given";
    given.textContent = prompt;
    $("text").replaceChildren(given);
    const reply = await fetch("api/extra/generate/stream", {
      method: "POST",
      headers: { "Content-Type": "application/json", ...keyHeaders() },
      body: JSON.stringify({
        prompt, max_length: 48, output_attentions: true, attention_format: "aggregated",
        attention_values: "probs",
      }),
    });
    if (!reply.ok) throw new Error((await reply.json()).error);
    const rows = [];
    for await (const one of events(reply.body)) {
      if (one.type === "error") throw new Error(one.error);
      if (one.type !== "token") continue;
      $("text").append(one.token.text);
      rows.push(decoded(one.attention));
      draw(rows);
    }
  } catch (error) {
    $("text").textContent = error.message;
    $("text").className = "bad";
  } finally {
    button.disabled = false;
  }
}

$("form").addEventListener("submit", generate);
$("key").addEventListener("change", showStatus);
showStatus().catch((error) => {
  $("status").textContent = `The server does not answer: ${error.message}`;
  $("status").className = "bad";
});
