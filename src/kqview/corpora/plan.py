"""Plan: what is taken of each document, and the bytes that it will need."""

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from types import MappingProxyType
from typing import Any, Final, Literal, NamedTuple, TypedDict, cast, get_args

import numpy as np

from kqview.arguments import choice, flag, invalid, whole_number
from kqview.corpora.sources import Pair, SourceDocument
from kqview.engine import Engine
from kqview.errors import RequestError, shown
from kqview.saved import padded, stack
from kqview.submission import MOST_TOP, arguments_of
from kqview.types import Capture, Token
from kqview.types.capture import Kind
from kqview.types.token import add_token

Field = Literal["attention", "hidden", "scores", "embedding", "text"]
Pool = Literal["mean", "first", "last"]
TooLong = Literal["error", "truncate", "window"]
Arrays = dict[str, np.ndarray[Any, Any]]

MESSAGES: Final = "messages"
"""Value of *spans* that sums over the messages of a chat."""
_HEADER_BYTES: Final = 110  # of an array in the header of its shard
_ROW_BYTES: Final = 160  # of a document in the index, besides its ids
_N_PROMPTS: Final = 16  # whose ids are kept
_ID_BYTES: Final = 3  # of a token id there, compressed


class Options(TypedDict, total=False):
    """The options of `extract` that say what is taken of each document."""

    fields: Sequence[str] | None
    capture: Capture | Kind
    last: int | None
    pool: str | None
    top_logprobs: int | None
    generate: Mapping[str, Any] | None
    spans: str | Mapping[str, str] | None
    too_long: str
    max_length: int | None
    stride: int | None
    deterministic: bool
    compress: bool


DEFAULTS: Final[Mapping[str, Any]] = MappingProxyType(
    {
        "fields": None, "capture": "probs", "last": None, "pool": None, "top_logprobs": None,
        "generate": None, "spans": None, "too_long": "error", "max_length": None, "stride": None,
        "deterministic": False, "compress": False,
    }
)  # fmt: skip


class NamedSpan(NamedTuple):
    """Tokens *start* to *stop* of a document, and what they are."""

    name: str
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class DocumentPart:
    """A document, or one window of it, as it is evaluated.

    Attributes:
        window: Number of the window, 0 for the first or only one.
        start: Position of its first token in the document.
        ids: Its tokens.
        last: Tokens at its end whose rows and scores are wanted; None for all.
        spans: Columns whose sums are wanted, () for whole rows.
    """

    window: int
    start: int
    ids: list[int]
    last: int | None = None
    spans: tuple[NamedSpan, ...] = ()


