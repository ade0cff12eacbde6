"""Runs: the engine that is measured and the single pieces of work that rows compare."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from models import model_path, prompt_ids

from kqview import Capture, Engine

if TYPE_CHECKING:
    from collections.abc import Sequence

    from settings import Settings

# 10 heads of 24 layers x 16 heads, as someone who knows his induction heads would choose.
CHOSEN_HEADS = Capture(layers=(3, 8, 13, 18, 23), heads=(2, 9))
CHOSEN_HEADS_QUICK = Capture(layers=(0, 1), heads=(1, 4, 7, 10, 13))


def open_engine(settings: Settings, *, flash_attn: bool, **options: Any) -> Engine:
    """An engine as llama-bench would open it: F16 cache, ubatches of 512, the CPU."""
    return Engine(
        model_path(is_quick=settings.is_quick),
        **{
            "n_ctx": settings.n_context + 256,
            "n_threads": settings.n_threads,
            "n_gpu_layers": 0,
            "flash_attn": flash_attn,
            # A process clock must not count steps that nobody has taken yet.
            "run_ahead": 8 if settings.clock == "wall" else 0,
            **options,
        },
    )


class DecodeRuns:
    """Greedy generations after one prompt, which stays in the slot.

    Each run evaluates only the last prompt token again (prefix reuse), so a pair of runs costs
    two short generations and not two prefills.
    """

    def __init__(
        self, settings: Settings, engine: Engine, prompt: Sequence[int] | None = None
    ) -> None:
        """Bring *prompt*, random ids where None is given, into the slot."""
        self._now_s = settings.now_s
        self._engine = engine
        self._prompt = prompt or prompt_ids(settings.n_context, engine.model.n_vocab)
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

    def __init__(self, settings: Settings, engine: Engine) -> None:
        self._now_s = settings.now_s
        self.engine = engine
        self.prompt = prompt_ids(settings.n_context, engine.model.n_vocab)  # of the last run
        self._n_runs = 0

    def ms(self, capture: Capture | str | None) -> float:
        """Milliseconds from the call to the first token."""
        self._n_runs += 1
        # Another first id each time: no prefix to reuse.
        self.prompt = [self._n_runs % self.engine.model.n_vocab, *self.prompt[1:]]
        start = self._now_s()
        with self.engine.generate(
            self.prompt, max_tokens=1, temperature=0.0, ignore_eos=True, capture=capture
        ) as generation:
            next(generation)
            return (self._now_s() - start) * 1000.0
