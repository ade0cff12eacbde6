"""Slots of llama.cpp's server: GET /slots, and files of slots."""

from __future__ import annotations

import stat
from typing import TYPE_CHECKING, Any

import pytest

from kqview.server import Settings
from tests.support.serving import serving

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import httpx

    from tests.support.serving import Served

PROMPT = "The river was wide and the boat was small."
# Its events are too large for the buffers of a connection, so it waits for a client that is slow.
WAITS = {
    "prompt": PROMPT, "n_predict": 400, "n_probs": 500, "stream": True, "ignore_eos": True,
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("slots")


@pytest.fixture(scope="module")
def served(folder: Path) -> Iterator[Served]:
    settings = Settings(n_slots=2, slot_save_path=str(folder), slot_wait_s=0.2)
    with serving(settings) as one:
        yield one


@pytest.fixture
def client(served: Served) -> Iterator[httpx.Client]:
    with served.client() as client:
        yield client


def act(client: httpx.Client, action: str, slot: object = 0, **body: Any) -> httpx.Response:
    return client.post(f"/slots/{slot}?action={action}", json=body)


def fill(client: httpx.Client, slot: int = 0, prompt: str = PROMPT) -> dict[str, Any]:
    body = {"prompt": prompt, "n_predict": 1, "id_slot": slot, "temperature": 0}
    return client.post("/completion", json=body).json()


# ---- files


def test_slot_is_saved_erased_and_restored_into_another(
    served: Served, client: httpx.Client, folder: Path
):
    fill(client)
    ids = served.engine.slots[0].tokens
    saved = act(client, "save", filename="river.bin").json()
    path = folder / "river.bin"
    assert saved.pop("timings").keys() == {"save_ms"}
    assert 0 < saved.pop("n_written") <= path.stat().st_size
    assert saved == {"id_slot": 0, "filename": "river.bin", "n_saved": len(ids)}
    assert stat.S_IMODE(path.stat().st_mode) == 0o600

    assert act(client, "erase").json() == {"id_slot": 0, "n_erased": len(ids)}
    assert served.engine.slots[0].tokens == []
    fill(client, 1, "Something else")

    restored = act(client, "restore", 1, filename="river.bin").json()
    assert restored.pop("timings").keys() == {"restore_ms"}
    assert restored.pop("n_read") > 0
    assert restored == {"id_slot": 1, "filename": "river.bin", "n_restored": len(ids)}
    assert served.engine.slots[1].tokens == ids
    assert fill(client, 1)["timings"]["prompt_n"] == 1  # all but the last token were there


REFUSED: list[tuple[str, object, dict[str, Any], int, str]] = [
    ("restore", 0, {"filename": "none.bin"}, 404, "none.bin"),
    ("save", 7, {"filename": "a.bin"}, 404, "7"),
    ("save", 0, {}, 400, "filename"),
    ("save", 0, {"filename": 5}, 400, "filename"),
    ("dance", 0, {}, 400, "save, restore, erase"),
]


@pytest.mark.parametrize(("action", "slot", "body", "status", "fact"), REFUSED)
def test_request_that_cannot_work_is_refused(
    client: httpx.Client, action: str, slot: object, body: dict[str, Any], status: int, fact: str
):
    reply = act(client, action, slot, **body)
    assert reply.status_code == status, reply.text
    assert fact in reply.json()["error"]["message"]


def test_file_of_another_model_is_refused(client: httpx.Client, byte_model: Path, folder: Path):
    fill(client)
    act(client, "save", filename="demo.bin")
    settings = Settings(model=str(byte_model), n_ctx=64, slot_save_path=str(folder))
    with serving(settings) as other, other.client() as own:
        reply = act(own, "restore", filename="demo.bin")
    assert reply.status_code == 400
    assert "model" in reply.json()["error"]["message"]


def test_busy_slot_is_a_conflict(served: Served, client: httpx.Client):
    body = {**WAITS, "id_slot": 0}
    with served.client() as other, other.stream("POST", "/completion", json=body) as stream:
        lines = stream.iter_lines()  # it closes the stream when it is dropped
        next(lines)
        reply = act(client, "erase")
    assert reply.status_code == 409
    assert "slot 0" in reply.json()["error"]["message"]
    served.wait_idle()


# ---- GET /slots


def test_idle_slots_are_listed(client: httpx.Client, served: Served):
    served.wait_idle()
    slots = client.get("/slots").json()
    assert slots == [
        {"id": i, "n_ctx": 512, "speculative": False, "is_processing": False} for i in range(2)
    ]


def test_slots_and_replies_name_what_guesses():
    with serving(Settings(demo=True, draft="prompt-lookup")) as served, served.client() as client:
        [slot] = client.get("/slots").json()
        props = client.get("/props").json()
        reply = client.post("/completion", json={"prompt": "a b a b a", "n_predict": 1}).json()
    assert slot["speculative"] is True
    for settings in (
        props["default_generation_settings"]["params"],
        reply["generation_settings"],
    ):
        assert settings["speculative.types"] == "ngram-simple"


def test_slot_that_generates_shows_how_far_it_is():
    with serving(Settings()) as served, served.client() as client:
        body = {**WAITS, "temperature": 0.5}
        with served.client() as other, other.stream("POST", "/completion", json=body) as stream:
            lines = stream.iter_lines()  # it closes the stream when it is dropped
            next(lines)
            [slot] = client.get("/slots").json()
            none_free = client.get("/slots?fail_on_no_slot=1")
        assert slot["is_processing"] is True
        assert slot["n_prompt_tokens"] == len(served.engine.tokenize(PROMPT))
        assert slot["params"]["temperature"] == 0.5
        [token] = slot["next_token"]
        assert token["has_next_token"] is True
        assert token["n_decoded"] + token["n_remain"] == 400
        assert none_free.status_code == 503
        assert none_free.json()["error"]["type"] == "unavailable_error"
        served.wait_idle()
        assert client.get("/slots?fail_on_no_slot=1").status_code == 200


def test_what_runs_is_shown_only_to_its_key():
    with serving(Settings(api_keys=("one", "two"))) as served:
        one, two = {"authorization": "Bearer one"}, {"authorization": "Bearer two"}
        with served.client(headers=one) as mine, served.client(headers=two) as other:
            with mine.stream("POST", "/completion", json=WAITS) as stream:
                lines = stream.iter_lines()  # it closes the stream when it is dropped
                next(lines)
                assert "params" not in other.get("/slots").json()[0]
                assert other.get("/slots").json()[0]["is_processing"] is True
                assert "params" in mine.get("/slots").json()[0]
            served.wait_idle()
