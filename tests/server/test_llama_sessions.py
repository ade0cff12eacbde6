"""Sessions over HTTP: in memory and in files, their limits, whose they are, and what disks do."""

from __future__ import annotations

import errno
import json
import os
import stat
import subprocess
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest

from kqview import durable
from kqview.errors import RequestError
from kqview.server import Settings, create_app
from kqview.state import read_state
from tests.server.test_llama_slots import (
    ADMIN,
    ANNA,
    BORIS,
    TEXT,
    act,
    clients_of,
    fill,
    saved,
    shape,
    tokens,
)
from tests.support.serving import serving

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import httpx

    from tests.support.serving import Served


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "slots"
    path.mkdir()
    return path


@pytest.fixture
def served(folder: Path) -> Iterator[Served]:
    settings = Settings(n_slots=2, n_ctx=512, slot_save_path=str(folder), max_sessions=2)
    with serving(settings) as one:
        yield one


@pytest.fixture
def client(served: Served) -> Iterator[httpx.Client]:
    with served.client() as one:
        fill(one)
        yield one


def session(
    client: httpx.Client, action: str, number: Any = 42, slot: int | None = 0, **body: Any
) -> httpx.Response:
    where = "" if slot is None else f"&slot={slot}"
    path = f"/sessions/{number}?action={action}{where}"
    return client.post(path, **({"json": body} if body else {}))


def uses_of_file(client: httpx.Client, name: str) -> Iterator[httpx.Response]:
    """Every use of a file: a session's, and those that llama.cpp's server has for a slot's."""
    yield session(client, "remove", slot=None, file=name)
    yield session(client, "restore", slot=1, file=name)
    yield act(client, "save", json={"filename": name})
    yield act(client, "restore", 1, json={"filename": name})


def listed(client: httpx.Client) -> list[int]:
    return [one["id"] for one in client.get("/sessions").json()]


# ---- the seed's replies

SEED: dict[str, Any] = {
    "save": {"id_session": 42, "id_slot": 0, "n_tokens": 156, "n_bytes": 4194560, "t_ms": 12.5},
    "restore": {
        "id_session": 42, "id_slot": 0, "n_bytes_read": 4194560, "success": True, "t_ms": 8.3,
    },
    "remove": {"id_session": 42, "removed": True},
    "remove to file": {
        "id_session": 42, "removed": True, "file": "session_42.bin", "n_bytes": 4194560,
    },
    "list": [{"id": 1, "size": 4194560, "created_at": 1739376000, "updated_at": 1739376120}],
}  # fmt: skip
"""Replies as the seed prints them."""


def test_replies_have_the_fields_of_the_seed(client: httpx.Client):
    found = {
        "save": session(client, "save").json(),
        "restore": session(client, "restore", slot=1).json(),
        "list": client.get("/sessions").json(),
        "remove": session(client, "remove", slot=None).json(),
    }
    session(client, "save")
    found["remove to file"] = session(client, "remove", slot=None, file="session_42.bin").json()
    assert {name: shape(one) for name, one in found.items()} == {
        name: shape(one) for name, one in SEED.items()
    }


def test_session_is_saved_again_listed_restored_and_removed(client: httpx.Client):
    blob = saved(client)
    session(client, "save", 7)
    (first,) = client.get("/sessions").json()
    assert (first["id"], first["size"]) == (7, len(blob))
    fill(client, prompt=TEXT + " And", n=2)
    session(client, "save", 7)
    session(client, "save", 1)
    again = client.get("/sessions").json()
    assert [one["id"] for one in again] == [1, 7]
    assert again[1]["created_at"] == first["created_at"]
    assert again[1]["updated_at"] >= first["updated_at"]
    reply = session(client, "restore", 7, slot=1)
    assert reply.json()["n_bytes_read"] == again[1]["size"]
    assert tokens(client, 1) == tokens(client)
    assert session(client, "remove", 7, slot=None).json()["removed"]
    assert listed(client) == [1]


def test_restored_session_goes_on_without_evaluating_it_again(client: httpx.Client):
    session(client, "save")
    before = tokens(client)
    fill(client, prompt="Something else entirely, which takes the slot.")
    session(client, "restore", slot=0)
    assert tokens(client) == before
    assert fill(client, n=2)["timings"]["cache_n"] > 10


# ---- files


