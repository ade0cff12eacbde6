"""A server killed within a turn, or while it saves one, has all that was done after a restart."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from tests.support.serve_process import started

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Iterator

pytestmark = pytest.mark.full

WITHIN_S = 60.0
ROOT = Path(__file__).parents[2]
PROMPT = "Tell me about the baker, the silver key and the old bridge of the village. " * 3
# Kills itself in the call of `durable` that a file names, once that file is there.
SERVER = """
import contextlib, os, signal, sys
from kqview.cli.main import app
from kqview import durable
from tests.support.sessions import SeenOs

def tell(moment, call, *_):
    with contextlib.suppress(FileNotFoundError), open(sys.argv[2]) as wanted:
        if wanted.read() == f"{moment} {call}":
            os.kill(os.getpid(), signal.SIGKILL)

durable.os = SeenOs(tell)
app(["serve", "--config", sys.argv[1], "--demo", "--threads", "1", "--ctx", "512", "--port", "0",
     "--no-supervise"])
"""


@contextlib.contextmanager
def server(config: Path, kill_at: Path) -> Iterator[tuple[subprocess.Popen[str], httpx.Client]]:
    command = [sys.executable, "-c", SERVER, str(config), str(kill_at)]
    with (
        started(command, cwd=ROOT) as parent,
        httpx.Client(base_url=parent.url, timeout=WITHIN_S) as client,
    ):
        yield parent.process, client


def turn(
    client: httpx.Client, n: int, *, n_frames: int | None = None, n_tokens: int = 4
) -> tuple[str, int]:
    """Turn *n*; its text as far as it came, up to *n_frames*, and the tokens of its prompt."""
    body = {
        "session_id": "kept", "prompt": f"{n} {PROMPT}",
        "overrides": {"temperature": 0, "max_output_tokens": n_tokens},
    }  # fmt: skip
    text, n_prompt = "", 0
    # A server that dies while it saves the turn may do so before its last frame is sent.
    with (
        contextlib.suppress(httpx.NetworkError, httpx.RemoteProtocolError),
        client.stream("POST", "/generate", json=body) as reply,
    ):
        assert reply.status_code == 200, reply.read()
        for line in reply.iter_lines():
            if line.startswith("data: "):
                data: dict[str, Any] = json.loads(line[6:])
                text += data.get("text", "")
                if n_frames is not None and (n_frames := n_frames - 1) == 0:
                    break
                n_prompt = data.get("prompt_tokens", n_prompt)
                assert data.get("status", "ok") == "ok"
    return text, n_prompt


def n_evaluated(client: httpx.Client) -> int:
    """Tokens of prompts that were evaluated since the start."""
    found = re.search(r"^kqview_prompt_tokens\S* (\d+)", client.get("/metrics").text, re.MULTILINE)
    assert found
    return int(found[1])


def messages(client: httpx.Client) -> list[str]:
    return [one["content"] for one in client.get("/chat/sessions/kept").json()["messages"]]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="a process kills itself")
def test_server_killed_in_a_turn_or_while_it_saves_one_has_the_last_completed_turn(tmp_path: Path):
    config, kill_at, states = tmp_path / "kqview.toml", tmp_path / "kill_at", tmp_path / "states"
    config.write_text(
        f'[sessions]\ndatabase = "{tmp_path / "sessions.db"}"\nstates_dir = "{states}"\n'
    )
    said: list[str] = []
    with server(config, kill_at) as (process, client):
        said += [f"0 {PROMPT}", turn(client, 0)[0]]
        turn(client, 1, n_frames=2, n_tokens=200)
        process.send_signal(signal.SIGKILL)
        assert process.wait(WITHIN_S) == -signal.SIGKILL
    for n, moment in enumerate(["half write", "after replace"], 1):
        with server(config, kill_at) as (process, client):
            assert messages(client) == said
            kill_at.write_text(moment)
            said += [f"{n} {PROMPT}", turn(client, n)[0]]
            # It died of what came behind the turn: of saving its slot.
            assert process.wait(WITHIN_S) == -signal.SIGKILL
            kill_at.unlink()
    with server(config, kill_at) as (_, client):
        assert messages(client) == said
        assert len([one for one in states.iterdir() if one.suffix != ".ses1"]) == 0
        _, n_prompt = turn(client, 3)
        assert len(messages(client)) == 8
        assert n_evaluated(client) < n_prompt // 2  # the others are in the last complete file
