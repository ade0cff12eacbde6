"""Extraction: from the documents of a source to a corpus, with every slot busy.

A few threads evaluate one document at a time, a little ahead of the one that is written, so memory
does not grow with the source. The documents of a group are evaluated in the order of their texts;
results are written in the order of the source.
"""

import json
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from importlib.metadata import version
from itertools import islice
from typing import Any, Final, NamedTuple, Unpack, cast

from kqview import _core
from kqview.arguments import INT32_MAX, whole_number
from kqview.corpora.plan import DEFAULTS, DocumentPart, Options, PartResult, Plan
from kqview.corpora.reader import Corpus, open_corpus
from kqview.corpora.sources import (
    Columns,
    Pair,
    SourceDocument,
    can_be_read_again,
    documents,
    n_documents,
)
from kqview.corpora.writer import HeldRows, PartRow, Writer, chained
from kqview.engine import Engine
from kqview.errors import ClosedError, CorpusError, KqviewError, RequestError
from kqview.many import Prompt, prompt_key, reporter
from kqview.option_names import names_options

SHARD_BYTES: Final = 256 * 2**20
_N_AHEAD: Final = 2  # documents in work and results kept, per slot
_UNITS: Final = ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"), (-1, "bytes"))


class Estimate(NamedTuple):
    """What a corpus will take.

    Attributes:
        n_documents: Documents of the source.
        n_failed: Those that cannot be evaluated.
        n_tokens: Tokens to evaluate.
        n_bytes: Bytes on disk, without texts that are generated and without compression.
    """

    n_documents: int
    n_failed: int
    n_tokens: int
    n_bytes: int


@names_options("estimate", DEFAULTS)
def estimate(
    source: object, *, engine: Engine, columns: Columns | None = None, **options: Unpack[Options]
) -> Estimate:
    """Count what `extract` would evaluate and write, by reading and tokenizing all of *source*.

    Arguments and errors as of `extract`.
    """
    plan = Plan.of(engine, options)
    n = n_failed = n_tokens = n_bytes = 0
    for document in documents(source, columns or Columns()):
        n += 1
        try:
            for part in _parts(plan, document):
                n_tokens += len(part.ids)
                n_bytes += plan.n_bytes(part)
        except ClosedError:
            raise
        except KqviewError:
            n_failed += 1
    return Estimate(n, n_failed, n_tokens, n_bytes)


