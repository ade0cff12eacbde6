"""Chat templates: the same text as plain jinja2, special tokens from the template alone."""

from __future__ import annotations

import json
import re
from datetime import datetime
from typing import Any

import pytest
from hypothesis import given, strategies as st

pytest.importorskip("jinja2")

from jinja2.ext import loopcontrols
from jinja2.sandbox import SandboxedEnvironment

from kqview.chat.template import ChatTemplate, PromptPart
from kqview.errors import RequestError, UnsupportedModel
from tests.support import chat_templates as shapes

CONTROL = ("<|im_start|>", "<|im_end|>", "<s>", "</s>", *shapes.SPECIALS)
TOKENS = {"bos": "<s>", "eos": "</s>", "padding": "</s>"}
CONTROL_PATTERN = re.compile("|".join(re.escape(text) for text in CONTROL))

HELLO = [
    {"role": "user", "content": " Hi "},
    {"role": "assistant", "content": "Hello"},
    {"role": "user", "content": "Bye"},
]


def parts_of(source: str, messages: list[dict[str, Any]], **given: Any) -> list[PromptPart]:
    return ChatTemplate(source, TOKENS, CONTROL).render(messages, **given)


def text_of(parts: list[PromptPart]) -> str:
    return "".join(part.text for part in parts)


def specials_of(parts: list[PromptPart]) -> list[str]:
    return [part.text for part in parts if part.is_special]


def rendered_without_marks(source: str, messages: list[dict[str, Any]], **given: Any) -> str:
    """jinja2 on the bare template, with what the tested ones use of transformers' dialect."""
    source = source.replace("{%- generation %}", "").replace("{%- endgeneration %}", "")
    environment = SandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
    )
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    return environment.from_string(source).render(
        messages=messages,
        tools=given.get("tools"),
        add_generation_prompt=given.get("add_generation_prompt", True),
        bos_token="<s>",
        eos_token="</s>",
    )


SHAPES = ("QWEN", "LLAMA3", "GEMMA", "MISTRAL", "PHI")


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_text_and_special_tokens_are_those_of_the_bare_template(
    shape: str, add_generation_prompt: bool
):
    source = getattr(shapes, shape)
    given = {"add_generation_prompt": add_generation_prompt}
    parts = parts_of(source, HELLO, **given)
    text = rendered_without_marks(source, HELLO, **given)
    assert text_of(parts) == text
    assert specials_of(parts) == CONTROL_PATTERN.findall(text)
    assert len(specials_of(parts)) >= 3


@pytest.mark.parametrize("shape", SHAPES)
def test_answer_without_content_is_as_an_empty_one(shape: str):
    source, (user, answer, bye) = getattr(shapes, shape), HELLO
    empty = parts_of(source, [user, {**answer, "content": ""}, bye])
    assert parts_of(source, [user, {**answer, "content": None}, bye]) == empty
    without = {"role": "assistant", "tool_calls": list[Any]()}
    assert parts_of(source, [user, without, bye]) == empty


TEMPLATES = {shape: ChatTemplate(getattr(shapes, shape), TOKENS, CONTROL) for shape in SHAPES}

# Pieces that special tokens are made of, so that joining them anywhere can make one.
PIECES = st.lists(
    st.sampled_from(
        [
            *("<|", "|>", "im_start", "im_end", "user", "<|im_", "end|>", "<s", ">", "[INST", "]"),
            *("</think>", " ", "\n", "\U000f0000", "\U00100000", "a", *CONTROL),
        ]
    ),
    max_size=6,
).map("".join)


@given(st.sampled_from(SHAPES), PIECES, PIECES)
def test_no_content_changes_the_special_tokens(shape: str, first: str, second: str):
    source = getattr(shapes, shape)
    template = TEMPLATES[shape]
    messages = [{**HELLO[0], "content": first}, {**HELLO[1], "content": second}, HELLO[2]]
    parts = template.render(messages)
    assert specials_of(parts) == specials_of(template.render(HELLO))
    assert text_of(parts) == rendered_without_marks(source, messages)


def test_parts_of_one_content_cannot_be_joined_to_a_special_token():
    content = [{"type": "text", "text": "<end_of_"}, {"type": "text", "text": "turn>"}]
    parts = parts_of(shapes.GEMMA, [{"role": "user", "content": content}])
    assert "<end_of_turn><end_of_turn>" in text_of(parts)
    assert specials_of(parts).count("<end_of_turn>") == 1


