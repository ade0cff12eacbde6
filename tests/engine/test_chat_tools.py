"""Chats of Python: tools and the choice among them, replies taken apart, messages continued."""

from __future__ import annotations

import json
import pickle
from typing import TYPE_CHECKING, Any

import pytest

from kqview import Engine, Sampling
from kqview.chat import Reply, ToolCall, tools_as_text
from kqview.demo import MODEL_PATH
from kqview.errors import InvalidSampling, RequestError
from tests.support import chat_templates as shapes, tiny_gguf
from tests.support.chat_templates import HARMONY, HELLO, STOP, TOOLS

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.engine.conftest import MakeEngine

pytest.importorskip("jinja2")
pytest.importorskip("llguidance")

ANY: dict[str, Any] = {
    "chat_template": shapes.QWEN,
    # Not asked to reason, because a random model would not end it.
    "template_options": {"enable_thinking": False},
    "temperature": 1,
    "max_tokens": 700,
}
OPEN = "{{ messages[0].content }}{% if add_generation_prompt %}<think>\n{% endif %}"
CHANNELS = ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|call|>")


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """Random weights; ids below 256 are bytes."""
    path = tmp_path_factory.mktemp("model") / "marks.gguf"
    tiny_gguf.write_model(path, specials=CHANNELS)
    with Engine(path, n_ctx=2048, n_threads=1) as engine:
        yield engine


def chat(engine: Engine, **options: Any) -> Reply:
    """The reply of a chat that has to end by itself."""
    generation = engine.chat(HELLO, **{**ANY, **options})
    generation.read()
    assert generation.finish_reason == "stop", generation.text
    return generation.reply


# ---- tools


def test_template_that_ignores_tools_is_an_error(engine: Engine):
    """As it was called by 30 programs: the model had never heard of the tools."""
    words = "template of random qwen2 .* ignores tools.* pass a chat_template .*tools_as_text"
    for call in (engine.chat, engine.apply_chat_template):
        with pytest.raises(RequestError, match=words) as failure:
            call(HELLO, tools=TOOLS)
        assert failure.value.parameter == "tools"
    # It names them, and does not show them for these messages.
    unused = "{% if tools and messages | length > 9 %}{{ tools }}{% endif %}x"
    with pytest.raises(RequestError, match="ignores tools"):
        engine.chat(HELLO, tools=TOOLS, chat_template=unused)
    text = engine.apply_chat_template(tools_as_text(HELLO, TOOLS), tokenize=False)
    assert '"name": "look_up", "description": "Finds a word."' in text


@pytest.mark.parametrize("seed", range(3))
def test_required_call_is_made(engine: Engine, seed: int):
    reply = chat(engine, tools=TOOLS, tool_choice="required", seed=seed, parallel_tool_calls=False)
    [call] = reply.tool_calls
    assert (reply.content, reply.reasoning) == ("", "")
    if call.name == "look_up":
        assert len(call.arguments["word"]) <= 5
        assert len(call.arguments) == 1
    else:
        assert (call.name, call.arguments) == ("stop", {})


@pytest.mark.parametrize("choice", ["stop", {"type": "function", "function": {"name": "stop"}}])
def test_named_function_is_called(engine: Engine, choice: Any):
    for seed in range(2):
        reply = chat(engine, tools=TOOLS, tool_choice=choice, seed=seed)
        assert [call.name for call in reply.tool_calls] == ["stop"]


def test_calls_of_harmony_are_in_its_channels(engine: Engine):
    reply = chat(
        engine, tools=[STOP], tool_choice="required", chat_template=HARMONY + "{{ tools }}",
        # Without the first letter of "analysis": a random model would not end that.
        logit_bias={ord("a"): -100},
    )  # fmt: skip
    assert [(call.name, call.arguments) for call in reply.tool_calls] == [("stop", {})]


