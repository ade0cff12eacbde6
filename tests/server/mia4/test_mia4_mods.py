"""Mods in the MIA4 API: what they take back is told, and the conversation keeps the final text."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from kqview.chat.reasoning import Split
from kqview.chat.turn import Reading
from kqview.server.apps.mia4.turn import FrameWriter
from kqview.server.models.run import Removal
from tests.support import mia4

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.serving import Serve

REWRITE = """
from kqview.mods import Mod

class Rewrite(Mod):
    def __init__(self, text=" XY", back=2):
        self.text, self.back, self.n = text, back, 0
    def on_added(self, event, actions, tokenizer):
        self.n += len(event.added_tokens)
        if self.n == 4:
            self.n = 100
            return actions.backtrack(self.back, tokenizer.encode(self.text, False))
"""

REQUIRED = """
from kqview.mods import Mod

class Guard(Mod):
    required = True
    def on_sampled(self, event, actions, tokenizer):
        if event.step == 3:
            raise KeyError("inside")
"""


def applied(frames: list[mia4.Frame], name: str = "token", lost: str = "characters") -> str:
    """The text that a client has which drops what was taken back."""
    text = ""
    for kind, data in frames:
        if kind == name:
            text += data["text"]
        elif kind == "removed" and data.get(lost):
            text = text[: -data[lost]]
    return text


@pytest.mark.parametrize("attention", [None, True])
def test_text_that_a_mod_wrote_over_is_taken_back(
    serve: Serve, tmp_path: Path, attention: bool | None
):
    (tmp_path / "rewrite.py").write_text(REWRITE)
    served = serve(mia4.config(settings={"mods_dir": str(tmp_path)}))
    overrides = {**mia4.GREEDY, **({"attention": attention} if attention else {})}
    plain = mia4.generate(served, overrides=overrides)
    mods = [{"name": "rewrite", "text": " Bea"}]
    frames = mia4.generate(served, overrides=overrides, mods=mods, session_id="s")
    [lost] = mia4.named(frames, "removed")
    assert lost["tokens"] >= 1  # a token that was taken back before it was sent is not told
    text = applied(frames)
    assert " Bea" in text
    assert text.startswith(mia4.text_of(plain)[: text.index(" Bea")])
    assert mia4.check_end(frames)["status"] == "ok"
    with served.client() as client:
        messages = client.get("/chat/sessions/s").json()["messages"]
    assert messages[-1]["content"] == text


@pytest.mark.parametrize(
    ("mods", "message"),
    [(["none"], "has 'none', which"), ([{"text": "x"}], "mods[0].name"), ("rewrite", "mods")],
)
def test_mods_that_cannot_be_used_are_refused(
    serve: Serve, tmp_path: Path, mods: Any, message: str
):
    (tmp_path / "rewrite.py").write_text(REWRITE)
    served = serve(mia4.config(settings={"mods_dir": str(tmp_path)}))
    reply = mia4.post(served, mods=mods)
    assert reply.status_code == 400
    assert reply.json()["field"] == "mods"
    assert message in reply.json()["message"]


def test_reasoning_and_answer_are_taken_back_apart():
    parts = ["<analysis>", "Tom", " asks", "</analysis><final>", "Anna", " is"]
    reading = Reading(split=Split(mode="tags", marker="===FINAL==="))
    writer = FrameWriter("r-1", "demo", reading, drops_reasoning=False)
    frames = [one for i, part in enumerate(parts) for one in writer.feed(part, i)]
    taken = Removal(0, 4, len("".join(parts[2:])), 2, parts[:2])
    writer, sent = writer.take_back(taken)
    frames += sent
    rest = [" waits", "</analysis><final>", "Bea"]
    frames += [one for i, part in enumerate(rest) for one in writer.feed(part, 2 + i)]
    frames += writer.finish("".join(parts[:2] + rest))
    heard = list(mia4.frames_of(b"\n\n".join(frames).decode().split("\n")))
    assert applied(heard) == "Bea"
    assert applied(heard, "analysis", "reasoning_characters") == "Tom waits"
    assert (writer.tokens.n_reasoning, writer.tokens.n_final) == (2, 1)


def test_model_may_be_named_with_a_mod_and_its_rows_are_those_of_the_final_text(
    serve: Serve, tmp_path: Path
):
    (tmp_path / "rewrite.py").write_text(REWRITE)
    served = serve(mia4.config({"a": {}, "b": {}}, settings={"mods_dir": str(tmp_path)}))
    overrides = {**mia4.GREEDY, "attention": {"reduce": "mean"}}
    frames = mia4.generate(served, model="b/rewrite", request_id="r", overrides=overrides)
    assert mia4.named(frames, "removed")
    assert {data["model_id"] for _, data in frames if "model_id" in data} == {"b"}
    with served.client() as client:
        kept = client.get("/generate/r/attention").json()["rows"]
    # Tokens that a mod wrote have no rows.
    assert "".join(one["text"] for one in kept) == applied(frames).replace(" XY", "")
    assert mia4.post(served, model="b/none").status_code == 400


def test_required_mod_that_fails_ends_the_turn_with_an_error(serve: Serve, tmp_path: Path):
    (tmp_path / "guard.py").write_text(REQUIRED)
    served = serve(mia4.config(settings={"mods_dir": str(tmp_path)}))
    frames = mia4.generate(served, overrides=mia4.GREEDY, mods=["guard"])
    [error] = mia4.named(frames, "error")
    assert "mod Guard failed at Sampled of step 3 with KeyError" in error["message"]
    assert "inside" not in str(frames)
    assert mia4.check_end(frames)["status"] == "error"