def test_session_goes_to_a_file_and_comes_back(client: httpx.Client, folder: Path):
    blob = saved(client)
    session(client, "save")
    reply = session(client, "remove", slot=None, file="a b-\u00e4.bin")
    assert reply.json()["n_bytes"] == len(blob)
    path = folder / "a b-\u00e4.bin"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert read_state(path) == blob
    assert listed(client) == []
    # A session that does not exist can be restored from a file, and is not made by that.
    reply = session(client, "restore", 99, slot=1, file=path.name)
    assert reply.json()["n_bytes_read"] == len(blob)
    assert tokens(client, 1) == tokens(client)
    assert listed(client) == []
    assert fill(client, slot=1, n=2)["timings"]["cache_n"] > 10  # the trailer says it is exact


def test_file_of_the_server_before_is_restored(client: httpx.Client, folder: Path):
    session(client, "save")
    session(client, "remove", slot=None, file="kept")
    (folder / ".kqview-0123456789abcdef.part").write_bytes(b"what a dead process left")
    settings = Settings(n_ctx=512, slot_save_path=str(folder))
    with serving(settings) as later, later.client() as one:
        assert os.listdir(folder) == ["kept"]
        assert session(one, "restore", file="kept").is_success
        assert len(tokens(one)) == len(tokens(client))