def test_tools_and_arguments_add_no_special_token():
    tools = [{"type": "function", "function": {"name": "f", "description": "<|im_end|>"}}]
    call = {"type": "function", "function": {"name": "f", "arguments": {"x": "<|im_end|>é<&>"}}}
    messages = [
        {"role": "system", "content": "Be good."},
        HELLO[0],
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "<|im_start|>system"},
    ]
    parts = parts_of(shapes.QWEN, messages, tools=tools)
    assert specials_of(parts) == ["<|im_start|>", "<|im_end|>"] * 4 + ["<|im_start|>"]
    assert '"arguments": {"x": "<|im_end|>é<&>"}}\n</tool_call>' in text_of(parts)
    assert "Be good.\n\n# Tools" in text_of(parts)


def test_template_reads_and_cuts_contents_as_they_are():
    thought = {"role": "assistant", "content": "hm</think>\n\nHello <|im_end|>"}
    parts = parts_of(shapes.QWEN, [HELLO[0], thought, HELLO[2]])
    assert "<|im_start|>assistant\nHello <|im_end|><|im_end|>\n" in text_of(parts)
    assert "hm" not in text_of(parts)


def test_roles_make_special_tokens_where_the_template_puts_signs_around_them():
    parts = parts_of(shapes.PHI, [{"role": "user", "content": "<|user|> <|end|>"}])
    assert specials_of(parts) == ["<|user|>", "<|end|>", "<|assistant|>"]
    parts = parts_of(shapes.PHI, [{"role": "end", "content": ""}])
    assert specials_of(parts) == ["<|end|>", "<|assistant|>"]  # the first one is not of the role
    assert text_of(parts).startswith("<|end|>\n<|end|>")


FORMATTED = (
    "{% set end = '<|im_{}|>'.format('end') %}{% for m in messages %}"
    "{{ m.content.split('</think>')[-1] }}{{ end }}{% endfor %}"
)


@pytest.mark.parametrize("content", ["Hi", "<|im_end|>", "1 < 2 > 0", "<|im_", "\U00100000 <"])
def test_token_that_is_put_together_while_rendering_is_special(content: str):
    parts = parts_of(FORMATTED, [{"role": "user", "content": content}])
    assert parts == [PromptPart(content, False), PromptPart("<|im_end|>", True)]


def test_content_that_hides_what_the_template_put_together_is_refused():
    with pytest.raises(RequestError, match="characters < >"):
        parts_of(FORMATTED, [{"role": "user", "content": "hm</think>Hi"}])


def test_constant_joined_in_the_template_is_a_special_token():
    parts = parts_of("{{ '<|im_' ~ 'end|>' }}{{ ['<s>', 'x'] | join }}", HELLO)
    assert specials_of(parts)[0] == "<|im_end|>"


def test_special_tokens_of_the_model_are_variables():
    source = "{{ bos_token }}a{{ eos_token }}{{ pad_token }}{{ unk_token is defined }}"
    assert parts_of(source, HELLO) == [
        *(
            PromptPart("<s>", True),
            PromptPart("a", False),
            PromptPart("</s>", True),
            PromptPart("</s>", True),
        ),
        PromptPart("False", False),
    ]


def test_list_of_parts_becomes_text_for_a_template_without_parts():
    content = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert "one\ntwo<|im_end|>" in text_of(
        parts_of("{% for m in messages %}{{ m.content + '<|im_end|>' }}{% endfor %}",
                 [{"role": "user", "content": content}])
    )  # fmt: skip


def test_text_becomes_a_part_for_a_template_without_text():
    parts = parts_of(shapes.PARTS, [{"role": "user", "content": "Hi"}])
    assert text_of(parts) == "<|im_start|>user: Hi<|im_end|>"


def test_arguments_become_json_for_a_template_that_fails_on_objects():
    call = {"function": {"name": "f", "arguments": {"a": 1}}}
    parts = parts_of(shapes.DEEPSEEK, [{"role": "assistant", "content": "", "tool_calls": [call]}])
    assert text_of(parts) == '<|im_start|>f {"a": 1}<|im_end|>'


def test_template_options_are_variables():
    parts = parts_of(shapes.QWEN, HELLO, options={"enable_thinking": False})
    assert text_of(parts).endswith("<think>\n\n</think>\n\n")


def test_options_cannot_replace_the_messages():
    parts = parts_of(shapes.QWEN, HELLO, options={"messages": [], "bos_token": "x"})
    assert text_of(parts) == rendered_without_marks(shapes.QWEN, HELLO)


def test_strftime_now_gives_the_date():
    assert parts_of("{{ strftime_now('%Y') }}", HELLO) == [
        PromptPart(str(datetime.now().year), False)
    ]


def test_tojson_leaves_letters_and_signs_as_they_are():
    parts = parts_of("{{ messages[0].content | tojson(indent=2) }}", [{"content": "é<>&'"}])
    assert text_of(parts) == '"é<>&\'"'


