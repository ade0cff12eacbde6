"""Chats as work for the engine: prompts, grammars of calls, and answers read as they come."""

from __future__ import annotations

import json
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from hypothesis import given, settings, strategies as st

from kqview import Engine, Sampling
from kqview.chat.formats import format_of
from kqview.chat.reasoning import Split
from kqview.chat.tool_format import ReasoningStart, Wanted, grammar, literal
from kqview.chat.turn import AnswerReader, ChatAnswer, Reading
from kqview.errors import InvalidSampling, RequestError
from kqview.server.api.openai.events import finish_reason
from kqview.server.api.wire.chat import ChatRequest, prepare
from tests.support import chat_templates as shapes, tiny_gguf
from tests.support.accepting import accepts
from tests.support.chat_templates import HARMONY, HELLO, TOOLS

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytest.importorskip("jinja2")
pytest.importorskip("llguidance")

BEGIN, END, ONE, ONE_END, SEP = (
    f"<\uff5ctool\u2581{words}\uff5c>"
    for words in ("calls\u2581begin", "calls\u2581end", "call\u2581begin", "call\u2581end", "sep")
)
XML = "<tool_call>\n<function=%s>\n%s</function>\n</tool_call>"
CALLS = ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|call|>",
    "[TOOL_CALLS]", "[ARGS]")  # fmt: skip


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """Random weights, ids below 256 are bytes, with the marks of every format."""
    path = tmp_path_factory.mktemp("model") / "marks.gguf"
    tiny_gguf.write_model(path, specials=CALLS)
    with Engine(path, n_ctx=2048, n_threads=1) as engine:
        yield engine


def chat(**options: Any) -> ChatRequest:
    given: dict[str, Any] = {
        "messages": HELLO,
        "sampling": Sampling(temperature=1, seed=1),
        "request_id": "r",
        "template_options": {"enable_thinking": False},  # a random model would not end it
    }
    return ChatRequest(**given | options)


def answered(engine: Engine, request: ChatRequest) -> ChatAnswer:
    """What the engine answers, read as it comes."""
    work = prepare(engine, request)
    answer, reader = ChatAnswer(), AnswerReader(work.reading)
    assert not isinstance(work.request.prompt, str)
    generation = engine.generate(
        list(work.request.prompt), sampling=work.request.sampling, max_tokens=700
    )
    for token in generation:
        answer.add(reader.feed(token.text))
    answer.add(reader.finish(generation.text))
    assert generation.finish_reason == "stop", generation.text
    return answer


