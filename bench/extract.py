"""What does a corpus cost beside evaluating its documents, and does memory stay flat?

Documents of random ids; a run writes them to a new folder under /tmp with `kqview.extract`. The
stock program is llama-bench, which evaluates prompts of one length and keeps nothing: the same
model, threads and batch sizes, and as many prompts. The other rows compare extractions with each
other or with bare calls of the engine: rows summed over spans of each document, hidden states of
all layers as float16, a prompt of 500 tokens that all documents share beside the documents alone,
16 slots beside one. transformers evaluates as many documents one by one, with weights of the same
width (float32), and saves the same hidden states in one file of safetensors.

The rows of Ray put 1, 2 and 4 actors of one thread beside one engine of as many threads: the time
of a document from the first shards to the last, so neither program's start counts. Actors beyond
the cores share these, and the engine has a thread for each core at most. These rows have 5 pairs at
most, because Ray takes long to start.

The row of memory extracts 10,000 short documents with the demo model. Its time is that of a
document among the last thousand, against one among the first thousand; it is an error if the
process has grown by more than 32 MiB from one to the other.

With `--shape 6x16 --pairs 8` a row takes about two minutes on two cores.
"""

from __future__ import annotations

import itertools
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from console import attempt, main
from hf import TransformersRuns, check_installed
from loop import llama_bench_prompt_ms
from models import NotHere, model_path, peer
from report import Timing
from runs import open_engine

import kqview
from kqview import Capture, Engine, extract
from kqview.bench.pairs import Pairs
from kqview.bench.sweep import prompt_ids
from kqview.machine import default_threads

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from console import ProgressLine
    from report import Row
    from settings import Settings

    from kqview.bench.records import LeftOut

N_DOCUMENTS: Final = 4
N_TOKENS: Final = 512  # of a document
N_PREFIX: Final = 500
N_SUFFIX: Final = 24
N_SHORT: Final = 64  # documents behind a prefix
N_SLOTS: Final = 16
N_SPANS: Final = 4
N_ACTOR_TOKENS: Final = 128  # of a document for an actor of Ray
N_BATCH: Final = 2
N_BATCHES: Final = 4
N_MEMORY: Final = 10_000
N_COUNTED: Final = 1000
MOST_GROWN_BYTES: Final = 32 * 2**20
MOST_PAIRS: Final = 10
MOST_RAY_PAIRS: Final = 5
CASES: Final[dict[str, float | None]] = {
    "extract-llama-bench": 1.05,
    "extract-spans": 1.07,
    "extract-hidden": None,
    "extract-prefix": 1.1,
    "extract-slots": 1.0,
    "extract-transformers": None,
    **{f"extract-ray-{n}": 1.1 for n in (1, 2, 4)},
}
MEMORY: Final = "extract-memory"
WEIGHTS: Final = {
    **{name: 400.0 if "ray" in name else 120.0 for name in CASES}, MEMORY: 60.0
}  # fmt: skip
_SCORE_LAST: Final[dict[str, Any]] = {"fields": ["scores"], "last": 1}  # as good as nothing
_HIDDEN: Final = Capture(layers=[], hidden="all", dtype="float16")


def measure(settings: Settings, line: ProgressLine) -> Iterator[Row | LeftOut]:
    """Measure the chosen cases."""
    for name in settings.chosen(CASES):
        yield attempt(name, _MEASURES[name], settings, line)
    for name in settings.chosen([MEMORY]):
        yield attempt(name, _measure_memory, settings, line)


class Runs:
    """Extractions of one list of documents, each to a folder of its own that is removed."""

    def __init__(self, settings: Settings, engine: Engine) -> None:
        self._now_s = settings.now_s
        self._engine = engine
        self._seed = itertools.count()

    def documents(self, n: int, n_tokens: int) -> list[list[int]]:
        """Ids that no run had before, so that none are in a cache."""
        n_vocab = self._engine.model.n_vocab
        return [prompt_ids(n_tokens, n_vocab, seed=next(self._seed)) for _ in range(n)]

    def ms(self, documents: Sequence[Any], **options: Any) -> float:
        """Milliseconds a document."""
        with tempfile.TemporaryDirectory() as folder:
            start = self._now_s()
            extract(documents, str(Path(folder) / "corpus"), engine=self._engine, **options)
            return (self._now_s() - start) * 1000.0 / len(documents)


