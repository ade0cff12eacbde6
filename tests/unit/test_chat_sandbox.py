"""Templates that would take long, or make much, are stopped with a typed error."""

from __future__ import annotations

import time

import pytest

pytest.importorskip("jinja2")

from kqview.chat import sandbox
from kqview.chat.template import ChatTemplate
from kqview.errors import KqviewError, RequestError, UnsupportedModel

HELLO = [{"role": "user", "content": "Hello"}]


def text_of(source: str, **options: object) -> str:
    template = ChatTemplate(source, {}, [])
    return "".join(part.text for part in template.render(HELLO, options=options))


@pytest.mark.parametrize(
    "source",
    [
        "{{ " + "(" * 50_000 + "1" + ")" * 50_000 + " }}",
        "{% if a %}" * 5_000 + "{% endif %}" * 5_000,
        "{% for a in [1] %}" * 60 + "x" + "{% endfor %}" * 60,
        "{{ " + "[" * 3_000 + "]" * 3_000 + " }}",
        "{{ " + "not " * 30_000 + "a }}",
        "{{ a" + ".b" * 5_000 + " }}",
        "x" * (sandbox.SOURCE_MAX + 1),
    ],
    ids=["parentheses", "ifs", "fors", "lists", "nots", "attributes", "long"],
)
def test_source_that_is_nested_deeply_or_long_is_refused(source: str):
    with pytest.raises(KqviewError) as caught:
        text_of(source)
    assert isinstance(caught.value, UnsupportedModel | RequestError)


@pytest.mark.parametrize(
    "source",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{% macro m(n) %}{% for i in range(9) %}{{ m(n + 1) if n < 99 }}{% endfor %}{% endmacro %}"
        "{{ m(0) }}",
    ],
    ids=["loops", "macros"],
)
def test_template_without_an_end_is_stopped(source: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sandbox, "CPU_S_MAX", 0.2)
    start = time.thread_time()
    with pytest.raises(UnsupportedModel, match=r"more than 0\.2 s"):
        text_of(source)
    assert time.thread_time() - start < 20


@pytest.mark.parametrize(
    "expression",
    [
        "'a' * 10 ** 9",
        "10 ** 9 * 'a'",
        "9 ** (9 ** 9)",
        "'a' | center(10 ** 9)",
        "'a'.center(1000000000)",
        "'a'.ljust(1000000000)",
        "'%1000000000d' % 1",
        "'%1000000000d' | format(1)",
        "'%*d' % (1000000000, 1)",
        "'{:>1000000000}'.format(1)",
        "('a' * 100000).replace('a', 'b' * 100000)",
        "('a' * 100000) | replace('a', 'b' * 100000)",
        "('a' * 100000).join(range(99999) | map('string') | list)",
        "range(99999) | join('a' * 100000)",
        "('a\\n' * 100000) | indent(100000)",
        "[[[[1]]]] | tojson(indent=1000000)",
        "[0] * 10 ** 9",
        "(1).to_bytes(1000000000, 'big')",
    ],
)
def test_giant_value_is_refused_before_it_is_made(expression: str):
    with pytest.raises(UnsupportedModel, match=r"limit|wider"):
        text_of("{{ " + expression + " }}")


@pytest.mark.parametrize(
    "body",
    [
        "{% set ns.x = ns.x + ns.x %}",
        "{% set ns.x = ns.x ~ ns.x %}",
        "{% set y %}{{ ns.x }}{{ ns.x }}{% endset %}{% set ns.x = y %}",
        "{% set ns.x = ns.x | replace('a', 'aa') %}",
        "{% set ns.x = [ns.x, ns.x] | join %}",
    ],
)
def test_text_that_doubles_is_stopped(body: str):
    loop = "{% for i in range(99) %}" + body + "{% endfor %}"
    with pytest.raises(UnsupportedModel, match=f"the limit is {sandbox.LENGTH_MAX}"):
        text_of("{% set ns = namespace(x='a') %}" + loop + "{{ ns.x | length }}")


def test_output_that_is_too_long_is_stopped():
    with pytest.raises(UnsupportedModel, match=f"the limit is {sandbox.LENGTH_MAX}"):
        text_of("{% for i in range(99999) %}{{ 'a' * 1000 }}{% endfor %}")


def test_only_some_messages_exhaust_a_template(monkeypatch: pytest.MonkeyPatch):
    source = "{{ messages[0].content }}{% if n %}{{ 'a' * n }}{% endif %}"
    template = ChatTemplate(source, {}, [])
    assert template.render(HELLO, options={"n": 3})[0].text == "Helloaaa"
    with pytest.raises(RequestError, match="the limit is"):
        template.render(HELLO, options={"n": 10**9})


def test_what_templates_do_is_as_ever():
    assert (
        text_of("{{ 'a' ~ 1 ~ none }}{{ 2 * 3 }}{{ '%05.1f' % 2 }}{{ 2 ** 3 }}") == "a1None6002.08"
    )
    assert text_of("{% for m in messages %}{{ loop.index }}{{ loop.last }}{% endfor %}") == "1True"
    assert text_of("{% macro m(a) %}[{{ a }}]{% endmacro %}{{ m('x') + m('y') }}") == "[x][y]"
    assert text_of("{{ 5000000 | default(7000000) }}{{ 'a\nb' | indent(2) }}") == "5000000a\n  b"
