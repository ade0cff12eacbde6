"""What does capture cost when the layers are on a GPU, by context, slots and capture?

The random model of the 7B shape (28 layers x 28 heads, 4 KV heads, head size 128, Q8_0), flash
attention on, prompts of 1k, 4k and 16k tokens that stay in their slots. A run decodes some tokens
in every slot, in lockstep; its figure is the median step. Rounds as in contexts.py: no capture, no
capture once more, then each capture, every second round backwards. Beside it, with one slot:
llama-bench and the eval callback of the stock build, and transformers with `output_attentions` on
the same shape. Two rows measure only the copy to the host, and some compare both places where
rows can be computed (cuda_rows.py). cuda.sh builds everything and runs it;
--device cpu measures the same things on a CPU.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING

import eval_callback
from console import attempt, main
from cuda_copy import COPY_CASES, measure_copies
from cuda_rows import PLACE_CASES, SAVED_ROUNDS, measure_places
from loop import llama_bench_ms
from models import peer
from report import SoFar, Timing
from runs import LockstepRuns, open_engine, view_memory

from kqview import Capture
from kqview.bench.pairs import Pairs, mean_step_ms, rounds, step_ms
from kqview.bench.sweep import chosen_heads
from kqview.errors import KqviewError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from console import ProgressLine
    from settings import Settings

    from kqview import Engine, ModelInfo
    from kqview.bench.records import LeftOut

CONTEXTS, QUICK_CONTEXTS = (1024, 4096, 16384), (64, 128, 256)
SLOTS = (1, 8)
SIZES = ("1k", "4k", "16k")
WORKS = [(size, n_slots) for n_slots in SLOTS for size in SIZES]
WHAT = {
    "again": "no capture, once more",
    "logits": "logits, all heads, float32",
    "float16": "logits, all heads, float16",
    "10-heads": "logits of 10 chosen heads",
    "mean-heads": "logits, mean over heads",
    "probs": "probs, all heads, float32",
    "spans": "probs, sums over 4 spans",
    "top-8": "probs, the 8 largest of each row",
    "one-layer": "logits of one layer, all heads",
    "one-head": "logits of one head of each layer",
    "hidden": "hidden states of all layers, no attention",
}
# Upper bounds at 4k and 16k with one slot, then with eight.
TARGETS_OF = {
    "logits": (1.005, 1.03, 1.03, 1.17),
    "float16": (1.005, 1.025, 1.03, 1.14),
    "probs": (1.01, 1.04, 1.035, 1.19),
    **dict.fromkeys(("mean-heads", "spans"), (1.01, 1.04, 1.02, 1.13)),
    "top-8": (1.01, 1.03, 1.025, 1.12),
    **dict.fromkeys(("one-layer", "one-head", "hidden"), (1.003, 1.005, 1.01, 1.02)),
}
TARGETS = {
    f"cuda-{size}-{n_slots}-{way}": target
    for way, targets in TARGETS_OF.items()
    for (size, n_slots), target in zip([w for w in WORKS if w[0] != "1k"], targets, strict=True)
}
PEERS = {
    "llama-bench": 1.01,
    "callback-decode": 1.0,
    "callback-prefill": 1 / 1.5,
    "hf-attentions": None,
}
CASES = {
    **{
        f"cuda-{k}-{n}-{way}": (k, n, way)
        for k, n in WORKS
        for way in WHAT
        if k != "1k" or way in ("again", "logits")
    },
    # Eager attention of transformers at 16k would not fit beside the others.
    **{
        f"cuda-{k}-{name}": (k, 1, name)
        for name in PEERS
        for k in SIZES
        if name != "hf-attentions" or k != "16k"
    },
}
WEIGHTS = {
    **dict.fromkeys(PLACE_CASES, 5.0),
    **dict.fromkeys(CASES, 5.0),
    **dict.fromkeys(COPY_CASES, 2.0),
}
N_REPETITIONS = 5
MOST_ROUNDS = 5


def measure(settings: Settings, line: ProgressLine) -> Iterator[Timing | SoFar | LeftOut]:
    """Measure the chosen rows, one engine for each number of slots."""
    sizes: dict[str, int] = dict(
        zip(SIZES, QUICK_CONTEXTS if settings.is_quick else CONTEXTS, strict=True)
    )
    yield from measure_places(settings, line, sizes)
    for n_slots in SLOTS:
        names = [name for name in settings.chosen(CASES) if _is_own(name, n_slots)]
        if not names:
            continue
        largest = replace(settings, n_context=max(sizes.values()))
        # Rows of many slots are large: fewer of them ahead of the consumer.
        with open_engine(
            largest, flash_attn=True, n_slots=n_slots, run_ahead=8 if n_slots == 1 else 2
        ) as engine:
            for size in SIZES:
                chosen = [name for name in names if CASES[name][0] == size]
                if chosen:
                    own = replace(settings, n_context=sizes[size])
                    yield from _own_rows(own, line, engine, chosen, n_slots)
            print(f"{n_slots} slots: {_pool_text(engine)}")
    yield from measure_copies(settings, line, sizes["4k"])
    for name in settings.chosen(CASES):
        size, _, way = CASES[name]
        if way in PEERS:
            own = replace(settings, n_context=sizes[size])
            measure_one = _llama_bench if way == "llama-bench" else _callback
            measure_one = _hf if way == "hf-attentions" else measure_one
            line.start(name, 1)
            yield attempt(name, measure_one, own, name)
            line.tick()


def _is_own(name: str, n_slots: int) -> bool:
    _, slots, way = CASES[name]
    return slots == n_slots and way in WHAT


def captures(model: ModelInfo) -> dict[str, Capture | None]:
    """The ways to capture, by the names in WHAT."""
    return {
        "again": None,
        "logits": Capture("logits"),
        "float16": Capture("logits", dtype="float16"),
        "10-heads": chosen_heads(model),
        "mean-heads": Capture("logits", reduce="mean_heads"),
        "probs": Capture("probs"),
        "spans": Capture("probs", spans=[(0, 16), (16, 512), (512, None), (0, None)]),
        "top-8": Capture("probs", top_k=8),
        "one-layer": Capture("logits", layers=[model.n_layer // 2]),
        "one-head": Capture("logits", heads=[0]),
        "hidden": Capture(layers=(), hidden="all"),
    }


def _own_rows(
    settings: Settings, line: ProgressLine, engine: Engine, names: list[str], n_slots: int
) -> Iterator[Timing | SoFar | LeftOut]:
    """Rows of one context and number of slots, out of the same rounds."""
    runs = LockstepRuns(settings, engine, n_slots)
    known = captures(engine.model)
    ways: dict[str, Callable[[], float]] = {"off": lambda: _step(settings, runs, None)}
    ways["off"]()
    for name in names[:-1]:
        line.start(name, 1)
    n_rounds = max(settings.pairs_for(TARGETS.get(name)) for name in names)
    line.start(names[-1], n_rounds)
    refused: dict[str, KqviewError] = {}
    for name in names:
        capture = known[CASES[name][2]]

        def run(capture: Capture | None = capture) -> float:
            return _step(settings, runs, capture)

        try:
            run()  # memory of the first blocks and graphs
            ways[name] = run
        except KqviewError as error:
            refused[name] = error
    found = {name: Pairs() for name in names}
    for i, times in enumerate(rounds(ways, n_rounds), 1):
        measured = [name for name in ways if name != "off"]
        for name in measured:
            found[name].add(times["off"], times[name])
        line.tick()
        if i % SAVED_ROUNDS == 0 and i < n_rounds:
            memory = view_memory(settings, engine)
            for name in measured:
                yield SoFar(_timing(settings, name, found[name], refused, memory))
    memory = view_memory(settings, engine)
    for name in names:
        yield attempt(name, _timing, settings, name, found[name], refused, memory)


def _step(settings: Settings, runs: LockstepRuns, capture: Capture | None) -> float:
    return step_ms(runs.stamps_s(settings.n_tokens, capture), settings.n_skip)


def _timing(
    settings: Settings, name: str, pairs: Pairs, refused: Mapping[str, KqviewError], memory: str
) -> Timing:
    if name in refused:
        raise refused[name]
    _, n_slots, way = CASES[name]
    slots = "1 slot" if n_slots == 1 else f"{n_slots} slots"
    what = WHAT[way] + ("" if way == "again" else memory)
    return _row(settings, name, what, "no capture", pairs, f"a step of {slots}")


def _llama_bench(settings: Settings, name: str) -> Timing:
    program = str(peer("llama-bench"))
    n_rounds = max(1, min(MOST_ROUNDS, settings.n_pairs // N_REPETITIONS))
    pairs = Pairs()
    with open_engine(settings, flash_attn=True) as engine:
        runs = LockstepRuns(settings, engine, 1)

        def ours() -> list[float]:
            stamps = (runs.stamps_s(33, None) for _ in range(N_REPETITIONS))
            return [mean_step_ms(times_s) for times_s in stamps]

        ours()
        for i in range(n_rounds):
            found = ours() if i % 2 else []
            stock = llama_bench_ms(program, settings, flash_attn=True, n_repetitions=N_REPETITIONS)
            for pair in zip(stock, found or ours(), strict=True):
                pairs.add(*pair)
    what = "greedy, no capture"
    return _row(settings, name, what, "llama-bench (stock build)", pairs, "a step of 1 slot")


@cache
def _callback_pairs(settings: Settings) -> dict[str, Pairs]:
    """A prompt and the steps after it, each way: one start of the stock program has both."""
    program = str(peer("kq-eval-rows"))
    pairs = {"prefill": Pairs(), "decode": Pairs()}
    with open_engine(settings, flash_attn=True) as engine:
        prefills = eval_callback.PrefillRuns(settings, engine)
        eval_callback.run_ours(settings, prefills)
        for _ in range(min(MOST_ROUNDS, settings.n_pairs)):
            ours = eval_callback.run_ours(settings, prefills)
            stock = eval_callback.run_stock(program, settings, bench="callback")
            theirs = eval_callback.stock_ms(settings, stock["callback"][0])
            for part, found in pairs.items():
                found.add(theirs[part], ours[part])
    return pairs


def _callback(settings: Settings, name: str) -> Timing:
    """The tap beside the eval callback, which needs flash attention off."""
    part = name.rpartition("-")[2]
    pairs = _callback_pairs(settings)[part]
    what = "tap: logits, all heads, float32"
    piece = "a prompt" if part == "prefill" else "a step of 1 slot"
    return _row(settings, name, what, eval_callback.CALLBACK, pairs, piece)


def _hf(settings: Settings, name: str) -> Timing:
    """The tap beside transformers, weights of 8 bits beside bfloat16."""
    from hf import TransformersRuns, check_installed

    check_installed()
    pairs = Pairs()
    with open_engine(settings, flash_attn=True) as engine:
        theirs = TransformersRuns(settings, engine, "bfloat16")
        runs = LockstepRuns(settings, engine, 1)
        ways = {
            "hf": lambda: theirs.decode_ms(attentions=True),
            "tap": lambda: _step(settings, runs, Capture("probs")),
        }
        for run in ways.values():
            run()
        for times in rounds(ways, min(MOST_ROUNDS, settings.n_pairs)):
            pairs.add(times["hf"], times["tap"])
    what = "tap: probs, all heads, float32; Q8_0"
    against = "transformers eager, output_attentions, bfloat16"
    return _row(settings, name, what, against, pairs, "a step of 1 slot")


def _row(
    settings: Settings, name: str, what: str, baseline: str, pairs: Pairs, piece: str
) -> Timing:
    work = f"{piece} at {settings.n_context} tokens" if "step" in piece else (
        f"{piece} of {settings.n_context} tokens"
    )  # fmt: skip
    target = TARGETS.get(name, PEERS.get(CASES[name][2]))
    return Timing(
        name=name,
        what=what,
        baseline=baseline,
        work=f"{work}; the 7B shape, Q8_0, flash attention on, {settings.device}",
        pairs=pairs,
        # The targets are those of a GPU.
        target=settings.target(target) if settings.device == "gpu" else None,
        command=f"python bench/cuda_cost.py --row {name} {settings.flags}",
    )


def _pool_text(engine: Engine) -> str:
    """What the views' memory was; blocks in plain memory are slower to copy to."""
    stats = engine.stats()
    pool = stats.pool
    return (
        f"views used at most {pool.peak_leased_bytes / 1e6:,.0f} MB, blocks in page-locked memory "
        f"{pool.pinned_bytes / 1e6:,.0f} MB, blocks that were to be and are not "
        f"{pool.plain_fallbacks}; {stats.graph_builds} graphs built, {stats.graph_reuses} reused"
    )


if __name__ == "__main__":
    main(__doc__, WEIGHTS, measure, shape="7b")
