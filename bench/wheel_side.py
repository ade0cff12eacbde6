"""One side of wheel.py: a process with the kqview of a folder, or of "" for the installed one.

A program of its own, because it chooses a kqview before anything else imports one. Writes which
CPU variant that uses and in how many milliseconds it could say so; then reads settings, opens an
engine, and answers each case with its milliseconds. All are pickled, through stdin and stdout.
"""

from __future__ import annotations

import importlib.machinery
import pickle
import sys
import time
from typing import Any


def say(answer: object) -> None:
    """Answer."""
    pickle.dump(answer, sys.stdout.buffer)
    sys.stdout.buffer.flush()


folder = sys.argv[1]
if folder:
    sys.path.insert(0, folder)
    # Before the finder of an editable install.
    sys.meta_path.insert(0, importlib.machinery.PathFinder)
start_s = time.perf_counter()
import kqview  # noqa: E402

info = kqview.system_info()
load_ms = (time.perf_counter() - start_s) * 1000
if folder and not (kqview.__file__ or "").startswith(folder):
    raise SystemExit(f"kqview is {kqview.__file__}, not that of the wheel")
say((info["cpu_variant"], load_ms))

from runs import PrefillRuns, decode_runs, open_engine  # noqa: E402

from kqview.bench.pairs import step_ms  # noqa: E402

settings = pickle.load(sys.stdin.buffer)
with open_engine(settings, flash_attn=True) as engine:
    prefill, decode = PrefillRuns(settings, engine), decode_runs(settings, engine)

    def step(capture: Any) -> float:
        """Milliseconds of a decoded token."""
        return step_ms(decode.stamps_s(settings.n_tokens, capture=capture), settings.n_skip)

    cases = {
        "wheel-prompt": lambda: prefill.ms(None),
        "wheel-prompt-logits": lambda: prefill.attend_ms("logits"),
        "wheel-decode": lambda: step(None),
        "wheel-decode-logits": lambda: step("logits"),
    }
    say(0.0)
    while True:
        say(cases[pickle.load(sys.stdin.buffer)]())
