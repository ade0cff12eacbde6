"""Reader: a corpus as arrays that are read from its files when they are used.

They are mapped without a copy, unless the corpus is compressed or behind a URL.
"""

import math
import os
import random
from collections.abc import Iterator, Mapping
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from kqview import json_input
from kqview.corpora.files import INSTALL, Files, open_files, parquet_tables
from kqview.corpora.writer import CONSTANTS, FACTS, index_parts, read_facts, shard_name
from kqview.errors import CorpusError, RequestError, shown
from kqview.extras import needed
from kqview.types.forms import Array

if TYPE_CHECKING:
    import mmap

_LISTED: Final = 8
_N_READ: Final = 2  # compressed shards in memory


def open_corpus(path: str) -> "Corpus":
    """Open a corpus; it may still grow, and shows what is there now.

    Args:
        path: Its folder, or a URL of fsspec. Behind a URL nothing can be mapped: each array is
            read when it is used, or where it is compressed with its shard.

    Raises:
        RequestError: There is no corpus, or no such kind of URL.
        CorpusError: It is damaged.
        OSError: The URL cannot be reached.
        KqviewError: pyarrow is not installed, or for a URL fsspec or a package that it needs.
    """
    files = open_files(path)
    if (facts := read_facts(files)) is None:
        raise RequestError(f"{path} is no corpus: it has no {FACTS}; correct the path")
    arrow = needed("pyarrow", "a corpus needs", INSTALL)
    tables = [
        table.replace_schema_metadata()
        for table in parquet_tables(files, index_parts(files), dictionaries=CONSTANTS)
    ]
    if not tables:
        raise RequestError(
            f"{path} has no documents: its source has none, or its first piece is not written yet"
        )
    # What a run of an older version lacks is null.
    index = arrow.concat_tables(tables, promote_options="default")
    return Corpus(os.fspath(path), files, facts, index)


class Entry:
    """A document of a corpus, or one window of it.

    Its arrays are attributes: read-only views of the mapped file, or of what was read of one that
    is compressed or behind a URL, which stay valid as long as they are held. What there is depends
    on the fields of the corpus:

    - ``attention``, with ``attention_positions`` for ``top_k``: as `PromptAttention.array` of the
      rows that were wanted, ``(n_layers, n_heads, n_rows, n_columns)`` without reductions;
      ``attention.0`` and so on, with ``entry["attention.0"]``, where layers differ in heads.
    - ``hidden``: ``(n_layers, n_rows, n_embd)``, or ``(n_layers, n_embd)`` with *pool*.
    - ``logprobs`` float32 and ``ranks`` int32, ``(n_tokens,)``, as of `Score`; ``top_ids`` and
      ``top_logprobs``, ``(n_tokens, n)``, with -1 and NaN where there is none.
    - ``embedding``: float32 ``(n_embd,)``.
    - ``generated_ids``: int32 ``(n_tokens,)``; ``generated_attention`` as of `kqview.stack`, with
      ``top_k`` also ``generated_attention_positions``, -1 where a row has no value.

    Attributes:
        id: Its name.
        n: Its number in the source.
        status: "ok" or "error".
        error: Why it failed, None if it did not.
        window: Number of the window, 0 for the first or only one.
        start: Position of its first token in the document.
        token_ids: Its tokens.
        spans: Name, start and stop of each column of *attention* if it has sums over spans.
        text: The text that was generated, None without.
        columns: The columns of its record that were kept.
        windows: All windows of the document.
    """

    def __init__(self, corpus: "Corpus", row: Mapping[str, Any]) -> None:
        self._corpus = corpus
        self._shard: int = row["shard"]
        self._places = {one["name"]: one for one in row["arrays"]}
        self.id: str = row["id"]
        self.n: int = row["n"]
        self.status: str = row["status"]
        self.error: str | None = row["error"]
        self.window: int = row["window"]
        self.start: int = row["start"]
        self.token_ids: list[int] = row["token_ids"]
        self.spans = [(one["name"], one["start"], one["stop"]) for one in row["spans"]]
        self.text: str | None = row["text"]
        self.columns: dict[str, Any] = json_input.loads(row["columns"] or "{}")

    @property
    def names(self) -> list[str]:
        """Names of its arrays."""
        return list(self._places)

    @property
    def windows(self) -> "list[Entry]":
        return self._corpus.windows(self.id)

    def __getitem__(self, name: str) -> Array:
        """An array by its name.

        Raises:
            KeyError: There is none of this name.
        """
        place = self._places.get(name)
        if place is None:
            raise KeyError(
                f"{self.id} has no {name}; it has {', '.join(self._places) or 'no arrays'}"
                + (f" ({self.error})" if self.error else "")
            )
        return self._corpus.array(self._shard, place)

    def __getattr__(self, name: str) -> Array:
        if name.startswith("_"):
            raise AttributeError(name)
        try:
            return self[name]
        except KeyError as error:
            raise AttributeError(error.args[0]) from None

    def __repr__(self) -> str:
        what = self.error or ", ".join(self._places)
        return f"Entry({self.id!r}, {len(self.token_ids)} tokens, {what})"


