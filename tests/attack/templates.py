"""Hostile chat templates: programs made at random that would take all time or memory.

Each is rendered by an engine, as if a request had brought it, while a thread of this process counts
its longest wait. What may come of one is a prompt or an error of kqview's; the helper processes
stay within their memory, and an ordinary template renders as before.
"""

from __future__ import annotations

import os
import random
import threading
import time

from kqview import Engine, errors
from kqview.chat import rendering
from tests.attack.summary import Summary, main
from tests.attack.target import helper_bytes, processes_below
from tests.support.chat_templates import HOSTILE

CPU_S = 0.3
MEMORY_BYTES = 192 << 20
MORE_BYTES = 64 << 20
"""What a helper process takes by itself, and a margin."""
GAP_S_MAX = 2.0
HELLO = [{"role": "user", "content": "Hello"}]
PLAIN = "{{ messages[0].content }}"
FILTERS = (
    "abs", "batch(3)", "capitalize", "center(99999999)", "default(1)", "dictsort", "e", "escape",
    "filesizeformat", "first", "float", "forceescape", "format(n.t)", "groupby(0)", "indent(99999)",
    "int", "items", "join", "join(n.t)", "last", "length", "list", "lower", "map('string')", "max",
    "map(attribute=0)", "min", "pprint", "random", "reject", "replace('a', n.t)", "reverse",
    "round(99)", "safe", "select", "slice(99999)", "sort", "string", "striptags", "sum(start=[])",
    "title", "tojson", "tojson(indent=9999)", "trim", "truncate(9)", "unique", "upper",
    "urlencode", "urlize", "wordcount", "wordwrap(1)", "xmlattr",
)  # fmt: skip
VALUES = (
    "n.a", "n.b", "n.t", "n.i", "[n.a, n.b]", "{'x': n.a}", "messages", "range(99999)", "9", "'<('",
    "namespace", "cycler", "joiner(n.t)", "lipsum()", "dict(a=n.a)", "none", "raise_exception(n.t)",
    "strftime_now('%Y' * 9999)", "n.t.format(n.a)", "n.t.split('a')", "n.t.__class__", "self",
)  # fmt: skip
OPERATORS = ("==", "<", "in", "~", "+", "*", "**", "%", "//", "is sameas", "and", "or")
STEPS = (
    "{% set n.a = [n.a, n.a] %}", "{% set n.b = [n.b, n.b] %}", "{% set n.a = [n.a, n.b] %}",
    "{% set n.t = n.t ~ n.t %}", "{% set n.t = n.t ~ '(a)<b> ' %}", "{% set n.i = n.i * 99 %}",
    "{% set n.a = {'x': n.a, 'y': n.a} %}", "{% set n.b = n.b + [n.t] %}", "{{ n.t }}",
)  # fmt: skip


def expression(rng: random.Random, depth: int = 2) -> str:
    """One expression of values, operators and filters."""
    value = rng.choice(VALUES)
    if depth and rng.random() < 0.6:
        value = f"({expression(rng, depth - 1)} {rng.choice(OPERATORS)} {value})"
    for _ in range(rng.choice((0, 1, 1, 2))):
        value += " | " + rng.choice(FILTERS)
    return value


def source_of(rng: random.Random) -> str:
    """One template."""
    if rng.random() < 0.1:
        return rng.choice(list(HOSTILE.values()))
    steps = "".join(rng.sample(STEPS, rng.randrange(1, 4)))
    for _ in range(rng.randrange(1, 3)):
        n = rng.choice((5, 20, 28, 40, 99, 99999))
        steps = "{% for i in range(" + str(n) + ") %}" + steps + "{% endfor %}"
    shown = "".join("{{ " + expression(rng) + " }}" for _ in range(rng.randrange(1, 3)))
    source = "{% set n = namespace(a=[], b=[], t='a', i=9) %}" + steps + shown
    if rng.random() < 0.1:
        at = rng.randrange(len(source))
        source = source[:at] + rng.choice("{}%()[]'|~") * rng.choice((1, 2, 5000)) + source[at:]
    return source


class Watch(threading.Thread):
    """Notes the longest time in which this thread did not run, and the helpers' most memory."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.longest_s = 0.0
        self.peak_bytes = 0
        self.is_done = threading.Event()

    def run(self) -> None:
        """Watch until it is done."""
        before_s = time.monotonic()
        while not self.is_done.wait(0.02):
            now_s = time.monotonic()
            self.longest_s, before_s = max(self.longest_s, now_s - before_s), now_s
            self.peak_bytes = max(self.peak_bytes, helper_bytes(os.getpid()))


def run(seconds: float, seed: int) -> Summary:
    """Render for *seconds*."""
    summary = Summary("templates", seed)
    rng = random.Random(seed)
    rendering.CPU_S_MAX, rendering.MEMORY_MAX = CPU_S, MEMORY_BYTES  # pyright: ignore[reportConstantRedefinition, reportAttributeAccessIssue]
    watch = Watch()
    watch.start()
    ends_s = time.monotonic() + seconds
    n_files = 0
    with Engine.demo(n_ctx=64, n_threads=1) as engine:
        while time.monotonic() < ends_s or not n_files:
            source = source_of(rng)
            try:
                engine.apply_chat_template(HELLO, chat_template=source, tokenize=False)
            except errors.InternalError as error:
                summary.fail(f"{source!r}: {error}")
            except errors.KqviewError as error:
                stopped = "stopped: " in str(error)
                summary.count(f"{type(error).__name__}{', stopped' if stopped else ''}")
            except Exception as error:
                summary.fail(f"{source!r}: {type(error).__name__}: {error}")
            else:
                summary.count("done")
            if engine.apply_chat_template(HELLO, chat_template=PLAIN, tokenize=False) != "Hello":
                summary.fail(f"an ordinary template renders otherwise after {source!r}")
            n_now = len(os.listdir("/dev/fd"))
            if n_files and n_now > n_files + 2:
                summary.fail(f"{n_now} open files in place of {n_files}")
            n_files = n_files or n_now
    watch.is_done.set()
    watch.join()
    summary.figures["longest_gap_s"] = watch.longest_s
    summary.figures["helper_peak_mib"] = watch.peak_bytes / 2**20
    if watch.longest_s > GAP_S_MAX:
        summary.fail(f"no other thread ran for {watch.longest_s:.1f} s")
    if watch.peak_bytes > MEMORY_BYTES + MORE_BYTES:
        summary.fail(f"a helper process had {watch.peak_bytes >> 20} MiB")
    if left := processes_below(os.getpid())[1:]:
        summary.fail(f"processes {left} are left over")
    return summary


if __name__ == "__main__":
    raise SystemExit(main(run))
