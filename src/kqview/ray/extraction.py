"""Extraction on a cluster: actors evaluate and write shards, one driver writes the index.

Each actor of Ray Data has an engine, and evaluates batches of documents. A batch becomes a shard,
under a number that no other has, and rows of the index, which the actor hands on. The driver gives
each document its place and writes the rows as a part of the index: with that they are done. So what
Ray does twice, because a node died, leaves a shard that no index names, and no document twice.
Shards without an index are removed when a run ends well.
"""

import os
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Unpack

from kqview.arguments import invalid, whole_number
from kqview.corpora import Columns
from kqview.corpora.extraction import facts_of, held
from kqview.corpora.files import open_files
from kqview.corpora.plan import Options, Plan
from kqview.corpora.reader import Corpus, open_corpus
from kqview.corpora.writer import Writer, packed, shard_name
from kqview.engine import Engine, check_opening
from kqview.errors import CorpusError, KqviewError, RequestError, shown
from kqview.extras import needed

INSTALL: Final = 'run pip install "kqview[ray]"'
SHARD_BITS: Final = 62  # of a number that is drawn, so that no two shards have one
_BATCH: Final = 256
_PROCESS_BYTES: Final = 256 * 2**20  # of an actor without its engine
_DUPLICATE: Final[Mapping[str, Any]] = {
    "status": "duplicate", "error": "a document before it has the same id", "token_ids": [],
    "n_tokens": 0, "spans": [], "text": None, "arrays": [],
}  # fmt: skip


def extract(
    dataset: Any,
    sink: str,
    *,
    model: str,
    engine: Mapping[str, Any] | None = None,
    actors: int | tuple[int, int] | None = None,
    batch: int = _BATCH,
    columns: Columns | None = None,
    keep: Sequence[str] = (),
    max_errors: int | None = None,
    group: int = 1,
    progress: Callable[[int], object] | None = None,
    yes: bool = False,
    **options: Unpack[Options],
) -> Corpus | None:
    """As `kqview.extract`, of a ``ray.data.Dataset``, with an engine in each of several actors.

    An actor takes ``n_threads`` CPUs, by default all but one of the smallest node, which is left
    for reading; the memory that its process, cache and buffers need; and a GPU if the cluster has
    some and layers go there. Actors of a node map one file of weights, so these are in its memory
    once; where llama.cpp packs weights anew for the processor, as with AMX, each actor has its own.
    Called again after it was interrupted, it leaves out the documents that the corpus has, by
    their ids.

    Args:
        dataset: Records with an id, each another one; see `Columns`.
        sink: A folder that all nodes see, such as of NFS; or a URL of fsspec, such as
            ``"s3://bucket/corpus"``.
        model: Path of the GGUF file on each node.
        engine: Options of `Engine`, the same for all.
        actors: Number of actors, or the least and the most, between which Ray chooses; None for as
            many as the CPUs, or GPUs, of the cluster allow.
        batch: Documents that an actor evaluates at once, and that are in a shard. Their arrays are
            in its memory, and that many are done again when a node dies.
        columns: As of `kqview.extract`.
        keep: As of `kqview.extract`.
        max_errors: As of `kqview.extract`.
        group: As of `kqview.extract`, within a batch.
        progress: Gets the number of documents that are done, after each part of the index.
        yes: As of `kqview.extract`.
        **options: As of `kqview.extract`.

    Returns:
        The corpus, in the order in which batches were done; None if there were no documents.

    Raises:
        RequestError: An argument is invalid, or *dataset* has no ids.
        CorpusError: As of `kqview.extract`.
        KqviewError: ray, fsspec or pyarrow is not installed.
    """
    ray = needed("ray", "kqview.ray needs", INSTALL)
    needed("ray.data", "kqview.ray needs", INSTALL)
    columns = columns or Columns()
    if columns.id not in (dataset.schema().names or ()):
        raise RequestError(
            f"dataset has no column {columns.id!r}, by which documents are known when a node dies; "
            "add one, or name it with Columns(id=...)",
            parameter="dataset",
        )
    whole_number("batch", batch, low=1)
    given = {"n_threads": None, **(engine or {})}
    if not ray.is_initialized():
        ray.init()
    sizes = _sizes(ray, model, given)
    given["n_threads"] = sizes["num_cpus"]
    facts = ray.remote(_facts).options(**sizes)
    try:
        about, packed_bytes = ray.get(facts.remote(model, given, options, tuple(keep), yes))
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, KqviewError):
            raise error.cause from None
        raise
    about["plan"]["by"] = "ray"
    sizes["memory"] = _memory_bytes(model, given, packed_bytes)
    with Writer(sink, about) as writer:
        done = writer.ids()
        arguments = {
            "model": model, "engine": given, "options": options, "columns": columns,
            "keep": tuple(keep), "group": group, "sink": sink,
            "done": ray.put(frozenset(done)),
        }  # fmt: skip
        found = dataset.map_batches(
            Extractor,
            fn_constructor_kwargs=arguments,
            batch_size=batch,
            batch_format="pyarrow",
            compute=ray.data.ActorPoolStrategy(**_pool(ray, actors, sizes)),
            **sizes,
        )
        tables = found.iter_batches(batch_size=None, batch_format="pyarrow")
        _write(tables, writer, done, max_errors, progress)
        writer.remove_unnamed()
        return open_corpus(sink) if writer.n_done else None