SHOWN = "{{ tools | tojson if tools }}"
TEMPLATES = {
    "hermes": shapes.QWEN,
    "mistral": shapes.MISTRAL.replace("messages %}", "messages %}" + SHOWN, 1),
    "mistral_named": "{{ messages[0].content }}" + SHOWN + "{# [TOOL_CALLS] [ARGS] #}",
    "llama": "{{ messages[0].content }}" + SHOWN + "{# <|python_tag|> #}",
    "harmony": HARMONY + SHOWN,
    "xml": "{{ messages[0].content }}" + SHOWN + "{# <tool_call> <function= <parameter= #}",
    "deepseek": "{{ messages[0].content }}" + SHOWN + "{# " + ONE + " #}",
    "deepseek_fenced": "{{ messages[0].content }}" + SHOWN + "{# " + ONE + " ```json #}",
    "none": "{% for m in messages %}{{ m.role + ':' + m.content }}{% endfor %}",
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_required_call_is_held_by_a_grammar_in_the_format_of_the_model(engine: Engine, name: str):
    assert format_of(TEMPLATES[name]) == ("hermes" if name == "none" else name)
    for seed in range(2):
        answer = answered(
            engine,
            chat(
                # An element of text may have any length, and a random model would not end it.
                tools=TOOLS[name == "xml" :], tool_choice="required", parallel_calls=False,
                chat_template=TEMPLATES[name],
                # Without the first letter of "analysis": a random model would not end that.
                sampling=Sampling(temperature=1.5, seed=seed, logit_bias={ord("a"): -100}),
            ),
        )  # fmt: skip
        [call] = answer.calls
        arguments = json.loads(call.arguments)
        if call.name == "look_up":
            assert len(arguments.pop("word")) <= 5
        assert arguments == {}
        assert answer.content == ""


CALL = '<tool_call>\n{"name": "stop", "arguments": {}}\n</tool_call>'


@pytest.mark.parametrize(
    ("wanted", "good", "bad"),
    [
        (
            Wanted(calls=TOOLS),
            [CALL, f"{CALL}\n{CALL}"],
            ["", "text", f"<think>a</think>{CALL}", CALL.replace("stop", "other")],
        ),
        (
            Wanted(calls=TOOLS, is_parallel=False, reasoning=ReasoningStart("may")),
            [CALL, f"<think>a < b</think>\n\n{CALL}"],
            [f"{CALL}\n{CALL}", f"a</think>{CALL}"],
        ),
        (
            Wanted(schema={"const": [1]}, reasoning=ReasoningStart("open")),
            ["a\nb</think>\n[1]", "</think>[1]"],
            ["[1]", "a</think>[2]", "</think>[ 1 ]"],
        ),
        (Wanted(calls=TOOLS, schema={"const": [1]}), [CALL, "[1]"], ["text", f"[1]{CALL}"]),
        (
            Wanted(schema={"const": [1]}, reasoning=ReasoningStart("may", "[THINK]")),
            ["[THINK]a[/THINK][1]", "[1]"],
            ["<think>a</think>[1]"],
        ),
    ],
)
def test_grammar_allows_what_is_wanted(wanted: Wanted, good: list[str], bad: list[str]):
    text = grammar(wanted, "hermes", literal)
    assert [accepts(text, one) for one in good] == [True] * len(good)
    assert [accepts(text, one) for one in bad] == [False] * len(bad)


def test_grammar_of_harmony_has_its_channels():
    final = "<|channel|>final<|message|>[1]"
    thoughts = "<|channel|>analysis<|message|>a < b<|end|><|start|>assistant"
    call = "<|channel|>commentary to=functions.stop <|constrain|>json<|message|>{}"
    answer = grammar(Wanted(schema={"const": [1]}), "harmony", literal)
    assert [accepts(answer, one) for one in (final, thoughts + final, call)] == [True, True, False]
    calls = grammar(Wanted(calls=TOOLS), "harmony", literal)
    assert [accepts(calls, one) for one in (call, thoughts + call, final)] == [True, True, False]


def test_grammar_of_elements_has_those_that_are_required():
    call = XML % ("look_up", "<parameter=word>\na <b\n</parameter>\n")
    elements = grammar(Wanted(calls=TOOLS), "xml", literal)
    good = [call, XML % ("stop", ""), f"{call}\n{call}"]
    bad = [XML % ("look_up", ""), XML % ("other", ""), "text"]
    assert [accepts(elements, one) for one in good] == [True] * 3
    assert [accepts(elements, one) for one in bad] == [False] * 3


def test_reasoning_that_the_prompt_opened_precedes_the_schema(engine: Engine):
    template = "{{ messages[0].content }}{% if add_generation_prompt %}<think>\n{% endif %}"
    work = prepare(engine, chat(schema={"const": [1]}, chat_template=template))
    assert work.reading.split.opened == "<think>"
    assert accepts(str(work.request.sampling.grammar), "I think</think>[1]")
    answer = work.reading.answer("I think</think>[1]")
    assert (answer.reasoning, answer.content) == ("I think", "[1]")


def test_schema_without_reasoning_is_a_plain_constraint(engine: Engine):
    request = chat(schema={"const": "x"})
    sampling = prepare(engine, request).request.sampling
    assert (sampling.json_schema, sampling.grammar) == ('{"const": "x"}', None)
    assert answered(engine, request).content == '"x"'


def test_template_without_tools_gets_them_as_text(engine: Engine):
    messages = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "Find it."},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {"id": "1", "function": {"name": "look_up", "arguments": '{"word": "a"}'}}
            ],
        },
        {"role": "tool", "tool_call_id": "1", "content": "found"},
    ]
    work = prepare(engine, chat(messages=messages, tools=TOOLS))
    text = engine.detokenize(work.request.prompt)  # pyright: ignore[reportArgumentType]
    assert "Be kind.\n\nYou may call" in text
    assert '"name": "look_up", "description": "Finds a word."' in text
    assert '<tool_call>\n{"name": "look_up", "arguments": {"word": "a"}}\n</tool_call>' in text
    assert "<|im_start|>user\n<tool_response>\nfound\n</tool_response><|im_end|>" in text


