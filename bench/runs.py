"""Runs: the engine to measure and its pieces of work, with the settings applied."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from models import model_path

from kqview import Capture, Engine
from kqview.bench.sweep import DecodeRuns, prompt_ids

if TYPE_CHECKING:
    from collections.abc import Sequence

    from settings import Settings


# What views of a GPU may take: a machine that is just starting may show little of its memory, and
# rows of 8 slots at 16k tokens need more page-locked memory than the default.
GPU_VIEWS = {"attention_budget_bytes": 16 * 2**30, "pinned_bytes": 8 * 2**30}


def open_engine(
    settings: Settings, *, flash_attn: bool, weight_type: str = "Q8_0", **options: Any
) -> Engine:
    """An engine as llama-bench opens it: F16 cache, ubatches of 512, layers as set."""
    return Engine(
        model_path(settings, weight_type),
        **{
            "n_ctx": settings.n_context + 256,
            "n_threads": settings.n_threads,
            "n_gpu_layers": settings.n_gpu_layers,
            "flash_attn": flash_attn,
            # A process clock must not count steps ahead of the consumer.
            "run_ahead": 8 if settings.clock == "wall" else 0,
            **(GPU_VIEWS if settings.device == "gpu" else {}),
            **options,
        },
    )


def view_memory(settings: Settings, engine: Engine) -> str:
    """For a row's text: the sort of memory that a GPU's rows were copied to; "" on a CPU."""
    if settings.device == "cpu":
        return ""
    pool = engine.stats().pool
    is_locked = pool.pinned_bytes and not pool.plain_fallbacks
    return "; page-locked views" if is_locked else "; views not all page-locked"


def decode_runs(
    settings: Settings, engine: Engine, prompt: Sequence[int] | None = None
) -> DecodeRuns:
    """Generations after *prompt*, random ids where None is given."""
    prompt = prompt or prompt_ids(settings.n_context, engine.model.n_vocab)
    return DecodeRuns(engine, prompt, now_s=settings.now_s)


class PrefillRuns:
    """Prompts that share no prefix with what the slot holds; one token is generated after each."""

    def __init__(self, settings: Settings, engine: Engine) -> None:
        """Prompts of ``settings.n_context`` tokens."""
        self._now_s = settings.now_s
        self.engine = engine
        self.prompt = prompt_ids(settings.n_context, engine.model.n_vocab)  # of the last run
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


class LockstepRuns:
    """Greedy generations in all slots of an engine, each behind a prompt of its own that stays.

    A step is a token of every slot; views are dropped as the next token of their slot comes.
    """

    def __init__(
        self,
        settings: Settings,
        engine: Engine,
        n_slots: int,
        n_context: int | None = None,
        prompts: Sequence[Sequence[int]] | None = None,
    ) -> None:
        """Bring a prompt of ``settings.n_context`` tokens, or *n_context*, into each slot.

        *prompts* are those to use in their place, one a slot.
        """
        self._settings = settings
        self._engine = engine
        n_context = n_context or settings.n_context
        self._prompts = prompts or [
            prompt_ids(n_context, engine.model.n_vocab, seed=i) for i in range(n_slots)
        ]
        self.stamps_s(1, None)

    def stamps_s(self, n_tokens: int, capture: Capture | None) -> list[float]:
        """Times at which each of *n_tokens* steps had arrived from all slots."""
        running = [
            self._engine.generate(
                prompt, slot=i, max_tokens=n_tokens, temperature=0.0, ignore_eos=True,
                capture=capture,
            )
            for i, prompt in enumerate(self._prompts)
        ]  # fmt: skip
        stamps: list[float] = []
        for _ in range(n_tokens):
            for generation in running:
                next(generation)
            stamps.append(self._settings.now_s())
        for generation in running:
            generation.close()
        return stamps
