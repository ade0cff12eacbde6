"""Keys separate callers: what one key's requests make, no other key sees, ends or stumbles over."""

from __future__ import annotations

import contextlib
import json
from typing import TYPE_CHECKING, Any

import pytest

from kqview.server import Settings
from kqview.server.web.access import Caller
from tests.server.clients import WAITS_S, read_to_close, websocket
from tests.support.serving import serving

if TYPE_CHECKING:
    from collections.abc import Iterator

    import httpx

    from tests.support.serving import Served

ANNA, BORIS, ADMIN = "anna-key", "boris-key", "admin-key"
TEXT = "Mirelda found a silver key near the old bridge."
STREAM, ABORT = "/api/extra/generate/stream", "/api/extra/abort"
CHECK, LOGPROBS, PERF = (
    "/api/extra/generate/check", "/api/extra/last_logprobs", "/api/extra/perf",
)  # fmt: skip
NOBODY = {"success": "false", "done": "false"}
ENDED = {"success": "true", "done": "true"}


@pytest.fixture
def served() -> Iterator[Served]:
    settings = Settings(n_slots=3, n_ctx=8192, api_keys=(ANNA, BORIS), admin_keys=(ADMIN,))
    with serving(settings) as one:
        yield one


@contextlib.contextmanager
def client(served: Served, key: str) -> Iterator[httpx.Client]:
    with served.client(headers={"x-api-key": key}) as one:
        yield one


@contextlib.contextmanager
def held(served: Served, key: str, **body: Any) -> Iterator[Iterator[bytes]]:
    """A generation that waits for its client, who reads its first bytes and no more."""
    body = {"prompt": TEXT, "max_length": 4000, "ban_eos_token": True, **body}
    body["output_attentions"] = True
    with client(served, key) as one, one.stream("POST", STREAM, json=body) as reply:
        assert reply.status_code == 200, reply.read()
        chunks = reply.iter_raw()
        next(chunks)
        yield chunks


def text_of(one: httpx.Client, **name: str) -> str:
    return one.post(CHECK, json=name).json()["results"][0]["text"]


def generate(one: httpx.Client, **body: Any) -> None:
    body = {"prompt": TEXT, "max_length": 3, "temperature": 0, "logprobs": 2, **body}
    assert one.post(STREAM, json=body).status_code == 200


@pytest.mark.parametrize("name", [{"request_id": "mine"}, {"genkey": "mine"}, {}])
def test_foreign_run_is_as_one_that_does_not_exist(served: Served, name: dict[str, str]):
    with (
        held(served, ANNA, **name) as rest,
        client(served, BORIS) as boris,
        client(served, ANNA) as anna,
    ):
        served.wait_until(lambda: text_of(anna, **name))
        unknown = {field: "nobody's" for field in name}
        for path in (CHECK, ABORT, LOGPROBS):
            foreign, none = (boris.post(path, json=one) for one in (name, unknown))
            assert (foreign.status_code, foreign.json()) == (none.status_code, none.json())
        assert text_of(boris, **name) == ""
        assert len(served.service.runs) == 1
        assert anna.post(ABORT, json=name).json() == ENDED
        for _ in rest:  # else it waits for its client to read what is on its way
            pass
        served.wait_idle()


def test_two_keys_use_one_request_id_and_one_genkey_at_a_time(served: Served):
    name = {"request_id": "same", "genkey": "same"}
    with held(served, ANNA, **name), held(served, BORIS, **name), client(served, BORIS) as boris:
        assert len(served.service.runs) == 2
        again = boris.post(STREAM, json={"prompt": TEXT, "max_length": 1, **name})
        assert '"request_id":"same"' in again.text  # a label, of its own requests too
        assert boris.post(ABORT, json={"genkey": "same"}).json() == ENDED
        served.wait_until(lambda: len(served.service.runs) == 1)
        assert boris.post(ABORT, json=name).json() == NOBODY
        with client(served, ANNA) as anna:
            assert text_of(anna, **name)


