"""Templates of strangers that would take long, or much, are stopped with a typed error."""

from __future__ import annotations

import os
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("jinja2")

from kqview.chat import rendering, template
from kqview.chat.rendering import ConfinedTemplate
from kqview.confined import Confined
from kqview.errors import KqviewError, RequestError, UnsupportedModel
from tests.attack.target import helper_bytes
from tests.support.chat_templates import HOSTILE

if TYPE_CHECKING:
    from collections.abc import Iterator

HELLO = [{"role": "user", "content": "Hello"}]
MEMORY_BYTES = 256 << 20
CPU_S = 0.5


@pytest.fixture(scope="module")
def helpers() -> Iterator[Confined]:
    program = template.__file__
    pool = Confined(program, n_processes=1, memory_bytes=MEMORY_BYTES, cpu_s=CPU_S, wall_s=60)
    yield pool
    pool.close()


def text_of(helpers: Confined, source: str, **options: object) -> str:
    confined = ConfinedTemplate(helpers, source, {}, [])
    return "".join(part.text for part in confined.render(HELLO, options=options))


@pytest.mark.parametrize(
    "source",
    [
        "{{ " + "(" * 50_000 + "1" + ")" * 50_000 + " }}",
        "{% if a %}" * 5_000 + "{% endif %}" * 5_000,
        "{% for a in [1] %}" * 60 + "x" + "{% endfor %}" * 60,
        "{{ " + "[" * 3_000 + "]" * 3_000 + " }}",
        "{{ " + "not " * 30_000 + "a }}",
        "{{ a" + ".b" * 5_000 + " }}",
        "x" * (template.SOURCE_MAX + 1),
    ],
    ids=["parentheses", "ifs", "fors", "lists", "nots", "attributes", "long"],
)
def test_source_that_is_nested_deeply_or_long_is_refused(helpers: Confined, source: str):
    with pytest.raises(KqviewError) as caught:
        text_of(helpers, source)
    assert isinstance(caught.value, UnsupportedModel | RequestError)


class Gaps(threading.Thread):
    """Notes the longest time in which this process ran no other thread, and the helpers' memory."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.longest_s = 0.0
        self.peak_bytes = 0
        self._start_s = self._before_s = time.monotonic()
        self._is_done = threading.Event()

    def _note(self) -> None:
        now_s = time.monotonic()
        self.longest_s, self._before_s = max(self.longest_s, now_s - self._before_s), now_s

    def run(self) -> None:
        while not self._is_done.wait(0.01):
            self._note()
            self.peak_bytes = max(self.peak_bytes, helper_bytes(os.getpid()))

    def __enter__(self) -> Gaps:
        self.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._is_done.set()
        self.join()
        self._note()
        self.whole_s = self._before_s - self._start_s


@pytest.mark.skipif(sys.platform != "linux", reason="Linux limits memory")
@pytest.mark.parametrize("name", HOSTILE)
def test_template_that_takes_all_is_stopped_while_others_run(helpers: Confined, name: str):
    assert text_of(helpers, "{{ messages[0].content }}") == "Hello"  # a child that has started
    with Gaps() as gaps, pytest.raises((UnsupportedModel, RequestError)):
        text_of(helpers, HOSTILE[name])
    assert gaps.longest_s < max(CPU_S, gaps.whole_s / 2)  # else it was one gap, with a busy GIL
    assert gaps.peak_bytes < MEMORY_BYTES + (64 << 20)
    assert text_of(helpers, "{{ messages[0].content }}") == "Hello"


def test_output_that_is_too_long_is_refused(helpers: Confined):
    source = "{% if n %}{% for i in range(n) %}{{ 'a' * 1000 }}{% endfor %}{% endif %}"
    with pytest.raises(RequestError, match=f"the limit is {template.LENGTH_MAX}"):
        text_of(helpers, source, n=20_000)


def test_only_some_messages_exhaust_a_template(helpers: Confined):
    source = "{{ messages[0].content }}{% if n %}{{ 'a' * n }}{% endif %}"
    confined = ConfinedTemplate(helpers, source, {}, [])
    assert confined.render(HELLO, options={"n": 3})[0].text == "Helloaaa"
    with pytest.raises(RequestError, match="stopped: it takes more than 256 MiB"):
        confined.render(HELLO, options={"n": 10**9})
    with pytest.raises(RequestError, match="cannot be rendered"):
        confined.render(HELLO, options={"n": 10**5000})


def test_helpers_render_as_this_process_does(helpers: Confined):
    source = (
        "{{ bos_token }}{% for m in messages %}<|a|>{{ m.content }}{{ o | default(1) | tojson }}"
        "{% endfor %}{{ tools | tojson if tools }}"
    )
    about: Any = (source, {"bos": "<s>"}, ["<|a|>", "<s>"])
    messages = [{"role": "user", "content": "<|a|>\ud800\0é\U0001f600"}] * 2
    given: Any = {"tools": [{"type": "function"}], "options": {"o": [0.1, None, 2**70]}}
    here, there = template.ChatTemplate(*about), ConfinedTemplate(helpers, *about)
    parts = here.render(messages, **given)
    assert [part.text for part in parts if part.is_special] == ["<s>", "<|a|>", "<|a|>"]
    assert there.render(messages, **given) == parts
    text = "".join(part.text for part in parts)
    ends = {"text": text, "ends_of_turn": ["<|a|>"]}
    assert there.ends(messages, **given, **ends) == here.ends(messages, **given, **ends)
    headers = here.headers(ends_of_turn=["<|a|>"])
    assert there.headers(ends_of_turn=["<|a|>"]) == headers
    assert headers


def test_limits_are_those_that_are_documented():
    assert (rendering.CPU_S_MAX, rendering.MEMORY_MAX) == (5.0, 512 << 20)
    assert template.LENGTH_MAX == 16 << 20
