"""Saved slots over HTTP: the seed's fields, every refusal, whose a slot is, and who waits."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import random
import threading
import tracemalloc
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from kqview import Engine
from kqview.errors import BusyError, RequestError
from kqview.server import Settings
from kqview.server.api.llama_server import blobs
from kqview.server.models.model_entry import ModelWork
from kqview.server.models.slots import Slots
from kqview.server.web.access import Caller
from kqview.server.web.budget import Body
from tests.attack.blobs import changed
from tests.engine.test_state_refused import PROMPT, REFUSED
from tests.server.clients import raw_connection
from tests.support.serving import serving

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import httpx

    from tests.support.serving import Served

TEXT = "Anna is a painter. She lives in a small house."
BINARY = {"content-type": "application/octet-stream"}
ANNA, BORIS, ADMIN = "anna-key", "boris-key", "admin-key"


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    """Two slots; a busy one is waited for only a moment."""
    with serving(Settings(n_slots=2, n_ctx=4096, slot_wait_s=0.05)) as one:
        yield one


@pytest.fixture
def client(served: Served) -> Iterator[httpx.Client]:
    with served.client() as one:
        yield one


def fill(client: httpx.Client, *, slot: int = 0, n: int = 8, **body: Any) -> dict[str, Any]:
    """Generate from TEXT in a slot."""
    body = {"prompt": TEXT, "id_slot": slot, "n_predict": n, "temperature": 0, **body}
    reply = client.post("/completion", json=body)
    assert reply.status_code == 200, reply.text
    return reply.json()


def act(client: httpx.Client, action: str, slot: Any = 0, **options: Any) -> httpx.Response:
    return client.post(f"/slots/{slot}?action={action}", **options)


def saved(client: httpx.Client, slot: int = 0) -> bytes:
    reply = act(client, "save-state", slot, headers={"accept": "application/octet-stream"})
    assert reply.status_code == 200, reply.text
    return reply.content


def tokens(client: httpx.Client, slot: int = 0) -> list[int]:
    return act(client, "tokens", slot).json()["tokens"]


@contextlib.contextmanager
def busy(served: Served, slot: int = 0, **headers: str) -> Iterator[None]:
    """A generation that holds a slot, because its client reads its first bytes and no more."""
    body = {"prompt": TEXT, "id_slot": slot, "n_predict": -1, "ignore_eos": True, "stream": True}
    body["n_probs"] = 300  # more than any buffer on the way takes
    with served.client(headers=headers) as one, one.stream("POST", "/completion", json=body) as got:
        assert got.status_code == 200, got.read()
        chunks = got.iter_raw()  # dropped, it would close the connection
        next(chunks)
        yield


# ---- the seed's replies

SEED: dict[str, Any] = {
    "save-state": {"id_slot": 0, "n_tokens": 156, "n_bytes": 4194560, "t_ms": 12.5, "state": "U0"},
    "restore-state": {"id_slot": 0, "n_bytes_read": 4194560, "success": True, "t_ms": 8.3},
    "tokens": {
        "id_slot": 0, "n_tokens": 156, "tokens": [1, 9707], "n_prompt_tokens_processed": 156,
    },
    "context-shift": {"success": True, "new_n_tokens": 84},
    "info": {
        "n_tokens": 234, "boundary_eot": 151645, "n_messages": 5,
        "messages": [{"index": 0, "start": 0, "end": 13}],
    },
}  # fmt: skip
"""Replies as the seed prints them."""


def shape(value: Any) -> Any:
    """Names and types of a reply, in order."""
    if isinstance(value, dict):
        return {name: shape(one) for name, one in value.items()}
    if isinstance(value, list):
        return [shape(one) for one in value[:1]]
    return type(value)


def test_replies_have_the_fields_of_the_seed(client: httpx.Client):
    fill(client)
    found = {
        "save-state": act(client, "save-state").json(),
        "tokens": act(client, "tokens").json(),
        "info": client.get("/v1/slots/0/info").json(),
    }
    found["restore-state"] = act(
        client, "restore-state", json={"state": found["save-state"]["state"]}
    ).json()
    found["context-shift"] = act(client, "context-shift", json={"n_keep": 2, "n_discard": 3}).json()
    assert {name: shape(one) for name, one in found.items()} == {
        name: shape(one) for name, one in SEED.items()
    }


def test_blob_is_the_engines_in_base64_and_raw(served: Served, client: httpx.Client):
    fill(client)
    blob = served.engine.slots[0].save()
    reply = act(client, "save-state")
    assert int(reply.headers["content-length"]) == len(reply.content)
    assert base64.b64decode(reply.json()["state"]) == saved(client) == blob
    n_tokens = len(tokens(client))
    assert (reply.json()["n_bytes"], reply.json()["n_tokens"]) == (len(blob), n_tokens)
    wanted = act(client, "save-state", headers={"accept": "text/html, application/octet-stream"})
    assert wanted.headers["content-type"] == "application/octet-stream"


def test_restored_slot_goes_on_where_the_saved_one_was(client: httpx.Client):
    text = fill(client)["content"]
    before = tokens(client)
    blob = saved(client)
    act(client, "restore-state", 1, content=states_of_nothing(client), headers=BINARY)
    reply = act(client, "restore-state", 1, content=blob, headers=BINARY)
    assert reply.json()["n_bytes_read"] == len(blob)
    assert tokens(client, 1) == before
    assert act(client, "tokens", 1).json()["n_prompt_tokens_processed"] == 0
    ways = [fill(client, slot=slot, prompt=TEXT + text, n=6) for slot in (0, 1)]
    assert ways[0]["content"] == ways[1]["content"]
    # The server made the blob, so what it holds is exact and is not evaluated again.
    assert ways[1]["timings"]["cache_n"] == ways[0]["timings"]["cache_n"] > 10


def states_of_nothing(client: httpx.Client) -> bytes:
    """The blob of an empty slot."""
    n = len(tokens(client, 1))
    if n:
        act(client, "context-shift", 1, json={"n_keep": 0, "n_discard": n})
    return saved(client, 1)


def test_blob_of_unknown_origin_goes_on_only_for_who_names_its_slot(client: httpx.Client):
    fill(client)
    blob = bytearray(saved(client))
    blob[-2] ^= 1  # the last digit of a value
    assert act(client, "restore-state", 1, content=bytes(blob), headers=BINARY).status_code == 200
    assert len(tokens(client, 1)) == len(tokens(client))
    n_tokens = len(tokens(client, 1))
    act(client, "context-shift", 0, json={"n_keep": 0, "n_discard": n_tokens})
    assert fill(client, slot=-1, n=1)["timings"]["cache_n"] == 0
    act(client, "restore-state", 1, content=bytes(blob), headers=BINARY)
    assert fill(client, slot=1)["timings"]["cache_n"] > 10


def test_slot_that_was_shifted_goes_on_without_being_evaluated_again(client: httpx.Client):
    fill(client)
    reply = act(client, "context-shift", json={"n_keep": 2, "n_discard": 3})
    assert reply.json()["success"]
    left = tokens(client)
    timings = fill(client, prompt=[*left, 7], n=1)["timings"]
    assert (timings["cache_n"], timings["prompt_n"]) == (len(left), 1)


def test_empty_slot_is_saved_restored_and_looked_into(client: httpx.Client):
    blob = states_of_nothing(client)
    assert act(client, "restore-state", 1, content=blob, headers=BINARY).json()["success"]
    assert act(client, "tokens", 1).json()["tokens"] == []
    info = client.get("/v1/slots/1/info").json()
    assert (info["n_tokens"], info["n_messages"], info["messages"]) == (0, 0, [])


def test_messages_end_with_the_end_of_turn(served: Served, client: httpx.Client):
    eot = served.engine.model.eot_token_id
    assert eot is not None
    fill(client, prompt=[5, 6, eot, 7, 8, 9, eot, 4], n=1)
    info = client.get("/v1/slots/0/info").json()
    assert info["boundary_eot"] == eot
    spans = [(one["index"], one["start"], one["end"]) for one in info["messages"]]
    assert spans == [(0, 0, 2), (1, 3, 6), (2, 7, 7)]
    # The seed's example: keep message 0, drop message 1.
    n_keep, n_discard = spans[0][2] + 1, spans[1][2] - spans[0][2]
    act(client, "context-shift", json={"n_keep": n_keep, "n_discard": n_discard})
    assert tokens(client) == [5, 6, eot, 4]


# ---- refusals

WRONG: dict[str, tuple[str, str, dict[str, Any], int, str]] = {
    "slot without a number": ("POST", "/slots/x?action=tokens", {}, 400, "Invalid slot ID"),
    "number with a tail": ("POST", "/slots/1abc?action=tokens", {}, 400, "Invalid slot ID"),
    "slot below 0": ("POST", "/slots/-1?action=tokens", {}, 404, "slots 0 to 1"),
    "slot out of range": ("POST", "/slots/2?action=save-state", {}, 404, "slots 0 to 1"),
    "slot out of range, info": ("GET", "/v1/slots/2/info", {}, 404, "slots 0 to 1"),
    "slot out of range, restore": ("POST", "/slots/9?action=restore-state", {}, 404, "0 to 1"),
    "no action": ("POST", "/slots/0", {}, 400, "save-state, restore-state"),
    "unknown action": ("POST", "/slots/0?action=burn", {}, 400, "'burn'"),
    "no body": ("POST", "/slots/0?action=restore-state", {}, 400, "state"),
    "no JSON": ("POST", "/slots/0?action=restore-state", {"content": b"{"}, 400, "truncated"),
    "no state": ("POST", "/slots/0?action=restore-state", {"json": {}}, 400, "`state`"),
    "state within": (
        "POST", "/slots/0?action=restore-state", {"json": {"a": {"state": "AAAA"}}}, 400, "`state`",
    ),
    "state no text": ("POST", "/slots/0?action=restore-state", {"json": {"state": 5}}, 400, "str"),
    "no base64": (
        "POST", "/slots/0?action=restore-state", {"json": {"state": "!!!!"}}, 400, "base64",
    ),
    "base64 cut": (
        "POST", "/slots/0?action=restore-state", {"json": {"state": "U0VTM"}}, 400, "base64",
    ),
    "too small": (
        "POST", "/slots/0?action=restore-state", {"json": {"state": "U0VTMQ=="}}, 400, "n_tokens",
    ),
    "other magic": (
        "POST", "/slots/0?action=restore-state",
        {"content": b"SES2" + bytes(20), "headers": BINARY}, 400, "SES1",
    ),
    "tokens beyond the end": (
        "POST", "/slots/0?action=restore-state",
        {"content": b"SES1" + (200).to_bytes(4, "little") + bytes(20), "headers": BINARY}, 400,
        "tokens",
    ),
    "shift without a body": ("POST", "/slots/0?action=context-shift", {}, 400, "n_discard=0"),
    "shift of nothing": (
        "POST", "/slots/0?action=context-shift", {"json": {"n_keep": 1}}, 400, "n_discard=0",
    ),
    "shift below 0": (
        "POST", "/slots/0?action=context-shift", {"json": {"n_keep": -1, "n_discard": 1}}, 400,
        "n_keep=-1",
    ),
    "shift beyond the end": (
        "POST", "/slots/0?action=context-shift", {"json": {"n_keep": 2**31 - 1, "n_discard": 1}},
        400, "n_keep=2147483647",
    ),
    "shift by a text": (
        "POST", "/slots/0?action=context-shift", {"json": {"n_keep": "1", "n_discard": 1}}, 400,
        "n_keep",
    ),
    "shift by a fraction": (
        "POST", "/slots/0?action=context-shift", {"json": {"n_keep": 1.5, "n_discard": 1}}, 400,
        "n_keep",
    ),
    "other method": ("GET", "/slots/0", {}, 405, "POST"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_wrong_request_is_refused_with_its_reason_and_changes_nothing(
    client: httpx.Client, name: str
):
    method, path, options, status, fact = WRONG[name]
    fill(client, n=2)
    before = tokens(client)
    reply = client.request(method, path, **options)
    assert reply.status_code == status, reply.text
    if status != 405:
        error = reply.json()["error"]
        kind = "not_found_error" if status == 404 else "invalid_request_error"
        assert (error["code"], error["type"]) == (status, kind)
    assert fact in reply.text.replace('\\"', '"')
    assert tokens(client) == before


def test_server_without_slots_answers_501_but_for_their_files(tmp_path: Path):
    settings = Settings(slot_endpoints=False, slot_save_path=str(tmp_path))
    with serving(settings) as served, served.client() as client:
        fill(client)
        assert act(client, "save", json={"filename": "a.bin"}).status_code == 200
        replies = [
            act(client, "tokens"), act(client, "burn"), client.get("/v1/slots/0/info"),
            client.get("/slots"), client.get("/sessions"),
            client.post("/sessions/1?action=save&slot=0"),
        ]  # fmt: skip
        assert client.get("/props").json()["endpoint_slots"] is False
    assert {reply.status_code for reply in replies} == {501}
    assert {reply.json()["error"]["type"] for reply in replies} == {"not_supported_error"}


@pytest.fixture(scope="module")
def tiny(byte_model: Path) -> Iterator[Served]:
    """A server whose first slot holds PROMPT, as `REFUSED` wants it."""
    with Engine(byte_model, n_threads=1, n_ctx=64, n_slots=2, kv_type="f32") as engine:
        list(engine.attend(PROMPT))
        with serving(Settings(), engine) as served:
            yield served


def test_blob_that_is_unsound_is_400_with_field_and_offset_and_changes_nothing(tiny: Served):
    import re

    with tiny.client() as client:
        blob = saved(client)
        for name, (mutate, _, message) in REFUSED.items():
            wrong = mutate(blob)
            for body in ({"content": wrong, "headers": BINARY},
                         {"json": {"state": base64.b64encode(wrong).decode()}}):  # fmt: skip
                reply = act(client, "restore-state", **body)
                assert reply.status_code == 400, name
                assert re.search(message, reply.json()["error"]["message"]), name
        assert saved(client) == blob


def test_blobs_changed_at_random_are_refused_or_restored(tiny: Served):
    rng = random.Random(3)
    with tiny.client() as client:
        text = fill(client, slot=1, prompt=PROMPT, n=4)["content"]
        blobs = [saved(client), saved(client, 1)]
        statuses = set()
        for _ in range(150):
            before = tokens(client)
            wrong = changed(rng.choice(blobs), rng, blobs)
            reply = act(client, "restore-state", content=wrong, headers=BINARY)
            statuses.add(reply.status_code)
            assert reply.status_code == 200 or tokens(client) == before
        assert statuses == {200, 400}
        assert fill(client, slot=1, prompt=PROMPT, n=4)["content"] == text


# ---- base64 in pieces


def body_of(data: bytes) -> Body:
    body = Body()
    body.add(data)
    return body


@pytest.mark.parametrize("n", range(90, 102))
@pytest.mark.parametrize("mark", ["/", "\\/"])
def test_base64_is_read_across_its_pieces(monkeypatch: pytest.MonkeyPatch, n: int, mark: str):
    monkeypatch.setattr(blobs, "_TEXT", 33)
    blob = bytes([255] * n)  # its base64 is almost only "/"
    text = base64.b64encode(blob).decode().replace("/", mark)
    body = body_of(f'{{ "a": 1, "state" : "{text}", "b": 2}}'.encode())
    with body, blobs.blob_in(body) as found:
        assert found.read() == blob


@pytest.mark.parametrize("wrong", ["AA==AAAA" * 9, "A" * 97, "AAA=" * 12 + "AAAA", "AA\\u0041A"])
def test_base64_that_is_wrong_in_any_piece_is_refused(monkeypatch: Any, wrong: str):
    monkeypatch.setattr(blobs, "_TEXT", 32)
    with body_of(f'{{"state":"{wrong}"}}'.encode()) as body:
        with pytest.raises(RequestError, match="base64"):
            blobs.blob_in(body)


def test_base64_of_a_large_blob_is_never_whole_in_memory():
    blob = random.Random(1).randbytes(24 * 2**20)
    body = Body()
    tracemalloc.start()
    reply = blobs.saved_reply(0, blob, 1.0)
    n_bytes = 0
    for piece in reply.pieces:
        n_bytes += len(piece)
        body.add(piece)
    with body, blobs.blob_in(body) as found:
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert found.read() == blob
    assert n_bytes == reply.n_bytes
    assert peak < 8 * 2**20


# ---- a slot in use


def test_busy_slot_is_409_after_a_time_and_the_others_are_free(served: Served):
    with busy(served), served.client() as client:
        for reply in (
            act(client, "tokens"), act(client, "save-state"), client.get("/v1/slots/0/info"),
            act(client, "context-shift", json={"n_keep": 1, "n_discard": 1}),
            act(client, "restore-state", content=saved(client, 1), headers=BINARY),
        ):  # fmt: skip
            assert reply.status_code == 409, reply.text
            assert "slot 0" in reply.json()["error"]["message"]
        assert act(client, "tokens", 1).status_code == 200
    served.wait_idle()


def test_busy_slot_is_waited_for():
    replies: list[httpx.Response] = []
    with serving(Settings(n_ctx=4096, slot_wait_s=60)) as served, served.client() as client:
        with busy(served):
            waiting = threading.Thread(target=lambda: replies.append(act(client, "save-state")))
            waiting.start()
            served.wait_until(lambda: served.service.pool.default.slots._locks[0].locked())
            assert not replies
        waiting.join(30)
        assert replies[0].status_code == 200
        # Whoever leaves while waiting does nothing to the slot, and blocks nobody.
        with busy(served), raw_connection(served) as left:
            left.sendall(b"POST /slots/0?action=tokens HTTP/1.1\r\nhost: localhost\r\n\r\n")
            served.wait_until(lambda: served.service.pool.default.slots._locks[0].locked())
            left.close()
        assert act(client, "tokens").status_code == 200


@pytest.mark.parametrize(
    ("owners", "refusal"), [([ANNA], None), ([ANNA, ANNA], None), ([BORIS, ANNA], BusyError)]
)
async def test_generation_that_is_settled_during_the_work_refuses_only_what_others_left(
    owners: list[str], refusal: type[Exception] | None
):
    slot: Any = SimpleNamespace(id=0, is_busy=False)
    engine: Any = SimpleNamespace(slots=[slot])
    live: Any = SimpleNamespace(settings=Settings(slot_wait_s=60))
    register = ModelWork(lambda: None)
    slots = Slots(live, register, lambda: engine)
    loop = asyncio.get_running_loop()

    async def settle() -> None:
        usage = SimpleNamespace(prompt_tokens=1, cached_tokens=0)
        for owner in owners:
            run: Any = SimpleNamespace(
                owner=owner, request_id="r", generations=[SimpleNamespace(slot=0, usage=usage)]
            )
            register.ended(run)

    def work(_: Any) -> str:
        asyncio.run_coroutine_threadsafe(settle(), loop).result()
        return "done"

    with pytest.raises(refusal) if refusal else contextlib.nullcontext():
        assert await slots.use(Caller("anna", owner=ANNA), 0, work) == "done"
    slots.shutdown()


# ---- whose it is


@contextlib.contextmanager
def clients_of(served: Served, *keys: str) -> Iterator[list[httpx.Client]]:
    with contextlib.ExitStack() as stack:
        yield [
            stack.enter_context(served.client(headers={"x-api-key": key} if key else {}))
            for key in keys
        ]


def test_slot_belongs_to_the_key_that_used_it_last():
    settings = Settings(n_slots=2, n_ctx=512, api_keys=(ANNA, BORIS), admin_keys=(ADMIN,))
    with serving(settings) as served, clients_of(served, ANNA, BORIS, ADMIN) as (a, b, admin):
        fill(a)
        blob = saved(a)
        for reply in (
            act(b, "tokens"), act(b, "save-state"), b.get("/v1/slots/0/info"),
            act(b, "context-shift", json={"n_keep": 1, "n_discard": 1}),
            b.post("/sessions/1?action=save&slot=0"),
        ):  # fmt: skip
            assert reply.status_code == 404, reply.text
            assert "nothing of yours" in reply.json()["error"]["message"]
        assert b.get("/sessions").json() == []
        assert saved(admin) == blob
        assert act(b, "tokens", 1).json()["tokens"] == []  # nobody's yet
        # Boris may take it for contents of his own, as his next generation might.
        act(b, "restore-state", content=saved(b, 1), headers=BINARY)
        assert act(b, "tokens").json()["tokens"] == []
        assert act(a, "tokens").status_code == 404
        fill(a)
        assert saved(a) == blob


def test_restoring_needs_a_key_where_there_are_keys():
    settings = Settings(n_ctx=512, admin_keys=(ADMIN,))
    with serving(settings) as served, clients_of(served, "", ADMIN) as (anybody, admin):
        fill(anybody)
        blob = saved(anybody)
        for one, status in ((anybody, 401), (admin, 200)):
            reply = act(one, "restore-state", content=blob, headers=BINARY)
            assert reply.status_code == status
        assert anybody.post("/sessions/1?action=restore&slot=0").status_code == 401
    with serving(Settings(api_keys=(ANNA,))) as served, served.client() as anybody:
        for path in ("/slots/0?action=tokens", "/sessions/1?action=save&slot=0"):
            assert anybody.post(path).status_code == 401


# ---- limits


def test_blob_over_the_limit_is_refused_before_it_is_sent():
    with serving(Settings(n_ctx=512, max_state_bytes=1000)) as served, served.client() as client:
        reply = act(client, "restore-state", content=bytes(1001), headers=BINARY)
        assert reply.status_code == 413
        assert "1000" in reply.json()["error"]["message"]
        with raw_connection(served) as sock:  # the declared size is enough
            sock.sendall(
                b"POST /slots/0?action=restore-state HTTP/1.1\r\nhost: localhost\r\n"
                b"content-length: 5000000000\r\n\r\n"
            )
            assert sock.recv(100).startswith(b"HTTP/1.1 413")


def test_many_slow_uploads_do_not_disturb_a_good_client():
    settings = Settings(
        n_slots=2, n_ctx=512, max_connections=512, max_connections_per_client=512,
        memory_budget_bytes=2**30,
    )  # fmt: skip
    head = (
        b"POST /slots/1?action=restore-state HTTP/1.1\r\nhost: localhost\r\n"
        b"content-type: application/octet-stream\r\ncontent-length: 1000000\r\n\r\n"
    )
    with serving(settings) as served, served.client() as client:
        text = fill(client)["content"]
        blob = saved(client)
        with contextlib.ExitStack() as stack:
            slow = [stack.enter_context(raw_connection(served)) for _ in range(200)]
            for sock in slow:
                sock.sendall(head + blob[:4096])
            served.wait_until(lambda: served.service.budget.used_bytes >= 200 * 4096)
            assert served.service.budget.used_bytes < 200 * 64 * 1024
            assert fill(client)["content"] == text
            assert act(client, "restore-state", 1, content=blob, headers=BINARY).is_success
            for sock in slow:
                sock.sendall(blob[4096:5000])
            assert tokens(client, 1) == tokens(client)
        served.wait_until(lambda: not served.service.budget.used_bytes)
        served.wait_idle()


def test_slot_of_another_model_is_400_and_what_was_in_the_slots_is_forgotten(byte_model: Path):
    settings = Settings(
        demo=True, n_ctx=64, models_dir=str(byte_model.parent), api_keys=(ANNA,),
        admin_keys=(ADMIN,),
    )  # fmt: skip
    with serving(settings) as served, clients_of(served, ANNA, ADMIN) as (a, admin):
        fill(a, n=2)
        blob = saved(a)
        assert a.post("/sessions/1?action=save&slot=0").status_code == 200
        loaded = admin.post("/api/v1/model/load", json={"model": byte_model.name})
        assert loaded.status_code == 200, loaded.text
        for reply in (
            act(a, "restore-state", content=blob, headers=BINARY),
            a.post("/sessions/1?action=restore&slot=0"),
        ):
            assert reply.status_code == 400, reply.text
        assert "another model" in reply.json()["error"]["message"]
        assert act(a, "tokens").json()["tokens"] == []
