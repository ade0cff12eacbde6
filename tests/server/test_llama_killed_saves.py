"""A server killed while it saves over HTTP has the old or the new file after its restart, whole."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.full

WITHIN_S = 60.0
ROOT = Path(__file__).parents[2]
# Kills itself in the call of `durable` that the file KILL_AT names, once that file is there.
SERVER = """
import contextlib, os, signal, sys
from kqview.cli.main import app
from kqview.state import durable
from tests.support.sessions import SeenOs

def tell(moment, call, *_):
    with contextlib.suppress(FileNotFoundError), open(os.environ["KILL_AT"]) as wanted:
        if wanted.read() == f"{moment} {call}":
            os.kill(os.getpid(), signal.SIGKILL)

durable.os = SeenOs(tell)
app(["serve", "--demo", "--threads", "1", "--ctx", "256", "--port", "0", "--no-supervise",
     "--slot-save-path", sys.argv[1]])
"""


@contextlib.contextmanager
def server(folder: Path, kill_at: Path) -> Iterator[tuple[subprocess.Popen[str], httpx.Client]]:
    environ = {name: value for name, value in os.environ.items() if name[:7] != "KQVIEW_"}
    path = os.pathsep.join([str(ROOT), environ.get("PYTHONPATH", "")])
    process = subprocess.Popen(
        [sys.executable, "-c", SERVER, str(folder)],
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, cwd=ROOT,
        env={**environ, "KILL_AT": str(kill_at), "PYTHONPATH": path},
    )  # fmt: skip
    assert process.stdout is not None
    try:
        line = next(line for line in process.stdout if "serves" in line)
        url = re.search(r"http://[\w.:]+", line)
        assert url
        with httpx.Client(base_url=url[0], timeout=WITHIN_S) as client:
            yield process, client
    finally:
        process.kill()
        process.wait(WITHIN_S)
        process.stdout.close()


def post(client: httpx.Client, path: str, **body: Any) -> Any:
    reply = client.post(path, json=body)
    assert reply.status_code == 200, reply.text
    return reply.json()


def filled(client: httpx.Client, prompt: str) -> list[int]:
    """Fill slot 0; returns its ids."""
    body = {"prompt": prompt, "n_predict": 1, "id_slot": 0, "temperature": 0}
    post(client, "/completion", **body, cache_prompt=False)
    return post(client, "/slots/0?action=tokens")["tokens"]


def restored(client: httpx.Client, path: str, file: dict[str, str]) -> list[int]:
    """The ids that a file holds, by way of an empty slot."""
    client.post("/slots/0?action=erase", json={})
    post(client, path, **file)
    return post(client, "/slots/0?action=tokens")["tokens"]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="a process kills itself")
@pytest.mark.parametrize(
    ("save", "restore", "file", "moments"),
    [
        (
            "/slots/0?action=save", "/slots/0?action=restore", {"filename": "kept"},
            ["half write", "before replace", "after replace"],
        ),
        (
            "/sessions/7?action=remove", "/sessions/7?action=restore&slot=0", {"file": "kept"},
            ["before fsync", "after replace"],
        ),
    ],
    ids=["slot", "session"],
)  # fmt: skip
def test_server_killed_while_it_saves_leaves_the_old_or_the_new_file(
    tmp_path: Path, save: str, restore: str, file: dict[str, str], moments: list[str]
):
    folder, kill_at = tmp_path / "files", tmp_path / "kill_at"
    folder.mkdir()
    with server(folder, kill_at) as (_, client):
        saved = filled(client, "Once")
        if save.startswith("/sessions"):
            post(client, "/sessions/7?action=save&slot=0")
        post(client, save, **file)
    for moment in moments:
        with server(folder, kill_at) as (process, client):
            assert restored(client, restore, file) == saved
            latest = filled(client, f"Killed {moment}")
            assert latest != saved
            if save.startswith("/sessions"):
                post(client, "/sessions/7?action=save&slot=0")
            kill_at.write_text(moment)
            with pytest.raises(httpx.HTTPError):
                client.post(save, json=file)
            assert process.wait(WITHIN_S) == -signal.SIGKILL
        kill_at.unlink()
        if moment == "after replace":
            saved = latest
    with server(folder, kill_at) as (_, client):
        assert restored(client, restore, file) == saved