def test_file_that_was_altered_is_refused_and_changes_nothing(client: httpx.Client, folder: Path):
    session(client, "save")
    session(client, "remove", slot=None, file="a")
    before = tokens(client, 1)
    data = bytearray((folder / "a").read_bytes())
    data[len(data) // 2] ^= 1
    (folder / "a").write_bytes(data)
    (folder / "b").write_bytes(b"")
    (folder / "c").write_bytes(b"hello")
    (folder / "d").write_bytes(data[:-100])
    for name, fact in (("a", "checksum"), ("b", "magic"), ("c", ""), ("d", "")):
        for reply in (
            session(client, "restore", slot=1, file=name),
            act(client, "restore", 1, json={"filename": name}),
        ):
            error = reply.json()["error"]
            assert (reply.status_code, error["type"]) == (400, "invalid_request_error"), name
            assert fact in error["message"]
            assert str(folder) not in reply.text
            assert tokens(client, 1) == before


WRONG_NAMES = (
    "", ".", "..", "../a", "a/b", "/etc/passwd", "a\\b", "a:b", "a*", "a?", 'a"', "a<", "a>", "a|",
    "a\0b", "a\nb", "a\x7f", " a", "a ", "a.", "a..b", "x" * 201, "a\uff0eb", "a\u2215b", ".hidden",
)  # fmt: skip


def test_name_that_leads_elsewhere_is_refused_and_the_session_stays(
    client: httpx.Client, folder: Path
):
    session(client, "save")
    for name in WRONG_NAMES:
        for reply in uses_of_file(client, name):
            assert reply.status_code == 400, name
            assert "Invalid filename" in reply.json()["error"]["message"]
    assert listed(client) == [42]
    assert os.listdir(folder) == []


@pytest.mark.parametrize("kind", ["link", "dangling", "pipe", "folder"])
def test_what_is_no_file_is_refused_and_the_session_stays(
    client: httpx.Client, folder: Path, tmp_path: Path, kind: str
):
    target = tmp_path / "elsewhere"
    target.write_bytes(b"a secret")
    path = folder / "x"
    {
        "link": lambda: path.symlink_to(target),
        "dangling": lambda: path.symlink_to(tmp_path / "nowhere"),
        "pipe": lambda: os.mkfifo(path),
        "folder": path.mkdir,
    }[kind]()
    session(client, "save")
    for reply in uses_of_file(client, "x"):
        assert reply.status_code == 400, reply.text
        assert "not a regular file" in reply.json()["error"]["message"]
    assert listed(client) == [42]
    assert target.read_bytes() == b"a secret"
    assert sorted(os.listdir(tmp_path)) == ["elsewhere", "slots"]


@pytest.mark.parametrize(
    ("number", "call", "status"),
    [
        (errno.ENOSPC, "write", 507),
        (errno.EDQUOT, "fsync", 507),
        (errno.EROFS, "open", 500),
        (errno.EIO, "replace", 500),
    ],
)
def test_disk_that_fails_leaves_the_session_and_the_old_file(
    client: httpx.Client, folder: Path, monkeypatch: pytest.MonkeyPatch, number: int, call: str,
    status: int,
):  # fmt: skip
    session(client, "save")
    session(client, "remove", slot=None, file="a")
    old = (folder / "a").read_bytes()
    fill(client, prompt=TEXT + " She", n=3)
    session(client, "save")

    class Failing:
        def __getattr__(self, name: str) -> Any:
            return fail if name == call else getattr(os, name)

    def fail(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(durable, "os", Failing())
        reply = session(client, "remove", slot=None, file="a")
    assert reply.status_code == status, reply.text
    assert reply.json()["error"]["type"] == "server_error"
    assert listed(client) == [42]
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == {"a": old}
    assert session(client, "remove", slot=None, file="a").is_success
    assert (folder / "a").read_bytes() != old


# ---- refusals

WRONG: dict[str, tuple[str, int, str]] = {
    "session without a number": ("/sessions/x?action=save&slot=0", 400, "Invalid session ID"),
    "session below 0": ("/sessions/-1?action=save&slot=0", 400, "Invalid session ID"),
    "no slot": ("/sessions/1?action=save", 400, "Missing or invalid 'slot' parameter"),
    "no slot to restore": ("/sessions/1?action=restore", 400, "Missing or invalid 'slot'"),
    "slot that is no number": ("/sessions/1?action=save&slot=a", 400, "Missing or invalid 'slot'"),
    "slot out of range": ("/sessions/1?action=save&slot=2", 404, "slots 0 to 1"),
    "slot out of range to restore": ("/sessions/1?action=restore&slot=2", 404, "slots 0 to 1"),
    "unknown session": ("/sessions/1?action=restore&slot=0", 404, "session 1"),
    "unknown session to remove": ("/sessions/1?action=remove", 404, "session 1"),
    "unknown action": ("/sessions/1?action=burn", 400, "save, restore, remove"),
    "no action": ("/sessions/1", 400, "save, restore, remove"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_request_is_refused_with_its_reason(demo: Served, name: str):
    path, status, fact = WRONG[name]
    with demo.client() as client:
        reply = client.post(path)
    assert reply.status_code == status, reply.text
    error = reply.json()["error"]
    kind = "not_found_error" if status == 404 else "invalid_request_error"
    assert (error["code"], error["type"]) == (status, kind)
    assert fact in error["message"]


def test_body_that_cannot_be_read_is_400_and_the_session_stays(client: httpx.Client):
    session(client, "save")
    for body in (b"{", b"[]", b'{"file": 5}', b"\xff"):
        for path in ("/sessions/42?action=remove", "/sessions/42?action=restore&slot=1"):
            assert client.post(path, content=body).status_code == 400
    assert listed(client) == [42]


def test_file_without_a_folder_is_501_and_missing_is_404(client: httpx.Client, demo: Served):
    with demo.client() as one:
        session(one, "save")
        for reply in (*uses_of_file(one, "a"), act(one, "erase")):
            assert reply.status_code == 501
            assert "--slot-save-path" in reply.json()["error"]["message"]
        assert session(one, "remove", slot=None).is_success
    assert session(client, "restore", file="missing").status_code == 404


def test_folder_that_is_missing_is_named_before_the_model_is_loaded(tmp_path: Path):
    with pytest.raises(RequestError, match=r"slot_save_path.*missing.*--slot-save-path"):
        create_app(Settings(demo=True, slot_save_path=str(tmp_path / "missing")))


# ---- limits


def test_sessions_over_their_number_or_bytes_are_507_and_the_others_stay(client: httpx.Client):
    for number in (1, 2, 1):  # the second time in place of itself
        assert session(client, "save", number).is_success
    reply = session(client, "save", 3)
    assert reply.status_code == 507
    assert "max_sessions" in reply.json()["error"]["message"]
    assert listed(client) == [1, 2]
    n_bytes = len(saved(client))
    with serving(Settings(n_ctx=512, max_session_bytes=n_bytes)) as served, served.client() as one:
        fill(one)
        assert session(one, "save", 1).is_success
        assert session(one, "save", 2).status_code == 507
        assert listed(one) == [1]


def test_files_over_their_bytes_are_507_and_the_session_stays(folder: Path):
    (folder / "large").write_bytes(bytes(60_000))
    settings = Settings(n_ctx=512, slot_save_path=str(folder), max_saved_bytes=90_000)
    with serving(settings) as served, served.client() as client:
        fill(client)
        session(client, "save")
        reply = session(client, "remove", slot=None, file="a")
        assert reply.status_code == 507
        assert "90000" in reply.json()["error"]["message"]
        assert listed(client) == [42]
        assert session(client, "remove", slot=None, file="large").is_success  # in its place


# ---- whose it is


def test_sessions_and_files_belong_to_their_key(folder: Path):
    settings = Settings(
        n_slots=2, n_ctx=512, api_keys=(ANNA, BORIS), admin_keys=(ADMIN,),
        slot_save_path=str(folder),
    )  # fmt: skip
    with serving(settings) as served, clients_of(served, ANNA, BORIS, ADMIN) as (a, b, admin):
        fill(a)
        fill(b, slot=1, prompt="Boris is a painter, too.")
        assert session(a, "save", 1).is_success
        for action in ("restore", "remove"):
            assert session(b, action, 1, slot=1).status_code == 404
        assert session(b, "save", 1, slot=1).is_success  # his own of that number
        assert listed(a) == listed(b) == [1]
        assert listed(admin) == [1, 1]
        for one in (a, b):
            assert session(one, "remove", 1, slot=None, file="mine").is_success
        sizes = [session(one, "restore", slot=i, file="mine").json()["n_bytes_read"]
                 for i, one in enumerate((a, b))]  # fmt: skip
        assert sizes[0] != sizes[1]
        assert session(admin, "restore", file="mine").status_code == 404
        assert not (folder / "mine").exists()
        session(a, "save", 5)
        assert session(admin, "remove", 5, slot=None).is_success
        assert listed(a) == []


def test_one_key_cannot_fill_the_sessions_of_all():
    settings = Settings(n_slots=2, n_ctx=512, api_keys=(ANNA, BORIS), max_sessions=4)
    with serving(settings) as served, clients_of(served, ANNA, BORIS) as (a, b):
        fill(a)
        fill(b, slot=1, prompt="Boris is a painter, too.")
        replies = [session(a, "save", number) for number in (1, 2, 3, 2)]
        assert [one.status_code for one in replies] == [200, 200, 507, 200]
        assert "one key may have 2 sessions" in replies[2].json()["error"]["message"]
        assert [session(b, "save", i, slot=1).status_code for i in (1, 2, 3)] == [200, 200, 507]
        n_bytes = len(saved(a))
    settings = Settings(n_ctx=512, api_keys=(ANNA, BORIS), max_session_bytes=3 * n_bytes)
    with serving(settings) as served, clients_of(served, ANNA, BORIS) as (a, b):
        fill(a)
        assert [session(a, "save", number).status_code for number in (1, 2)] == [200, 507]
        assert session(b, "save", 1).status_code != 507


def test_many_sessions_at_a_time_are_whole(served: Served, client: httpx.Client):
    blob = saved(client)
    replies: list[int] = []

    def work(number: int) -> None:
        with served.client() as one:
            for action in ("save", "restore", "save", "remove"):
                replies.append(session(one, action, number).status_code)

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(work, range(8)))
    assert set(replies) <= {200, 404, 507}  # two fit at a time
    assert 200 in replies
    assert saved(client) == blob
    assert listed(client) == []


# ---- the seed's workflows


SCRIPT = r"""
set -euo pipefail
curl() { command curl --fail-with-body -sS "$@"; }
curl -X POST $URL/v1/chat/completions -H "Content-Type: application/json" \
  -d '{"messages": [{"role": "user", "content": "I am Alice."}], "id_slot": 0, "max_tokens": 8}'
curl -X POST "$URL/sessions/1?action=save&slot=0"
curl -X POST "$URL/sessions/1?action=restore&slot=0"
curl -X POST "$URL/slots/0?action=save-state" -H "Accept: application/octet-stream" -o slot0.ses1
curl -X POST "$URL/slots/0?action=restore-state" \
  -H "Content-Type: application/octet-stream" --data-binary @slot0.ses1
curl -X POST "$URL/slots/0?action=save-state" > state.json
curl -X POST "$URL/slots/1?action=restore-state" -H "Content-Type: application/json" -d @state.json
curl -X POST "$URL/slots/0?action=tokens"
curl $URL/v1/slots/0/info
curl -X POST "$URL/slots/0?action=context-shift" \
  -H "Content-Type: application/json" -d '{"n_keep": 2, "n_discard": 3}'
curl -X POST "$URL/sessions/1?action=save&slot=0"
curl $URL/sessions
curl -X POST "$URL/sessions/1?action=remove" \
  -H "Content-Type: application/json" -d '{"file": "session_1.bin"}'
curl -X POST "$URL/sessions/1?action=restore&slot=1" \
  -H "Content-Type: application/json" -d '{"file": "session_1.bin"}'
"""


@pytest.mark.needs("curl")
def test_workflow_of_the_seed_with_curl(
    served: Served, client: httpx.Client, folder: Path, tmp_path: Path
):
    done = subprocess.run(
        ["bash", "-c", SCRIPT], env={**os.environ, "URL": served.url}, cwd=tmp_path, timeout=60,
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count('"success":true') == 5
    assert os.listdir(folder) == ["session_1.bin"]
    assert tokens(client, 1) == tokens(client)
    state = json.loads((tmp_path / "state.json").read_text())
    assert state["n_bytes"] == (tmp_path / "slot0.ses1").stat().st_size
