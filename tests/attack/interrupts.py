"""Interrupts: Ctrl-C at any moment of any call that waits, again and again in one process.

Each one comes out as KeyboardInterrupt, at once, or the call had ended; afterwards the same engine
works.
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from typing import TYPE_CHECKING

from kqview import Capture, Engine, errors
from tests.attack.summary import Summary, main

if TYPE_CHECKING:
    from collections.abc import Callable

PROMPT = [1, 2, 3, 4, 5, 6]
LATE_S = 20.0
LONGEST_DELAY_S = 0.02


def calls_of(engine: Engine, rng: random.Random) -> dict[str, Callable[[], object]]:
    """Calls that take longer than the signal's delay."""
    ids = [rng.randrange(3, 700) for _ in range(400)]

    def held() -> None:
        # The slot is taken, so that the second one waits for it.
        with engine.generate(PROMPT, max_tokens=400, ignore_eos=True, slot=0) as first:
            next(first)
            engine.generate(PROMPT, max_tokens=1, slot=0).read()

    return {
        "read": lambda: engine.generate(PROMPT, max_tokens=400, ignore_eos=True).read(),
        "rows": lambda: list(
            engine.generate(PROMPT, max_tokens=400, ignore_eos=True, capture="probs")
        ),
        "attend": lambda: engine.attend(ids, Capture("probs", reduce="mean")).array(),
        "tokenize": lambda: engine.tokenize("Tom found a red ball. " * 20_000),
        "wait for a slot": held,
        "save": lambda: [engine.slots[0].restore(engine.slots[0].save()) for _ in range(200)],
        "open": lambda: Engine.demo(n_ctx=64, n_threads=1).close(),
    }


def run(seconds: float, seed: int) -> Summary:
    """Interrupt for *seconds*; on the main thread, where signals arrive."""
    summary = Summary("interrupts", seed)
    rng = random.Random(seed)
    ends_s = time.monotonic() + seconds
    previous = signal.signal(signal.SIGINT, interrupted)
    try:
        with Engine.demo(n_ctx=512, n_slots=2, n_threads=1) as engine:
            right = engine.generate(PROMPT, max_tokens=4, temperature=0).read()
            while time.monotonic() < ends_s:
                name, call = rng.choice(list(calls_of(engine, rng).items()))
                interrupt(name, call, rng.random() * LONGEST_DELAY_S, summary)
                text = engine.generate(PROMPT, max_tokens=4, temperature=0).read()
                if text != right:
                    summary.fail(f"after {name}: {text!r} in place of {right!r}")
    finally:
        signal.signal(signal.SIGINT, previous)
    return summary


HANDLED = threading.Event()
"""Set by the handler: the signal of this attempt has become a KeyboardInterrupt."""


def interrupted(_signal: int, _frame: object) -> None:
    HANDLED.set()
    raise KeyboardInterrupt


def interrupt(name: str, call: Callable[[], object], delay_s: float, summary: Summary) -> None:
    """Call, send the signal meanwhile, and return when it has been handled.

    The kernel may give it to a thread that is not running, so it can come after the call and after
    the thread that sent it.
    """
    sent_s = time.monotonic()
    HANDLED.clear()

    def send() -> None:
        nonlocal sent_s
        sent_s = time.monotonic()
        os.kill(os.getpid(), signal.SIGINT)

    timer = threading.Timer(delay_s, send)
    outcome = f"interrupted: {name}"
    try:
        timer.start()
        try:
            call()
        except errors.BusyError:  # the one thread holds the slot that it waits for
            pass
        except Exception as error:
            summary.fail(f"{name}: {type(error).__name__}: {error}")
        outcome = "ended before"
        while not HANDLED.is_set():
            if time.monotonic() - sent_s > LATE_S:
                summary.fail(f"{name}: no KeyboardInterrupt {LATE_S:.0f} s after Ctrl-C")
                break
            time.sleep(0.001)
    except KeyboardInterrupt:
        late_s = time.monotonic() - sent_s
        summary.figures["latest_ms"] = max(summary.figures.get("latest_ms", 0), late_s * 1000)
        if late_s > LATE_S:
            summary.fail(f"{name} went on for {late_s:.1f} s after Ctrl-C")
    summary.count(outcome)
    timer.join()


if __name__ == "__main__":
    raise SystemExit(main(run))
