"""What do guessed tokens gain where a text repeats, and what do they cost where it does not?

SmolLM2 (`Engine.demo("smollm2")`; the bundled demo model with --quick), greedy behind the source of
a module of Python's library: "code" is that source once more, of which the prompt has two copies
and the beginning of a third; "quotes" lists its sentences; "random" is sampled at a temperature at
which nothing repeats. Models guess in texts of a model of 24 layers, 300 MB, made for it: each
token follows from the one before it, so that every guess is right; at a temperature at which any
may follow, nearly none is. Every prompt stays in its slot; a run is a generation in each slot, all
started together, timed from when all have their first token, and divided by the tokens after it.
Rows:

- speculation-TEXT-CONTEXT-SLOTS: with prompt lookup against without, in one engine.
- speculation-capture-...: the same with the probabilities of all heads.
- speculation-mtp-..., speculation-model-...: layers of the model guess, or a model of 2 layers.
- speculation-server-...: against llama-server, with its own drafter of that kind.

How many guesses come true is printed to stderr.
"""

from __future__ import annotations

import inspect
import sys
import textwrap
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from console import attempt, main
from models import NotHere, predicting_models
from report import Timing
from slots import ServerRuns

from kqview import Engine
from kqview.demo import model_path
from kqview.errors import ModelLoadError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from console import ProgressLine
    from report import Row
    from settings import Settings

    from kqview import Generation
    from kqview.bench.records import LeftOut

N_TOKENS, QUICK_TOKENS = 128, 24
CONTEXTS: Final = (1024, 4096)
QUICK_CONTEXT: Final = 128
SLOTS: Final = (1, 4)
# Options of a generation, and what follows the source.
TEXTS: Final[dict[str, tuple[dict[str, Any], str]]] = {
    "code": ({"temperature": 0.0}, "\n\n# The same code:\n\n"),
    "quotes": ({"temperature": 0.0}, "\n\n# Sentences of its documentation, word for word:\n\n"),
    "random": ({"temperature": 2.0, "top_k": 0, "seed": 1}, "\n\n"),
}
# What any may follow in the model made for it, and what follows from the token before.
_ANY: Final[dict[str, Any]] = {
    "temperature": 100.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 1,
}  # fmt: skip
_ONE: Final[dict[str, Any]] = {"temperature": 0.0}


class Case(NamedTuple):
    """One row: its text, its size, and what the other side is."""

    text: str
    n_context: int
    n_slots: int
    captures: bool = False
    is_server: bool = False
    drafter: str = "prompt-lookup"

    @property
    def name(self) -> str:
        """Of the row."""
        kind = "capture-" if self.captures else "server-" if self.is_server else ""
        by = "" if self.drafter == "prompt-lookup" else f"{self.drafter}-"
        return f"speculation-{kind}{by}{self.text}-{self.n_context}-{self.n_slots}"

    @property
    def target(self) -> float | None:
        """Most that the ratio of times may be: capture may take 0.03 of the gain."""
        if self.is_server:
            return None
        return 1 / 0.97 if self.text == "random" else 1 / (1.57 if self.captures else 1.6)


_SIZES: Final = [(n_context, n_slots) for n_context in CONTEXTS for n_slots in SLOTS]
CASES: Final = {
    one.name: one
    for one in (
        *(Case(text, *size) for text in TEXTS for size in _SIZES),
        *(Case("code", *size, captures=True) for size in _SIZES),
        *(Case("code", *size, is_server=True) for size in _SIZES),
        *(
            Case(text, *size, is_server=is_server, drafter=drafter)
            for drafter in ("mtp", "model")
            for text, is_server in (("chain", False), ("random", False), ("chain", True))
            for size in _SIZES
        ),
    )
}
WEIGHTS = {name: 20.0 * one.n_slots * one.n_context / 1024 for name, one in CASES.items()}


