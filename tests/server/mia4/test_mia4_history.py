"""Conversations over HTTP: what the prompt has of them, and models that change between turns."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import pytest

from kqview.server.config import ChatSessions
from tests.support import mia4
from tests.support.serving import serving

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.serving import Served

LONG = "Tell me about the baker, the silver key and the old bridge of the village. " * 3


def history(served: Served, session: str) -> list[dict[str, str]]:
    with served.client() as client:
        return client.get(f"/chat/sessions/{session}").json()["messages"]


def usage(served: Served, **body: Any) -> dict[str, Any]:
    frames = mia4.generate(served, **body)
    mia4.check_end(frames)
    (found,) = mia4.named(frames, "usage")
    return found


def test_usage_says_how_many_messages_left_the_prompt():
    with serving(mia4.config(settings={"n_ctx": 512})) as served:
        said = [usage(served, session_id="s", prompt=f"{n} {LONG}") for n in range(9)]
        assert len(history(served, "s")) == 18
    left_out = [one.get("messages_left_out") for one in said]
    assert left_out[0] is None
    assert left_out[-1]
    assert left_out[-1] % 2 == 0
    assert all(one["prompt_tokens"] <= 512 for one in said)


@pytest.mark.parametrize("database", [None, "sessions.db"])
def test_models_take_turns_in_one_session(tmp_path: Path, database: str | None):
    sessions = ChatSessions(
        database=database and str(tmp_path / database), states_dir=str(tmp_path / "states")
    )
    models: dict[str, dict[str, Any]] = {"a": {}, "b": {"kv_type": "q8_0"}}
    with serving(mia4.config(models, sessions=sessions)) as served:
        for n, model in enumerate("abbab"):
            frames = mia4.generate(served, session_id="s", model=model, prompt=f"{n} {LONG}")
            assert mia4.check_end(frames)["status"] == "ok"
            assert {data["model_id"] for _, data in frames if "model_id" in data} == {model}
            assert len(history(served, "s")) == 2 * (n + 1)
        with served.client() as client:
            (listed,) = client.get("/chat/sessions").json()["sessions"]
        assert listed["model"] == "b"


@pytest.mark.parametrize("name", ["a/b", "50% off?", "äöü 日本", "x/", "#1"])
def test_session_of_any_name_is_shown_and_forgotten(demo: Served, name: str):
    usage(demo, session_id=name)
    path = f"/chat/sessions/{quote(name, safe='')}"
    with demo.client() as client:
        assert client.get(path).json()["session_id"] == name
        assert client.delete(path).status_code == 204
        assert client.get(path).status_code == 404


def test_a_turn_replaces_the_last_ones_once_it_has_an_answer():
    with serving(mia4.config()) as served:
        for prompt in ("Who is Anna?", "And Tom?", "And then?"):
            mia4.generate(served, session_id="s", prompt=prompt)
        with served.client() as client:
            body = {"session_id": "s", "prompt": "Why?"}
            odd = client.post("/generate", json={**body, "replaces": 3})
            assert (odd.status_code, odd.json()["field"]) == (400, "replaces")
            bad = {**body, "replaces": 2, "overrides": {"top_p": 2}}
            assert client.post("/generate", json=bad).status_code == 422
        assert len(history(served, "s")) == 6
        mia4.generate(served, session_id="s", prompt="Why?", replaces=4)
        said = [one["content"] for one in history(served, "s")[::2]]
        assert said == ["Who is Anna?", "Why?"]
        mia4.generate(served, session_id="s", prompt="Who is Tom?", replaces=100)
        assert [one["content"] for one in history(served, "s")[::2]] == ["Who is Tom?"]
        with served.client() as client:
            (listed,) = client.get("/chat/sessions").json()["sessions"]
        assert (listed["title"], listed["n_messages"]) == ("Who is Tom?", 2)


def test_citations_come_behind_their_sentences():
    documents = [{"text": "Anna has a red ball. Tom found a key.", "title": "People"}]
    with serving(mia4.config()) as served:
        frames = mia4.generate(
            served, prompt="Who is Anna?", documents=documents,
            overrides={"temperature": 0, "max_output_tokens": 30},
        )  # fmt: skip
    mia4.check_end(frames)
    text, n = "", 0
    for name, data in frames:
        if name == "token":
            text += data["text"]
        elif name == "citation":
            n += 1
            assert data["end_index"] == len(text.rstrip())
            passage = documents[0]["text"][data["start_char_index"] : data["end_char_index"]]
            assert (data["cited_text"], data["title"]) == (passage, "People")
    assert n > 0