def test_abort_without_a_name_ends_the_only_run_of_its_own_key(served: Served):
    with held(served, ANNA), held(served, BORIS), client(served, BORIS) as boris:
        assert boris.post(ABORT, json={}).json() == ENDED
        served.wait_until(lambda: len(served.service.runs) == 1)
        assert boris.post(ABORT, json={}).json() == {"success": "false", "done": "true"}


def test_logprobs_and_figures_of_the_last_run_are_the_keys_own(served: Served):
    with client(served, ANNA) as anna, client(served, BORIS) as boris:
        untouched = boris.get(PERF).json()
        generate(anna, sampler_seed=42)
        assert boris.get(LOGPROBS).json() == {"logprobs": None}
        seen = boris.get(PERF).json()
        times = {"uptime", "idletime"}
        assert {k: v for k, v in seen.items() if k not in times} == {
            k: v for k, v in untouched.items() if k not in times
        }
        generate(boris, max_length=2)
        assert len(anna.get(LOGPROBS).json()["logprobs"]["content"]) == 3
        assert len(boris.get(LOGPROBS).json()["logprobs"]["content"]) == 2
        mine = anna.get(PERF).json()
        assert (mine["last_token_count"], mine["last_seed"], mine["total_gens"]) == (3, 42, 1)


def test_admin_sees_and_ends_what_any_key_made(served: Served):
    with client(served, ADMIN) as admin, client(served, ANNA) as anna:
        generate(anna)
        assert len(admin.get(LOGPROBS).json()["logprobs"]["content"]) == 3
        assert admin.get(PERF).json()["total_gens"] == 1
        with held(served, BORIS, request_id="r"), held(served, ADMIN, request_id="r"):
            assert admin.post(ABORT, json={"request_id": "r"}).json() == ENDED  # its own first
            served.wait_until(lambda: len(served.service.runs) == 1)
            assert text_of(admin, request_id="r")
            assert admin.post(ABORT, json={"request_id": "r"}).json() == ENDED
            served.wait_idle()


def test_websockets_of_two_keys_use_one_request_id(served: Served):
    ask = {"type": "generate", "prompt": TEXT, "max_new_tokens": 1, "request_id": "same"}
    path = "/api/v1/generate/stream"
    with (
        held(served, ANNA, request_id="same"),
        websocket(served, path, additional_headers={"x-api-key": BORIS}) as socket,
    ):
        socket.send(json.dumps({"type": "cancel", "request_id": "same"}))
        assert json.loads(socket.recv(timeout=WAITS_S))["type"] == "error"
        socket.send(json.dumps(ask))
        assert json.loads(socket.recv(timeout=WAITS_S))["type"] == "token"
        assert json.loads(socket.recv(timeout=WAITS_S))["type"] == "done"
        assert len(served.service.runs) == 1


def test_every_dialect_names_the_owner_of_its_runs(served: Served):
    """A run without one could be seen by nobody but an admin."""
    body = {"prompt": TEXT, "max_length": 1}
    ask = {"type": "generate", "prompt": TEXT, "max_new_tokens": 1}
    with client(served, ANNA) as anna:
        anna.post(STREAM, json=body)
        anna.post("/api/v1/generate", json=body)
        for path, message in ((f"{STREAM}/ws", body), ("/api/v1/generate/stream", ask)):
            with websocket(served, path, additional_headers={"x-api-key": ANNA}) as socket:
                socket.send(json.dumps(message))
                assert '"token"' in str(socket.recv(timeout=WAITS_S))
                socket.close()
                read_to_close(socket)
        served.wait_idle()
        assert anna.get(PERF).json()["total_gens"] == served.service._n_runs_of.total() == 4


def test_without_keys_everybody_is_one_caller():
    with serving(Settings()) as served, served.client() as one, client(served, "any") as other:
        generate(one)
        assert len(other.get(LOGPROBS).json()["logprobs"]["content"]) == 3
        generate(other)
        assert one.get(PERF).json()["total_gens"] == 2


def test_caller_sees_its_own_and_an_admin_all():
    assert Caller("a", owner="x").may_see("x")
    assert not Caller("a", owner="x").may_see("y")
    assert not Caller("a", owner="x").may_see("")
    assert Caller("a", is_admin=True, owner="z").may_see("x")
