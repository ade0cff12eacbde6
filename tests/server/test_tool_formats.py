"""Formats of tool calls: what llama.cpp's 70 templates write is read back as the same calls."""

from __future__ import annotations

import json
import time
from functools import cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings, strategies as st

from kqview.chat.formats import FORMATS, format_of
from kqview.chat.reasoning import split_of
from kqview.chat.tool_format import Wanted, grammar, literal, text_parameters
from kqview.chat.turn import AnswerReader, ChatAnswer, Reading, opened_by
from kqview.errors import RequestError
from tests.support import stock, stock_templates
from tests.support.accepting import accepts

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from kqview.chat.template import ChatTemplate

pytest.importorskip("jinja2")
pytest.importorskip("llguidance")

Calls = list[tuple[str, dict[str, Any]]]

PROPERTIES = {
    "city": {"type": "string", "description": "Its name"},
    "days": {"type": "integer", "description": "How many"},
    "exact": {"type": "boolean", "description": "Whether to round"},
    "more": {"type": "object", "description": "Anything", "properties": {
        "a": {"type": "array", "items": {"type": "integer"}}, "b": {"type": "string"}},
        "additionalProperties": {"type": "string"}},
}  # fmt: skip
TOOLS = [
    {"type": "function", "function": {
        "name": "get_weather", "description": "The weather.",
        "parameters": {"type": "object", "properties": PROPERTIES, "required": ["city"]}}},
    {"type": "function", "function": {
        "name": "stop", "description": "Stops.",
        "parameters": {"type": "object", "properties": {}, "additionalProperties": False}}},
]  # fmt: skip
TEXTS = text_parameters(TOOLS)
ARGUMENTS: dict[str, Any] = {
    "city": 'Köln "am" <b> Rhein, \\n{1}\n[2]', "days": 3, "exact": True,
    "more": {"a": [1, 2], "b": "c"},
}  # fmt: skip
FLAT = {key: value for key, value in ARGUMENTS.items() if key != "more"}

# Templates of models that call functions, or may, but which write no calls.
WRITES_NONE = {
    "HuggingFaceTB-SmolLM3-3B": "shows tools in a variable of its own, and no calls",
    "LFM2-8B-A1B": "leaves calls to the content of the message",
    "LFM2.5-Instruct": "leaves calls to the content of the message",
    "deepseek-ai-DeepSeek-R1-Distill-Llama-8B": "writes calls only beside a missing content",
    "google-gemma-2-2b-it": "knows no tools",
    "ibm-granite-granite-3.3-2B-Instruct": "shows tools, and writes no calls",
    "llama-cpp-rwkv-world": "knows no tools",
    "microsoft-Phi-3.5-mini-instruct": "knows no tools",
}
WRITES_ONE = {
    "GigaChat3-10B-A1.8B", "GigaChat3.1-10B-A1.8B", "meta-llama-Llama-3.1-8B-Instruct",
    "meta-llama-Llama-3.2-3B-Instruct", "meta-llama-Llama-3.3-70B-Instruct", "openai-gpt-oss-120b",
}  # fmt: skip
# What a grammar does not allow although the template writes it.
NOT_FORCED = {
    "mistralai-Mistral-Nemo-Instruct-2407": "ids of calls, which clients give and models do not",
    "openai-gpt-oss-120b": "the recipient before the channel instead of behind it",
}
# This template writes text without escapes, which models are trained to write.
UNESCAPED: dict[str, Any] = {**ARGUMENTS, "city": 'Köln "am" <b> Rhein, {1} [2]'}
# Arguments that these templates write as the grammar has them; others they do not.
FORCED: dict[str, dict[str, Any]] = {
    "ByteDance-Seed-OSS": FLAT,  # objects are in Python's notation
    "LFM2.5-8B-A1B": UNESCAPED,
    "MiniMax-M3": FLAT,  # objects are elements
    "Reka-Edge": {**ARGUMENTS, "city": "Koln"},  # letters beyond ASCII are escaped
    "openbmb-MiniCPM5-1B": FLAT,  # objects are in Python's notation
}
NAMES = list(stock_templates.stored())


@cache
def templates() -> Path:
    return stock.source() / "models" / "templates"


@cache
def template_of(name: str) -> tuple[str, ChatTemplate]:
    from kqview.chat.template import ChatTemplate

    source = (templates() / f"{name}.jinja").read_text()
    return source, ChatTemplate(source, {"bos": "<s>", "eos": "</s>"}, [])


def rendered(name: str, messages: list[Any], *, adds_header: bool) -> str:
    """What the template makes of *messages* behind the user's, which is the first."""
    _, template = template_of(name)
    parts = template.render(messages, tools=TOOLS, add_generation_prompt=adds_header)
    return "".join(part.text for part in parts).rpartition("THE QUESTION")[2]


def written(name: str, calls: Calls) -> tuple[str, str | None]:
    """An answer with *calls* as the template writes it, and the mark of reasoning before it."""
    made = [
        {"id": f"abcdefgh{i}", "type": "function", "function": {"name": name, "arguments": given}}
        for i, (name, given) in enumerate(calls)
    ]
    user = {"role": "user", "content": "THE QUESTION"}
    header = rendered(name, [user], adds_header=True)
    answer = {"role": "assistant", "content": "", "tool_calls": made}
    text = rendered(name, [user, answer], adds_header=False)
    # Some templates leave out in an answer the reasoning that the prompt begins.
    is_cut = text.startswith(header)
    return text.removeprefix(header), opened_by(header) if is_cut else None


