"""Are rows of layers on a device cheaper in the step's graph, or beside the next step?

Two engines of the same model, one for each setting of ``device_rows``, decode the same work in
rounds: each without capture and with the logits of all heads, float32, every second round
backwards. Each setting is compared with no capture in its own engine, and both settings with each
other. "auto" should mean "beside" if that is not slower than "in graph" in any row, and meets its
target at 4k tokens with one slot.

The targets are for grouped queries, which this shape has. Computing rows reads the keys of the
cache once more; `keys_again` says what share of a step's reads that is.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING

from console import attempt
from models import NotHere
from report import SoFar, Timing
from runs import LockstepRuns, open_engine, view_memory

from kqview import Capture
from kqview.bench.pairs import Pairs, rounds, step_ms

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from console import ProgressLine
    from settings import Settings
    from wide_model import Shape

    from kqview import Engine
    from kqview.bench.records import LeftOut

SAVED_ROUNDS = 5  # rounds after which rows are saved once more, in case that the run is cut off
WORKS = (("4k", 1), ("16k", 1), ("4k", 8))
# What is compared: (what, baseline, candidate's way, baseline's way)
COMPARED = {
    "in-graph": ("rows in the step's graph", "no capture", "in graph", "in graph, off"),
    "beside": ("rows beside the next step", "no capture", "beside", "beside, off"),
    "both": ("rows beside the next step", "rows in the step's graph", "beside", "in graph"),
}
PLACE_CASES = {
    f"device-rows-{size}-{n_slots}-{way}": (size, n_slots, way)
    for size, n_slots in WORKS
    for way in COMPARED
}
PLACE_TARGETS = {"device-rows-4k-1-beside": 1.03} | {
    name: 1.0 for name, (_, _, way) in PLACE_CASES.items() if way == "both"
}


def keys_again(shape: Shape, n_context: int) -> float:
    """The share that reading all keys once more has of what a decoded token reads.

    That is the weights as Q8_0 (34 bytes for 32 values; of the embedding one row, which is left
    out) and the float16 keys and values of *n_context* cells.
    """
    width, n_kv = shape.n_embd, shape.head_size * shape.n_head_kv
    of_layer = 2 * width * width + 2 * width * n_kv + 3 * width * shape.n_ff
    weights = (shape.n_layer * of_layer + shape.n_vocab * width) * 34 / 32
    keys = shape.n_layer * n_context * n_kv * 2
    return keys / (weights + 2 * keys)


def measure_places(
    settings: Settings, line: ProgressLine, contexts: Mapping[str, int]
) -> Iterator[Timing | SoFar | LeftOut]:
    """Measure the chosen rows; those of one context and number of slots share their rounds."""
    for size, n_slots in WORKS:
        names = [n for n in settings.chosen(PLACE_CASES) if PLACE_CASES[n][:2] == (size, n_slots)]
        if not names:
            continue
        for name in names[:-1]:
            line.start(name, 1)
        line.start(names[-1], settings.n_pairs)
        own = replace(settings, n_context=contexts[size])
        times: list[dict[str, float]] = []
        memory = ""
        refused: Exception | None = None
        try:
            for one, memory in _rounds(own, line, n_slots):
                times.append(one)
                if len(times) % SAVED_ROUNDS == 0 and len(times) < own.n_pairs:
                    for name in names:
                        yield SoFar(_timing(own, name, times, None, memory))
        except Exception as error:
            refused = error
        for name in names:
            yield attempt(name, _timing, own, name, times, refused, memory)


def _rounds(
    settings: Settings, line: ProgressLine, n_slots: int
) -> Iterator[tuple[dict[str, float], str]]:
    """Times of every way for each round, and the sort of memory that views were in.

    Raises:
        NotHere: Both engines compute rows in the graph.
    """
    capture = Capture("logits")
    with ExitStack() as engines:
        ways: dict[str, Callable[[], float]] = {}
        n_nodes: dict[str, int] = {}
        opened: list[Engine] = []
        for place in ("in graph", "beside"):
            engine = engines.enter_context(
                open_engine(
                    settings, flash_attn=True, n_slots=n_slots, device_rows=place,
                    run_ahead=8 if n_slots == 1 else 2,
                )
            )  # fmt: skip
            opened.append(engine)
            runs = LockstepRuns(settings, engine, n_slots)
            for way, wanted in ((place, capture), (f"{place}, off", None)):
                ways[way] = lambda runs=runs, wanted=wanted: step_ms(
                    runs.stamps_s(settings.n_tokens, wanted), settings.n_skip
                )
            ways[place]()  # memory of the first blocks, graphs
            n_nodes[place] = engine.stats().graph_nodes_added
            ways[f"{place}, off"]()
        if settings.device == "gpu" and n_nodes["beside"] >= n_nodes["in graph"]:
            raise NotHere(
                f"device_rows='beside' adds {n_nodes['beside']} nodes to a step's graph and "
                f"'in graph' {n_nodes['in graph']}: this device computes no rows beside a step"
            )
        for times in rounds(ways, settings.n_pairs):
            line.tick()
            found = dict.fromkeys(view_memory(settings, one) for one in opened)
            yield times, "".join(found)


def _timing(
    settings: Settings,
    name: str,
    times: list[dict[str, float]],
    refused: Exception | None,
    memory: str,
) -> Timing:
    if refused is not None:
        raise refused
    _, n_slots, way = PLACE_CASES[name]
    what, baseline, candidate, against = COMPARED[way]
    slots = "1 slot" if n_slots == 1 else f"{n_slots} slots"
    return Timing(
        name=name,
        what=f"logits, all heads, float32; {what}{memory}",
        baseline=baseline,
        work=f"a step of {slots} at {settings.n_context} tokens; the 7B shape, Q8_0, "
        f"flash attention on, {settings.device}",
        pairs=Pairs([t[against] for t in times], [t[candidate] for t in times]),
        # The targets are those of a GPU.
        target=settings.target(PLACE_TARGETS.get(name)) if settings.device == "gpu" else None,
        command=f"python bench/cuda_cost.py --row {name} {settings.flags}",
    )