def _measure_llama_bench(settings: Settings, line: ProgressLine) -> Timing:
    program = str(peer("llama-bench"))
    if settings.clock != "wall":
        raise NotHere("llama-bench tells its wall time; leave --clock cpu out")
    with open_engine(settings, flash_attn=True, n_ctx=N_TOKENS) as engine:
        runs = Runs(settings, engine)
        return _timed(
            settings, line, "extract-llama-bench",
            "extract, a score of each", lambda: runs.ms(_long(runs), **_SCORE_LAST),
            "llama-bench (stock build), nothing kept",
            lambda: llama_bench_prompt_ms(program, settings, N_TOKENS, N_DOCUMENTS),
            f"a document of {N_TOKENS} tokens, {N_DOCUMENTS} of them",
        )  # fmt: skip


def _measure_spans(settings: Settings, line: ProgressLine) -> Timing:
    with open_engine(settings, flash_attn=True, n_ctx=N_TOKENS) as engine:
        runs = Runs(settings, engine)

        def spans(n_changed: int) -> Capture:
            ends = [n_changed % 64 + i * N_TOKENS // N_SPANS for i in range(N_SPANS)]
            return Capture(spans=[(end, end + 32) for end in ends])

        changed = itertools.count()
        return _timed(
            settings, line, "extract-spans",
            f"sums of all rows over {N_SPANS} spans, other ones in each run",
            lambda: runs.ms(_long(runs), capture=spans(next(changed))),
            "extract, a score of each", lambda: runs.ms(_long(runs), **_SCORE_LAST),
            f"a document of {N_TOKENS} tokens, {N_DOCUMENTS} of them",
        )  # fmt: skip


def _measure_hidden(settings: Settings, line: ProgressLine) -> Timing:
    with open_engine(settings, flash_attn=True, n_ctx=N_TOKENS) as engine:
        runs = Runs(settings, engine)
        n_bytes = N_TOKENS * _HIDDEN.bytes_per_token(engine.model, N_TOKENS)
        return _timed(
            settings, line, "extract-hidden",
            f"hidden states of all layers, float16, {n_bytes / 2**20:.0f} MiB a document",
            lambda: runs.ms(_long(runs), capture=_HIDDEN),
            "extract, a score of each", lambda: runs.ms(_long(runs), **_SCORE_LAST),
            f"a document of {N_TOKENS} tokens, {N_DOCUMENTS} of them",
        )  # fmt: skip


def _measure_prefix(settings: Settings, line: ProgressLine) -> Timing:
    # In the slot of the first, the prefix stays from one run to the next, as it does in a long one.
    with (
        open_engine(settings, flash_attn=True, n_ctx=2 * N_TOKENS) as sharing,
        open_engine(settings, flash_attn=True, n_ctx=2 * N_TOKENS) as single,
    ):
        shared, alone = Runs(settings, sharing), Runs(settings, single)
        prefix = prompt_ids(N_PREFIX, sharing.model.n_vocab, seed=2**32)

        def together() -> float:
            documents = [prefix + one for one in shared.documents(N_SHORT, N_SUFFIX)]
            return shared.ms(documents, fields=["scores"], last=N_SUFFIX - 1)

        return _timed(
            settings, line, "extract-prefix",
            f"behind {N_PREFIX} tokens that all share", together, "alone",
            lambda: alone.ms(alone.documents(N_SHORT, N_SUFFIX), fields=["scores"]),
            f"scores of a document of {N_SUFFIX} tokens, {N_SHORT} of them",
        )  # fmt: skip


def _measure_slots(settings: Settings, line: ProgressLine) -> Timing:
    n_ctx = N_TOKENS // 2
    with (
        open_engine(settings, flash_attn=True, n_ctx=n_ctx, n_slots=N_SLOTS) as several,
        open_engine(settings, flash_attn=True, n_ctx=n_ctx) as single,
    ):
        many, one = Runs(settings, several), Runs(settings, single)

        def ms(runs: Runs) -> float:
            return runs.ms(runs.documents(N_SLOTS, n_ctx), **_SCORE_LAST)

        return _timed(
            settings, line, "extract-slots",
            f"{N_SLOTS} slots", lambda: ms(many), "1 slot", lambda: ms(one),
            f"a document of {n_ctx} tokens, {N_SLOTS} of them",
        )  # fmt: skip


def _measure_transformers(settings: Settings, line: ProgressLine) -> Timing:
    check_installed()
    with open_engine(settings, flash_attn=True, n_ctx=N_TOKENS, weight_type="F32") as engine:
        runs = Runs(settings, engine)
        theirs = TransformersRuns(settings, engine, "float32", attention="sdpa")
        return _timed(
            settings, line, "extract-transformers",
            "extract, hidden states of all layers, F32 weights",
            lambda: runs.ms(_long(runs), capture=_HIDDEN),
            "transformers, output_hidden_states, float32", lambda: theirs.hidden_ms(_long(runs)),
            f"a document of {N_TOKENS} tokens, {N_DOCUMENTS} of them, states in float16",
        )  # fmt: skip


def _measure_ray(settings: Settings, line: ProgressLine, n_actors: int) -> Timing:
    try:
        import ray
        import ray.data
    except ImportError as error:
        raise NotHere(f"{error}; run pip install 'kqview[ray]'") from error
    if settings.clock != "wall":
        raise NotHere("actors are other processes; leave --clock cpu out")
    n = n_actors * N_BATCHES * N_BATCH
    n_threads = min(n_actors, default_threads())
    settings = replace(settings, n_threads=n_threads)
    with open_engine(settings, flash_attn=True, n_ctx=N_ACTOR_TOKENS) as engine:
        runs = Runs(settings, engine)

        def ms(extracted: Callable[[list[list[int]], str], list[tuple[float, int]]]) -> float:
            """Milliseconds a document, from when each actor has written until the last does."""
            with tempfile.TemporaryDirectory() as folder:
                found = extracted(runs.documents(n, N_ACTOR_TOKENS), str(Path(folder) / "corpus"))
            (first_s, n_first), (last_s, n_last) = found[n_actors - 1], found[-1]
            return (last_s - first_s) * 1000.0 / (n_last - n_first)

        def by_actors(documents: list[list[int]], sink: str) -> list[tuple[float, int]]:
            records = [{"id": str(i), "ids": ids} for i, ids in enumerate(documents)]
            options = {"n_ctx": N_ACTOR_TOKENS, "n_threads": 1, "flash_attn": True}
            kqview.ray.extract(
                ray.data.from_items(records, override_num_blocks=n // N_BATCH), sink,
                model=str(model_path(settings)), batch=N_BATCH, actors=n_actors,
                engine={**options, "n_gpu_layers": settings.n_gpu_layers},
                **_SCORE_LAST,
            )  # fmt: skip
            times = sorted(one.stat().st_mtime for one in Path(sink, "shards").iterdir())
            return [(at_s, (i + 1) * N_BATCH) for i, at_s in enumerate(times)]

        def by_engine(documents: list[list[int]], sink: str) -> list[tuple[float, int]]:
            found: list[tuple[float, int]] = []

            def note(n_done: int, _: int | None) -> None:
                found.append((settings.now_s(), n_done))

            extract(documents, sink, engine=engine, progress=note, **_SCORE_LAST)
            return found

        # One CPU is for reading; what Ray calls a CPU is a number that actors take from.
        ray.init(
            "local", num_cpus=n_actors + 1, include_dashboard=False, log_to_driver=False,
            logging_level="ERROR",
        )  # fmt: skip
        ray.data.DataContext.get_current().enable_progress_bars = False
        try:
            return _timed(
                settings, line, f"extract-ray-{n_actors}",
                f"kqview.ray.extract, {n_actors} actors of one thread", lambda: ms(by_actors),
                f"extract, {n_threads} threads", lambda: ms(by_engine),
                f"a document of {N_ACTOR_TOKENS} tokens among {n}",
            )  # fmt: skip
        finally:
            ray.shutdown()


_MEASURES: Final[dict[str, Callable[[Settings, ProgressLine], Timing]]] = {
    "extract-llama-bench": _measure_llama_bench, "extract-spans": _measure_spans,
    "extract-hidden": _measure_hidden, "extract-prefix": _measure_prefix,
    "extract-slots": _measure_slots, "extract-transformers": _measure_transformers,
    **{f"extract-ray-{n}": partial(_measure_ray, n_actors=n) for n in (1, 2, 4)},
}  # fmt: skip


def _long(runs: Runs) -> list[list[int]]:
    return runs.documents(N_DOCUMENTS, N_TOKENS)


def _timed(
    settings: Settings,
    line: ProgressLine,
    name: str,
    what: str,
    candidate: Callable[[], float],
    against: str,
    baseline: Callable[[], float],
    work: str,
) -> Timing:
    target = CASES[name]
    candidate(), baseline()
    most = MOST_RAY_PAIRS if "ray" in name else MOST_PAIRS
    n_pairs = min(settings.pairs_for(target), most)
    pairs = line.pairs(name, baseline, candidate, n_pairs)
    return Timing(
        name=name,
        what=what,
        baseline=against,
        work=f"{work}; {settings.shape}, {settings.n_threads} threads",
        pairs=pairs,
        target=settings.target(target),
        command=f"python bench/extract.py --row {name} {settings.flags}",
    )


def _measure_memory(settings: Settings, line: ProgressLine) -> Timing:
    n, n_counted = (N_MEMORY, N_COUNTED) if not settings.is_quick else (400, 50)
    line.start(MEMORY, 1)
    stamps: list[float] = []
    grown: list[int] = []

    def note(n_done: int, n_all: int | None) -> None:
        stamps.append(settings.now_s())
        if n_done in (n_counted, n):
            grown.append(_resident_bytes())

    with (
        Engine.demo(n_ctx=64, n_slots=4, n_threads=settings.n_threads) as engine,
        tempfile.TemporaryDirectory() as folder,
    ):
        documents = (prompt_ids(16, engine.model.n_vocab, seed=i) for i in range(n))
        sink = str(Path(folder) / "corpus")
        # Small shards, so that the first thousand documents have filled several.
        extract(documents, sink, engine=engine, last=1, shard_bytes=2**20, progress=note)
    if grown[1] - grown[0] > MOST_GROWN_BYTES:
        raise ValueError(f"the process grew from {grown[0]} to {grown[1]} bytes")
    line.tick()
    pairs = Pairs()
    n_part = n_counted // 10
    for i in range(10):  # parts of the first thousand after the very first, and of the last
        first, last = i * n_part, n - n_counted + i * n_part
        pairs.add(*(
            (stamps[at + n_part - 1] - stamps[at]) * 1000.0 / (n_part - 1) for at in (first, last)
        ))  # fmt: skip
    return Timing(
        name=MEMORY,
        what=f"one of the last {n_counted:,}, {(grown[1] - grown[0]) / 2**20:+.1f} MiB of memory",
        baseline=f"one of the first {n_counted:,}",
        work=f"a document of 16 tokens among {n:,}, its last row kept; demo model, 4 slots",
        pairs=pairs,
        target=None,
        command=f"python bench/extract.py --row {MEMORY} {settings.flags}",
    )


def _resident_bytes() -> int:
    try:
        status = Path("/proc/self/status").read_text("utf-8")
    except OSError as error:
        raise NotHere("memory is read from /proc, which is not here") from error
    found = next(text for text in status.splitlines() if text.startswith("VmRSS:"))
    return int(found.split()[1]) * 1024


if __name__ == "__main__":
    main(__doc__, WEIGHTS, measure)
