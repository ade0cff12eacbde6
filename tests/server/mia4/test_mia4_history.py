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
