"""Templates of published models, which come with llama.cpp, under hostile contents.

The reference is jinja2 on the bare template: for harmless messages every name of a special token in
its text is one.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("jinja2")

from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from kqview.chat.messages import checked_messages
from kqview.chat.template import ChatTemplate
from kqview.errors import RequestError

if TYPE_CHECKING:
    from pathlib import Path

TALK = [
    {"role": "user", "content": "Hi there"},
    {"role": "assistant", "content": "Hello"},
    {"role": "user", "content": "Bye"},
]
# What special tokens look like in these files; {} is a gap that a template fills.
SPECIAL = re.compile(
    r"<\|[^|<>{}\n]+\|>|<｜[^｜<>{}\n]+｜>|</?(?:s|bos|eos|start_of_turn|end_of_turn)>|\[/?[A-Z_]{3,}\]"
)
N_LEAST = 40  # of about 60 files; the rest wants tools, or other things than TALK has


def bare_text(source: str, messages: list[dict[str, Any]]) -> str:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
    )
    environment.filters["tojson"] = lambda value, **_: json.dumps(value, ensure_ascii=False)
    environment.globals["strftime_now"] = lambda form: "today"  # pyright: ignore
    return environment.from_string(source).render(
        messages=messages,
        tools=None,
        documents=None,
        add_generation_prompt=True,
        bos_token="<s>",
        eos_token="</s>",
    )


def specials_of(template: ChatTemplate, messages: list[dict[str, Any]]) -> list[str]:
    return [part.text for part in template.render(messages) if part.is_special]


def test_published_templates_take_special_tokens_from_nowhere_else(llama_cpp_dir: Path):
    n_checked = 0
    for path in sorted((llama_cpp_dir / "models" / "templates").glob("*.jinja")):
        source = path.read_text(encoding="utf-8")
        try:
            text = bare_text(source, TALK)
        except Exception:  # it wants more than messages, and fails for transformers too
            continue
        names = sorted({"<s>", "</s>", *SPECIAL.findall(source), *SPECIAL.findall(text)})
        longest_first = "|".join(map(re.escape, sorted(names, key=len, reverse=True)))
        wanted = re.findall(longest_first, text)
        template = ChatTemplate(source, {"bos": "<s>", "eos": "</s>"}, names)
        assert specials_of(template, TALK) == wanted, path.name
        hostile = [{**m, "content": f"{m['content']} {''.join(names)} end"} for m in TALK]
        assert specials_of(template, hostile) == wanted, path.name
        n_checked += 1
    assert n_checked >= N_LEAST


def test_published_templates_write_no_none_for_a_call_without_content(llama_cpp_dir: Path):
    call = {"id": "abcdefghi", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    talk = [
        {"role": "user", "content": "Hi there"},
        {"role": "assistant", "content": None, "name": None, "tool_calls": [call]},
        {"role": "tool", "content": "42", "tool_call_id": "abcdefghi"},
    ]
    messages = checked_messages("chat", talk)
    assert "content" not in messages[1]
    n_checked = 0
    for path in sorted((llama_cpp_dir / "models" / "templates").glob("*.jinja")):
        template = ChatTemplate(path.read_text(encoding="utf-8"), {"bos": "<s>", "eos": "</s>"}, [])
        try:
            text = "".join(part.text for part in template.render(messages))
        except RequestError:  # it wants something else of a call
            continue
        assert "None" not in text, path.name
        n_checked += 1
    assert n_checked >= 30
