"""What the README's section on serving shows of the kobold dialect works as it stands there."""

from __future__ import annotations

import contextlib
import io
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
SECTION = README.partition("\n## Serve it\n")[2].partition("\n## ")[0]
ADDRESS = "127.0.0.1:5001"
CURLS = [
    command
    for block in re.findall(r"```sh\n(.*?)```", SECTION, re.DOTALL)
    for command in re.findall(r"^(curl (?:.*\\\n)*.*)", block, re.MULTILINE)
    if "/api/v1/tokenize" in command or "/api/extra/" in command
]
PYTHON = next(
    block
    for block in re.findall(r"```python\n(.*?)```", SECTION, re.DOTALL)
    if "/api/extra/generate/stream/ws" in block
)


def test_section_shows_two_curl_lines():
    assert len(CURLS) == 2


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
@pytest.mark.parametrize("command", CURLS, ids=["tokenize", "stream"])
def test_curl_line_prints_what_stands_below_it(demo: Served, command: str):
    command = command.replace(f"http://{ADDRESS}", demo.url)
    done = subprocess.run(
        ["bash", "-c", command], capture_output=True, text=True, timeout=60, check=True
    )
    if "tokenize" in command:
        shown = re.search(r"^# (\{\"tokens\".*)$", SECTION, re.MULTILINE)
        assert shown
        head, tail = shown[1].split(", ...")
        assert done.stdout.startswith(head)
        assert done.stdout.endswith(tail)
        return
    data = [json.loads(line[6:]) for line in done.stdout.split("\n") if line[:6] == "data: "]
    assert [event["type"] for event in data] == ["token", "token", "done"]
    text = json.dumps(data[0]["token"], separators=(",", ":"))
    assert text in SECTION
    assert f'"shape":{data[0]["attention"]["shape"]}'.replace(" ", "") in SECTION


def test_python_example_prints_a_row_for_each_token(demo: Served):
    code = PYTHON.replace(f"ws://{ADDRESS}", demo.ws_url)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(code, "README.md", "exec"), {"__name__": "readme"})
    lines = printed.getvalue().splitlines()
    n_prompt = len(demo.engine.tokenize("Mirelda found a key. Then Mirel", add_special=True))
    assert 1 <= len(lines) <= 8
    for i, line in enumerate(lines):
        assert line.endswith(f"(4, 8, {n_prompt + i})")
