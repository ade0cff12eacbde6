"""Limits of reasoning by passport, preset and request, from the configuration to the frames."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from kqview import Engine
from kqview.server import Settings
from kqview.server.apps.mia4 import request, schema
from kqview.server.apps.mia4.turn import FrameWriter
from kqview.server.config import Llm, ModelConfig
from tests.support import mia4

if TYPE_CHECKING:
    from collections.abc import Iterator

pytest.importorskip("jinja2")

N = 24
LLM = msgspec.convert(
    {
        "postproc": {"reasoning": {"drop_from_history": False}},
        "reasoning_presets": {
            "none": {"reasoning_max_tokens": 0},
            "low": {"reasoning_max_tokens": 3, "temperature": 0},
            "all": {"reasoning_max_tokens": -1},
        },
    },
    Llm,
)
TAGS = replace(LLM, prompt=msgspec.convert({"harmony": {"enabled": True}}, type(LLM.prompt)))
MARKED = {"text": "Think, write ===FINAL===, then answer."}
OPENED = "{{ messages[-1].content }}{% if add_generation_prompt %}<analysis>{% endif %}"


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine.demo(n_threads=1, n_ctx=512) as engine:
        yield engine


def plan(engine: Engine, llm: Llm, overrides: dict[str, Any], **model: Any) -> request.TurnPlan:
    fields = {"temperature": 0, "ignore_eos": True, "max_output_tokens": N, **overrides}
    return request.plan_of(
        schema.GenerateBody(prompt="Who is Anna?", overrides=fields),
        request_id="r",
        engine=engine,
        settings=Settings(),
        llm=llm,
        model=msgspec.convert({"system_prompt": MARKED, **model}, ModelConfig),
        max_context=engine.n_ctx,
    )


def written(engine: Engine, asked: request.TurnPlan) -> tuple[list[mia4.Frame], FrameWriter]:
    """Frames of the answer."""
    wanted = asked.request
    generation = engine.generate(
        list(asked.ids), sampling=wanted.sampling, max_tokens=wanted.max_tokens,
        forcing=wanted.forcing and wanted.forcing(engine),
    )  # fmt: skip
    writer = FrameWriter("r", "demo", asked.reading, drops_reasoning=asked.drops_reasoning)
    raw = [frame for token in generation for frame in writer.feed(token.text, token.index)]
    raw += writer.finish(generation.text)
    assert len(generation.tokens) == N
    lines = [line for frame in raw for line in frame.decode().splitlines()]
    return list(mia4.frames_of(lines)), writer


@pytest.mark.parametrize(
    ("overrides", "model", "most"),
    [
        ({"reasoning_preset": "low"}, {}, 3),
        ({"reasoning_preset": "none"}, {}, 0),
        ({}, {"passport": {"postproc": {"reasoning": {"max_tokens": 5}}}}, 5),
        ({"reasoning_preset": "low", "reasoning_max_tokens": 2}, {}, 2),
    ],
)
def test_marker_is_written_at_the_limit_and_the_answer_follows(
    engine: Engine, overrides: dict[str, Any], model: dict[str, Any], most: int
):
    frames, writer = written(engine, plan(engine, LLM, overrides, **model))
    marker = len(engine.tokenize("===FINAL===", add_special=False))
    assert (writer.tokens.n_reasoning, writer.tokens.n_marks) == (most, marker)
    assert writer.tokens.n_final == N - most - marker
    assert writer.answer == mia4.text_of(frames) != ""
    assert "===" not in json.dumps(frames)
    # The reasoning is one frame, before those of the answer.
    reasoning = mia4.named(frames, "reasoning")
    assert len(reasoning) == (most > 0)
    assert [name for name, _ in frames if name != "token"] == ["reasoning"] * len(reasoning)
    assert frames[-1][0] == "token"


@pytest.mark.parametrize("overrides", [{}, {"reasoning_preset": "all"}])
def test_answer_without_a_limit_is_not_steered(engine: Engine, overrides: dict[str, Any]):
    asked = plan(engine, LLM, overrides)
    assert asked.request.forcing is None
    _, writer = written(engine, asked)
    assert (writer.tokens.n_reasoning, writer.tokens.n_final) == (0, N)


def test_reasoning_in_tags_streams_until_its_limit(engine: Engine):
    with Engine.demo(n_threads=1, n_ctx=512, chat_template=OPENED) as opened:
        frames, writer = written(opened, plan(opened, TAGS, {"reasoning_max_tokens": 3}))
    assert writer.tokens.n_reasoning == 3
    names = [name for name, _ in frames]
    assert names == ["analysis"] * names.count("analysis") + ["token"] * names.count("token")
    assert {"analysis", "token"} <= set(names)
    shown = mia4.text_of(frames) + mia4.text_of(frames, "analysis")
    assert not any(mark in shown for mark in ("analysis>", "final>"))
