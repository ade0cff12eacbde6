"""How far does a corpus on a Ray cluster go, and what breaks first?

A simulation of `kqview.ray.extract`: actors evaluate batches and put shards into a store, Ray hands
the rows of the index on, and one driver writes them. What the driver, the index and Ray cost is
measured here first; the speed of a node and the latency of the store are options.

    python bench/cluster.py [--rate 10] [--batch 256] [--store-ms 30] [--nodes 1 10 100 1000]

Events of the simulation: an actor asks for a batch, gets it when Ray's one scheduler has handed out
those before it, evaluates it (again if its node dies meanwhile), puts the shard; its rows then wait
for the driver. Nothing holds the actors up while rows wait, as in Ray Data until its object store
is full. So the documents/s of a run end where one of the two, which work one piece after the other,
is busy all the time.
"""

from __future__ import annotations

import argparse
import heapq
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from rich.console import Console
from rich.table import Table

from kqview import open_corpus
from kqview.corpora.files import N_READERS
from kqview.corpora.writer import PartRow, Writer, packed
from kqview.ray.extraction import SHARD_BITS, _write

N_TOKENS: Final = 500
N_STATE: Final = 4096  # values of a pooled hidden state, float16
N_PIECES: Final = 40  # that are measured, of each size
N_TASKS: Final = (50, 150)
PIECES_A_NODE: Final = 20
RESTART_S: Final = 60.0  # of a node that died: a new one, and its engine
PUTS_A_PREFIX: Final = 3500.0  # a second: what S3 promises
FACTS: Final[dict[str, Any]] = {
    "model": {"fingerprint": "0" * 64, "name": "simulated", "architecture": "llama"},
    "plan": {"fields": ["hidden"], "capture": None, "compress": False},
    "versions": {"kqview": "0", "llama.cpp": "0"},
}


@dataclass(frozen=True)
class Figures:
    """What was measured here.

    Attributes:
        row_s: Time of the driver for a document, in processor time.
        piece_s: The same for a part of the index, beside its documents.
        dispatch_s: Time of Ray's scheduler for a batch.
        read_s: Time to read and decode a document of the index.
        row_bytes: A document as the driver gets it, in Ray's object store.
        index_bytes: The same in the index, compressed.
        open_bytes: The same in the memory of who opens the corpus.
        shard_bytes: The same in its shard.
        id_bytes: An id of a finished document, in the memory of an actor.
    """

    row_s: float
    piece_s: float
    dispatch_s: float
    read_s: float
    row_bytes: float
    index_bytes: float
    open_bytes: float
    shard_bytes: float
    id_bytes: float


@dataclass(frozen=True)
class Load:
    """What the cluster is, and is asked for.

    Attributes:
        n_nodes: Nodes, an actor each.
        rate: Documents a second of a node.
        batch: Documents of a shard.
        store_s: Time of a request to the store.
        days: Mean time until a node dies.
    """

    n_nodes: int
    rate: float
    batch: int
    store_s: float
    days: float


@dataclass(frozen=True)
class Outcome:
    """What became of a run.

    Attributes:
        rate: Documents a second until the driver has written the last.
        n_waiting: Most batches whose rows waited for the driver at once.
        driver: Part of the time in which the driver was busy.
        n_lost: Batches done again, of all.
    """

    rate: float
    n_waiting: int
    driver: float
    n_lost: int


def simulate(figures: Figures, load: Load) -> Outcome:
    """One run of `PIECES_A_NODE` batches a node."""
    rng = np.random.default_rng(load.n_nodes)
    n_pieces = load.n_nodes * PIECES_A_NODE
    free = [(0.0, i) for i in range(load.n_nodes)]
    handed = np.zeros(n_pieces)  # when the rows of a batch were there
    scheduler_s, n_lost, death_s = 0.0, 0, load.days * 86400
    for i in range(n_pieces):
        at, node = heapq.heappop(free)
        scheduler_s = max(at, scheduler_s) + figures.dispatch_s
        spent = load.batch / load.rate * rng.gamma(100.0, 0.01)  # 10 % more or less
        at = scheduler_s
        while (dies_s := rng.exponential(death_s)) < spent:
            at, n_lost = at + dies_s + RESTART_S, n_lost + 1
        at += spent + load.store_s * rng.gamma(4.0, 0.25)
        handed[i] = at
        heapq.heappush(free, (at, node))
    handed.sort()
    # A folder has no requests to wait for; an object store two: is the lock mine, and the part.
    busy = figures.piece_s + load.batch * figures.row_s
    busy_s = busy + 2 * load.store_s * rng.gamma(4.0, 0.25, n_pieces)
    written, at = np.zeros(n_pieces), 0.0
    for i, one in enumerate(busy_s):
        at = max(at, handed[i]) + one
        written[i] = at
    waiting = np.searchsorted(handed, written, "right") - np.arange(n_pieces)
    return Outcome(n_pieces * load.batch / at, int(waiting.max()), busy_s.sum() / at, n_lost)


def measured(dispatch_ms: float | None) -> Figures:
    """The figures of this machine; *dispatch_ms* is of Ray's scheduler, None to measure it."""
    few, many = 16, 256
    few_s, _ = _driver_s(few)
    many_s, sizes = _driver_s(many)
    row_s = (many_s - few_s) / (many - few)
    dispatch_s = _dispatch_s() if dispatch_ms is None else dispatch_ms / 1000
    ids = {f"document-{i:09}" for i in range(10_000)}
    return Figures(
        row_s=row_s, piece_s=few_s - few * row_s, dispatch_s=dispatch_s,
        id_bytes=sum(one.__sizeof__() + 32 for one in ids) / len(ids), **sizes,
    )  # fmt: skip


