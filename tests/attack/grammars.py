"""Hostile grammars and constraints beside one ordinary client.

Random ambiguous grammars, changed ones of the table in tests/support/hostile_grammars.py, its
constraints and random ones run in one slot; an ordinary request runs in the other all the time.
Each hostile request is refused with InvalidSampling or generates within its limits, what the
ordinary one says never changes, and the memory of all processes stays within limits.
"""

from __future__ import annotations

import os
import random
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from kqview import Engine, errors
from tests.attack.summary import Summary, main
from tests.support.hostile_grammars import (
    CONSTRAINTS,
    GRAMMARS,
    random_constraint,
    write_spaced_model,
)
from tests.support.processes import rss_bytes

PROMPT = list(range(65, 77))
PLAIN = list(range(97, 109))
N_PLAIN = 80
N_TOKENS_MAX = 40
PARTS = ('" "', '"  "', '"x"', '"y"', "[a-z ]", "[^x]", ".", '""', "<[260]>", "!<[7]>", '"é"')
SIGNS = ("", "", "", "", "", "*", "+", "?", "{2}", "{0,5}", "{3,}", "{0,300}")
GROWS_MAX = 800 << 20
"""Memory of all processes: a grammar's own limits, and a constraint's of 256 MiB."""
SYNTAX = '"[](){}|*+?.-^\\<>! \n:=#,x0'


def ambiguous(rng: random.Random) -> str:
    """A grammar of a few rules that can be read in many ways."""
    names = ["root", *(f"r{i}" for i in range(rng.randrange(1, 6)))]

    def part(depth: int) -> str:
        kind = rng.random()
        if kind < 0.45:
            return rng.choice(PARTS)
        if kind < 0.6 and depth > 0:
            return f"({alternates(depth - 1)})"
        return rng.choice(names)

    def alternates(depth: int) -> str:
        return " | ".join(
            " ".join(part(depth) + rng.choice(SIGNS) for _ in range(rng.randrange(0, 4)))
            for _ in range(rng.randrange(1, 4))
        )

    # Nearly every rule begins with a character, so that few are refused as left-recursive.
    return "\n".join(
        f"{name} ::= " + rng.choice(PARTS[:7]) + f" ({alternates(2)})" + rng.choice((' | " "', ""))
        for name in names
    )


def changed(text: str, rng: random.Random) -> str:
    """*text* with a few characters added, dropped or replaced."""
    letters = list(text)
    for _ in range(rng.randrange(1, 6)):
        at = rng.randrange(len(letters) + 1)
        letters[at : at + rng.randrange(3)] = rng.choices(SYNTAX, k=rng.randrange(3))
    return "".join(letters)


def options_of(rng: random.Random) -> dict[str, Any]:
    """What the next hostile request asks for."""
    kind = rng.random()
    if kind < 0.7:
        return {"grammar": ambiguous(rng)}
    if kind < 0.9:
        return {"grammar": changed(rng.choice(list(GRAMMARS.values()))[:20_000], rng)}
    return rng.choice(list(CONSTRAINTS.values())) if kind < 0.95 else random_constraint(rng)


class Ordinary(threading.Thread):
    """Generates the same text over and over and notes the longest wait for a token."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(daemon=True)
        self.engine = engine
        self.expected = self.generate()
        self.worst_gap_s = 0.0
        self.n_texts = 0
        self.first_bytes = rss_bytes(os.getpid())
        self.grown_bytes = 0
        self.wrong = ""
        self.is_done = threading.Event()

    def generate(self) -> list[int]:
        generation = self.engine.generate(PLAIN, temperature=0, max_tokens=N_PLAIN, slot=1)
        return [token.id for token in generation]

    def run(self) -> None:
        try:
            while not self.is_done.is_set():
                last_s = 0.0
                ids: list[int] = []
                for token in self.engine.generate(PLAIN, temperature=0, max_tokens=N_PLAIN, slot=1):
                    now_s = time.monotonic()
                    if last_s:
                        self.worst_gap_s = max(self.worst_gap_s, now_s - last_s)
                    last_s = now_s
                    ids.append(token.id)
                if ids != self.expected:
                    self.wrong = f"the ordinary client got {ids}, expected {self.expected}"
                self.n_texts += 1
                self.grown_bytes = max(self.grown_bytes, rss_bytes(os.getpid()) - self.first_bytes)
        except BaseException as failure:
            self.wrong = f"the ordinary client got {failure!r}"


def attack_engine(engine: Engine, rng: random.Random, ends_s: float, summary: Summary) -> None:
    """Send hostile requests to *engine* until *ends_s*."""
    while time.monotonic() < ends_s:
        options = options_of(rng)
        started_s = time.monotonic()
        try:
            generation = engine.generate(
                PROMPT,
                slot=0,
                max_tokens=rng.randrange(1, N_TOKENS_MAX),
                temperature=rng.choice((0, 1)),
                top_k=rng.choice((0, 1, 40)),
                seed=rng.randrange(1 << 31),
                **options,
            )
            if rng.random() < 0.1:
                generation.cancel()
            for _ in generation:
                pass
            summary.count(f"ended: {generation.finish_reason}")
        except errors.InvalidSampling:
            summary.count("InvalidSampling")
        except errors.KqviewError as failure:
            summary.fail(f"{failure!r} for {options!r:.300}")
        took_s = time.monotonic() - started_s
        slowest_s = summary.figures.get("slowest_request_s", 0.0)
        summary.figures["slowest_request_s"] = max(slowest_s, took_s)


def run(seconds: float, seed: int) -> Summary:
    """Attack for about this long."""
    rng = random.Random(seed)
    summary = Summary("grammars", seed)
    with tempfile.TemporaryDirectory() as folder:
        path = write_spaced_model(Path(folder) / "spaced.gguf")
        with Engine(path, n_ctx=512, n_slots=2, n_threads=1) as engine:
            ordinary = Ordinary(engine)
            ordinary.start()
            attack_engine(engine, rng, time.monotonic() + seconds, summary)
            ordinary.is_done.set()
            ordinary.join(60)
            if ordinary.wrong or ordinary.is_alive():
                summary.fail(ordinary.wrong or "the ordinary client hangs")
            if ordinary.grown_bytes > GROWS_MAX:
                summary.fail(
                    f"memory grew by {ordinary.grown_bytes} bytes, allowed are {GROWS_MAX}"
                )
            summary.figures["grown_MiB"] = ordinary.grown_bytes / 2**20
            summary.figures["worst_gap_ms"] = ordinary.worst_gap_s * 1e3
            summary.figures["ordinary_texts"] = ordinary.n_texts
    return summary


if __name__ == "__main__":
    raise SystemExit(main(run))
