"""Sources: the documents of a corpus, one after the other, as their files have them.

Knows no model. A document that cannot be read is one with an error, and the next one follows.
"""

import csv
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple, cast

from kqview import json_input
from kqview.arguments import invalid
from kqview.corpora.files import INSTALL
from kqview.errors import RequestError, shown
from kqview.extras import needed

_CSV_FIELD: Final = 2**24  # characters, as many as `Engine.tokenize` takes bytes
_LISTED: Final = 12


class Pair(NamedTuple):
    """A prompt and the text that follows it."""

    prompt: str
    continuation: str


Content = str | list[int] | list[dict[str, Any]] | Pair
"""A text, ids, the messages of a chat, or a pair."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """Which columns of a record say what.

    A record has the first of these: *messages*, *prompt* and *continuation*, *ids*, *text*.

    Attributes:
        id: Name of the document; without this column its number in the source.
        text: A text.
        ids: Token ids, used unchanged.
        messages: A chat, as `Engine.chat` takes it.
        prompt: A text, before *continuation*.
        continuation: The text whose rows and scores are wanted.
    """

    id: str = "id"
    text: str = "text"
    ids: str = "ids"
    messages: str = "messages"
    prompt: str = "prompt"
    continuation: str = "continuation"


@dataclass(frozen=True, slots=True)
class SourceDocument:
    """A document of a source.

    Attributes:
        id: Its name.
        content: What it says; None with an *error*.
        record: All columns of its record; empty for one that is no record.
        error: Why it cannot be read, None if it can.
    """

    id: str
    content: Content | None
    record: Mapping[str, Any] = field(default_factory=dict[str, Any])
    error: str | None = None


def n_documents(source: Any) -> int | None:
    """How many documents there are; None where only reading all of them would tell."""
    if not isinstance(source, str | os.PathLike):
        return len(source) if hasattr(source, "__len__") else None
    path = Path(cast("str", source))
    if path.is_dir():
        return sum(1 for _ in path.rglob("*.txt")) or None
    if path.suffix.lower() == ".parquet" and path.exists():
        return needed("pyarrow.parquet", "Parquet needs", INSTALL).read_metadata(path).num_rows
    if path.suffix.lower() not in (".jsonl", ".ndjson") or not path.exists():
        return None
    with path.open("rb") as file:
        return sum(1 for _ in file)


def can_be_read_again(source: object) -> bool:
    """Whether *source* is no iterator, which gives its documents once."""
    return isinstance(source, str | os.PathLike) or iter(cast("Any", source)) is not source


def documents(source: object, columns: Columns) -> Iterator[SourceDocument]:
    """The documents of *source*, in its order.

    Args:
        source: A file ``.jsonl``, ``.csv``, ``.tsv`` or ``.parquet``; a folder of ``.txt`` files or
            one that `datasets` saved; a mapping of documents by their ids; or an iterable, such as
            a data set, of texts, lists of ids, lists of messages, pairs or records.
        columns: Of records.

    Raises:
        RequestError: There is no such file, or it is of another kind.
    """
    for n, one in enumerate(_items(source)):
        if isinstance(one, SourceDocument):
            yield one
        elif isinstance(one, Mapping):
            yield _of_record(n, cast("Mapping[str, Any]", one), columns)
        else:
            yield _of_content(str(n), one, {})


def _items(source: Any) -> Iterator[Any]:
    if isinstance(source, Mapping):
        given = cast("Mapping[object, object]", source)
        return (_of_content(str(name), one, {}) for name, one in given.items())
    if isinstance(source, str | os.PathLike):
        return _read(Path(cast("str", source)))
    if isinstance(source, bytes) or not isinstance(source, Iterable):
        raise invalid("source", "a file, a folder or an iterable of documents", shown(source))
    return iter(cast("Iterable[Any]", source))


def _read(path: Path) -> Iterator[Any]:
    if not path.exists():
        raise RequestError(f"source is {shown(str(path))}, which does not exist; correct the path")
    if path.is_dir():
        if any((path / name).exists() for name in ("state.json", "dataset_dict.json")):
            loaded = needed("datasets", "a saved data set needs", "run pip install datasets")
            return iter(loaded.load_from_disk(str(path)))
        return _texts(path)
    readers = {
        ".jsonl": _lines, ".ndjson": _lines, ".csv": _table, ".tsv": _table, ".parquet": _batches,
    }  # fmt: skip
    read = readers.get(path.suffix.lower())
    if read is None:
        raise RequestError(
            f"source is {shown(path.name)}; send one of {', '.join(readers)}, a folder of .txt "
            "files, or an iterable of documents",
            parameter="source",
        )
    return read(path)


def _texts(folder: Path) -> Iterator[SourceDocument]:
    """The ``.txt`` files of a folder and below, each by its path there."""
    files = sorted(file for file in folder.rglob("*.txt") if file.is_file())
    if not files:
        raise RequestError(
            f"source is the folder {shown(str(folder))}, which has no .txt file", parameter="source"
        )
    for file in files:
        name = file.relative_to(folder).as_posix()
        try:
            yield SourceDocument(name, file.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            yield SourceDocument(name, None, error=f"the file cannot be read: {error}")


def _lines(path: Path) -> Iterator[Any]:
    with path.open("rb") as file:
        for n, line in enumerate(file):
            try:
                yield json_input.loads(line)
            except ValueError as error:
                yield SourceDocument(str(n), None, error=f"line {n + 1} is not JSON: {error}")


def _table(path: Path) -> Iterator[Any]:
    before = csv.field_size_limit(_CSV_FIELD)
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:  # spreadsheets write a BOM
            yield from csv.DictReader(
                file, delimiter="\t" if path.suffix.lower() == ".tsv" else ","
            )
    except (csv.Error, UnicodeDecodeError) as error:
        raise RequestError(f"{path.name} cannot be read as a table: {error}") from error
    finally:
        csv.field_size_limit(before)


def _batches(path: Path) -> Iterator[Any]:
    with needed("pyarrow.parquet", "Parquet needs", INSTALL).ParquetFile(path) as file:
        for batch in file.iter_batches(batch_size=256):
            yield from batch.to_pylist()


# ---- one document


def _of_record(n: int, record: Mapping[str, Any], columns: Columns) -> SourceDocument:
    given = {name: one for name, one in record.items() if one is not None}
    id_ = str(given.get(columns.id, n))
    if columns.messages in given:
        return _of_content(id_, given[columns.messages], record)
    if columns.prompt in given and columns.continuation in given:
        return _of_content(id_, (given[columns.prompt], given[columns.continuation]), record)
    for name in (columns.ids, columns.text):
        if name in given:
            return _of_content(id_, given[name], record)
    known = ", ".join([str(name) for name in given][:_LISTED])
    error = f"the record has neither of the columns of {columns}; it has {known or 'none'}"
    return SourceDocument(id_, None, record, error)


def _of_content(id_: str, one: object, record: Mapping[str, Any]) -> SourceDocument:
    content: Content | None = None
    if isinstance(one, str):
        content = one
    elif isinstance(one, Sequence) or (hasattr(one, "tolist") and getattr(one, "ndim", 1) == 1):
        items: list[Any] = [] if isinstance(one, bytes) else list(cast("Iterable[Any]", one))
        if items and all(isinstance(part, Mapping) for part in items):
            content = [dict(part) for part in items]
        elif isinstance(one, tuple) and len(items) == 2 and all(type(p) is str for p in items):
            content = Pair(*items)
        elif items and not isinstance(items[0], str):
            content = items
    if content is None:
        what = "a text, a list of ids or of messages, or a pair (prompt, continuation)"
        return SourceDocument(
            id_, None, record, f"the document is {shown(cast('object', one))}; send {what}"
        )
    return SourceDocument(id_, content, record)