class Corpus:
    """The documents of a corpus by their ids, in the order of their source; any thread.

    Attributes:
        facts: What it is of: ``model``, ``plan`` (capture, fields and options), ``versions``.
        index: All rows, as a pyarrow Table: a document or a window each, failed ones too.
    """

    def __init__(self, place: str, files: Files, facts: dict[str, Any], index: Any) -> None:
        self._place = place
        self._files = files
        self.facts = facts
        self.index = index
        self._compress: bool = facts["plan"]["compress"]
        self._contents = lru_cache(_N_READ if self._compress else None)(self._content)

    @cached_property
    def _rows(self) -> dict[str, list[int]]:
        """Rows of each document by its id, without duplicates."""
        found: dict[str, list[int]] = {}
        columns = (self.index[name].to_pylist() for name in ("id", "status"))
        for i, (id_, status) in enumerate(zip(*columns, strict=True)):
            if status != "duplicate":
                found.setdefault(id_, []).append(i)
        return found

    @property
    def ids(self) -> list[str]:
        """The ids of its documents, failed ones too."""
        return list(self._rows)

    def __len__(self) -> int:
        return len(self._rows)

    def __contains__(self, id_: object) -> bool:
        return id_ in self._rows

    def __iter__(self) -> Iterator[Entry]:
        """The documents, the first window of each."""
        return (self[id_] for id_ in self._rows)

    def __getitem__(self, id_: str) -> Entry:
        """A document by its id; the first window if it has several.

        Raises:
            KeyError: There is none with this id.
        """
        return self.windows(id_)[0]

    def windows(self, id_: str) -> list[Entry]:
        """All windows of a document; raises as looking it up."""
        rows = self._rows.get(id_)
        if rows is None:
            known = ", ".join(map(repr, self.ids[:_LISTED]))
            raise KeyError(f"there is no document {shown(id_)}; the first ones are {known}")
        return [Entry(self, one) for one in self.index.take(rows).to_pylist()]

    def filter(self, condition: Any) -> "Corpus":
        """The documents whose rows fulfil *condition*, a `pyarrow.compute` expression.

        ``corpus.filter(pc.field("n_tokens") > 100)``. Raises what pyarrow raises.
        """
        return Corpus(self._place, self._files, self.facts, self.index.filter(condition))

    def array(self, shard: int, place: Mapping[str, Any]) -> Array:
        """The array at *place* in the file of *shard*."""
        shape, offset = tuple(place["shape"]), place["offset"]
        dtype = np.dtype(place["dtype"]).newbyteorder("<")
        if self._compress or self._files.is_mapped:
            data = self._contents(shard)
        else:
            n_bytes = math.prod(shape) * dtype.itemsize
            data = self._content(shard, offset, offset + n_bytes) if n_bytes else b""
            offset = 0
        try:
            return np.ndarray(shape, dtype, data, offset)
        except (TypeError, ValueError):
            name = self._name(shard)
            raise CorpusError(
                f"{name} of {self._place} is shorter than its index says; extract it again"
            ) from None

    def _name(self, shard: int) -> str:
        return f"shards/{shard_name(shard, compress=self._compress)}"

    def _content(self, shard: int, start: int = 0, stop: int | None = None) -> "mmap.mmap | bytes":
        """The file of a shard, mapped, or read if it is compressed; bytes of it if these say so."""
        name = self._name(shard)
        try:
            if stop is not None:
                return self._files.read(name, start, stop)
            data = self._files.content(name)
            if not self._compress:
                return data
            arrow = needed("pyarrow", "a corpus needs", INSTALL)
            return bytes(arrow.CompressedInputStream(arrow.BufferReader(data), "zstd").read())
        except (OSError, ValueError) as error:
            raise CorpusError(
                f"{name} of {self._place} cannot be read: {error}; extract it again"
            ) from None

    def to_torch(self, *names: str, shuffle: bool = False, seed: int = 0) -> Any:
        """A map-style `torch.utils.data.Dataset` of the documents that did not fail.

        Args:
            *names: Arrays of each item; all that the document has if none is named.
            shuffle: Whether to mix the documents, the same way for the same *seed*.
            seed: Of the order.

        Returns:
            Items are dicts: ``id``, ``token_ids`` and each array as a tensor, a copy of its own.

        Raises:
            KqviewError: torch is not installed.
        """
        torch = needed("torch", "to_torch needs", "install it")
        ids = [one.id for one in self if one.status == "ok"]
        if shuffle:
            random.Random(seed).shuffle(ids)
        corpus = self

        class Documents(torch.utils.data.Dataset):
            def __len__(self) -> int:
                return len(ids)

            def __getitem__(self, i: int) -> dict[str, Any]:
                entry = corpus[ids[i]]
                item = {name: torch.from_numpy(entry[name].copy()) for name in names or entry.names}
                return {"id": entry.id, "token_ids": torch.tensor(entry.token_ids), **item}

        return Documents()

    def __repr__(self) -> str:
        return f"Corpus({self._place!r}, {len(self)} documents)"
