"""Token: a generated token with the attention of its query; PromptBlock: rows of the prompt."""

import codecs
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, cast, overload

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kqview.errors import InvalidCapture
from kqview.types import forms
from kqview.types.capture import Capture
from kqview.types.forms import Framework
from kqview.types.score import TokenScore

Array = NDArray[np.floating[Any]]
Attention = Array | tuple[Array, ...]
Positions = NDArray[np.int32] | tuple[NDArray[np.int32], ...]
# Whether a row is there, and an array or a tuple, depends on what was asked for and on the model,
# which no type of a call can tell. To type checkers they are what they almost always are: Any lets
# code test for the rest, and does not make it.
AnyAttention = Array | Any
AnyPositions = NDArray[np.int32] | Any

_NONE: Final = range(0)


@dataclass(slots=True, eq=False, repr=False)
class Context:
    """The tokens of one generation, prompt first: what the columns of its rows stand for.

    Shared by the tokens of the generation. Ids are only ever appended, so a token needs to know
    just how many there were before it.

    Attributes:
        ids: Ids of the prompt, and then those that are generated.
        n_prompt: Number of ids of the prompt.
        n_head: Heads per layer; the largest number if layers differ.
        bytes_of: Bytes of token ids.
    """

    ids: list[int]
    n_prompt: int
    n_head: int
    bytes_of: Mapping[int, bytes]

    def branch(self, n_generated: int) -> "Context":
        """A context that goes on after *n_generated* tokens; this one keeps those after them."""
        ids = self.ids[: self.n_prompt + n_generated]
        return Context(ids, self.n_prompt, self.n_head, self.bytes_of)

    def text_of(self, token_id: int) -> str:
        data = self.bytes_of.get(token_id)
        return f"#{token_id}" if data is None else data.decode("utf-8", "replace")

    def texts_of(self, ids: Iterable[int]) -> list[str]:
        """Texts that join to the text of *ids*: tokens inside a character have "", its last has it.

        Bytes that are no UTF-8 together either become U+FFFD.
        """
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        texts: list[str] = []
        for token_id in ids:
            data = self.bytes_of.get(token_id)
            texts.append(decoder.decode(data or b"") if data is not None else f"#{token_id}")
        if texts:
            texts[-1] += decoder.decode(b"", final=True)
        return texts

    def heads_of(self, capture: Capture | None) -> tuple[int, ...]:
        """The heads of each layer that *capture* keeps; those of the largest if layers differ."""
        if capture is None or not capture.layers:
            return ()
        return tuple(range(self.n_head) if capture.heads is None else capture.heads)

    def __reduce__(self) -> Any:
        # The texts of the whole vocabulary stay behind.
        known = {i: self.bytes_of[i] for i in {*self.ids} & self.bytes_of.keys()}
        return Context, (self.ids, self.n_prompt, self.n_head, known)


