"""A corpus behind a URL: in memory, and by the protocol of S3 where moto serves it."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from kqview import Engine, extract, open_corpus
from kqview.corpora.files import open_files
from kqview.corpora.writer import PartRow, Writer, packed, shard_name
from kqview.errors import CorpusError, KqviewError, RequestError
from tests.support.object_store import s3_bucket

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

fsspec = pytest.importorskip("fsspec")
MemoryFileSystem: Any = pytest.importorskip("fsspec.implementations.memory").MemoryFileSystem

# What servers and clients of S3 deprecate, and leave to the end.
pytestmark = pytest.mark.filterwarnings("ignore")
TEXTS = [f"Anna has {n} red balls." for n in range(20)]
SMALL = 3000  # bytes of a shard: about three of these documents
ABOUT: dict[str, Any] = {
    "model": {"fingerprint": "0"}, "versions": {},
    "plan": {"fields": ["hidden"], "capture": None, "compress": True},
}  # fmt: skip


@pytest.fixture(params=["memory", "s3"])
def sink(request: pytest.FixtureRequest) -> Iterator[str]:
    """The URL of a corpus that is not there yet."""
    if request.param == "memory":
        yield f"memory://corpora/{os.urandom(4).hex()}"
        return
    with s3_bucket() as bucket:
        yield f"{bucket}/stories"


@pytest.mark.parametrize("compress", [False, True])
def test_corpus_behind_a_url_is_that_of_a_folder(
    engine: Engine, tmp_path: Path, sink: str, compress: bool
):
    options: Any = {
        "engine": engine, "last": 1, "shard_bytes": SMALL, "deterministic": True,
        "compress": compress,
    }  # fmt: skip
    made = extract(TEXTS, sink, **options)
    folder = extract(TEXTS, str(tmp_path), **options)
    assert made.ids == folder.ids
    assert made.index.equals(folder.index)
    for one, other in zip(open_corpus(sink), folder, strict=True):
        assert np.array_equal(one.attention, other.attention)
        assert not one.attention.flags.writeable
    assert repr(made) == f"Corpus({sink!r}, 20 documents)"


def test_run_goes_on_where_it_was_stopped(engine: Engine, sink: str):
    def stop(n: int, total: int | None) -> None:
        if n == 10:
            raise KeyboardInterrupt

    options: Any = {"engine": engine, "last": 1, "shard_bytes": SMALL}
    with pytest.raises(KeyboardInterrupt):
        extract(TEXTS, sink, progress=stop, **options)
    assert len(open_corpus(sink)) == 10
    left: list[int] = []
    corpus = extract(TEXTS, sink, progress=lambda n, total: left.append(n), **options)
    assert left == [*range(11, 21)]
    assert corpus.ids == [str(n) for n in range(20)]
    with pytest.raises(CorpusError, match="last 1, not 2"):
        extract(TEXTS, sink, engine=engine, last=2)


def test_the_later_of_two_writers_goes_on(engine: Engine, sink: str):
    options: Any = {"engine": engine, "last": 1}

    def interrupted() -> Iterator[str]:
        yield TEXTS[0]
        extract(TEXTS[:2], sink, **options)
        yield TEXTS[1]

    with pytest.raises(CorpusError, match="another process has begun to write"):
        extract(interrupted(), sink, **options)
    assert open_corpus(sink).ids == ["0", "1"]


def piece(first: int, shard: int) -> tuple[bytes, Any]:
    """A shard of three documents, and the rows of its index."""
    rows = [PartRow(n=i, id=f"d{i}", ids=[i, i + 1]) for i in range(first, first + 3)]
    arrays = [{"hidden": np.full((2, 4), row.n, np.float32)} for row in rows]
    return packed(rows, arrays, shard, compress=True)


def test_pieces_of_other_processes_are_found_again_and_others_removed(sink: str):
    files = open_files(sink)
    for first, shard in ((0, 71), (3, 5)):
        with Writer(sink, ABOUT) as writer:
            assert (writer.n_done, writer.ids()) == (first, {f"d{i}" for i in range(first)})
            data, table = piece(first, shard)
            files.write(f"shards/{shard_name(shard, compress=True)}", data)
            files.write(f"shards/{shard_name(shard + 1, compress=True)}", b"of a node that died")
            writer.add_piece(table, 3)
    with Writer(sink, ABOUT) as writer:
        assert writer.n_done == 6
    assert files.names("shards") == ["00005.safetensors.zst", "00071.safetensors.zst"]
    assert files.read("shards/00005.safetensors.zst") == piece(3, 5)[0]
    assert open_corpus(sink)["d4"].hidden[0, 0] == 4


def test_many_files_are_read_at_once_in_their_order(sink: str):
    files = open_files(sink)
    names = [f"index/{n:05}.parquet" for n in range(100)]
    for name in names:
        files.write(name, name.encode())
    assert list(files.read_all(names)) == [one.encode() for one in names]
    with pytest.raises(FileNotFoundError):
        list(files.read_all([*names, "index/none"]))


class Odd(fsspec.AbstractFileSystem):
    """A store that only reads, and has an error of its own kind."""

    protocol = "odd"

    def pipe_file(self, path: str, value: bytes, **more: Any) -> None:
        raise NotImplementedError

    def cat_file(self, path: str, start: Any = None, end: Any = None, **more: Any) -> bytes:
        raise RuntimeError("the store is on fire")


def test_what_a_url_cannot_do_is_a_typed_error(engine: Engine):
    fsspec.register_implementation("odd", Odd, clobber=True)
    with pytest.raises(CorpusError, match="odd://c cannot be written to"):
        extract(TEXTS, "odd://c", engine=engine, last=1)
    with pytest.raises(OSError, match="cannot be reached: the store is on fire"):
        open_corpus("odd://c")
    with pytest.raises(RequestError, match="memory://nothing is no corpus"):
        open_corpus("memory://nothing")
    with pytest.raises(RequestError, match="nosuch://c is no URL that fsspec knows"):
        open_corpus("nosuch://c")
    with pytest.raises(KqviewError, match="gcsfs"):
        open_corpus("gs://bucket/c")


class Forked(MemoryFileSystem):
    """A store that works only in the process that opened it, as those with connections do."""

    protocol = "forked"

    def __init__(self, *given: Any, **more: Any) -> None:
        super().__init__(*given, **more)
        self.process = os.getpid()

    def cat_file(self, path: str, start: Any = None, end: Any = None, **more: Any) -> bytes:
        assert self.process == os.getpid()
        return super().cat_file(path, start, end, **more)


def test_forked_process_reads(engine: Engine, monkeypatch: pytest.MonkeyPatch):
    fsspec.register_implementation("forked", Forked, clobber=True)
    corpus = extract(TEXTS[:2], "forked://c", engine=engine, last=1)
    monkeypatch.setattr(os, "getpid", lambda: -1)
    assert corpus["1"].attention.shape[2] == 1