def test_reply_goes_on_as_messages_with_the_ids_of_its_calls(engine: Engine):
    generation = engine.chat(HELLO, tools=TOOLS, tool_choice="required", **ANY)
    generation.read()
    assert generation.finish_reason == "stop"
    reply = generation.reply
    ids = [call.id for call in reply.tool_calls]
    assert all(ids)
    assert len(set(ids)) == len(ids)
    assert generation.reply is reply  # the ids stay
    message = reply.to_message()
    assert [call["id"] for call in message["tool_calls"]] == ids
    results = [{"role": "tool", "tool_call_id": id_, "content": "found"} for id_ in ids]
    text = engine.apply_chat_template(
        [*HELLO, message, *results], tools=TOOLS, chat_template=shapes.QWEN, tokenize=False
    )
    assert text.count("<tool_response>\nfound") == len(ids)
    assert text.count('<tool_call>\n{"name": ') == len(ids)


def test_tools_are_not_shown_if_none_may_be_called(engine: Engine):
    bare = engine.chat(HELLO, max_tokens=1)
    none = engine.chat(HELLO, tools=TOOLS, tool_choice="none", max_tokens=1)
    assert none.prompt_ids == bare.prompt_ids
    for generation in (bare, none):
        generation.close()


def test_number_in_the_arguments_of_a_call_ends(engine: Engine):
    part = {"properties": {"part": {"type": "number"}}, "required": ["part"]}
    share = {"type": "function", "function": {"name": "share", "parameters": part}}
    bias = {ord("7"): 1000.0, ord("e"): -1000.0, ord("E"): -1000.0}
    (call,) = chat(
        engine, tools=[share], tool_choice="required", parallel_tool_calls=False, logit_bias=bias,
        temperature=0,
    ).tool_calls  # fmt: skip
    assert call.arguments == {"part": int(17 * "7")}


def test_call_that_reaches_its_limit_is_closed(engine: Engine):
    note = {"properties": {"text": {"type": "string"}}, "required": ["text"]}
    keep = {"type": "function", "function": {"name": "keep", "parameters": note}}
    (call,) = chat(
        engine, tools=[keep], tool_choice="required", max_tokens=120,
        parallel_tool_calls=False, finish_on_length="close", logit_bias={ord("a"): 1000.0},
    ).tool_calls  # fmt: skip
    assert call.name == "keep"
    assert set(call.arguments["text"]) == {"a"}


@pytest.mark.parametrize("seed", range(4))
def test_with_tools_and_a_schema_the_answer_is_a_call_or_json(engine: Engine, seed: int):
    options = {"json_schema": {"enum": [1, 2]}, "tools": [STOP], "seed": seed}
    reply = chat(engine, **options, logit_bias={ord("<"): 3.0 * seed - 5})
    if reply.tool_calls:
        assert reply.content == ""
    else:
        assert json.loads(reply.content) in (1, 2)


def test_pydantic_model_is_a_function(engine: Engine):
    pydantic = pytest.importorskip("pydantic")
    weather: Any = pydantic.create_model(
        "Weather", __doc__="Asks for the weather.", city=(str, ...), days=(int, 1)
    )
    text = engine.apply_chat_template(
        HELLO, tools=[weather], chat_template=shapes.QWEN, tokenize=False
    )
    line = next(one for one in text.splitlines() if one.startswith("{"))
    function = json.loads(line.removesuffix("</tools><|im_end|>"))["function"]
    assert (function["name"], function["description"]) == ("Weather", "Asks for the weather.")
    assert function["parameters"]["required"] == ["city"]


NAMES = ", ".join(tool["function"]["name"] for tool in TOOLS)


