"""Sweep: the cost of each capture per decoded token, by context size and flash attention.

For each context size, one prompt stays in the slot and every capture decodes the same few tokens
after it, in rounds: no capture, no capture once more (for the noise), then each capture. Odd rounds
run in reverse order. A row pairs a capture with the first run without capture of its round.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from kqview import Capture
from kqview.bench.pairs import Pairs, rounds, step_ms
from kqview.bench.records import OFF, LeftOut, SweepRow, row_name
from kqview.errors import CapacityError, KqviewError, ModelError, OutOfMemory, RequestError
from kqview.machine import physical_memory_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager

    from kqview import Engine, ModelInfo

    # Opens an engine, or what yields one, for (n_ctx, flash_attn).
    Opener = Callable[[int, bool], AbstractContextManager[Engine]]

N_SKIP: Final = 4  # first steps of a run: llama.cpp builds new graphs after a change of capture
CAPTURE_NAMES: Final = (
    "logits", "scores", "probs", "float16", "10-heads", "mean-heads", "mean", "top-8",
)  # fmt: skip

_BASELINE: Final = "baseline"
_MEMORY_SHARE: Final = 0.9  # share of the memory for model, cache and buffers
_N_HELD: Final = 12  # tokens whose attention exists at once: run-ahead, and those that Python holds


def prompt_ids(n_tokens: int, n_vocab: int, seed: int = 0) -> list[int]:
    """Random ids, reproducible; a shorter prompt is a prefix of a longer one."""
    return np.random.default_rng(seed).integers(0, n_vocab, n_tokens).tolist()


class DecodeRuns:
    """Greedy generations after one prompt, which stays in the slot.

    Prefix reuse leaves only the last prompt token to evaluate, so a pair of runs costs two short
    generations instead of two prefills.
    """

    def __init__(
        self, engine: Engine, prompt: Sequence[int], *, now_s: Callable[[], float] = perf_counter
    ) -> None:
        """Prefill *prompt*; *now_s* is the clock."""
        self._now_s = now_s
        self._engine = engine
        self._prompt = prompt
        self.stamps_s(1)

    def stamps_s(self, n_tokens: int, **options: Any) -> list[float]:
        """Arrival times of *n_tokens* tokens; the views of a token are dropped at the next one."""
        options.setdefault("temperature", 0.0)
        stamps: list[float] = []
        for _ in self._engine.generate(
            self._prompt, max_tokens=n_tokens, ignore_eos=True, **options
        ):
            stamps.append(self._now_s())
        return stamps


@dataclass(frozen=True)
class SweepPlan:
    """What to measure.

    Attributes:
        contexts: Sizes of the prompts in tokens, ascending.
        captures: Names of captures, from `CAPTURE_NAMES`.
        flash_attn: Settings of flash attention.
        n_rounds: Pairs per row; a bound needs at least 5.
        n_tokens: Tokens per run, at least ``N_SKIP + 2``.
        now_s: The clock.
    """

    contexts: Sequence[int] = (256, 1024, 4096)
    captures: Sequence[str] = CAPTURE_NAMES
    flash_attn: Sequence[bool] = (True, False)
    n_rounds: int = 10
    n_tokens: int = 16
    now_s: Callable[[], float] = perf_counter

    @property
    def n_runs(self) -> int:
        """Number of runs in the plan, as `sweep` reports them."""
        return len(self.flash_attn) * len(self.contexts) * self.n_runs_of_context

    @property
    def n_runs_of_context(self) -> int:
        """Number of runs at one context with one setting: the warm-up and the rounds."""
        return (1 + self.n_rounds) * (2 + len(self.captures))


def captures(model: ModelInfo) -> dict[str, Capture]:
    """The captures, by name."""
    return {
        "logits": Capture("logits"),
        "scores": Capture("scores"),
        "probs": Capture("probs"),
        "float16": Capture("logits", dtype="float16"),
        "10-heads": chosen_heads(model),
        "mean-heads": Capture("probs", reduce="mean_heads"),
        "mean": Capture("probs", reduce="mean"),
        "top-8": Capture("probs", top_k=8),
    }


def chosen_heads(model: ModelInfo, n: int = 10) -> Capture:
    """Logits of about *n* heads: the same heads in each of up to 5 layers, both spread evenly."""
    layers = _spread(model.attention_layers, min(5, n))
    heads = _spread(range(model.n_head), max(1, round(n / len(layers))))
    return Capture("logits", layers=layers, heads=heads)


def fitting_contexts(
    model: ModelInfo, contexts: Sequence[int], *, trained_only: bool = True
) -> tuple[list[int], list[LeftOut]]:
    """Those of *contexts* that *model* was trained for and that fit into memory.

    With *trained_only* False only memory counts: random weights have no trained length.
    """
    fitting: list[int] = []
    left_out: list[LeftOut] = []
    memory_bytes = int(physical_memory_bytes() * _MEMORY_SHARE)
    for n_context in sorted(set(contexts)):
        name = f"context {n_context:,}"
        needed_bytes = _needed_bytes(model, n_context)
        if trained_only and n_context > model.n_ctx_train:
            reason = f"the model was trained with {model.n_ctx_train:,} tokens"
            left_out.append(LeftOut(name, reason))
        elif needed_bytes > memory_bytes:
            reason = f"it needs about {needed_bytes / 1e9:.1f} GB of {memory_bytes / 1e9:.1f} GB"
            left_out.append(LeftOut(name, reason))
        else:
            fitting.append(n_context)
    return fitting, left_out


def sweep(
    open_engine: Opener,
    plan: SweepPlan,
    on_run: Callable[[str, int], object] = lambda _name, _n_runs: None,
) -> Iterator[SweepRow | LeftOut]:
    """Measure *plan*; each row comes as soon as its context is done.

    Args:
        open_engine: Called with n_ctx and flash_attn for each setting; the engine is closed here.
        plan: What to measure.
        on_run: Called with a description of the work and the number of runs just completed.

    Yields:
        Rows, and what could not be measured. An error of one capture does not end the others.
    """
    for flash_attn in plan.flash_attn:
        contexts = sorted(plan.contexts)
        with ExitStack() as stack:
            engine = None
            while contexts and engine is None:
                n_ctx = contexts[-1] + plan.n_tokens + 1
                try:
                    engine = stack.enter_context(open_engine(n_ctx, flash_attn))
                except OutOfMemory as error:
                    name = row_name("*", contexts.pop(), flash_attn=flash_attn)
                    on_run(name, plan.n_runs_of_context)
                    yield LeftOut(name, str(error))
            if engine is None:
                continue
            for n_context in contexts:
                yield from _at_context(engine, plan, n_context, flash_attn, on_run)


def _at_context(
    engine: Engine,
    plan: SweepPlan,
    n_context: int,
    flash_attn: bool,
    on_run: Callable[[str, int], object],
) -> Iterator[SweepRow | LeftOut]:
    known = captures(engine.model)
    wanted: Mapping[str, Capture | None] = {OFF: None, **{n: known[n] for n in plan.captures}}
    title = f"{n_context:,} tokens, flash attention {'on' if flash_attn else 'off'}"
    on_run(f"{title}: the prompt", 0)
    runs = DecodeRuns(engine, prompt_ids(n_context, engine.model.n_vocab), now_s=plan.now_s)

    def run_of(capture: Capture | None) -> Callable[[], float]:
        def run() -> float:
            ms = step_ms(runs.stamps_s(plan.n_tokens, capture=capture), N_SKIP)
            on_run(title, 1)
            return ms

        return run

    ways = {_BASELINE: run_of(None)}
    ways[_BASELINE]()  # a warm-up, which allocates the first blocks
    for name, capture in wanted.items():
        run = run_of(capture)
        try:
            run()
        except KqviewError as error:
            on_run(title, 1 + plan.n_rounds)
            row = row_name(name, n_context, flash_attn=flash_attn)
            yield LeftOut(row, str(error), is_failure=is_failure(error))
            continue
        ways[name] = run
    found = {name: Pairs() for name in ways if name != _BASELINE}
    for times_ms in rounds(ways, plan.n_rounds):
        for name, pairs in found.items():
            pairs.add(times_ms[_BASELINE], times_ms[name])
    for name, pairs in found.items():
        capture = wanted[name]
        n_bytes = 0 if capture is None else capture.bytes_per_token(engine.model, n_context)
        yield SweepRow(name, flash_attn, n_context, n_bytes, pairs)


def is_failure(error: Exception) -> bool:
    """Whether *error* is a fault, not a limit of this version, model or machine."""
    return not isinstance(error, RequestError | ModelError | CapacityError)


def _needed_bytes(model: ModelInfo, n_context: int) -> int:
    """Rough upper bound: weights, F16 cache, products of a ubatch, attention that is held."""
    key_length: Any = model.metadata.get(f"{model.architecture}.attention.key_length")
    n_row = int(key_length or model.n_embd // max(1, model.n_head))
    cache = 2 * 2 * len(model.attention_layers) * max(1, model.n_head_kv) * n_row * n_context
    products = 2 * 4 * 512 * model.n_head * n_context  # before and after the softmax
    held = _N_HELD * Capture().bytes_per_token(model, n_context)
    return model.size_bytes + cache + products + held


def _spread(values: Sequence[int], n: int) -> tuple[int, ...]:
    """*n* of *values* (or all, if fewer), from the middles of *n* equal parts."""
    n = min(n, len(values))
    return tuple(values[(2 * i + 1) * len(values) // (2 * n)] for i in range(n))