@names_options("extract", DEFAULTS)
def extract(
    source: object,
    sink: str,
    *,
    engine: Engine,
    columns: Columns | None = None,
    keep: Sequence[str] = (),
    max_errors: int | None = None,
    shard_bytes: int = SHARD_BYTES,
    group: int = 1,
    progress: bool | Callable[[int, int | None], object] = False,
    yes: bool = False,
    **options: Unpack[Options],
) -> Corpus:
    """Evaluate the documents of *source* and write what is wanted of them to the folder *sink*.

    Called again with the same arguments after it was interrupted, it goes on where it was: no
    document is lost, none is there twice, and at most the work of one shard is done again. The
    source may have grown at its end. A document that fails is in the corpus with its error.

    Args:
        source: A file ``.jsonl``, ``.csv``, ``.tsv`` or ``.parquet``; a folder of ``.txt`` files,
            or of a data set that `datasets` saved; or an iterable, such as a data set, of texts,
            lists of ids, lists of messages, pairs (prompt, continuation) or records (see Columns).
            A mapping gives ids to documents.
        sink: Folder of the corpus; made if there is none. Or a URL of fsspec, such as
            ``s3://bucket/corpus``, with the package that this kind of URL needs.
        engine: Evaluates; its slots work at once.
        columns: Names of the columns of records.
        keep: Columns of records to keep, as `Entry.columns`.
        max_errors: Failed documents after which to stop; None for any number.
        shard_bytes: Size from which a shard is written. Twice as much may be in memory.
        group: Documents to read together and to evaluate in the order of their texts, so that a
            beginning that some of them share is evaluated once in a slot; for sources in which
            these do not follow one another, with *last* or pairs. Results of two groups may be in
            memory. Without effect if *deterministic*.
        progress: True prints a line to stderr; a function gets the number of documents that are
            done and that of all (None if unknown).
        yes: Write whole maps, of all rows and columns, however many bytes they take.
        **options: What is taken of each document.

            - fields: "attention", "hidden", "scores", "embedding", "text"; None for what *capture*
              has.
            - capture: As of `Engine.attend`, "probs" by default.
            - last: Rows and scores of so many tokens at the end alone. Of a pair, those of the
              continuation are the default.
            - pool: "mean", "first" or "last" of the rows of hidden states; None for all of them.
            - top_logprobs: As of `Engine.score`.
            - generate: Options of `Engine.generate` for "text", at most 256 tokens by default; with
              ``capture``, the rows of the generated tokens are kept too.
            - spans: Sums over spans in place of columns: a column of records with spans, as a list
              or by name, each [start, stop] in characters of the text; or regular expressions by
              name, whose first match counts; or "messages", for each message of a chat.
            - too_long: What becomes of a document with more tokens than *max_length*: "error";
              "truncate" keeps its beginning, of a pair its end; "window" evaluates windows that
              begin every *stride* tokens.
            - max_length: Most tokens of a document; what the context holds by default.
            - stride: Half of *max_length* by default.
            - compress: Shards are compressed with zstd. That pays for whole maps, of which half are
              zeros; their arrays are read into memory then instead of being mapped.
            - deterministic: The same corpus twice is equal in every byte. Documents are evaluated
              one after the other then, without cached prefixes.

    Returns:
        The corpus, with all documents.

    Raises:
        RequestError: An option is invalid, or whole maps are wanted without *yes*; the message has
            the bytes that they take.
        CorpusError: *sink* is of another model, source or options, or another process writes to it;
            or more than *max_errors* documents failed. What is written stays.
        OSError: A file cannot be read or written; what is written stays.
        KqviewError: pyarrow or safetensors is not installed, or the engine is closed.
    """
    columns = columns or Columns()
    plan = Plan.of(engine, options)
    whole_number("shard_bytes", shard_bytes, low=1)
    n_group = whole_number("group", group, low=1, high=INT32_MAX)
    if plan.is_large and not yes:
        raise RequestError(_warning(source, plan, engine, columns, options), parameter="yes")
    facts = facts_of(plan, keep)
    with Writer(sink, facts, shard_bytes) as writer:
        n_total = n_documents(source)

        def line(n_done: int, n_new: int, n_errors: int, spent_s: float) -> str:
            rate = n_new / spent_s
            left = "" if n_total is None else f", {(n_total - n_done) / rate:.0f} s left"
            return f"{rate:.1f}/s{left}" + (f", {n_errors} failed" if n_errors else "")

        report = reporter(progress, n_total, "documents", line)
        run = _Run(plan, writer, tuple(keep), max_errors, n_group, report)
        run.all(run.left(documents(source, columns)))
    return open_corpus(sink)


def facts_of(plan: Plan, keep: Sequence[str]) -> dict[str, Any]:
    """What a corpus says of itself: model, plan, versions."""
    engine = plan.engine
    return {
        "model": {
            "fingerprint": engine.fingerprint(),
            "name": engine.model.name,
            "architecture": engine.model.architecture,
        },
        "plan": {**plan.described(), "keep": list(keep)},
        "versions": {
            "kqview": version("kqview"),
            "llama.cpp": _core.build_info()["llama_cpp_commit"],
        },
    }


def held(plan: Plan, source: object, columns: Columns, keep: Sequence[str], group: int) -> HeldRows:
    """Evaluate all documents of *source*, whose results are in memory then."""
    found = HeldRows()
    run = _Run(plan, found, tuple(keep), None, group, lambda n, n_errors: None)
    run.all(run.left(documents(source, columns)))
    return found


def _warning(source: object, plan: Plan, engine: Engine, columns: Columns, options: Options) -> str:
    if not can_be_read_again(source):
        return (
            "whole maps are wanted, of documents that can be read only once, so their bytes are "
            "not known; pass yes=True, or spans, last, top_k or reduce and fewer columns"
        )
    found = estimate(source, engine=engine, columns=columns, **options)
    return (
        f"whole maps of {found.n_documents} documents with {found.n_tokens} tokens take about "
        f"{size(found.n_bytes)}; pass yes=True (--yes) to write them, or ask for less: spans, "
        "last, top_k, fewer layers or heads"
    )


def size(n_bytes: int) -> str:
    """*n_bytes* for people."""
    unit, name = next(one for one in _UNITS if n_bytes >= one[0])
    return f"{n_bytes / max(unit, 1):.3g} {name}"


def _parts(plan: Plan, document: SourceDocument) -> list[DocumentPart]:
    if document.error is not None:
        raise RequestError(document.error)
    return list(plan.parts(document))


