"""``kqview extract``: what is wanted of each document of a corpus, into a folder."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final, Literal

import typer

from kqview.cli.option_groups import argument, option, with_groups
from kqview.cli.options import CaptureChoice, EngineChoice, parse_indices
from kqview.corpora import extraction
from kqview.corpora.sources import Columns
from kqview.errors import RequestError

_MIB: Final = 2**20


@with_groups
def extract(
    *,
    source: EngineChoice,
    documents: str | None = argument(
        None, "File .jsonl, .csv, .tsv or .parquet, or a folder of .txt files.", metavar="SOURCE"
    ),
    sink: str | None = argument(None, "Folder of the corpus.", metavar="SINK"),
    fields: str | None = option(
        None,
        "What to keep: attention, hidden, scores, embedding, text. [default: what is captured]",
        metavar="LIST",
    ),
    capture: CaptureChoice,
    hidden: str | None = option(
        None, "Layers whose hidden states are kept, such as 0,-1, or all.", metavar="LIST"
    ),
    last: int | None = option(None, "Only the last N tokens.", min=1, metavar="N"),
    pool: Literal["mean", "first", "last"] | None = option(
        None, "Keep one hidden state of each document."
    ),
    pooling: Literal["mean", "cls", "last"] | None = option(
        None, "With --fields embedding: how vectors are pooled. [default: as the file says]"
    ),
    span: list[str] | None = option(
        None,
        "Sums over columns: a column of records with spans, messages, or NAME=REGEX; "
        "the last form is repeatable.",
        "--span",
        metavar="WHAT",
    ),
    top_logprobs: int | None = option(
        None, "With --fields scores: the K most probable tokens.", min=0, metavar="K"
    ),
    max_tokens: int | None = option(
        None, "With --fields text: most tokens to generate.", "--max-tokens -n", min=1
    ),
    temperature: float | None = option(None, "With --fields text.", min=0),
    seed: int | None = option(None, "With --fields text."),
    slots: int = option(4, "Documents that are evaluated at once.", min=1),
    too_long: Literal["error", "truncate", "window"] = option(
        "error", "What becomes of a document that is longer than the context."
    ),
    max_length: int | None = option(None, "Most tokens of a document.", min=1, metavar="N"),
    stride: int | None = option(None, "Tokens from one window to the next.", min=1, metavar="N"),
    column: list[str] | None = option(
        None, "Name of a column, such as text=body; repeatable.", "--column", metavar="WHAT=NAME"
    ),
    keep: list[str] | None = option(
        None, "Keep this column of each record; repeatable.", "--keep", metavar="NAME"
    ),
    max_errors: int | None = option(
        None, "Stop after so many documents that fail.", min=0, metavar="N"
    ),
    shard_mib: int = option(
        extraction.SHARD_BYTES // _MIB, "Size of a shard.", min=1, metavar="MIB"
    ),
    group: int = option(
        1, "Documents to evaluate in the order of their texts.", min=1, metavar="N"
    ),
    deterministic: bool = option(
        False, "The same corpus twice is equal in every byte.", "--deterministic"
    ),
    compress: bool = option(False, "Compress shards with zstd; pays for whole maps.", "--compress"),
    only_estimate: bool = option(
        False, "Count documents, tokens and bytes, and evaluate nothing.", "--estimate"
    ),
    yes: bool = option(False, "Write whole maps, however many bytes they take.", "--yes -y"),
) -> None:
    """Write the attention, hidden states, scores or texts of many documents to a folder.

    Started again after it was interrupted, it goes on where it was. A document that fails is in
    the corpus with its error. `kqview.open_corpus(SINK)` reads it, and so do pyarrow and numpy.

    Examples:

    - `kqview extract docs.jsonl corpus --demo --reduce mean_heads --last 1`
    - `kqview extract docs.jsonl corpus -m model.gguf --fields hidden --hidden -1 --pool mean`
    - `kqview extract docs.csv corpus -m model.gguf --fields scores --column text=body`
    - `kqview extract docs.jsonl corpus -m model.gguf --span "question=Q:.*" --span "answer=A:.*"`
    """
    model, words = source.resolve(documents, sink)
    if len(words) != (1 if only_estimate else 2):
        raise RequestError("name a source and a folder: SOURCE SINK, and the model by an option")
    plan = capture.plan()
    if hidden is not None:
        plan = replace(
            plan, hidden=hidden if hidden == "all" else parse_indices("--hidden", hidden)
        )
    generate = {"max_tokens": max_tokens, "temperature": temperature, "seed": seed}
    options: dict[str, Any] = {
        "fields": None if fields is None else [one.strip() for one in fields.split(",")],
        "capture": plan,
        "last": last,
        "pool": pool,
        "top_logprobs": top_logprobs,
        "generate": {name: one for name, one in generate.items() if one is not None} or None,
        "spans": _spans(span or ()),
        "too_long": too_long,
        "max_length": max_length,
        "stride": stride,
        "deterministic": deterministic,
        "compress": compress,
        "columns": Columns(**_pairs("--column", column or ())),
    }
    with source.open(model, n_slots=slots, pooling=pooling) as engine:
        if only_estimate:
            found = extraction.estimate(words[0], engine=engine, **options)
            typer.echo(
                f"{found.n_documents} documents, {found.n_failed} of them fail, "
                f"{found.n_tokens} tokens, about {extraction.size(found.n_bytes)}"
            )
            return
        corpus = extraction.extract(
            words[0], words[1], engine=engine, keep=keep or (), max_errors=max_errors,
            shard_bytes=shard_mib * _MIB, group=group, progress=True, yes=yes, **options,
        )  # fmt: skip
    typer.echo("", err=True)
    failed = [one for one in corpus.index["status"].to_pylist() if one != "ok"]
    typer.echo(f"{words[1]}: {len(corpus)} documents, {len(failed)} failed")


def _spans(given: Sequence[str]) -> str | dict[str, str] | None:
    if len(given) == 1 and "=" not in given[0]:
        return given[0]
    return _pairs("--span", given) or None


def _pairs(name: str, given: Sequence[str]) -> dict[str, str]:
    """``WHAT=VALUE`` of each."""
    found: dict[str, str] = {}
    for one in given:
        what, sign, value = one.partition("=")
        if not sign or not what or not value:
            raise RequestError(f"{name} is {one!r}; write WHAT=VALUE")
        found[what] = value
    if name == "--column" and (unknown := found.keys() - Columns.__dataclass_fields__.keys()):
        known = ", ".join(Columns.__dataclass_fields__)
        raise RequestError(f"{name} has {', '.join(sorted(unknown))}; there are {known}")
    return found