def test_tools_go_to_the_user_where_a_template_has_no_system_messages(engine: Engine):
    results = [{"role": "tool", "tool_call_id": str(i), "content": f"r{i}"} for i in range(2)]
    call = {"id": "1", "function": {"name": "stop", "arguments": "{}"}}
    messages = [*HELLO, {"role": "assistant", "tool_calls": [call]}, *results]
    request = chat(messages=messages, tools=TOOLS, chat_template=shapes.GEMMA)
    text = engine.detokenize(prepare(engine, request).request.prompt)  # pyright: ignore[reportArgumentType]
    assert (
        text.index("You may call") < text.index("Who?") < text.index('<tool_call>\n{"name": "stop')
    )
    assert text.count("<start_of_turn>user") == 2
    assert "r0\n</tool_response>\n<tool_response>\nr1" in text
    kind = [{"role": "system", "content": "Be kind."}, *HELLO]
    ids = prepare(engine, chat(messages=kind, tools=TOOLS, chat_template=shapes.GEMMA))
    text = engine.detokenize(ids.request.prompt)  # pyright: ignore[reportArgumentType]
    assert text.index("Be kind.") < text.index("You may call") < text.index("Who?")


def test_file_may_have_a_template_of_its_own_for_tools(tmp_path: Path):
    both: Any = [
        {"name": "default", "template": "plain" + " " * 5000},
        {
            "name": "tool_use",
            "template": "{% for tool in tools %}{{ tool.function.name }};{% endfor %}",
        },
    ]
    path = tiny_gguf.write_model(tmp_path / "two.gguf", chat_template=both)

    def prompts(**options: Any) -> list[str]:
        with Engine(path, n_ctx=8192, n_threads=1, **options) as engine:
            rendered = partial(engine.apply_chat_template, HELLO, tokenize=False)
            served = [
                prepare(engine, chat(**given)).request.prompt for given in ({}, {"tools": TOOLS})
            ]
            read = [engine.detokenize(ids).strip() for ids in served]  # pyright: ignore
            assert read[0] == rendered().strip()
            if not options:
                assert read[1] == rendered(tools=TOOLS)
            return read

    assert prompts() == ["plain", "look_up;stop;"]
    assert prompts(chat_template="mine {{ tools }}")[1].startswith("mine [{")


def test_reasoning_of_earlier_answers_is_under_the_name_of_the_template(engine: Engine):
    template = (
        "{% for m in messages %}{{ m.thinking or '-' }}:{{ m.content }};{% endfor %}"
        "{# <|channel|> <|message|> #}"
    )
    answers = [
        {"role": "assistant", "content": "b", "reasoning_content": "a"},
        {"role": "assistant", "content": "d", "reasoning_content": "c", "tool_calls": [
            {"id": "1", "function": {"name": "stop", "arguments": "{}"}}]},
    ]  # fmt: skip
    request = chat(messages=[*answers, *HELLO], chat_template=template + "{# tools #}")
    text = engine.detokenize(prepare(engine, request).request.prompt)  # pyright: ignore[reportArgumentType]
    assert text == "a:b;c:;-:Who?;"


def test_last_message_of_the_assistant_is_continued(engine: Engine):
    messages = [*HELLO, {"role": "assistant", "content": "I am <|im_end|>"}]
    ids = prepare(engine, chat(messages=messages)).request.prompt
    begun = list(prepare(engine, chat()).request.prompt)  # pyright: ignore[reportArgumentType]
    assert ids == [*begun, *b"I am <|im_end|>"]
    whole = prepare(engine, chat(messages=messages, continues=False)).request.prompt
    assert engine.detokenize(whole).endswith("<|im_end|>\n<|im_start|>assistant\n")  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"messages": []}, RequestError, "messages is empty"),
        (
            {"messages": [{"role": "assistant", "content": "Hi"}]},
            RequestError,
            "messages has a message of the assistant alone",
        ),
        (
            {"messages": [{"role": "assistant", "content": "Hi"}], "names": {"messages": "input"}},
            RequestError,
            "input has a message of the assistant alone",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            RequestError,
            r"messages\[0\].content\[0\] is of type image_url.*text only",
        ),
        ({"tools": [{"type": "function"}]}, RequestError, r"tools\[0\] has no function"),
        (
            {"tools": TOOLS, "sampling": Sampling(grammar='root ::= "a"')},
            InvalidSampling,
            "grammar cannot be combined with tools",
        ),
        ({"continues": True}, RequestError, "last message of the assistant"),
        (
            {"messages": [], "tools": TOOLS, "chat_template": "{{ raise_exception('none') }}"},
            RequestError,
            "none",
        ),
    ],
)
def test_chat_that_cannot_work_is_refused(
    engine: Engine, options: dict[str, Any], error: type[Exception], words: str
):
    with pytest.raises(error, match=words):
        prepare(engine, chat(**options))


# ---- answers

HERMES = Reading(calls="hermes")
MARKED = (
    "<tool_call>", "</tool_call>", '\n{"name": "f", "arguments": ', '{"a": "}</tool_call>"}', "}",
    "<think>", "</think>", "{", '"', "\\", " ", "\n", "END", "text", "<tool", "[TOOL_CALLS]",
    '[{"name": "g", "arguments": {}}]', "<function=", "f>", "</function>", "<parameter=", "a>",
    "</parameter>", BEGIN, END, ONE, ONE_END, SEP, "[ARGS]", "function", "```json", '{"a": 1}',
)  # fmt: skip


