"""What a generation cost, and how far a prompt is, as llama.cpp's server tells it."""

import time
from dataclasses import replace
from typing import Annotated

from msgspec import Struct

from kqview.server.models.run import Run
from kqview.server.web.described import about
from kqview.types import Usage


class Timings(Struct, kw_only=True):
    """What a generation cost; rates are 0 where nothing was computed."""

    cache_n: Annotated[int, about("Tokens of the prompt that were in the cache.", 0)]
    prompt_n: Annotated[int, about("Tokens of the prompt that were evaluated.", 12)]
    prompt_ms: Annotated[float, about("Milliseconds of that.", 8.5)]
    prompt_per_token_ms: Annotated[float, about("Milliseconds for each of them.", 0.7)]
    prompt_per_second: Annotated[float, about("Such tokens a second.", 1411.8)]
    predicted_n: Annotated[int, about("Tokens that were generated.", 20)]
    predicted_ms: Annotated[float, about("Milliseconds of that.", 40.0)]
    predicted_per_token_ms: Annotated[
        float, about("Milliseconds for each of them but the first, which the prompt gives.", 2.0)
    ]
    predicted_per_second: Annotated[float, about("Such tokens a second.", 500.0)]


def timings(usage: Usage) -> Timings:
    """Timings of *usage*; rates are 0 where nothing was computed."""
    n_prompt = usage.prompt_tokens - usage.cached_tokens
    n = max(0, usage.completion_tokens - 1)
    return Timings(
        cache_n=usage.cached_tokens,
        prompt_n=n_prompt,
        prompt_ms=1000 * usage.prefill_s,
        prompt_per_token_ms=_ratio(1000 * usage.prefill_s, n_prompt),
        prompt_per_second=_ratio(n_prompt, usage.prefill_s),
        predicted_n=usage.completion_tokens,
        predicted_ms=1000 * usage.decode_s,
        predicted_per_token_ms=_ratio(1000 * usage.decode_s, n),
        predicted_per_second=_ratio(n, usage.decode_s),
    )


def _ratio(total: float, n: float) -> float:
    return total / n if n > 0 else 0.0


class Clock:
    """Timings of a generation while it runs."""

    def __init__(self, sample: int = 0) -> None:
        """Begin with generation *sample* of a run."""
        self._sample = sample
        self.first_s: float | None = None
        """When its first token came, in seconds of ``time.monotonic``; None before."""

    def note(self) -> None:
        """Note that a token came."""
        if self.first_s is None:
            self.first_s = time.monotonic()

    def timings(self, run: Run) -> Timings:
        """So far; whole once the run has ended."""
        usage = run.generations[self._sample].usage
        if run.is_over or self.first_s is None:
            return timings(usage)
        prefill_s, decode_s = self.first_s - run.started_s, time.monotonic() - self.first_s
        return timings(replace(usage, prefill_s=prefill_s, decode_s=decode_s))


class Progress(Struct):
    """How much of a prompt is evaluated."""

    total: Annotated[int, about("Tokens of the prompt.", 12)]
    cache: Annotated[int, about("Those that were in the cache.", 0)]
    processed: Annotated[int, about("Those that are evaluated or were in the cache.", 12)]
    time_ms: Annotated[int, about("Milliseconds of that.", 8)]


def prompt_progress(spent: Timings) -> list[tuple[Progress, Timings]]:
    """How far a prompt was, and what it had cost, when its evaluation began and when it ended.

    *spent* are the timings at the first token, which is when both are known.
    """
    n, cached = spent.cache_n + spent.prompt_n, spent.cache_n
    begun = timings(Usage(prompt_tokens=cached, cached_tokens=cached))
    ended = timings(Usage(n, cached, prefill_s=spent.prompt_ms / 1000))
    return [
        (Progress(n, cached, cached, 0), begun),
        (Progress(n, cached, n, int(spent.prompt_ms)), ended),
    ]