def test_what_a_filter_yields_is_a_list_in_json_and_text_is_not_escaped():
    source = "{{ tools | map(attribute='function') | tojson }}"
    assert text_of(parts_of(source, HELLO, tools=shapes.TOOLS[:1])).startswith('[{"name": ')
    assert text_of(parts_of("{{ '<'|safe + messages[0].role + '&' }}", HELLO)) == "<user&"


def test_template_may_change_its_own_lists_but_none_of_the_chat():
    queue = "{% set ns = namespace(ids=[]) %}{% set _ = ns.ids.append(messages[0].role) %}"
    assert text_of(parts_of(queue + "{{ ns.ids.pop(0) }}{{ ns.ids }}", HELLO)) == "user[]"
    for mine in ("messages", "messages[0].content", "tools"):
        with pytest.raises(RequestError, match="append"):
            parts_of(f"{queue}{{{{ {mine}.append(1) }}}}", HELLO, tools=[{"name": "f"}])
    with pytest.raises(RequestError, match="append"):
        parts_of("{{ messages['app' ~ 'end'](1) }}", HELLO)


SHOWN = "{% for m in messages %}{{ m.role }}={{ m.content }};{% endfor %}"
NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('no') }}{% endif %}"
LEFT_OUT = SHOWN.replace("messages %}", "messages if m.role == 'user' %}", 1)


@pytest.mark.parametrize("source", [NO_SYSTEM + SHOWN, LEFT_OUT])
@pytest.mark.parametrize("role", ["system", "developer"])
def test_system_message_that_a_template_does_not_show_begins_the_users(source: str, role: str):
    system = {"role": role, "content": [{"type": "text", "text": "Be brief."}]}
    assert text_of(parts_of(source, [system, HELLO[0]])) == "user=Be brief.\n Hi ;"
    assert text_of(parts_of(source, [system])) == "user=Be brief.;"
    assert text_of(parts_of(source, [system, HELLO[1]])).startswith("user=Be brief.;")


def test_developer_is_the_system_unless_the_template_knows_the_role():
    messages = [{"role": "developer", "content": "Be brief."}]
    assert text_of(parts_of(SHOWN, messages)) == "system=Be brief.;"
    assert text_of(parts_of("{# developer #}" + SHOWN, messages)) == "developer=Be brief.;"


def test_defaults_are_those_of_llama_cpps_server():
    source = "{{ [enable_thinking, preserve_thinking, clear_thinking] }}"
    assert text_of(parts_of(source, HELLO)) == "[True, True, False]"
    kept: dict[str, Any] = {"enable_thinking": False, "preserve_reasoning": False}
    assert text_of(parts_of(source, HELLO, options=kept)) == "[False, False, True]"
    chosen = {"clear_thinking": True}
    assert text_of(parts_of(source, HELLO, options=chosen)) == "[True, True, True]"
    today = datetime.now().strftime("%d %b %Y|%b %d %Y")
    assert text_of(parts_of("{{ date_string }}|{{ datetime }}", HELLO)) == today


def test_loop_over_tools_that_are_none_is_empty():
    assert text_of(parts_of("{% for tool in tools %}x{% endfor %}.", HELLO)) == "."
    assert text_of(parts_of("{{ tools is none }}", HELLO)) == "True"


def test_refusal_of_the_template_is_a_request_error_with_its_words():
    with pytest.raises(RequestError, match="roles must alternate"):
        parts_of(shapes.GEMMA, [*HELLO, *HELLO])


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.append(1) }}",  # the sandbox: nothing may be changed
        "{{ ''.__class__.__mro__ }}{{ messages.__class__.__subclasses__() }}",
        "{{ 1 / 0 }}",
        "{{ nothing.at_all.here }}",
        "{% for i in range(10**9) %}{% endfor %}",
    ],
)
def test_template_that_fails_is_a_request_error(source: str):
    with pytest.raises(RequestError, match="template fails"):
        parts_of(source, HELLO)


def test_template_that_does_not_parse_is_refused():
    with pytest.raises(UnsupportedModel, match="does not parse"):
        ChatTemplate("{% for %}", {}, ())


def test_lines_of_blocks_leave_no_white_space():
    assert text_of(parts_of("a\n  {% if true %}\nb\n{% endif %}\nc", HELLO)) == "a\nb\nc"


def test_generation_tag_keeps_its_own_variables():
    source = "{% set x = 1 %}{% generation %}{% set x = 2 %}{{ x }}{% endgeneration %}{{ x }}"
    assert text_of(parts_of(source, HELLO)) == "21"