@pytest.mark.parametrize("form", ["hermes", "mistral", "llama", "xml", "deepseek", None])
@settings(max_examples=40, deadline=None)
@given(
    text=st.lists(st.sampled_from(MARKED) | st.text(max_size=2), max_size=10).map("".join),
    cuts=st.lists(st.integers(0, 80), max_size=6),
)
def test_any_cutting_of_an_answer_reads_the_same(form: Any, text: str, cuts: list[int]):
    reading = Reading(calls=form, stops=("END",))
    whole = text.partition("END")[0]
    ends = sorted({min(cut, len(text)) for cut in cuts} | {0, len(text)})
    reader, answer = AnswerReader(reading), ChatAnswer()
    for start, end in pairwise(ends):
        answer.add(reader.feed(text[start:end]))
    answer.add(reader.finish(whole))
    expected = reading.answer(whole)
    assert (answer.reasoning, answer.content) == (expected.reasoning, expected.content)
    assert [(one.name, one.arguments) for one in answer.calls] == [
        (one.name, one.arguments) for one in expected.calls
    ]


@pytest.mark.parametrize(
    ("form", "text", "content", "calls"),
    [
        (
            "hermes",
            'First.\n<tool_call>\n{"name": "f", "arguments": {"a": "</tool_call>"}}\n</tool_call>\n'
            '<tool_call>{"arguments": {}, "name": "g"}</tool_call>\n',
            "First.\n",
            [("f", {"a": "</tool_call>"}), ("g", {})],
        ),
        ("hermes", '<tool_call>{"name": "f\n", "arguments": {}}</tool_call>',
         '<tool_call>{"name": "f\n", "arguments": {}}</tool_call>', []),
        ("hermes", r'<tool_call>{"name": "\x", "arguments": {}}</tool_call>',
         r'<tool_call>{"name": "\x", "arguments": {}}</tool_call>', []),
        ("hermes", r'<tool_call>{"name": "\"\u00e4", "arguments": {}}</tool_call>', "",
         [('"\N{LATIN SMALL LETTER A WITH DIAERESIS}', {})]),
        ("hermes", "<tool_call>no call</tool_call>", "<tool_call>no call</tool_call>", []),
        ("hermes", '<tool_call>{"name": "f", "arguments": {}}', "", [("f", {})]),
        (
            "mistral",
            'a[TOOL_CALLS][{"name": "f", "arguments": {}}, {"name": "g", "arguments": {"b": 1}}]',
            "a",
            [("f", {}), ("g", {"b": 1})],
        ),
        ("mistral", '[TOOL_CALLS]f[ARGS]{"b": 1}', "", [("f", {"b": 1})]),
        ("llama", '{"name": "f", "parameters": {"b": 1}}', "", [("f", {"b": 1})]),
        ("llama", '{"no": "call"}', '{"no": "call"}', []),
        ("llama", "Hello {", "Hello {", []),
        ("mistral_named", 'a[TOOL_CALLS]f[ARGS]{"b": 1}[TOOL_CALLS]g[CALL_ID]1[ARGS]{}', "a",
         [("f", {"b": 1}), ("g", {})]),
        ("llama", '<|python_tag|>{"name": "f", "parameters": {"b": 1}}', "", [("f", {"b": 1})]),
        ("xml", "Hi.\n" + XML % ("f", "<parameter=a>\n[1]\n</parameter>\n") + "\n"
         + XML % ("g", '<parameter=b>\n[1]\n</parameter>\n<parameter=c>\n"x\n</parameter>\n'),
         "Hi.\n", [("f", {"a": "[1]"}), ("g", {"b": [1], "c": '"x'})]),
        ("xml", XML % ("g", r'<parameter=b>["\ud800", NaN]</parameter>'
                       "<parameter=c>1e999</parameter>"),
         "", [("g", {"b": ["\ufffd", "NaN"], "c": "1e999"})]),
        ("hermes", r'<tool_call>{"name": "f", "arguments": {"a": NaN, "b": "\ud800",}}</tool_call>',
         "", [("f", {"a": "NaN", "b": "\ufffd"})]),
        ("mistral", r'[TOOL_CALLS][{"name": "f", "arguments": {"a": [1e999, "\ud800"]}}]', "",
         [("f", {"a": ["1e999", "\ufffd"]})]),
        ("xml", "<function=f>\n<parameter=a>one\ntwo</parameter></function> Done.", " Done.",
         [("f", {"a": "one\ntwo"})]),
        ("xml", "<tool_call>no call</tool_call>", "<tool_call>no call</tool_call>", []),
        ("deepseek", f'Hi.{BEGIN}{ONE}f{SEP}{{"b": "{END}"}}{ONE_END}{ONE}g{SEP}{{}}{ONE_END}{END}',
         "Hi.", [("f", {"b": END}), ("g", {})]),
        ("deepseek", '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>', "", [("f", {})]),
        ("deepseek_fenced",
         f'{BEGIN}{ONE}function{SEP}f\n```json\n{{"b": 1}}\n```{ONE_END}{END}', "",
         [("f", {"b": 1})]),
        ("deepseek", f"{ONE}no call{ONE_END}", f"{ONE}no call{ONE_END}", []),
        (None, "<tool_call>{}</tool_call>", "<tool_call>{}</tool_call>", []),
    ],
)  # fmt: skip
def test_calls_are_read_and_everything_else_stays_text(
    form: Any, text: str, content: str, calls: list[tuple[str, Any]]
):
    answer = Reading(calls=form, texts={"f": frozenset("a")}).answer(text)
    assert [(one.name, msgspec.json.decode(one.arguments)) for one in answer.calls] == calls
    assert msgspec.json.encode(answer)
    assert answer.content == content
    assert len({one.id for one in answer.calls}) == len(calls)