class TextRuns:
    """Generations of one kind of text in all slots of an engine that guesses."""

    def __init__(self, settings: Settings, engine: Engine, case: Case, n_tokens: int) -> None:
        """Bring the prompts into their slots."""
        self._now_s = settings.now_s
        self._engine = engine
        self._n_tokens = n_tokens
        if case.drafter == "prompt-lookup":
            options, end = TEXTS[case.text]
        else:
            options, end = _ONE if case.text == "chain" else _ANY, "\n"
        self._options: dict[str, Any] = {**options, "ignore_eos": True, "max_tokens": n_tokens}
        if case.captures:
            self._options["capture"] = "probs"
        n_context = QUICK_CONTEXT if settings.is_quick else case.n_context
        tail = engine.tokenize(end, add_special=False)
        ids = engine.tokenize(inspect.getsource(textwrap), add_special=False)
        # Another part of the source for each slot.
        step = max(1, (len(ids) - n_context) // max(1, case.n_slots - 1))
        self.prompts = [
            _prompt(ids[i * step :], tail, n_context, is_again=case.text == "code")
            for i in range(case.n_slots)
        ]
        self.usages: list[Any] = []
        self.ms(speculate=True)

    def ms(self, *, speculate: bool) -> float:
        """Milliseconds a token of a generation in each slot."""
        running = [
            self._engine.generate(ids, slot=i, speculate=speculate, **self._options)
            for i, ids in enumerate(self.prompts)
        ]
        stamps: list[tuple[float, float]] = []

        def take(generation: Generation) -> None:
            next(generation)
            first_s = self._now_s()
            for _ in generation:
                pass
            stamps.append((first_s, self._now_s()))

        threads = [threading.Thread(target=take, args=(one,)) for one in running]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if len(stamps) < len(running):
            raise RuntimeError("a generation failed; its error is on stderr")
        if speculate:
            self.usages = [one.usage for one in running]
        first_s, last_s = max(one[0] for one in stamps), max(one[1] for one in stamps)
        return (last_s - first_s) * 1000.0 / (len(running) * (self._n_tokens - 1))

    def share(self) -> str:
        """How many guesses of the last run came true."""
        n = sum(one.draft_tokens for one in self.usages)
        n_true = sum(one.accepted_tokens for one in self.usages)
        return f"{n_true} of {n} guesses for {len(self.usages) * self._n_tokens} tokens"


def _basename(word: str) -> str:
    """A flag as it is, of a path its last part."""
    return Path(word).name


def _prompt(ids: list[int], tail: list[int], n: int, *, is_again: bool) -> list[int]:
    """*n* ids that end with *tail*; or two copies of a text and the beginning of a third."""
    if not is_again:
        return ids[: n - len(tail)] + tail
    begun = ids[: n // 16]
    text = ids[: (n - 2 * len(tail) - len(begun)) // 2]
    return text + tail + text + tail + begun


def measure(settings: Settings, line: ProgressLine) -> Iterator[Row | LeftOut]:
    """Measure the chosen cases."""
    for name in settings.chosen(CASES):
        yield attempt(name, _measure, settings, line, CASES[name])


def _measure(settings: Settings, line: ProgressLine, case: Case) -> Timing:
    try:
        if case.drafter == "prompt-lookup":
            path, draft = model_path(None if settings.is_quick else "smollm2"), case.drafter
            flags = ("--spec-type", "ngram-simple")
        else:
            path, smaller = predicting_models(settings)
            draft = case.drafter if case.drafter == "mtp" else str(smaller)
            kind = ("--spec-type", "draft-mtp")
            if case.drafter == "model":
                kind = ("--model-draft", str(smaller))
            flags = (*kind, "--spec-draft-n-max", "16")
    except ModelLoadError as error:
        raise NotHere(str(error)) from None
    n_tokens = QUICK_TOKENS if settings.is_quick else N_TOKENS
    n_ctx = (QUICK_CONTEXT if settings.is_quick else case.n_context) + n_tokens + 64
    with Engine(
        path, n_ctx=n_ctx, n_slots=case.n_slots, n_threads=settings.n_threads,
        n_gpu_layers=settings.n_gpu_layers, flash_attn=True, draft=draft,
    ) as engine:  # fmt: skip
        runs = TextRuns(settings, engine, case, n_tokens)

        def with_guesses() -> float:
            return runs.ms(speculate=True)

        def without() -> float:
            return runs.ms(speculate=False)

        n_pairs = settings.pairs_for(case.target)
        if case.is_server:
            against = " ".join(("llama-server (stock build),", *map(_basename, flags)))
            with ServerRuns(
                settings, runs.prompts, n_tokens, model=path, more_flags=flags
            ) as server:
                pairs = line.pairs(case.name, server.ms, with_guesses, n_pairs)
        else:
            against = "without guesses"
            pairs = line.pairs(case.name, without, with_guesses, n_pairs)
        print(f"{case.name}: {runs.share()}", file=sys.stderr)
    slots = f"{case.n_slots} slot" + ("s" if case.n_slots > 1 else "")
    return Timing(
        name=case.name,
        what=f"{case.text}, {slots}, {case.drafter}" + (", all heads" if case.captures else ""),
        baseline=against,
        work=f"a decoded token at {case.n_context} tokens of context, tokens of all slots counted",
        pairs=pairs,
        target=settings.target(case.target),
        command=f"python bench/speculation.py --row {case.name} {settings.flags}",
    )


if __name__ == "__main__":
    main(__doc__, WEIGHTS, measure)