@dataclass(slots=True, eq=False, repr=False, weakref_slot=True)
class Token:
    """One generated token.

    Tokens compare by identity, because arrays have no single truth value. The arrays are read-only
    zero-copy views; each stays valid for as long as it is held. ``torch.from_dlpack`` makes a
    tensor on the same memory, and torch does not know that it is read-only: writing to that tensor
    changes the view without an error. ``to_hf("pt")`` and ``rows.copy()`` give copies.

    Attributes:
        id: Id in the vocabulary.
        text: Text that this token completes; "" inside a UTF-8 character. The texts of a generation
            join to its exact output; if that ends inside a character, the last text grows by U+FFFD
            when the generation ends.
        index: Position in the generation, from 0.
        logprob: Natural logarithm of the probability of ``id``; None unless top_logprobs was given.
            It is the model's own, before bias, penalties, grammar and samplers, unless
            ``post_sampling_probs`` was given.
        top_logprobs: The most probable ids with such logprobs, best first; None unless requested.
        attention: Row of the query that produced this token; its columns are the ``n_context``
            tokens before it. Shape ``(n_layers, n_heads, n_context)``, float32 or float16,
            C-contiguous. If layers differ in heads, a tuple with one ``(n_heads, n_context)`` per
            layer. With ``reduce``: ``(n_layers, n_context)`` or ``(n_context,)``. With ``top_k``:
            the k largest values of each row, best first, instead of ``n_context``; with ``spans``:
            a sum for each span. None without capture, if ``on_full="drop"`` dropped it, and for
            what a mod adds without a forward pass of its own: the ids behind the first of a run,
            and those in place of ids that it took back.
        attention_positions: With ``top_k``: int32 positions of the values, in the shape of
            attention.
        hidden: With ``Capture(hidden=[...])``: output of these layers for the query that produced
            this token, ``(n_hidden_layers, n_embd)`` in the dtype of the capture. Otherwise None.
        logits: With ``Capture(vocab_logits=True)``: the model's output before bias, penalties,
            grammar and sampling, from which this token was chosen, float32 ``(n_vocab,)``. None
            otherwise, and for a token that a mod forced.
        forced: Whether a mod forced this token; it was not sampled and has no logprob.
        n_removed: Number of tokens, counted back from the token yielded before this one, that mods
            took back: drop that many from the end of the text. Always 0 without mods.
        capture: What was captured, with its layers filled in; None without capture.
        discarded: With ``context_shift``: the tokens discarded before this row, as indices into the
            prompt followed by the generated tokens; the columns are the remaining ones. Otherwise
            empty. See `source_indices`.
    """

    id: int
    text: str
    index: int
    logprob: float | Any = None
    top_logprobs: list[tuple[int, float]] | Any = None
    attention: AnyAttention = None
    attention_positions: AnyPositions = None
    hidden: Array | Any = None
    logits: NDArray[np.float32] | Any = None
    forced: bool = False
    n_removed: int = 0
    capture: Capture | None = field(default=None)
    discarded: range = _NONE
    _context: Context | None = None
    _n_before: int = 0
    _has_pass: bool = True  # False: no forward pass was read for it

    @property
    def rows(self) -> Array:
        """`attention` as one array, for a type checker and for code that expects one.

        Raises:
            InvalidCapture: There is no attention; or layers differ in heads, so that `attention` is
                a tuple.
        """
        if self.attention is None:
            raise InvalidCapture(
                "this token has no attention; pass capture= to generate"
                if self.capture is None
                else "this token's attention was dropped (on_full='drop')"
                if self._has_pass
                else "this token has no attention: a mod added it without a forward pass; "
                "engine.attend(generation.prompt_ids + generation.tokens) has the rows of all"
            )
        if isinstance(self.attention, tuple):
            raise InvalidCapture(
                "the captured layers differ in their number of heads, so there is no single array; "
                "use token.attention, a tuple with one array per layer, or capture with reduce"
            )
        return self.attention

    @property
    def prompt_ids(self) -> list[int]:
        """Ids of the prompt of its generation."""
        context = self._context
        return [] if context is None else context.ids[: context.n_prompt]

    @property
    def column_ids(self) -> list[int]:
        """The token id that each column of `attention` stands for: prompt first, then generated.

        Without the tokens that ``context_shift`` discarded. With ``top_k``, index it with
        `attention_positions`.
        """
        ids = self.ids_before
        del ids[self.discarded.start : self.discarded.stop]
        return ids

    @property
    def ids_before(self) -> list[int]:
        """Ids of the prompt and of the tokens before this one, discarded ones among them."""
        return [] if self._context is None else self._context.ids[: self._n_before]

    @property
    def column_texts(self) -> list[str]:
        """The text of each of `column_ids`; bytes that are not UTF-8 on their own become U+FFFD."""
        context = self._context
        return [context.text_of(i) for i in self.column_ids] if context is not None else []

    @property
    def layers(self) -> tuple[int, ...]:
        """The model's layers that were captured, in the order of `attention`; () without capture.

        With ``reduce="mean"`` or "max", the layers that were reduced to one row.
        """
        return tuple(self.capture.layers or ()) if self.capture is not None else ()

    @property
    def heads(self) -> tuple[int, ...]:
        """The heads of each layer that were captured, in the order of `attention`; () without.

        With ``reduce``, the heads that were reduced. If layers differ in heads, those of the layer
        with most heads.
        """
        return () if self._context is None else self._context.heads_of(self.capture)

    def source_indices(self, columns: ArrayLike) -> NDArray[np.int64]:
        """Convert columns to indices into the prompt followed by the generated tokens.

        The two are equal unless a context shift discarded tokens before the column.

        Args:
            columns: Columns of ``attention``, or ``attention_positions``.
        """
        indices = np.asarray(columns, np.int64)
        return np.where(indices < self.discarded.start, indices, indices + len(self.discarded))

    @overload
    def to_hf(self, framework: Literal["np"] = "np") -> tuple[Array, ...]: ...

    @overload
    def to_hf(self, framework: Literal["pt"]) -> tuple[Any, ...]: ...

    def to_hf(self, framework: Framework = "np") -> tuple[Any, ...]:
        """The attention in the form that Hugging Face transformers returns for one generated token.

        Args:
            framework: "np" for views of ``attention``, "pt" for torch tensors with a copy of it.

        Returns:
            One array of shape ``(1, n_heads, 1, n_context)`` for each captured layer.

        Raises:
            InvalidCapture: There is no attention, its kind is not "probs", which is what
                transformers returns, or the capture has ``reduce``, ``top_k`` or ``spans``.
            KqviewError: torch is not installed.
        """
        forms.check_framework(framework)
        forms.check_hf(self._captured("to_hf"))
        return forms.hf_form(self._layers(), framework)

    def named(self, framework: Framework = "np") -> dict[str, Any]:
        """The captured arrays under the names of TransformerLens' activation cache.

        Args:
            framework: As in `to_hf`.

        Returns:
            ``blocks.{layer}.attn.hook_pattern`` for kind "probs" and
            ``blocks.{layer}.attn.hook_attn_scores`` for kind "scores", of shape
            ``(1, n_heads, 1, n_context)``; ``blocks.{layer}.hook_resid_post`` of shape
            ``(1, 1, n_embd)`` for hidden states.

        Raises:
            InvalidCapture: There is nothing to name: no capture, a capture with ``reduce``,
                ``top_k`` or ``spans``, or kind "qk", for which TransformerLens has no name.
            KqviewError: torch is not installed.
        """
        forms.check_framework(framework)
        named: dict[str, Any] = {}
        if self.attention is not None:
            name = forms.lens_name(self._captured("named"))
            named |= forms.lens_form(self.layers, name, self._layers(), framework)
        if self.hidden is not None and self.capture is not None:
            layers = cast("Sequence[int]", self.capture.hidden)
            states = (state[None] for state in self.hidden)
            named |= forms.lens_form(layers, forms.RESIDUAL, states, framework)
        if not named:
            raise InvalidCapture("this token has nothing to name; pass capture= to generate")
        return named

    def _captured(self, who: str) -> Capture:
        if self.attention is None or self.capture is None:
            raise InvalidCapture(
                f"{who}() needs attention, but this token has none; pass capture= to generate"
            )
        return self.capture

    def _layers(self) -> Iterator[Array]:
        return (row[:, None, :] for row in (() if self.attention is None else self.attention))

    def __repr__(self) -> str:
        """One line; arrays appear as shape and dtype."""
        parts = [f"id={self.id}, text={self.text!r}, index={self.index}"]
        if self.logprob is not None:
            parts.append(f"logprob={self.logprob:.4g}")
        if self.top_logprobs:
            parts.append(f"top_logprobs=<{len(self.top_logprobs)}>")
        for name in ("attention", "hidden", "logits"):
            if (value := getattr(self, name)) is not None:
                parts.append(f"{name}={_brief(value)}")
        if self.forced:
            parts.append("forced=True")
        return f"Token({', '.join(parts)})"