@pytest.mark.parametrize("form", ["hermes", "mistral", "llama"])
@pytest.mark.parametrize(
    "call",
    [
        r'{"name": "\ud800", "arguments": {}}',
        r'{"arguments": {"a": "\ud800"}, "name": "f"}',
        r'{"arguments": {}, "name": "f", "id": "\udfff"}',
    ],
)
def test_calls_with_half_a_surrogate_pair_have_utf8(form: Any, call: str):
    text = {"hermes": "<tool_call>%s</tool_call>", "mistral": "[TOOL_CALLS][%s]", "llama": "%s"}
    answer = Reading(calls=form).answer(text[form] % call)
    assert msgspec.json.encode(answer)
    assert answer.calls or call in answer.content


def test_arguments_come_while_they_are_written():
    reader = AnswerReader(HERMES)
    reader.feed('<tool_call>\n{"name": "f", "arguments": ')
    [begun, first] = reader.feed('{"a": "x')
    assert begun.call is not None
    assert (begun.call.name, begun.call.index) == ("f", 0)
    assert first.call is not None
    assert first.call.arguments == '{"a": "x'
    assert reader.has_calls


def test_elements_become_json_while_they_are_written():
    reader = AnswerReader(Reading(calls="xml", texts={"f": frozenset("a")}))
    reader.feed("<think>Hm.</think><tool_call>\n<function=f>\n<parameter=a>\n")
    [piece] = reader.feed('one "two"')
    assert piece.call is not None
    assert piece.call.arguments == r"one \"two\""
    [piece] = reader.feed("\nthree</parameter>")[:1]
    assert piece.call is not None
    assert piece.call.arguments == r"\nthree" + '"'


def test_template_without_tools_reads_its_own_calls_and_those_it_was_told_of(engine: Engine):
    source = "{{ messages[0].content }}{# " + ONE + " #}"
    work = prepare(engine, chat(tools=TOOLS, chat_template=source))
    for text in (f"{BEGIN}{ONE}stop{SEP}{{}}{ONE_END}{END}", CALL):
        assert [one.name for one in work.reading.answer(text).calls] == ["stop"]


@pytest.mark.parametrize(
    ("written", "arguments"),
    [("", "{}"), ("hello", '"hello"'), ('json {"a": NaN}', '{"a": "NaN"}'), ('{"a"', '{"a"')],
)
def test_arguments_in_a_channel_are_json(written: str, arguments: str):
    text = f"<|channel|>commentary to=functions.f<|message|>{written}"
    for end in ("", "<|call|>", "<|end|><|start|>assistant to=functions.g<|message|>{}"):
        answer = Reading(Split(mode="harmony")).answer(text + end)
        assert answer.calls[0].arguments.strip() == arguments


def test_reason_of_the_end_is_one_of_openais():
    reasons = ["stop", "stop_token", "stop_sequence", "length", "cancelled", "error"]
    plain = [finish_reason(reason, has_calls=False) for reason in reasons]
    assert plain == ["stop", "stop", "stop", "length", "stop", "length"]
    assert finish_reason("stop", has_calls=True) == "tool_calls"
    assert finish_reason("length", has_calls=True) == "length"
