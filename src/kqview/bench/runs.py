"""Runs: the single pieces of work that rows compare."""

from __future__ import annotations

from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np

from kqview import Capture

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kqview import Engine


def prompt_ids(n_tokens: int, n_vocab: int, seed: int = 0) -> list[int]:
    """Random ids, the same for the same arguments; a shorter prompt begins a longer one."""
    return np.random.default_rng(seed).integers(0, n_vocab, n_tokens).tolist()


class DecodeRuns:
    """Greedy generations after one prompt, which stays in the slot.

    Each run evaluates only the last prompt token again (prefix reuse), so a pair of runs costs
    two short generations and not two prefills.
    """

    def __init__(
        self, engine: Engine, prompt: Sequence[int], *, now_s: Callable[[], float] = perf_counter
    ) -> None:
        """Bring *prompt* into the slot; *now_s* is the clock."""
        self._now_s = now_s
        self._engine = engine
        self._prompt = prompt
        self.stamps_s(1)

    def stamps_s(self, n_tokens: int, **options: Any) -> list[float]:
        """Arrival times of *n_tokens* tokens; views are dropped as the next token comes."""
        options.setdefault("temperature", 0.0)
        stamps: list[float] = []
        for _ in self._engine.generate(
            self._prompt, max_tokens=n_tokens, ignore_eos=True, **options
        ):
            stamps.append(self._now_s())
        return stamps


class PrefillRuns:
    """Prompts that share nothing with what the slot holds; one token is generated after each."""

    def __init__(
        self, engine: Engine, n_context: int, *, now_s: Callable[[], float] = perf_counter
    ) -> None:
        """Prompts of *n_context* tokens, timed by the clock *now_s*."""
        self._now_s = now_s
        self.engine = engine
        self.prompt = prompt_ids(n_context, engine.model.n_vocab)  # of the last run
        self._n_runs = 0

    def ms(self, capture: Capture | str | None) -> float:
        """Milliseconds from the call to the first token, rows of the prompt read if captured."""
        prompt = self._next_prompt()
        start = self._now_s()
        with self.engine.generate(
            prompt, max_tokens=1, temperature=0.0, ignore_eos=True, capture=capture
        ) as generation:
            if isinstance(capture, Capture) and capture.prompt:
                for _ in generation.prompt_attention:
                    pass
            next(generation)
            return (self._now_s() - start) * 1000.0

    def attend_ms(self, capture: Capture | str) -> float:
        """Milliseconds of `Engine.attend` until its last block of rows, each dropped when read."""
        prompt = self._next_prompt()
        start = self._now_s()
        for _ in self.engine.attend(prompt, capture):
            pass
        return (self._now_s() - start) * 1000.0

    def _next_prompt(self) -> list[int]:
        self._n_runs += 1
        # Another first id each time: no prefix to reuse.
        self.prompt = [self._n_runs % self.engine.model.n_vocab, *self.prompt[1:]]
        return self.prompt