class PartResult(NamedTuple):
    """What was found of a part: its arrays by name, and the text that was generated."""

    arrays: Arrays
    text: str | None = None


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is taken of each document; options as of `extract`."""

    engine: Engine
    fields: tuple[Field, ...]
    capture: Capture | None
    last: int | None
    pool: Pool | None
    top_logprobs: int | None
    generate: Mapping[str, Any]
    spans: str | Mapping[str, str] | None
    too_long: TooLong
    max_length: int
    stride: int
    deterministic: bool
    compress: bool

    @classmethod
    def of(cls, engine: Engine, options: Options) -> "Plan":
        """Check *options*; raises as `extract`."""
        one: dict[str, Any] = {**DEFAULTS, **options}
        last, pool, stride = one["last"], one["pool"], one["stride"]
        spans: str | Mapping[str, str] | None = one["spans"]
        max_length, deterministic = one["max_length"], one["deterministic"]
        wanted = Capture.of(one["capture"])
        if wanted is None:
            raise invalid("capture", "a kind such as 'probs', or a Capture", "None")
        given: Any = one["fields"]
        if given is None:
            given = ["attention"] if wanted.layers is None or wanted.layers else []
            given = [*given, *(["hidden"] if wanted.hidden else [])]
        if isinstance(given, str):
            raise invalid("fields", "a list of names such as ['attention']", shown(given))
        chosen = tuple(choice("fields", name, Field) for name in dict.fromkeys(given))
        if not chosen:
            raise RequestError(
                f"fields is empty; name some of {', '.join(get_args(Field))}", parameter="fields"
            )
        if "hidden" not in chosen:
            wanted = replace(wanted, hidden=())
        elif not wanted.hidden:
            wanted = replace(wanted, hidden="all")
        if "attention" not in chosen:
            wanted = replace(wanted, layers=(), spans=None, top_k=None) if wanted.hidden else None
        if spans is not None and ("attention" not in chosen or wanted is None or wanted.spans):
            raise RequestError(
                "spans of each document need the field attention, and a capture without spans of "
                "its own; leave one of them out",
                parameter="spans",
            )
        if isinstance(spans, Mapping):
            for pattern in spans.values():
                try:
                    re.compile(pattern)
                except re.error as error:
                    raise RequestError(
                        f"spans has {shown(pattern)}, which is no regular expression: {error}",
                        parameter="spans",
                    ) from None
        if wanted is not None:
            wanted = replace(wanted.for_prompt(), on_full="wait").resolved(engine.model)
            wanted.bytes_per_token(engine.model, 0)  # refuses layers that there are not
        generate: dict[str, Any] = dict(one["generate"] or {})
        if "text" not in chosen and generate:
            raise RequestError(
                "generate has options, but text is not among the fields; add it",
                parameter="generate",
            )
        arguments_of("generate", generate)  # refuses options that there are not
        n_top = one["top_logprobs"]
        if n_top is not None:
            if "scores" not in chosen:
                raise RequestError(
                    "top_logprobs come with scores, which are not among the fields; add them",
                    parameter="top_logprobs",
                )
            n_top = whole_number("top_logprobs", n_top, low=0, high=MOST_TOP)
        room = engine.n_ctx
        if "text" in chosen:
            generate.setdefault("max_tokens", 256)
            room -= whole_number("max_tokens", generate["max_tokens"], low=1)
            if deterministic:
                generate["deterministic"] = True
        if room < 1:
            raise RequestError(
                f"max_tokens is {generate['max_tokens']}, which leaves no room for a prompt in the "
                f"context of {engine.n_ctx}; lower it, or open the engine with a larger n_ctx",
                parameter="generate",
            )
        length = room
        if max_length is not None:
            length = min(room, whole_number("max_length", max_length, low=1))
        if stride is None:
            stride = max(1, length // 2)
        if not 1 <= whole_number("stride", stride) <= length:
            raise RequestError(
                f"stride is {stride}, allowed are 1 to {length}, the tokens of a window",
                parameter="stride",
            )
        return cls(
            engine=engine, fields=chosen, capture=wanted,
            last=None if last is None else whole_number("last", last, low=1),
            pool=None if pool is None else choice("pool", pool, Pool),
            top_logprobs=n_top, generate=generate, spans=spans,
            too_long=choice("too_long", one["too_long"], TooLong), max_length=length, stride=stride,
            deterministic=flag("deterministic", deterministic),
            compress=flag("compress", one["compress"]),
        )  # fmt: skip

    @property
    def is_large(self) -> bool:
        """Whether it keeps whole maps, whose bytes grow with the square of a document."""
        one = self.capture
        return (
            "attention" in self.fields
            and one is not None
            and self.last is None
            and self.spans is None
            and one.shortened_by is None
        )

    def described(self) -> dict[str, Any]:
        """What decides about the values, for the corpus: JSON."""
        capture = None
        if self.capture is not None:
            names = ("kind", "layers", "heads", "reduce", "top_k", "spans", "dtype", "hidden")
            capture = {name: getattr(self.capture, name) for name in names}
        names = (
            "fields", "last", "pool", "top_logprobs", "spans", "too_long", "max_length", "stride",
            "deterministic", "compress",
        )  # fmt: skip
        generate = {name: _plain(one) for name, one in self.generate.items()}
        return {**{n: getattr(self, n) for n in names}, "capture": capture, "generate": generate}

    # ---- a document

    @cached_property
    def _prompt_ids(self) -> Callable[[str], list[int]]:
        """Ids of a prompt; several pairs may have one prompt."""
        return lru_cache(_N_PROMPTS)(self.engine.tokenize)

    def parts(self, document: SourceDocument) -> Iterator[DocumentPart]:
        """What to evaluate of *document*; any thread.

        Raises:
            KqviewError: It cannot be evaluated.
        """
        engine, content = self.engine, document.content
        n_last, offsets, ends = self.last, None, None
        if isinstance(content, Pair):
            ids = self._prompt_ids(content.prompt)
            more = engine.tokenize(content.continuation, add_special=False)
            if not more:
                raise RequestError("its continuation is empty; send the text that follows")
            ids, n_last = ids + more, len(more) if n_last is None else min(n_last, len(more))
        elif isinstance(content, str):
            if self.spans is None:
                ids = engine.tokenize(content)
            else:
                ids, offsets = engine.tokenize(content, offsets=True)
        elif content and isinstance(content[0], dict):
            ids, ends = engine.apply_chat_template(cast("Any", content), spans=True)
        else:
            ids = cast("list[int]", content)
        spans: tuple[NamedSpan, ...] = ()
        if self.spans is not None:
            spans = self._spans(document, offsets, ends)
        if len(ids) <= self.max_length:
            yield DocumentPart(0, 0, ids, n_last, spans)
        elif self.too_long == "error":
            raise RequestError(
                f"it has {len(ids)} tokens, the limit is {self.max_length}; pass too_long="
                '"truncate" or "window", or a larger n_ctx'
            )
        elif spans and self.too_long == "window":
            raise RequestError("it is longer than a window, over which spans cannot be summed")
        elif self.too_long == "truncate":
            # A continuation is what is wanted, so a pair loses its front.
            is_pair = isinstance(content, Pair)
            start = len(ids) - self.max_length if is_pair else 0
            inside = tuple(one for one in spans if one.start < self.max_length)
            yield DocumentPart(0, start, ids[start : start + self.max_length], n_last, inside)
        else:
            # Of a pair, windows that have some of its continuation, and of each its part of that.
            n_before = len(ids) - n_last if isinstance(content, Pair) and n_last else 0
            starts = range(0, len(ids) - self.max_length + self.stride, self.stride)
            reaching = (one for one in starts if one + self.max_length > n_before)
            for window, start in enumerate(reaching):
                part = ids[start : start + self.max_length]
                n = None if n_last is None else min(n_last, start + len(part) - n_before)
                yield DocumentPart(window, start, part, n)

    def _spans(
        self,
        document: SourceDocument,
        offsets: Sequence[tuple[int, int]] | None,
        messages: Sequence[tuple[int, int]] | None,
    ) -> tuple[NamedSpan, ...]:
        if self.spans == MESSAGES:
            if messages is None:
                raise RequestError("it is no chat, so it has no messages to sum over")
            # A message of which the template writes nothing has no columns.
            found = [NamedSpan(str(i), *one) for i, one in enumerate(messages) if one[0] < one[1]]
            return tuple(found)
        text = document.content
        if offsets is None or not isinstance(text, str):
            raise RequestError("spans are ranges of a text, and it is none")
        named: dict[str, tuple[int, int]] = {}
        if isinstance(self.spans, str):
            given = document.record.get(self.spans)
            try:
                items = (
                    cast("Mapping[str, Any]", given).items()
                    if isinstance(given, Mapping)
                    else enumerate(() if given is None else given)
                )
            except TypeError:
                raise RequestError(
                    f"its column {self.spans} is {shown(cast('Any', given))}; send a list or a "
                    "mapping of spans"
                ) from None
            named = {str(name): one for name, one in items if one is not None}
        for name, pattern in self.spans.items() if isinstance(self.spans, Mapping) else ():
            match = re.search(pattern, text)
            if match is None:
                raise RequestError(f"its text has no {name}: nothing matches {shown(pattern)}")
            named[name] = match.span()
        found = [_of_characters(name, one, offsets) for name, one in named.items()]
        if not found:
            raise RequestError(f"it has no spans: the column {self.spans!r} is empty")
        return tuple(found)

    def evaluate(self, part: DocumentPart) -> PartResult:
        """Evaluate *part*; any thread. Raises the errors of the engine."""
        engine, ids, text = self.engine, part.ids, None
        arrays: Arrays = {}
        alone, is_scored, score = self.deterministic, "scores" in self.fields, None
        if self.capture is not None:
            capture = self.capture
            if part.spans:
                capture = replace(capture, spans=[(one.start, one.stop) for one in part.spans])
            found = engine.attend(
                ids, capture, last=part.last, deterministic=alone, score=is_scored,
                top_logprobs=self.top_logprobs if is_scored else None,
            )  # fmt: skip
            hidden = found.hidden if "hidden" in self.fields else None
            if "attention" in self.fields:
                rows, positions = found.top_k() if capture.top_k else (found.array(), None)
                arrays |= _named("attention", rows)
                if positions is not None:
                    arrays |= _named("attention_positions", positions)
            if hidden is not None:
                arrays |= _named("hidden", _pooled(hidden, self.pool))
            score = found.score
        if is_scored:
            n = self.top_logprobs
            if score is None:
                score = engine.score(ids, last=part.last, top_logprobs=n, deterministic=alone)
            arrays |= {"logprobs": score.logprobs, "ranks": score.ranks}
            if score.top_logprobs is not None:
                none = (-1, math.nan)
                top = [[*one, *[none] * ((n or 0) - len(one))] for one in score.top_logprobs]
                arrays["top_ids"] = np.array([[i for i, _ in one] for one in top], np.int32)
                arrays["top_logprobs"] = np.array([[p for _, p in one] for one in top], np.float32)
        if "embedding" in self.fields:
            arrays["embedding"] = engine.embed(ids)
        if "text" in self.fields:
            generation = engine.generate(ids, **self.generate)
            tokens: list[Token] = []
            for token in generation:
                add_token(tokens, token)
            text = generation.text
            arrays["generated_ids"] = np.array(generation.tokens, np.int32)
            if any(token.attention is not None for token in tokens):
                arrays["generated_attention"] = stack(tokens)
                positions = [token.attention_positions for token in tokens]
                if any(one is not None for one in positions):
                    arrays["generated_attention_positions"] = padded(positions, -1)
        return PartResult(arrays, text)

    def n_bytes(self, part: DocumentPart) -> int:
        """About how many bytes its arrays and its place in the index take, without a new text."""
        model, n = self.engine.model, len(part.ids)
        n_rows = n if part.last is None else min(n, part.last)
        total = _ROW_BYTES + _ID_BYTES * n
        if self.capture is not None:
            if "attention" in self.fields:
                rows = replace(self.capture, hidden=())
                if part.spans:
                    rows = replace(rows, spans=[(one.start, one.stop) for one in part.spans])
                total += _HEADER_BYTES + n_rows * rows.bytes_per_token(model, n)
            if "hidden" in self.fields:
                states = replace(self.capture, layers=(), spans=None, top_k=None)
                n_states = n_rows if self.pool is None else 1
                total += _HEADER_BYTES + n_states * states.bytes_per_token(model, n)
        if "scores" in self.fields:
            total += 2 * _HEADER_BYTES + n * 8 * (1 + (self.top_logprobs or 0))
        if "embedding" in self.fields:
            total += _HEADER_BYTES + 4 * model.n_embd
        return total


def _of_characters(
    name: str, span: tuple[int, int], offsets: Sequence[tuple[int, int]]
) -> NamedSpan:
    """The tokens that have a character of *span*."""
    try:
        start, stop = span
        inside = [i for i, (a, b) in enumerate(offsets) if a < b and a < stop and b > start]
    except (TypeError, ValueError):
        raise RequestError(
            f"its span {name} is {shown(span)}; send [start, stop], characters of the text"
        ) from None
    if not inside:
        raise RequestError(f"its span {name}, {start} to {stop}, holds no token of the text")
    return NamedSpan(name, inside[0], inside[-1] + 1)


def _named(name: str, value: Any) -> Arrays:
    """*value* by its name; one array a layer where layers differ in heads.

    Copies of views, because the engine needs its memory for what comes next.
    """
    parts: dict[str, np.ndarray[Any, Any]] = {name: value}
    if isinstance(value, tuple):
        given = cast("tuple[np.ndarray[Any, Any], ...]", value)
        parts = {f"{name}.{i}": one for i, one in enumerate(given)}
    return {key: one if one.flags.owndata else one.copy() for key, one in parts.items()}


def _pooled(hidden: np.ndarray[Any, Any], pool: Pool | None) -> np.ndarray[Any, Any]:
    """``(n_layers, n_rows, n_embd)``, or with *pool* ``(n_layers, n_embd)``."""
    if pool is None:
        return hidden
    if pool == "mean":
        return hidden.mean(axis=1, dtype=np.float32).astype(hidden.dtype)
    return hidden[:, 0 if pool == "first" else -1]


def _plain(value: Any) -> Any:
    """*value* as JSON, or a text that tells it from others."""
    if isinstance(value, str | int | float | bool | type(None)):
        return value
    if isinstance(value, list | tuple):
        return [_plain(one) for one in cast("Sequence[Any]", value)]
    return repr(value)
