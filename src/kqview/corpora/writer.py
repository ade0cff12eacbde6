"""Writer: the files of a corpus, of which each piece appears whole or not at all.

``corpus.json`` says what the corpus is of. A piece is a shard, ``shards/00000.safetensors``, with
the arrays of some documents, and then its part of the index, ``index/00000.parquet``: once that is
there, its documents are done. A shard without one is left from a process that died, and is written
again. Pieces follow the order of the source, so the number of documents in the index says where to
go on, and the digest in its last part whether the source still begins in the same way.
"""

import hashlib
import io
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Self

from kqview import json_input
from kqview.corpora.files import INSTALL, Files, open_files, parquet_tables
from kqview.corpora.plan import Arrays, NamedSpan
from kqview.errors import CorpusError
from kqview.extras import needed

FORMAT: Final = 1
FACTS: Final = "corpus.json"
_MOST_ROWS: Final = 4096  # documents of a piece, so that little is repeated where they are small
_NO_DIGEST: Final = ""
CONSTANTS: Final = ("capture", "fingerprint", "versions")
"""Columns of the index that are the same for all documents of a run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartRow:
    """A document, or one of its windows, as the index has it.

    Attributes:
        n: Its number in the source, from 0.
        id: Its name.
        status: "ok"; "error"; "duplicate", of a name that came before.
        error: Why it failed.
        window: As of `DocumentPart`, like start, ids and spans.
        columns: Those of its record that are kept.
        text: The text that was generated.
    """

    n: int
    id: str
    status: str = "ok"
    error: str | None = None
    window: int = 0
    start: int = 0
    ids: list[int] = field(default_factory=list[int])
    spans: tuple[NamedSpan, ...] = ()
    columns: dict[str, Any] = field(default_factory=dict[str, Any])
    text: str | None = None


class HeldRows:
    """Keeps what a `Writer` would write, for somebody else to write it.

    Attributes:
        rows: Documents and windows.
        arrays: Those of each row.
        n_documents: Documents among the rows.
    """

    n_done = 0
    digest = ""

    def __init__(self) -> None:
        self.rows: list[PartRow] = []
        self.arrays: list[Arrays] = []
        self.n_documents = 0

    def add(self, row: PartRow, arrays: Arrays, digest: str, *, ends_document: bool = True) -> None:
        """As of `Writer`."""
        self.rows.append(row)
        self.arrays.append(arrays)
        self.n_documents += ends_document

    def commit(self) -> None:
        """Keep on holding."""


class Writer:
    """Writes one corpus; a context manager that lets it go. One thread.

    Attributes:
        n_done: Documents of the source that are in the index.
        digest: Of these, None if there are none.
    """

    def __init__(self, sink: str, facts: dict[str, Any], shard_bytes: int = 1) -> None:
        """Open or make *sink*, a folder or a URL, for a corpus with these *facts*.

        Raises:
            CorpusError: Another process writes to it, or it is of something else.
            OSError: It cannot be written to.
        """
        self._arrow = needed("pyarrow", "a corpus needs", INSTALL)
        self._parquet = needed("pyarrow.parquet", "a corpus needs", INSTALL)
        needed("safetensors.numpy", "a corpus needs", INSTALL)
        self._sink, self._files, self._shard_bytes = sink, open_files(sink), shard_bytes
        self._facts: dict[str, Any] = json.loads(json.dumps({"format": FORMAT, **facts}))
        self._compress: bool = facts["plan"]["compress"]
        self._rows: list[PartRow] = []
        self._arrays: list[Arrays] = []
        self._n_bytes = 0
        self._shards: set[int] = set()  # that the index names
        self._files.begin_writing()
        try:
            self._check()
            self.n_done, self.digest, self._n_pieces = self._found()
        except BaseException:
            self.close()
            raise

    def _check(self) -> None:
        wanted = self._facts
        if (known := read_facts(self._files)) is None:
            self._files.write(FACTS, json.dumps(wanted, indent=1).encode())
            return
        for name in ("format", "model", "plan"):
            if known.get(name) == wanted[name]:
                continue
            what = ", ".join(_differences(known.get(name), wanted[name]))
            raise CorpusError(
                f"{self._sink} is a corpus with another {name}: {what}; write to another folder, "
                "or start with what it was begun with"
            )

    def _found(self) -> tuple[int, str, int]:
        """Documents, their digest and pieces; what dead processes left is removed."""
        parts = index_parts(self._files)
        for table in parquet_tables(self._files, parts, columns=["shard"]):
            self._note_shards(table)
        self.remove_unnamed()
        if not parts:
            return 0, _NO_DIGEST, 0
        last = self._arrow.BufferReader(self._files.read(parts[-1]))
        about = json_input.loads(self._parquet.read_schema(last).metadata[b"kqview"])
        return about["n_done"], about["digest"], len(parts)

    def ids(self) -> set[str]:
        """Ids of the documents in the index."""
        found: set[str] = set()
        parts = index_parts(self._files)
        for table in parquet_tables(self._files, parts, columns=["id", "status"]):
            pairs = zip(table["id"].to_pylist(), table["status"].to_pylist(), strict=True)
            found.update(id_ for id_, status in pairs if status != "duplicate")
        return found

    def _note_shards(self, table: Any) -> None:
        self._shards.update(table["shard"].unique().to_pylist())

    def remove_unnamed(self) -> None:
        """Remove shards that no part of the index names; their writers died before that."""
        known = {shard_name(one, compress=self._compress) for one in self._shards}
        for shard in self._files.names("shards"):
            if ".safetensors" in shard and shard not in known:
                self._files.remove(f"shards/{shard}")

    def add(self, row: PartRow, arrays: Arrays, digest: str, *, ends_document: bool = True) -> None:
        """Add a document or a window; *digest* is that of the source with this document."""
        self._rows.append(row)
        self._arrays.append(arrays)
        self._n_bytes += sum(one.nbytes for one in arrays.values())
        if ends_document:
            self.n_done, self.digest = row.n + 1, digest
            if self._n_bytes >= self._shard_bytes or len(self._rows) >= _MOST_ROWS:
                self.commit()

    def commit(self) -> None:
        """Write what was added as a piece.

        Raises:
            OSError: It cannot be written; what was written before stays as it is.
        """
        if not self._rows:
            return
        shard = self._n_pieces
        data, table = packed(self._rows, self._arrays, shard, compress=self._compress)
        if data:
            name = shard_name(shard, compress=self._compress)
            self._files.write(f"shards/{name}", data)
            del data
        self._put(table)
        self._rows, self._arrays, self._n_bytes = [], [], 0

    def add_piece(self, table: Any, n_documents: int) -> None:
        """Add rows of an index, of so many documents, whose shard another process has written.

        Raises:
            OSError: As of `commit`.
        """
        self.n_done += n_documents
        self._put(table)

    def _put(self, table: Any) -> None:
        """Write a part of the index; with it, its documents are done."""
        facts = self._facts
        capture, versions = json.dumps(facts["plan"]["capture"]), json.dumps(facts["versions"])
        values = capture, facts["model"]["fingerprint"], versions
        for name, value in zip(CONSTANTS, values, strict=True):
            column = self._arrow.repeat(self._arrow.scalar(value), len(table))
            table = table.append_column(name, column)
        about = {"n_done": self.n_done, "digest": self.digest}
        table = table.replace_schema_metadata({"kqview": json.dumps(about)})
        buffer = io.BytesIO()
        # The same documents give the same bytes, whoever wrote them and when.
        self._parquet.write_table(table, buffer, compression="zstd")
        self._files.write(f"index/{self._n_pieces:05}.parquet", buffer.getvalue())
        self._n_pieces += 1
        self._note_shards(table)

    def close(self) -> None:
        """Let other processes write."""
        self._files.end_writing()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _differences(have: Any, want: Any, name: str = "") -> Iterator[str]:
    """Each value that differs, down to those of mappings in mappings."""
    if hasattr(have, "items") and hasattr(want, "items"):
        for key, one in want.items():
            if have.get(key) != one:
                yield from _differences(have.get(key), one, f"{key} ")
    else:
        yield f"{name}{have!r}, not {want!r}"


def shard_name(shard: int, *, compress: bool) -> str:
    """Name of the file of the shard of this number."""
    return f"{shard:05}.safetensors{'.zst' if compress else ''}"


def packed(
    rows: Sequence[PartRow], arrays: Sequence[Arrays], shard: int, *, compress: bool
) -> tuple[bytes, Any]:
    """A safetensors file of *arrays*, empty if there are none, and the rows of the index for it.

    Args:
        rows: Documents and windows.
        arrays: Those of each.
        shard: Number of the file.
        compress: Whether the file is compressed; places are those in it without compression.
    """
    arrow = needed("pyarrow", "a corpus needs", INSTALL)
    tensors = {f"{i}.{key}": one for i, of in enumerate(arrays) for key, one in of.items()}
    data = needed("safetensors.numpy", "a corpus needs", INSTALL).save(tensors) if tensors else b""
    places = _places(data) if data else {}
    columns = [
        {
            "n": row.n,
            "id": row.id,
            "status": row.status,
            "error": row.error,
            "window": row.window,
            "start": row.start,
            "n_tokens": len(row.ids),
            "token_ids": row.ids,
            "spans": [one._asdict() for one in row.spans],
            "text": row.text,
            "columns": json.dumps(row.columns, default=repr) if row.columns else None,
            "shard": shard,
            "arrays": [{"name": name, **places[f"{i}.{name}"]} for name in sorted(arrays[i])],
        }
        for i, row in enumerate(rows)
    ]
    if data and compress:
        data = arrow.compress(data, codec="zstd", asbytes=True)
    return data, arrow.Table.from_pylist(columns, schema=_schema(arrow))


def chained(digest: str, id_: str, key: str) -> str:
    """The digest of a source that goes on with the document *id_* of this content."""
    return hashlib.sha256(f"{digest}\0{id_}\0{key}".encode(errors="surrogatepass")).hexdigest()


def read_facts(files: Files) -> dict[str, Any] | None:
    """What the corpus in *files* is of; None if there is none.

    Raises:
        CorpusError: It is damaged.
    """
    try:
        return json_input.loads(files.read(FACTS))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except ValueError as error:
        raise CorpusError(f"{FACTS} is damaged: {error}; extract it again") from None


def index_parts(files: Files) -> list[str]:
    """The names of the parts of the index in their order."""
    names = (one for one in files.names("index") if one[0].isdigit() and one.endswith(".parquet"))
    return [f"index/{one}" for one in names]


def _places(data: bytes) -> dict[str, Any]:
    """Where each array of a safetensors file is: offset in the file, shape, dtype."""
    n_header = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + n_header])
    header.pop("__metadata__", None)
    return {
        name: {
            "offset": 8 + n_header + one["data_offsets"][0],
            "shape": one["shape"],
            "dtype": _DTYPES[one["dtype"]],
        }
        for name, one in header.items()
    }


_DTYPES: Final = {"F32": "float32", "F16": "float16", "F64": "float64", "I32": "int32"}


def _schema(arrow: Any) -> Any:
    span = {"name": arrow.string(), "start": arrow.int32(), "stop": arrow.int32()}
    array = {
        "name": arrow.string(), "offset": arrow.int64(), "shape": arrow.list_(arrow.int64()),
        "dtype": arrow.string(),
    }  # fmt: skip
    return arrow.schema(
        {
            "n": arrow.int64(), "id": arrow.string(), "status": arrow.string(),
            "error": arrow.string(), "window": arrow.int32(), "start": arrow.int32(),
            "n_tokens": arrow.int32(), "token_ids": arrow.list_(arrow.int32()),
            "spans": arrow.list_(arrow.struct(span)), "text": arrow.string(),
            "columns": arrow.string(), "shard": arrow.int64(),
            "arrays": arrow.list_(arrow.struct(array)),
        }
    )  # fmt: skip