def _brief(value: Any) -> str:
    """An array by its shape and dtype, a tuple of arrays by their number."""
    if isinstance(value, tuple):
        return f"<{len(cast('tuple[Any, ...]', value))} layers>"
    return "None" if value is None else f"<{value.shape} {value.dtype}>"


def add_token(tokens: list[Token], token: Token) -> None:
    """Append *token*, after removing those that mods took back before it."""
    del tokens[len(tokens) - token.n_removed :]
    tokens.append(token)


@dataclass(slots=True, eq=False, repr=False)
class PromptBlock:
    """Attention rows of the prompt's tokens ``start .. start + n_rows``.

    Attributes:
        start: Position of the first row's query in the prompt.
        n_rows: Number of rows, one per query.
        rows: Shape ``(n_layers, n_heads, n_rows, n_context)``, float32 or float16: a read-only
            zero-copy view that stays valid for as long as it is held. ``n_context`` is the length
            of the whole prompt in every block. Positions after a query are -inf in logits and
            scores and 0 in probs, unless the model attends in both directions. A reduction removes
            the axis of heads (and layers). If layers differ in heads, a tuple with one
            ``(n_heads, n_rows, n_context)`` per layer. ``top_k`` and ``spans`` keep k values, or
            one for each span, instead of ``n_context``. None if ``on_full="drop"`` dropped it, and
            with ``Capture(layers=[], hidden=...)``.
        positions: With ``top_k``: int32 positions of the values, in the shape of rows. Otherwise
            None.
        hidden: With ``Capture(hidden=...)``: the output of these layers for the queries,
            ``(n_hidden_layers, n_rows, n_embd)`` in the dtype of the capture, a view like *rows*.
            Otherwise None. Carries the result of `Engine.embed`: float32 ``(n_rows, n_values)``.
        scores: Always empty from `attend`: `PromptAttention.score` has them. Carries scores to
            `Engine.score`.
    """

    start: int
    n_rows: int
    rows: AnyAttention
    positions: AnyPositions = None
    hidden: Array | None = None
    scores: Sequence[TokenScore] = ()

    def __repr__(self) -> str:
        """One line; arrays appear as shape and dtype."""
        hidden = "" if self.hidden is None else f", hidden={_brief(self.hidden)}"
        return (
            f"PromptBlock(start={self.start}, n_rows={self.n_rows}, "
            f"rows={_brief(self.rows)}{hidden})"
        )