def _driver_s(batch: int) -> tuple[float, dict[str, float]]:
    """Processor time of the driver for a piece of so many documents; what they take."""
    import pyarrow

    rng = np.random.default_rng(0)
    tables: list[Any] = []
    n_shard = 0
    for piece in range(N_PIECES):
        rows = [
            PartRow(n=i, id=f"document-{piece * batch + i:09}", ids=_ids(rng)) for i in range(batch)
        ]
        states = rng.normal(size=(batch, 1, N_STATE)).astype(np.float16)
        shard = int(rng.integers(2**SHARD_BITS))
        data, table = packed(rows, [{"hidden": one} for one in states], shard, compress=False)
        tables.append(table)
        n_shard += len(data)
    n = N_PIECES * batch
    with tempfile.TemporaryDirectory() as folder:
        with Writer(folder, FACTS) as writer:
            begun = time.process_time()
            _write(tables, writer, set(), None, None)
            spent = time.process_time() - begun
        n_index = sum(one.stat().st_size for one in Path(folder, "index").iterdir())
        n_before, begun = pyarrow.total_allocated_bytes(), time.process_time()
        corpus = open_corpus(folder)
        read_s = time.process_time() - begun
        n_open = pyarrow.total_allocated_bytes() - n_before
        del corpus
    return spent / N_PIECES, {
        "read_s": read_s / n, "row_bytes": sum(one.nbytes for one in tables) / n,
        "index_bytes": n_index / n, "open_bytes": n_open / n, "shard_bytes": n_shard / n,
    }  # fmt: skip


def _ids(rng: np.random.Generator) -> list[int]:
    """Ids as frequent as those of texts."""
    return (rng.zipf(1.2, N_TOKENS) % 32000).tolist()


def _dispatch_s() -> float:
    """Processor time of the driver to hand out a batch and take its result."""
    import ray
    import ray.data

    class Same:
        def __call__(self, batch: Any) -> Any:
            return batch

    def spent(n: int) -> float:
        begun = time.process_time()
        data = ray.data.range(n, override_num_blocks=n).map_batches(
            Same, batch_size=None, compute=ray.data.ActorPoolStrategy(size=1)
        )
        for _ in data.iter_batches(batch_size=None):
            pass
        return time.process_time() - begun

    ray.init("local", num_cpus=3, include_dashboard=False, log_to_driver=False)
    try:
        ray.data.DataContext.get_current().enable_progress_bars = False
        few, many = N_TASKS
        spent(few)
        return (spent(many) - spent(few)) / (many - few)
    finally:
        ray.shutdown()


def main() -> None:
    """Measure, simulate, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, nargs="+", default=[1, 10, 100, 300, 1000])
    parser.add_argument("--rate", type=float, default=10.0, help="documents/s of a node (10)")
    parser.add_argument("--batch", type=int, default=256, help="documents of a shard (256)")
    parser.add_argument("--store-ms", type=float, default=30.0, help="time of a request (30)")
    parser.add_argument("--days", type=float, default=30.0, help="until a node dies (30)")
    parser.add_argument(
        "--dispatch-ms", type=float, help="of Ray's scheduler for a batch (measured, with Ray)"
    )
    args = parser.parse_args()
    figures = measured(args.dispatch_ms)
    console = Console(width=120)
    for name, value in vars(figures).items():
        text = f"{value * 1e6:.1f} us" if name.endswith("_s") else f"{value:.0f} bytes"
        console.print(f"{name}: {text}")
    columns = (
        "nodes", "documents/s asked", "reached", "driver busy", "rows waiting at most, MB",
        "batches done again", "shards and parts/s", "to the store, MB/s",
    )  # fmt: skip
    table = Table(*columns)
    for n_nodes in args.nodes:
        load = Load(n_nodes, args.rate, args.batch, args.store_ms / 1000, args.days)
        one = simulate(figures, load)
        table.add_row(
            f"{n_nodes:,}", f"{n_nodes * args.rate:,.0f}", f"{one.rate:,.0f}", f"{one.driver:.0%}",
            f"{one.n_waiting * args.batch * figures.row_bytes / 1e6:,.1f}", f"{one.n_lost:,}",
            f"{2 * one.rate / args.batch:.1f}", f"{one.rate * figures.shard_bytes / 1e6:,.0f}",
        )  # fmt: skip
    console.print(table)
    piece_s = figures.piece_s + args.batch * figures.row_s
    store_s = 2 * args.store_ms / 1000
    limits = Table("what has one place", "documents/s at most", f"nodes of {args.rate:g}/s")
    for what, rate in (
        ("driver, index in an object store", args.batch / (piece_s + store_s)),
        ("driver, index in a folder", args.batch / piece_s),
        ("Ray's scheduler", args.batch / figures.dispatch_s),
        ("requests to one prefix of S3", PUTS_A_PREFIX * args.batch / 2),
    ):
        limits.add_row(what, f"{rate:,.0f}", f"{rate / args.rate:,.0f}")
    console.print(limits)
    sizes = Table("documents", "parts", "index, GB", "open, GB", "ids, GB", "read the index, s")
    for n in (10**6, 10**7, 10**8):
        n_parts = n / args.batch
        each = (figures.index_bytes, figures.open_bytes, figures.id_bytes)
        read_s = n * figures.read_s + n_parts * args.store_ms / 1000 / N_READERS
        sizes.add_row(
            f"{n:,}", f"{n_parts:,.0f}", *[f"{n * one / 1e9:,.2f}" for one in each],
            f"{read_s:,.0f}",
        )  # fmt: skip
    console.print(sizes)


if __name__ == "__main__":
    main()
