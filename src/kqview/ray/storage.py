"""Storage: where a corpus of a cluster lies, a folder that all nodes see or an object store.

In a folder, the driver is the one writer of a corpus, as everywhere (`corpora.writer`). An object
store has no locks, and its objects appear whole: whoever starts two drivers on one URL gets a
corpus of neither.
"""

import io
import json
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from kqview import durable, json_input
from kqview.corpora.reader import Corpus, open_corpus
from kqview.corpora.sources import INSTALL
from kqview.corpora.writer import FACTS, FORMAT, Writer, shard_name
from kqview.errors import CorpusError
from kqview.extras import needed

_URL: Final = "://"


class _Folder:
    """A corpus in a folder, of which the driver holds the lock; as `_Objects`."""

    def __init__(self, folder: Path, writer: Writer) -> None:
        self._folder, self._writer = folder, writer
        self.add_piece, self.remove_unnamed = writer.add_piece, writer.remove_unnamed

    @property
    def n_done(self) -> int:
        return self._writer.n_done

    def ids(self) -> set[str]:
        tables = (_ids(path.read_bytes()) for path in sorted((self._folder / "index").iterdir()))
        return {one for table in tables for one in table}

    def corpus(self) -> Corpus | None:
        return open_corpus(str(self._folder)) if self.n_done else None


class _Objects:
    """A corpus in an object store.

    Attributes:
        n_done: Documents in its index.
    """

    def __init__(self, sink: str, facts: dict[str, Any]) -> None:
        self._files, self._root = _files(sink)
        self._parquet = needed("pyarrow.parquet", "a corpus needs", INSTALL)
        self._compress: bool = facts["plan"]["compress"]
        wanted = json.loads(json.dumps(facts))
        path = f"{self._root}/{FACTS}"
        for folder in ("shards", "index"):
            self._files.makedirs(f"{self._root}/{folder}", exist_ok=True)
        if not self._files.exists(path):
            self._files.pipe_file(path, json.dumps(wanted, indent=1).encode())
        known = json_input.loads(self._files.cat_file(path))
        for name in ("format", "model", "plan"):
            if known.get(name) != wanted[name]:
                raise CorpusError(
                    f"{sink} is a corpus with another {name}: {known.get(name)!r}, not "
                    f"{wanted[name]!r}; write to another URL"
                )
        self._n_pieces = len(self._named("index"))
        self.n_done = sum(self._about(name)["n_documents"] for name in self._named("index"))

    def _named(self, folder: str) -> list[str]:
        self._files.invalidate_cache()  # others write too
        try:
            return sorted(self._files.ls(f"{self._root}/{folder}", detail=False))
        except FileNotFoundError:  # there are no folders, but names of what is there
            return []

    def _about(self, name: str) -> dict[str, Any]:
        schema = self._parquet.read_schema(io.BytesIO(self._files.cat_file(name)))
        return json_input.loads(schema.metadata[b"kqview"])

    def ids(self) -> set[str]:
        """Ids of the documents in the index."""
        tables = (_ids(self._files.cat_file(name)) for name in self._named("index"))
        return {one for table in tables for one in table}

    def add_piece(self, table: Any, n_documents: int) -> None:
        """Write rows of so many documents as a part of the index."""
        about = json.dumps({"n_documents": n_documents})
        buffer = io.BytesIO()
        table = table.replace_schema_metadata({"kqview": about})
        self._parquet.write_table(table, buffer, compression="zstd")
        name = f"{self._root}/index/{self._n_pieces:05}.parquet"
        self._files.pipe_file(name, buffer.getvalue())
        self._n_pieces += 1
        self.n_done += n_documents

    def remove_unnamed(self) -> None:
        """Remove shards that no part of the index names."""
        known: set[str] = set()
        for name in self._named("index"):
            data = io.BytesIO(self._files.cat_file(name))
            numbers = self._parquet.read_table(data, columns=["shard"])["shard"].unique()
            known.update(shard_name(one, compress=self._compress) for one in numbers.to_pylist())
        for name in self._named("shards"):
            if Path(name).name not in known:
                self._files.rm_file(name)

    def corpus(self) -> None:
        """The corpus, where it can be mapped."""


Storage = _Folder | _Objects


@contextmanager
def open_storage(sink: str, facts: dict[str, Any]) -> Generator[Storage]:
    """Open the corpus at *sink*, a path or a URL, or make it.

    Raises:
        CorpusError: It is of something else, or another process writes to it.
        OSError: It cannot be read or written.
        KqviewError: fsspec is needed, but not installed.
    """
    facts = {"format": FORMAT, **facts, "plan": {**facts["plan"], "by": "ray"}}
    if _URL in sink:
        yield _Objects(sink, facts)
        return
    with Writer(Path(sink), facts, 1) as writer:
        yield _Folder(Path(sink), writer)


def write_shard(sink: str, name: str, data: bytes) -> None:
    """Write a shard of this name, on any node.

    Raises:
        OSError: It cannot be written.
    """
    if _URL in sink:
        files, root = _files(sink)
        files.pipe_file(f"{root}/shards/{name}", data)
    else:
        durable.write_whole(Path(sink) / "shards" / name, data)


def _ids(part: bytes) -> set[str]:
    parquet = needed("pyarrow.parquet", "a corpus needs", INSTALL)
    table = parquet.read_table(io.BytesIO(part), columns=["id", "status"]).to_pydict()
    pairs = zip(table["id"], table["status"], strict=True)
    return {id_ for id_, status in pairs if status != "duplicate"}


def _files(sink: str) -> tuple[Any, str]:
    """The file system of a URL, and the path there."""
    core = needed("fsspec.core", "a URL needs", 'run pip install "kqview[ray]"')
    return core.url_to_fs(sink)