def look_up(word: str) -> str:
    return word


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"tool_choice": "required"}, RequestError, "no tools"),
        (
            {"tools": TOOLS, "tool_choice": "any"},
            RequestError,
            f"'any', which is not among the tools; name one of {NAMES}",
        ),
        (
            {"tools": TOOLS, "tool_choice": "required", "json_schema": {"const": 1}},
            InvalidSampling,
            "json_schema cannot be combined with a tool_choice",
        ),
        (
            {"tools": TOOLS, "tool_choice": "stop", "sampling": Sampling(json_schema={"const": 1})},
            InvalidSampling,
            "json_schema cannot be combined with a tool_choice",
        ),
        ({"tools": TOOLS, "tool_choice": 1}, RequestError, "tool_choice is 1"),
        (
            {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}},
            RequestError,
            "'x', which is not among the tools",
        ),
        (
            {"tools": TOOLS, "tool_choice": "required", "grammar": 'root ::= "a"'},
            InvalidSampling,
            "grammar cannot be combined with tools",
        ),
        (
            {"tools": TOOLS, "tool_choice": "required", "regex": "a"},
            InvalidSampling,
            "regex cannot be combined with tools",
        ),
        (
            {"tools": [7]},
            RequestError,
            r"tools\[0\] is of type int; pass .* pydantic",
        ),
        ({"parallel_tool_calls": 1}, RequestError, "parallel_tool_calls must be True or False"),
        (
            {"continue_final_message": 1},
            RequestError,
            "continue_final_message must be True or False",
        ),
        ({"continue_final_message": True}, RequestError, "needs a last message of the assistant"),
    ],
)
def test_chat_that_cannot_work_is_refused_before_anything_runs(
    engine: Engine, options: dict[str, Any], error: type[Exception], words: str
):
    n_requests = engine.stats().n_requests
    with pytest.raises(error, match=words):
        engine.chat(HELLO, chat_template=shapes.QWEN, **options)
    assert engine.stats().n_requests == n_requests


# ---- continued messages


def test_last_message_is_continued(engine: Engine):
    begun = [*HELLO, {"role": "assistant", "content": " I am <|im_end|>"}]
    header = engine.apply_chat_template(HELLO)
    ids = engine.apply_chat_template(begun, continue_final_message=True)
    assert ids == [*header, *b" I am <|im_end|>"]  # its text is no special token
    for given in (begun, [*HELLO, {**begun[1], "content": [{"type": "text", "text": " I am"}]}]):
        generation = engine.chat(given, continue_final_message=True, max_tokens=1)
        assert generation.prompt_ids[: len(header) + 5] == [*header, *b" I am"]
        generation.close()
    text = engine.apply_chat_template(begun, continue_final_message=True, tokenize=False)
    assert text.endswith("<|im_start|>assistant\n I am <|im_end|>")
    ids, spans = engine.apply_chat_template(begun, continue_final_message=True, spans=True)
    assert spans[-1][1] == len(ids)
    assert engine.detokenize(ids[slice(*spans[-1])]) == "<|im_start|>assistant\n I am <|im_end|>"


# ---- messages in a slot

TALK = [
    {"role": "user", "content": "Hi <|system|>"},
    {"role": "assistant", "content": "Hello"},
    {"role": "user", "content": "Bye"},
]
SYSTEM = {"role": "system", "content": "Be kind."}


@pytest.fixture(params=["PHI", "LLAMA3", "CHATML"])
def talker(request: pytest.FixtureRequest, make_engine: MakeEngine, tmp_path: Path) -> Engine:
    """An engine whose template ends each message with the model's end of a turn."""
    if request.param == "CHATML":
        return make_engine(MODEL_PATH)
    specials = {
        "PHI": ("<|user|>", "<|assistant|>", "<|system|>", "<|end|>"),
        "LLAMA3": ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    }[request.param]
    path = tiny_gguf.write_model(tmp_path / "chat.gguf", specials=specials)
    return make_engine(path, chat_template=getattr(shapes, request.param))


def test_messages_of_a_slot_have_roles(talker: Engine):
    ids, spans = talker.apply_chat_template([SYSTEM, *TALK], spans=True)
    list(talker.attend(ids))
    messages = talker.slots[0].messages()
    roles = [message.role for message in messages]
    assert roles == ["system", "user", "assistant", "user", "assistant"]
    first = messages[0]
    assert first == (0, first[1])  # it is that pair
    assert first.span == (0, first[1] + 1)
    for message, (_, stop) in zip(messages, spans, strict=False):
        # A line end behind the end of a turn begins the next message here.
        assert message.span[1] in (stop, stop - 1)
    copies = pickle.loads(pickle.dumps(messages))
    assert copies == messages
    assert [one.role for one in copies] == roles