def _write(
    tables: Iterable[Any],
    writer: Writer,
    seen: set[str],
    max_errors: int | None,
    progress: Callable[[int], object] | None,
) -> None:
    """Write the rows that the actors hand on; ids are added to *seen*."""
    n_errors = 0
    for table in tables:
        placed, n_documents, n_failed = _placed(table, seen, writer.n_done)
        if not n_documents:
            continue
        writer.add_piece(placed, n_documents)
        if progress is not None:
            progress(writer.n_done)
        n_errors += n_failed
        if max_errors is not None and n_errors > max_errors:
            raise CorpusError(f"{n_errors} documents failed, max_errors is {max_errors}")


def _placed(table: Any, seen: set[str], n_done: int) -> tuple[Any, int, int]:
    """*table* with the numbers of its documents; how many these are, and how many of them failed.

    Of two documents of one id, the first counts; ids are added to *seen*.
    """
    arrow = needed("pyarrow", "a corpus needs", INSTALL)
    twice: list[int] = []
    kept: list[int] = []
    numbers: list[int] = []
    n, n_failed, is_twice = n_done - 1, 0, False
    columns = [table[name].to_pylist() for name in ("id", "status", "window")]
    for i, (id_, status, window) in enumerate(zip(*columns, strict=True)):
        if window == 0:
            n += 1
            is_twice = status != "duplicate" and id_ in seen
            seen.add(id_)
            n_failed += is_twice or status != "ok"
            twice += [i] if is_twice else []
        elif is_twice:
            continue
        kept.append(i)
        numbers.append(n)
    if twice:  # rare, so only then are all rows objects of Python, which is slow
        rows = table.to_pylist()
        for i in twice:
            rows[i] |= _DUPLICATE
        table = table.from_pylist([rows[i] for i in kept], schema=table.schema)
    field = table.schema.field("n")
    table = table.set_column(table.schema.names.index("n"), field, arrow.array(numbers, field.type))
    return table, n + 1 - n_done, n_failed


