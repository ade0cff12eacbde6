"""``kqview demo --mods``: what mods took back and wrote is marked, and the rest is the text."""

from __future__ import annotations

import io
import re

import pytest

from kqview import Engine

pytest.importorskip("rich")

from rich.console import Console

from kqview.cli.mods_demo import show_mods

PROMPT = "Mirelda found a silver key near the old bridge. One day, Mirelda"


def test_each_mod_is_shown_with_what_it_wrote_and_took_back():
    shown = io.StringIO()
    with Engine.demo(n_ctx=256, n_threads=1) as engine:
        show_mods(Console(file=shown, width=1000), engine, PROMPT, 40)
        plain = engine.generate(PROMPT, max_tokens=40, temperature=0).read()
    legend, *parts = shown.getvalue().rstrip().split("\n\n")
    without, question, aligned, guarded, reminded = (part.splitlines()[1] for part in parts)
    assert legend == "Marked: {+what a mod wrote+}, [-what it took back-]"
    assert without == PROMPT + plain.replace("\n", "")
    # What is erased is shown, and what is left is the text of no mod.
    assert re.search(r"\[- took the (red|blue|silver)-\]", question)
    assert re.sub(r"\[-.*?-\]", "", question) == without
    assert without.startswith(aligned)
    assert aligned != without
    assert "[-" in guarded
    assert "{+ Mirelda found a silver key near the old bridge.+}" in reminded
    assert "finish reason: stop" in parts[2]