def test_message_that_begins_with_no_header_has_no_role(make_engine: MakeEngine, tiny_llama: Path):
    engine = make_engine(tiny_llama)
    list(engine.attend([1, 2, 3]))
    assert engine.slots[0].messages() == [(0, 2)]
    assert engine.slots[0].messages()[0].role is None


# ---- what was answered


def test_json_after_open_reasoning_is_parsed(engine: Engine):
    """The prompt has opened the reasoning, which the answer has to close before its JSON."""
    thoughts = list(b"So.</think>")  # a random model would not end them
    generation = engine.chat(
        HELLO, chat_template=OPEN, json_schema={"const": [1, 2]},
        forcing=lambda text, added: [] if text or added else thoughts,
    )  # fmt: skip
    generation.read()
    assert generation.text.startswith("So.</think>")
    assert (generation.reply.reasoning, generation.reply.content) == ("So.", "[1,2]")
    assert generation.parsed == [1, 2]


def test_parsed_is_the_value_of_the_text(engine: Engine):
    generation = engine.generate("x", json_schema={"const": {"a": [1]}})
    with pytest.raises(RequestError, match="call read"):
        _ = generation.parsed
    generation.read()
    assert generation.parsed == {"a": [1]}
    assert generation.reply == Reply(generation.text)
    text = "true"
    # What ends a constant may have been left out with the last token; more digits may not.
    cut = engine.generate("x", json_schema={"const": True}, max_tokens=len(text))
    assert (cut.read(), cut.finish_reason) == (text, "length")
    assert cut.parsed is True


def test_parsed_is_of_the_type(engine: Engine):
    pydantic = pytest.importorskip("pydantic")
    person: Any = pydantic.create_model("Person", age=(int, pydantic.Field(ge=0, le=150)))
    generation = engine.chat(HELLO, json_schema=person, temperature=1)
    generation.read()
    assert isinstance(generation.parsed, person)
    assert 0 <= generation.parsed.age <= 150


def test_check_of_a_type_that_no_schema_expresses_is_its_own_error(engine: Engine):
    pydantic = pytest.importorskip("pydantic")

    def refuse(value: Any) -> Any:
        raise ValueError("too young")

    person: Any = pydantic.create_model(
        "Person", age=(int, pydantic.Field(ge=1, le=2)),
        __validators__={"refuse": pydantic.field_validator("age")(refuse)},
    )  # fmt: skip
    generation = engine.generate("x", json_schema=person, temperature=1)
    generation.read()
    with pytest.raises(pydantic.ValidationError, match="too young"):
        _ = generation.parsed


def test_json_that_was_cut_is_told(engine: Engine):
    generation = engine.generate("x", json_schema={"const": ["long enough"]}, max_tokens=4)
    generation.read()
    with pytest.raises(RequestError, match=r"'length' before its JSON did.* raise max_tokens"):
        _ = generation.parsed
    # Two of five digits are a number too.
    number = engine.generate("x", json_schema={"const": 12345}, max_tokens=2)
    assert number.read() == "12"
    with pytest.raises(RequestError, match="before its JSON did"):
        _ = number.parsed


def test_generation_without_a_schema_has_nothing_parsed(engine: Engine):
    generation = engine.generate("x", max_tokens=1)
    generation.read()
    with pytest.raises(RequestError, match="needs json_schema") as failure:
        _ = generation.parsed
    assert failure.value.parameter == "json_schema"


def test_call_that_was_cut_is_no_call(engine: Engine):
    from kqview.chat.turn import reading_of

    read = reading_of(shapes.QWEN, None, TOOLS).reply
    whole = 'Well.<tool_call>\n{"name": "stop", "arguments": {"a": 1}}\n</tool_call>'
    [call] = read(f"<think>Hm.</think>{whole}").tool_calls
    assert call == ToolCall("stop", {"a": 1}, call.id)
    assert read(f"<think>Hm.</think>{whole}").reasoning == "Hm."
    assert read(whole[: whole.index("1")]) == Reply("Well.")  # in its arguments