@cache
def written_of(name: str) -> tuple[Calls, str, str | None]:
    """Calls, and an answer with them as `written`."""
    arguments = UNESCAPED if name == "LFM2.5-8B-A1B" else ARGUMENTS
    calls: Calls = [("get_weather", arguments), ("stop", {})][: 1 if name in WRITES_ONE else 2]
    return calls, *written(name, calls)


def reading_of(form: str, opened: str | None = None) -> Reading:
    split = split_of("".join(FORMATS[form].shown[0]), opened, may_call=True)
    return Reading(split, form, texts=TEXTS)


def calls_of(answer: ChatAnswer) -> Calls:
    return [(call.name, json.loads(call.arguments)) for call in answer.calls]


def streamed(reading: Reading, pieces: Sequence[str]) -> ChatAnswer:
    reader, answer = AnswerReader(reading), ChatAnswer()
    for piece in pieces:
        answer.add(reader.feed(piece))
    answer.add(reader.finish("".join(pieces)))
    return answer


def shape(answer: ChatAnswer) -> tuple[str, str, list[tuple[str, str]]]:
    calls = [(call.name, call.arguments) for call in answer.calls]
    return answer.reasoning, answer.content, calls


@pytest.mark.parametrize("name", [name for name in NAMES if name not in WRITES_NONE])
@settings(max_examples=8, deadline=None)
@given(cuts=st.lists(st.integers(0, 900), max_size=30))
def test_call_that_a_template_writes_is_read_back(name: str, cuts: list[int]):
    calls, text, opened = written_of(name)
    form = format_of(template_of(name)[0])
    reading = reading_of(form, opened)
    whole = reading.answer(text)
    assert calls_of(whole) == calls
    assert not any(mark in whole.content for mark in FORMATS[form].marks)
    ends = sorted({min(cut, len(text)) for cut in cuts} | {0, len(text)})
    cut = streamed(reading, [text[start:end] for start, end in pairwise(ends)])
    assert shape(cut) == shape(whole) == shape(streamed(reading, list(text)))


@pytest.mark.parametrize("name", WRITES_NONE)
def test_template_without_calls_is_known_as_such(name: str):
    try:
        text, _ = written(name, [("get_weather", FLAT)])
    except RequestError:
        return
    assert "get_weather" not in text


@pytest.mark.parametrize("name", [name for name in NAMES if name not in WRITES_NONE | NOT_FORCED])
def test_grammar_of_a_required_call_accepts_what_a_template_writes(name: str):
    arguments = FORCED.get(name, ARGUMENTS)
    form = format_of(template_of(name)[0])
    syntax = FORMATS[form]
    rules = grammar(Wanted(calls=TOOLS), form, literal)
    for calls in ([("get_weather", arguments)], [("stop", {})], [("get_weather", {"city": "a"})]):
        text, _ = written(name, calls)
        marks = (
            () if syntax.answer else syntax.marks
        )  # behind a header, the call has one of its own
        text = text[min((at for mark in marks if (at := text.find(mark)) >= 0), default=0) :]
        end = (syntax.call.partition("$arguments")[2] + syntax.end).strip() or "}"
        text = text[: (text.rindex(end) if end == "}" else text.index(end)) + len(end)]
        assert accepts(rules, text), text
        assert not accepts(rules, text.replace("stop", "other").replace("get_weather", "other"))


@pytest.mark.parametrize("form", FORMATS)
def test_format_reads_back_what_its_grammar_forces(form: str):
    """Each row says the same to the grammar and to the reader, whatever templates there are."""
    syntax = FORMATS[form]
    rules = grammar(Wanted(calls=TOOLS[1:]), form, literal)
    call = syntax.call.replace("$name", "stop").replace("$id", "abcdefgh1").replace("$index", "0")
    call = call.replace("$arguments", "" if syntax.argument else "{}")
    one, two = (
        f"{syntax.begin}{calls}{syntax.end}" for calls in (call, f"{call}{syntax.between}{call}")
    )
    assert accepts(rules, one)
    assert accepts(rules, two) == (form != "harmony")
    assert [name for name, _ in calls_of(reading_of(form).answer(one))] == ["stop"]
    if form != "harmony":
        answer = reading_of(form).answer(f"{two} Done.")
        assert (answer.content.strip(), len(answer.calls)) == ("Done.", 2)


@pytest.mark.full
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("unit", [" ", "{", '"', "mark", "close", "call"])
def test_reading_takes_time_in_proportion_to_the_length(form: str, unit: str):
    """Ten times the text takes about ten times as long: a square would be a hundred."""
    syntax = FORMATS[form]
    call = syntax.call.replace("$name", "f").replace("$arguments", "{}")
    words = {"mark": "".join(syntax.marks), "close": "".join(syntax.closes), "call": call}
    unit = words.get(unit, unit) or "x"
    seconds: list[float] = []
    for n in (3_000, 30_000):
        text = (syntax.begin + call.partition("{}")[0] + unit * n)[:n]
        begun = time.process_time()
        streamed(reading_of(form), [text[i : i + 4] for i in range(0, n, 4)])
        reading_of(form).answer(text)
        seconds.append(time.process_time() - begun)
    assert seconds[1] < 40 * seconds[0] + 0.5
