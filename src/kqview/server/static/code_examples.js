// Programs that send a request and read its stream: for a shell, Python and JavaScript.

import { html, quietButton } from "./dom.js";

// Examples of a POST of *body* to *address*, one of which is shown; *chosen* names it.
export function codeExamples(address, body, needsKey, chosen = "curl") {
  const sources = {
    curl: curl(address, body, needsKey),
    Python: python(address, body, needsKey),
    JavaScript: javascript(address, body, needsKey),
  };
  const code = html`<code></code>`;
  const copy = quietButton("Copy", async () => {
    await navigator.clipboard.writeText(code.textContent);
    copy.textContent = "Copied";
  });
  copy.hidden = !navigator.clipboard; // a page without HTTPS has none
  const choices = Object.keys(sources).map((name) =>
    quietButton(name, () => show(name), { "aria-pressed": "false" }),
  );
  const node = html`<div class="examples">
    <div class="bar">${choices}${copy}</div>
    <pre tabindex="0" role="group" aria-label="Program">${code}</pre>
  </div>`;

  function show(name) {
    node.dataset.chosen = name;
    code.textContent = sources[name];
    copy.textContent = "Copy";
    for (const one of choices) one.setAttribute("aria-pressed", one.textContent === name);
  }

  show(chosen in sources ? chosen : "curl");
  return node;
}

const shellQuoted = (text) => `'${text.replaceAll("'", "'\\''")}'`;

function curl(address, body, needsKey) {
  const key = needsKey ? ` \\\n  -H "X-Api-Key: $KQVIEW_KEY"` : "";
  return `curl -N ${address} \\
  -H 'Content-Type: application/json'${key} \\
  -d ${shellQuoted(JSON.stringify(body))}
`;
}

function python(address, body, needsKey) {
  const fields = Object.entries(body).map(([name, value]) => `    "${name}": ${pythonLiteral(value)},\n`);
  const key = needsKey ? `headers["X-Api-Key"] = os.environ["KQVIEW_KEY"]\n` : "";
  return `import base64
import json
${needsKey ? "import os\n" : ""}import urllib.request

import numpy as np

body = {
${fields.join("")}}
headers = {"Content-Type": "application/json"}
${key}request = urllib.request.Request(
    "${address}", json.dumps(body).encode(), headers
)
with urllib.request.urlopen(request) as reply:
    for line in reply:
        if not line.startswith(b"data: "):
            continue
        event = json.loads(line[6:])
        if event["type"] != "token":
            continue
        attention = event["attention"]
        values = np.frombuffer(base64.b64decode(attention["data"]), attention["dtype"])
        weights = values.reshape(attention["shape"])  # (layers, heads, columns)
        print(repr(event["token"]["text"]), weights.shape)
`;
}

function pythonLiteral(value) {
  if (typeof value === "boolean") return value ? "True" : "False";
  return JSON.stringify(value);
}

function javascript(address, body, needsKey) {
  const key = needsKey ? `, "X-Api-Key": process.env.KQVIEW_KEY` : "";
  return `const reply = await fetch("${address}", {
  method: "POST",
  headers: { "Content-Type": "application/json"${key} },
  body: JSON.stringify(${JSON.stringify(body, undefined, 2).replaceAll("\n", "\n  ")}),
});
let rest = "";
for await (const text of reply.body.pipeThrough(new TextDecoderStream())) {
  const lines = (rest + text).split("\\n");
  rest = lines.pop();
  for (const line of lines) {
    if (!line.startsWith("data: ")) continue;
    const event = JSON.parse(line.slice(6));
    if (event.type === "token") console.log(event.token.text, event.attention.shape);
  }
}
`;
}
