"""The mod kit and the mods that see attention, on the demo model: what they leave in the text."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import pytest

from kqview import Capture, Engine, errors, mod
from kqview.mods import Prefilled
from kqview.mods.attention import AlignAtt, LookbackGuard, ReRead
from kqview.mods.kit import (
    CharsMode,
    CharsStrat,
    ChoicesStrat,
    EraseMode,
    FlowEngine,
    FlowQuestion,
    JsonSchemaStrat,
    ListStrat,
    RegexStrat,
    UntilEndType,
    UntilStrat,
    get_conversation,
    get_schemas,
    route_message,
    self_prompt_mod,
)
from kqview.mods.pruning import generate_pruned

if TYPE_CHECKING:
    from collections.abc import Iterator

SOURCE = "Mirelda found a silver key near the old bridge."
STORY = f"{SOURCE} One day, Mirelda"
GREEDY: dict[str, Any] = {"max_tokens": 40, "temperature": 0}


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine.demo(n_ctx=256, n_threads=1) as opened:
        yield opened


def test_text_after_an_erased_question_is_as_if_nobody_had_asked(engine: Engine):
    asks = self_prompt_mod(
        " took the", ChoicesStrat([" red key", " silver key", " silver"]), erase=EraseMode.ALL
    )
    generation = engine.generate(STORY, mods=[asks], **GREEDY)
    text = generation.read()
    assert generation.mods[0].answer in (" red key", " silver key", " silver")
    assert text == engine.generate(STORY, **GREEDY).read()


def test_text_after_a_question_that_stays_is_that_of_a_prompt_with_it(engine: Engine):
    asks = self_prompt_mod(" took the", ChoicesStrat([" silver key"]), ".")
    text = engine.generate(STORY, mods=[asks], **GREEDY).read()
    added = " took the silver key."
    assert text.startswith(added)
    n_added = len(
        [
            i
            for part in (" took the", " silver key", ".")
            for i in engine.tokenize(part, add_special=False)
        ]
    )
    rest = engine.generate(STORY + added, temperature=0, max_tokens=GREEDY["max_tokens"] - n_added)
    assert text == added + rest.read()


@pytest.mark.parametrize(
    ("strategy", "pattern"),
    [
        (ChoicesStrat(["red", "reddish"]), "red|reddish"),
        (UntilStrat("<", UntilEndType.TAG, ">"), "(?s:<.*>)"),
        (CharsStrat(CharsMode.NUMERIC, 3), "[0-9]{1,3}"),
        (ListStrat(["cat", "dog"], "[", "]", '"', max=2), r'\["(cat|dog)"(, "(cat|dog)")?\]'),
        (RegexStrat("[a-f]{2}-[0-9]{2}"), "[a-f]{2}-[0-9]{2}"),
    ],
)
@pytest.mark.parametrize("argmax_sampling", [True, False])
def test_answer_is_what_the_strategy_says(
    engine: Engine, strategy: Any, pattern: str, argmax_sampling: bool
):
    if isinstance(strategy, RegexStrat):
        pytest.importorskip("llguidance")
    asks = self_prompt_mod(" ", strategy, erase=EraseMode.PROMPT, argmax_sampling=argmax_sampling)
    generation = engine.generate(STORY, mods=[asks], max_tokens=64, temperature=1, seed=3)
    text = generation.read()
    if generation.mods[0].is_complete:  # free text may have no end within so many tokens
        assert re.match(pattern, text), text
    else:
        assert isinstance(strategy, UntilStrat)


def test_answer_by_a_schema_is_json_of_it(engine: Engine):
    pytest.importorskip("llguidance")
    schema = {
        "type": "object",
        "properties": {"colour": {"enum": ["red", "silver"]}, "n": {"enum": [1, 2]}},
        "required": ["colour", "n"],
        "additionalProperties": False,
    }
    generation = engine.generate(
        STORY, mods=[self_prompt_mod(" ", JsonSchemaStrat(schema))], **GREEDY
    )
    generation.read()
    answer = json.loads(generation.mods[0].answer)
    assert answer["colour"] in ("red", "silver")
    assert answer["n"] in (1, 2)


def test_flow_writes_its_message_and_ends_the_text(engine: Engine):
    question = FlowQuestion("what", " took the", ChoicesStrat([" key", " ball"]))
    question.then(route_message(lambda state: f" It is{state.answers['what']}."))
    generation = engine.generate(STORY, mods=[FlowEngine(question).as_mod()], **GREEDY)
    answer = generation.read() and generation.mods[0].state.answers["what"]
    assert generation.text == f" took the{answer}\n It is{answer}."
    assert generation.finish_reason == "stop"


# ---- attention


def test_aligned_text_ends_before_the_model_looks_at_the_frontier(engine: Engine):
    copying = Capture("probs", layers=[1], heads=[0, 1, 2, 3])
    aligned = AlignAtt("Mirelda found a silver key")
    generation = engine.generate(STORY, mods=[aligned], capture=copying, **GREEDY)
    text = generation.read()
    whole = engine.generate(STORY, **GREEDY).read()
    places: list[int] = generation.mods[0].alignment
    assert generation.finish_reason == "stop"
    assert whole.startswith(text)
    # While it copies the sentence, each token looks one place further, up to the last of the five.
    assert places == list(range(places[0], places[0] + len(places)))
    last = engine.tokenize(STORY)[places[-1]]
    assert engine.token_text(last) == " key"


def test_guard_keeps_whole_windows_above_its_floor(engine: Engine):
    guard = LookbackGuard(SOURCE, 0.3, "resample", window=8)
    generation = engine.generate(STORY, mods=[guard], capture="probs", **GREEDY)
    text = generation.read()
    worked = generation.mods[0]
    assert worked.n_taken_back > 0
    assert text != engine.generate(STORY, **GREEDY).read()
    assert len(worked.ratios) == len(generation.tokens) == GREEDY["max_tokens"]


def test_reminder_is_in_the_text_where_the_mod_says(engine: Engine):
    again = ReRead(SOURCE, 0.2, reminder=f" {SOURCE}", window=4, most=1)
    generation = engine.generate(STORY, mods=[again], capture="probs", **GREEDY)
    generation.read()
    worked = generation.mods[0]
    (place,) = worked.reminded_at
    n_prompt = generation.usage.prompt_tokens
    reminder = engine.tokenize(f" {SOURCE}", add_special=False)
    assert generation.tokens[place - n_prompt :][: len(reminder)] == reminder
    # The instruction is looked at again afterwards.
    assert worked.shares[place - n_prompt + 1] > 2 * worked.shares[place - n_prompt]


@pytest.mark.parametrize("made", [AlignAtt(SOURCE), LookbackGuard(SOURCE, 0.5), ReRead(SOURCE, 1)])
@pytest.mark.parametrize(
    ("capture", "got"),
    [
        (None, "there is none"),
        ("qk", "kind 'qk'"),
        (Capture("scores", layers=[1]), "kind 'scores'"),
        (Capture(spans=[(0, 2)]), "spans"),
        (Capture(layers=[], hidden=[1]), "there is none"),
    ],
)
def test_capture_without_shares_is_refused_before_a_token(
    engine: Engine, made: Any, capture: Any, got: str
):
    with pytest.raises(errors.InvalidCapture, match=f"{made.name} .*{got}.*'probs'") as caught:
        engine.generate(STORY, mods=[made], capture=capture)
    assert caught.value.parameter == "capture"
    with pytest.raises(errors.InvalidCapture, match=r"generate_pruned .*'qk'"):
        generate_pruned(engine, STORY, capture="qk")


@pytest.mark.parametrize("capture", [Capture("probs", top_k=4), Capture("probs", reduce="mean")])
def test_guard_reads_every_form_of_capture(engine: Engine, capture: Any):
    guard = LookbackGuard(SOURCE, 0.5)
    generation = engine.generate(STORY, mods=[guard], capture=capture, max_tokens=4, temperature=0)
    generation.read()
    assert all(0 <= ratio <= 1 for ratio in generation.mods[0].ratios)
    trace = generation.trace
    assert trace is not None
    assert not any(call.exception_occurred for call in trace.mod_calls)


# ---- chats


def test_mod_reads_the_messages_and_tools_of_its_chat(engine: Engine):
    messages = [{"role": "user", "content": "Paint it red."}]
    tools: Any = [{"type": "function", "function": {"name": "paint", "parameters": {}}}]
    seen: list[Any] = []

    @mod
    def reads(event: Any) -> None:
        if isinstance(event, Prefilled):
            seen.append((get_conversation(event), get_schemas(event)))

    for given in (tools, None):
        template = "{{ messages[0].content }}{{ tools }}"
        engine.chat(
            messages, tools=given, mods=[reads], max_tokens=1, chat_template=template
        ).read()
    engine.generate(STORY, mods=[reads], max_tokens=1).read()  # behind a chat, no chat
    assert seen == [(messages, [tools[0]["function"]]), (messages, []), ([], [])]
