"""What a notebook shows of a generation and of a prompt's attention.

Neither holds attention that was handed out, and displaying must not take any: what is shown is what
the caller still has, found by weak references.
"""

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, cast

import numpy as np
from numpy.typing import NDArray

from kqview.coloured.encode import N_TEXTS_MAX
from kqview.coloured.html import coloured_html
from kqview.coloured.rows import QueryRow, Rows, layers_of, rows_of_queries, rows_of_tokens
from kqview.errors import InvalidCapture
from kqview.types import Capture, PromptBlock, Token
from kqview.types.token import Attention, Context, Positions

N_REMEMBERED: Final = N_TEXTS_MAX
PEEK_S: Final = 2.0
"""How long the display of a prompt's attention waits for the first rows."""


def generation_html(
    name: str, reason: str | None, context: Context, capture: Capture | None, tokens: list[Token]
) -> str:
    """The text of the generation *name* so far, coloured by the attention of *tokens*."""
    rows, notes = generation_rows(context, capture, tokens)
    n = len(rows.texts) - context.n_prompt
    state = "not finished" if reason is None else f"finish reason {reason}"
    if reason is None:
        notes.append(
            "It is not finished: these are the tokens taken so far. Displaying takes none; "
            "list(generation) or generation.read() takes the rest, generation.cancel() ends it."
        )
    return _shown(rows, f"Generation {name}: {_count(n)}, {state}", notes)


def generation_rows(
    context: Context, capture: Capture | None, tokens: list[Token]
) -> tuple[Rows, list[str]]:
    """The rows of *tokens* of a generation, and what is to be said about its other tokens."""
    ids = [*context.ids]
    texts = context.texts_of(ids)
    n_generated = len(ids) - context.n_prompt
    if capture is None:
        notes = ['It has no attention; pass capture="probs" to generate to see it here.']
        return Rows(texts, [], [], context.n_prompt), notes
    tokens = [token for token in tokens if token.index < n_generated]
    rows = rows_of_tokens(tokens, n_prompt=context.n_prompt)
    rows.texts = texts  # of the tokens without a row too
    if len(tokens) == n_generated:
        return rows, []
    return rows, [
        f"{len(tokens):,} of {n_generated:,} rows are shown: a row leaves memory with its token. "
        "Keep them with tokens = list(generation)."
    ]


class HandedRows:
    """Arrays of a prompt's rows that were handed out, for as long as something else holds them."""

    __slots__ = ("_parts", "has_begun")

    def __init__(self) -> None:
        self.has_begun = False
        self._parts: list[tuple[int, Any, Any]] = []

    def add(self, start: int, rows: Attention | None, positions: Positions | None) -> None:
        """Remember rows from position *start* on, in the form that `PromptBlock` has."""
        self.has_begun = True
        if rows is not None:
            self._parts = [part for part in self._parts if _strong(part[1]) is not None]
            self._parts.append((start, _weak(rows), _weak(positions)))

    def held(self) -> Iterable[tuple[int, Any, Any]]:
        """Start, rows and positions of those that are still held."""
        for start, weak_rows, weak_positions in self._parts:
            rows, positions = _strong(weak_rows), _strong(weak_positions)
            if rows is not None and (positions is not None) == (weak_positions is not None):
                yield start, rows, positions


def _weak(arrays: Any) -> Any:
    """Weak references to the arrays of one value, in its form."""
    if isinstance(arrays, tuple):
        return tuple(map(weakref.ref, cast("tuple[NDArray[Any], ...]", arrays)))
    return None if arrays is None else weakref.ref(arrays)


def _strong(weak: Any) -> Any:
    """What `_weak` was given, None if a part of it is gone."""
    if isinstance(weak, tuple):
        arrays = tuple(one() for one in cast("tuple[weakref.ref[NDArray[Any]], ...]", weak))
        return None if any(one is None for one in arrays) else arrays
    return None if weak is None else weak()


def prompt_rows(context: Context, capture: Capture, parts: Iterable[tuple[int, Any, Any]]) -> Rows:
    """The rows in *parts*: start, rows and positions of each."""
    texts = context.texts_of(context.ids[: context.n_prompt])
    found: dict[int, QueryRow] = {}
    for start, rows, positions in parts:
        layers = layers_of(rows, 2)
        places = None if positions is None else layers_of(positions, 2)
        causal = positions is None and _is_causal(layers, start)
        at, made = rows_of_queries(layers, start, places, n_context=len(texts), causal=causal)
        found.update(zip(at, made, strict=True))
    return Rows(
        texts,
        sorted(found),
        [found[i] for i in sorted(found)],
        None,
        tuple(capture.layers or ()),
        () if capture.reduce is not None else context.heads_of(capture),
        capture.kind,
        capture.reduce,
        bool(capture.spans),
    )


def _is_causal(layers: Sequence[NDArray[Any]], start: int) -> bool:
    """Whether the first query, which sees least, sees nothing behind it; encoders see all."""
    beyond = [layer[:, 0, start + 1 :] for layer in layers]
    return all(bool(np.all((one == 0) | np.isneginf(one))) for one in beyond)


def prompt_html(
    context: Context,
    capture: Capture,
    n_rows: int,
    handed: HandedRows,
    peek: Callable[[float], PromptBlock | None],
) -> str:
    """The prompt, coloured by the rows that are still held, else by the first that arrive.

    Args:
        context: The prompt's tokens.
        capture: What is captured.
        n_rows: How many rows there will be.
        handed: The rows that were handed out.
        peek: Waits for the first block for so many seconds, without taking it.
    """
    n = context.n_prompt
    parts = list(handed.held())
    if not handed.has_begun:
        block = peek(PEEK_S)
        if block is not None and block.rows is not None:
            parts = [(block.start, block.rows, block.positions)]
    rows = prompt_rows(context, capture, parts)
    notes: list[str] = []
    if not parts:
        notes = [
            "No rows are here: they are still computed, or they left memory after they were taken. "
            "Keep them with rows = attention.array(), and display it again."
        ]
    elif len(rows.at) < n_rows:
        notes = [f"{len(rows.at):,} of {n_rows:,} rows are shown: those that are in memory."]
    return _shown(rows, f"Attention of a prompt: {_count(n)}", notes)


def _shown(rows: Rows, title: str, notes: list[str]) -> str:
    try:
        return coloured_html(rows, title=title, notes=notes)
    except InvalidCapture as error:
        bare = Rows(rows.texts, [], [], rows.n_prompt)
        return coloured_html(bare, title=title, notes=[*notes, f"No attention is shown: {error}."])


def _count(n: int) -> str:
    return f"{n:,} token{'s' * (n != 1)}"