class _Outcome(NamedTuple):
    """What became of a document."""

    n: int
    document: SourceDocument
    digest: str
    status: str
    error: str | None
    found: list[tuple[DocumentPart, PartResult]]


# Number, document, digest, whether its id came before.
_Left = tuple[int, SourceDocument, str, bool]


def _order(document: SourceDocument) -> str:
    """A text of *document*: those that begin alike have texts that begin alike."""
    content = document.content
    if isinstance(content, Pair):
        return "".join(content)
    return content if isinstance(content, str) else json.dumps(content, default=str)


class _Run:
    """One run of `extract`."""

    def __init__(
        self,
        plan: Plan,
        writer: Writer | HeldRows,
        keep: tuple[str, ...],
        max_errors: int | None,
        n_group: int,
        report: Callable[[int, int], object],
    ) -> None:
        self._plan = plan
        self._writer = writer
        self._keep = keep
        self._max_errors = max_errors
        self._n_group = n_group
        self._report = report
        self._seen: set[str] = set()
        self._n_errors = 0

    def left(self, source: Iterator[SourceDocument]) -> Iterator[_Left]:
        """The documents that are not in the corpus."""
        n_done, known, digest, n = self._writer.n_done, self._writer.digest, "", 0
        for n, document in enumerate(source, 1):
            digest = chained(
                digest, document.id, prompt_key(cast("Prompt", document.content or ""))
            )
            is_twice = document.id in self._seen
            self._seen.add(document.id)
            if n == n_done and digest != known:
                break
            if n > n_done:
                yield n - 1, document, digest, is_twice
        if n < n_done or (n == n_done and digest != known):
            raise CorpusError(
                f"the corpus has {n_done} documents of another source; go on with the source that "
                "it was begun with, or write to another folder"
            )

    def all(self, documents_left: Iterator[_Left]) -> None:
        """Evaluate and write what is left."""
        is_alone = self._plan.deterministic
        n_slots = len(self._plan.engine.slots)
        pending: deque[Future[_Outcome]] = deque()
        # One thread more than slots: while one tokenizes or copies, a request waits for its slot.
        pool = ThreadPoolExecutor(1 if is_alone else n_slots + 1, "kqview-extract")
        n_ahead = 1 if is_alone else _N_AHEAD * n_slots
        try:
            while group := list(islice(documents_left, 1 if is_alone else self._n_group)):
                # Evaluated in the order of their texts, written in that of the source.
                order = sorted(range(len(group)), key=lambda i: _order(group[i][1]))
                futures = {i: pool.submit(self._evaluated, *group[i]) for i in order}
                pending.extend(futures[i] for i in range(len(group)))
                while len(pending) > max(n_ahead, len(group)):
                    self._write(pending.popleft().result())
            while pending:
                self._write(pending.popleft().result())
        except KeyboardInterrupt:
            self._writer.commit()  # what is done need not be done again
            raise
        finally:
            pool.shutdown(cancel_futures=True)
        self._writer.commit()

    def _evaluated(self, n: int, document: SourceDocument, digest: str, is_twice: bool) -> _Outcome:
        if is_twice:
            error = "a document before it has the same id"
            return _Outcome(n, document, digest, "duplicate", error, [])
        try:
            parts = _parts(self._plan, document)
            found = [(part, self._plan.evaluate(part)) for part in parts]
        except ClosedError:
            raise
        except KqviewError as failure:
            return _Outcome(n, document, digest, "error", str(failure), [])
        return _Outcome(n, document, digest, "ok", None, found)

    def _write(self, one: _Outcome) -> None:
        kept = {name: one.document.record.get(name) for name in self._keep}
        row: dict[str, Any] = {"n": one.n, "id": one.document.id, "columns": kept}
        if one.status != "ok":
            self._n_errors += 1
            self._writer.add(PartRow(status=one.status, error=one.error, **row), {}, one.digest)
        for i, (part, result) in enumerate(one.found, 1):
            place: dict[str, Any] = {"window": part.window, "start": part.start, "ids": part.ids}
            self._writer.add(
                PartRow(**row, **place, spans=part.spans, text=result.text),
                result.arrays,
                one.digest,
                ends_document=i == len(one.found),
            )
        self._report(one.n + 1, self._n_errors)
        if self._max_errors is not None and self._n_errors > self._max_errors:
            self._writer.commit()
            raise CorpusError(
                f"{self._n_errors} documents failed, max_errors is {self._max_errors}; the last "
                f"one is {one.document.id!r}: {one.error}"
            )