class Extractor:
    """An actor: an engine, and what it makes of batches."""

    def __init__(
        self,
        *,
        model: str,
        engine: Mapping[str, Any],
        options: Options,
        columns: Columns,
        keep: Sequence[str],
        group: int,
        sink: str,
        done: Any,
    ) -> None:
        ray = needed("ray", "kqview.ray needs", INSTALL)
        self._plan = Plan.of(Engine(model, **engine), options)
        self._columns, self._keep, self._group, self._sink = columns, keep, group, sink
        self._done: frozenset[str] = ray.get(done)

    def __call__(self, batch: Any) -> Any:
        """The rows of the index for *batch*, whose shard is written.

        Args:
            batch: A ``pyarrow.Table`` of records.

        Raises:
            OSError: The shard cannot be written.
        """
        name = self._columns.id
        records = [one for one in batch.to_pylist() if str(one[name]) not in self._done]
        found = held(self._plan, records, self._columns, self._keep, self._group)
        shard = secrets.randbits(SHARD_BITS)
        compress = self._plan.compress
        data, table = packed(found.rows, found.arrays, shard, compress=compress)
        if data:
            open_files(self._sink).write(f"shards/{shard_name(shard, compress=compress)}", data)
        return table


def _facts(
    model: str, engine: Mapping[str, Any], options: Options, keep: Sequence[str], yes: bool
) -> tuple[dict[str, Any], int]:
    """What the corpus will say of itself, and bytes of weights that an engine has to itself.

    Both are found out where the model is: whether weights are packed depends on the processor.
    """
    before = _unshared_bytes()
    with Engine(model, **engine) as opened:
        packed_bytes = max(0, _unshared_bytes() - before)
        plan = Plan.of(opened, options)
        if plan.is_large and not yes:
            raise RequestError(
                "whole maps are wanted; pass yes=True to write them, or ask for less: spans, last, "
                "top_k, fewer layers or heads",
                parameter="yes",
            )
        return facts_of(plan, keep), packed_bytes


def _unshared_bytes() -> int:
    """Memory of this process that no file is mapped to; 0 where the system does not say."""
    try:
        status = Path("/proc/self/status").read_text("utf-8")
    except OSError:
        return 0
    found = next((one for one in status.splitlines() if one.startswith("RssAnon:")), "RssAnon: 0")
    return int(found.split()[1]) * 1024


def _sizes(ray: Any, model: str, engine: Mapping[str, Any]) -> dict[str, Any]:
    """What an actor takes of its node."""
    nodes = [one["Resources"] for one in ray.nodes() if one["Alive"]]
    cpus = [int(one["CPU"]) for one in nodes if one.get("CPU", 0) >= 1]
    if not cpus:
        raise KqviewError("no node of the Ray cluster has a CPU; add one")
    n_threads = engine["n_threads"] or max(1, min(cpus) - 1)
    if n_threads > max(cpus):
        raise invalid("n_threads", f"at most {max(cpus)}, the CPUs of a node", shown(n_threads))
    has_gpus = any(one.get("GPU") for one in nodes) and engine.get("n_gpu_layers", -1) != 0
    sizes: dict[str, Any] = {"num_cpus": n_threads, "num_gpus": int(has_gpus)}
    return {**sizes, "memory": _memory_bytes(model, {**engine, "n_threads": n_threads}, 0)}


def _memory_bytes(model: str, engine: Mapping[str, Any], packed_bytes: int) -> int:
    """Memory that an actor has to itself, with *packed_bytes* of weights.

    Other weights are mapped, and in the memory of a node once, however many actors it has.
    """
    needed = check_opening(model, **engine)[0].needed_bytes
    n_mapped = max(0, os.path.getsize(model) - packed_bytes)
    return _PROCESS_BYTES + packed_bytes + max(0, needed - n_mapped)


def _pool(
    ray: Any, actors: int | tuple[int, int] | None, sizes: Mapping[str, Any]
) -> dict[str, Any]:
    """Arguments of ``ActorPoolStrategy``."""
    if isinstance(actors, tuple):
        least, most = (whole_number("actors", one, low=1) for one in actors)
        return {"min_size": least, "max_size": most}
    if actors is None:
        have = ray.cluster_resources()
        wanted = [("CPU", sizes["num_cpus"]), ("GPU", sizes["num_gpus"])]
        actors = max(1, min(int(have.get(name, 0) // n) for name, n in wanted if n))
    return {"size": whole_number("actors", actors, low=1)}
