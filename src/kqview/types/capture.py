"""Capture: which attention a generation hands out, and what happens when its memory runs out."""

import copy
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from itertools import islice
from typing import Any, Final, Literal, TypedDict, Unpack, cast

from kqview.arguments import (
    INT32_MAX,
    choice,
    flag,
    invalid,
    is_iterable,
    to_index,
    to_number,
    to_pair,
)
from kqview.errors import InvalidCapture, RequestError, shown
from kqview.option_names import lists_options, unknown_option
from kqview.types.model import ModelInfo

Kind = Literal["qk", "logits", "scores", "probs"]
RAW_KINDS: Final = ("qk", "logits")  # two names of one kind; the second is the older one
Reduce = Literal["mean_heads", "max_heads", "mean", "max"]
DType = Literal["float32", "float16"]
OnFull = Literal["raise", "wait", "drop"]
Span = tuple[int, int | None]

MOST_SPANS: Final = 512

_INT32_MIN: Final = -(2**31)
_ITEM_BYTES: Final = {"float32": 4, "float16": 2}
_POSITION_BYTES: Final = 4  # int32


# ---- checks of single fields


def _to_choice(choices: Any) -> Callable[[str, object], object]:
    return partial(choice, choices=choices, error=InvalidCapture)


_to_flag: Final = partial(flag, error=InvalidCapture)


def _to_indices(name: str, values: object) -> tuple[int, ...] | str:
    if name == "hidden" and isinstance(values, str) and values == "all":
        return values
    if not is_iterable(values):
        raise _invalid(name, "a sequence of indices such as [0, 1]", values)
    indices: list[int] = []
    for value in values:
        index = to_index(value)
        if index is None or index < _INT32_MIN:
            raise _invalid(f"an index of {name}", "a whole number", value)
        indices.append(index)
    if len(set(indices)) != len(indices):
        raise InvalidCapture(f"{name} has repeated indices: {indices}", parameter=name)
    return tuple(indices)


def _to_top_k(name: str, value: object) -> int:
    top_k = to_index(value)
    if top_k is None or top_k < 1:
        raise _invalid(name, "a whole number from 1, or None to keep whole rows", value)
    return top_k


def _to_spans(name: str, spans: object) -> tuple[Span, ...]:
    if not is_iterable(spans):
        raise _invalid(name, "ranges of columns such as [(0, 10), (10, None)]", spans)
    pairs = tuple(_to_span(span) for span in islice(spans, MOST_SPANS + 1))
    if not 0 < len(pairs) <= MOST_SPANS:
        n = "no range" if not pairs else f"more than {MOST_SPANS} ranges"
        raise InvalidCapture(
            f"spans has {n}; pass 1 to {MOST_SPANS}, or None for whole rows", parameter="spans"
        )
    return pairs


def _to_span(span: Any) -> Span:
    pair = to_pair(span)
    if pair is None:
        raise _invalid("a range of spans", "(start, stop) or (start, None)", cast("object", span))
    start = to_index(pair[0])
    stop = None if pair[1] is None else to_index(pair[1])
    if start is None or start < 0 or (pair[1] is not None and (stop is None or stop <= start)):
        raise _invalid("a range of spans", "0 <= start < stop, or stop None", cast("object", span))
    return start, stop


def _to_wait_s(name: str, value: object) -> float:
    seconds = to_number(value)
    if seconds is None or not 0 <= seconds < math.inf:
        raise _invalid(name, "a finite number of seconds, at least 0", value)
    return seconds


def _invalid(name: str, allowed: str, value: object) -> RequestError:
    return invalid(name, allowed, shown(value), InvalidCapture)


class CaptureOptions(TypedDict, total=False):
    """The fields of Capture but *kind*, as keyword arguments."""

    layers: Sequence[int] | None
    heads: Sequence[int] | None
    reduce: Reduce | None
    top_k: int | None
    spans: Sequence[Span] | None
    dtype: DType
    prompt: bool
    hidden: Sequence[int] | Literal["all"]
    vocab_logits: bool
    on_full: OnFull
    wait_s: float


@dataclass(frozen=True, slots=True, init=False)
class Capture:
    """What to capture for every generated token.

    The constructor checks only the form of the values; the engine refuses what the build or the
    model cannot provide. Sequences of indices become tuples and keep their order.

    Attributes:
        kind: "probs" is the output of the softmax; "scores" is its input; "qk" is the raw product
            of K and Q before scale, mask and softmax ("logits" is an alias).
        layers: Layers to capture, negative ones counted from the last layer; None for every layer
            that has attention. May be empty if *hidden* or *vocab_logits* is given: then no
            attention is captured.
        heads: Query heads to capture in each layer, negative ones counted from the last head of the
            layer with most heads; None for all.
        reduce: Reduction done on the device, or None: "mean_heads" and "max_heads" over heads,
            "mean" and "max" over layers and heads.
        top_k: Keep only the k largest values of each row, with their positions.
        spans: Instead of whole rows, the sums of each row over these ranges of columns:
            ``[(start, stop), ...]``, ascending within a range, in any order and overlapping as you
            like. A stop of None, or beyond the context, grows with it. Columns not there yet count
            0. Sums are taken where the rows are computed, of kind "probs" only, after *reduce*.
        dtype: Type of the values and hidden states, "float32" or "float16". float16 saturates: a
            value out of range becomes 65504 or -65504, so -inf always means a position that is not
            visible.
        prompt: Also capture the rows, and hidden states, of the prompt's own tokens.
        hidden: Layers whose output, the residual stream after the layer, to hand out as well, given
            as for *layers*; "all" for every layer. For the last layer's of a prompt, llama.cpp
            computes the logits of its tokens too, in steps of at most 64 MiB of logits.
        vocab_logits: Also hand out the logits of the model's output, before anything is sampled
            from them.
        on_full: What to do when the budget of attention memory is used up: "raise" ends the
            generation with PoolExhausted, "wait" waits for views to be dropped, "drop" continues
            without attention.
        wait_s: Maximum wait in seconds with ``on_full="wait"``, after which PoolExhausted is
            raised.
    """

    kind: Kind = "probs"
    layers: Sequence[int] | None = None
    heads: Sequence[int] | None = None
    reduce: Reduce | None = None
    top_k: int | None = None
    spans: Sequence[Span] | None = None
    dtype: DType = "float32"
    prompt: bool = False
    hidden: Sequence[int] | Literal["all"] = ()
    vocab_logits: bool = False
    on_full: OnFull = "raise"
    wait_s: float = 10.0

    def __init__(self, kind: Kind = "probs", **options: Unpack[CaptureOptions]) -> None:
        """Check every field that is given.

        Raises:
            InvalidCapture: A field is malformed.
        """
        given = {"kind": kind, **options}
        for name in given.keys() - _FIELDS.keys():
            raise unknown_option("Capture", name, _FIELDS)
        for name, (default, check) in _FIELDS.items():
            value = given.get(name, default)
            object.__setattr__(self, name, value if value is default else check(name, value))
        if self.layers is not None and not (self.layers or self.hidden or self.vocab_logits):
            raise InvalidCapture("layers is empty; pass None to keep all", parameter="layers")
        if self.heads is not None and not self.heads:
            raise InvalidCapture("heads is empty; pass None to keep all", parameter="heads")
        if self.spans is not None and self.kind != "probs":
            raise InvalidCapture(
                f"spans are sums of probabilities, not of '{self.kind}'; capture 'probs'",
                parameter="spans",
            )
        if self.spans is not None and self.top_k is not None:
            raise InvalidCapture(
                "top_k and spans are two ways to shorten rows; leave one of them out",
                parameter="spans",
            )

    @property
    def shortened_by(self) -> Literal["top_k", "spans"] | None:
        """The option whose values a row holds instead of one per column; None for whole rows."""
        if self.top_k is not None:
            return "top_k"
        return None if self.spans is None else "spans"

    @classmethod
    def of(cls, value: "Capture | Kind | None") -> "Capture | None":
        """Convert the ``capture=`` argument of a call to a Capture; a string is its kind.

        Raises:
            InvalidCapture: *value* is an unknown kind or has the wrong type.
        """
        if value is None or isinstance(value, Capture):
            return value
        if not isinstance(value, str):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise _invalid("capture", "None, a kind such as 'probs', or a Capture", value)
        return cls(kind=value)

    def counted(self, model: ModelInfo) -> "Capture":
        """This capture with layers and heads counted from 0: negative ones, and all, are resolved.

        Raises:
            InvalidCapture: An index is before the first one or beyond the last one of any
                model, or two are the same.
        """
        hidden = range(model.n_layer) if self.hidden == "all" else self.hidden
        given = (*hidden, *(self.layers or ()), *(self.heads or ()))
        if all(0 <= i <= INT32_MAX for i in given) and self.hidden != "all":
            return self
        layers = None if self.layers is None else _counted("layers", self.layers, model.n_layer)
        heads = None if self.heads is None else _counted("heads", self.heads, model.n_head)
        hidden = _counted("hidden", hidden, model.n_layer)
        return replace(self, layers=layers, heads=heads, hidden=hidden)

    def resolved(self, model: ModelInfo) -> "Capture":
        """As `counted`, with the attention layers of *model* filled in if *layers* is None."""
        counted = self.counted(model)
        if counted.layers is not None:
            return counted
        found = copy.copy(counted)  # the rest is checked
        object.__setattr__(found, "layers", model.attention_layers)
        return found

    def for_prompt(self) -> "Capture":
        """This capture as `Engine.attend` uses it, with the rows of the prompt.

        Raises:
            InvalidCapture: *vocab_logits* is true.
        """
        if self.vocab_logits:
            raise InvalidCapture(
                "the model's logits are captured for generated tokens only; use generate, or leave "
                "vocab_logits out",
                parameter="capture",
            )
        return replace(self, prompt=True)

    def check_columns(self, unordered: Collection[int]) -> None:
        """Refuse to capture attention whose columns would not be positions.

        Args:
            unordered: Layers on devices whose cache keeps only what their sliding windows see.

        Raises:
            InvalidCapture: One of them is captured, or *prompt* is true but *layers* and *hidden*
                are empty.
        """
        has_attention = self.layers is None or len(self.layers) > 0
        refused = [one for one in unordered if self.layers is None or one in self.layers]
        if refused:
            raise InvalidCapture(
                f"attention of layers {', '.join(map(str, refused))} cannot be captured: they have "
                "sliding windows and are on a device, and swa_full is off, so columns are not "
                "positions; capture other layers, or open the Engine with swa_full=True",
                parameter="capture",
            )
        if self.prompt and not has_attention and not self.hidden:
            raise InvalidCapture(
                "prompt is True but layers and hidden are empty; name layers in one of them, or "
                "leave prompt out",
                parameter="capture",
            )

    def bytes_per_token(self, model: ModelInfo, n_context: int) -> int:
        """Bytes that the capture of one token takes with *n_context* tokens before it.

        Counts attention, hidden states and logits, but neither the rows of the prompt nor the
        rounding of the pool. An upper bound if layers differ in their number of heads.

        Args:
            model: Model of the engine.
            n_context: Columns of the row, at least 0.

        Raises:
            InvalidCapture: *model* lacks one of the layers or heads, or *n_context* is no such
                number.
            RequestError: *model* is no ModelInfo.
        """
        if not isinstance(model, ModelInfo):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise invalid("model", "the ModelInfo of an engine, engine.model", shown(model))
        n_columns = to_index(n_context)
        if n_columns is None or n_columns < 0:
            raise _invalid("n_context", "the number of tokens before the query", n_context)
        n_context = n_columns
        counted = self.counted(model)
        layers = model.attention_layers if counted.layers is None else counted.layers
        hidden = cast("Sequence[int]", counted.hidden)
        _check_members("layers", layers, model.attention_layers)
        _check_members("heads", counted.heads or (), range(model.n_head))
        _check_members("hidden", hidden, range(model.n_layer))
        n_layers = len(layers)
        n_heads = model.n_head if self.heads is None else len(self.heads)
        if self.reduce in ("mean", "max"):
            n_rows = min(n_layers, 1)
        elif self.reduce is not None:
            n_rows = n_layers
        else:
            n_rows = n_layers * n_heads
        if self.top_k is not None:
            attention_bytes = (
                n_rows * min(self.top_k, n_context) * (_ITEM_BYTES[self.dtype] + _POSITION_BYTES)
            )
        else:
            n_values = n_context if self.spans is None else len(self.spans)
            attention_bytes = n_rows * n_values * _ITEM_BYTES[self.dtype]
        hidden_bytes = len(hidden) * model.n_embd * _ITEM_BYTES[self.dtype]
        logits_bytes = model.n_vocab * _ITEM_BYTES["float32"] if self.vocab_logits else 0
        return attention_bytes + hidden_bytes + logits_bytes


def _check_members(name: str, values: Iterable[int], known: tuple[int, ...] | range) -> None:
    unknown = [value for value in values if value not in known]
    if unknown:
        if known:
            limit = f"the model has {len(known)}, from {known[0]} to {known[-1]}"
        else:
            limit = "the model has none"
        raise InvalidCapture(f"{name} has {unknown}, but {limit}", parameter=name)


def _counted(name: str, values: Iterable[int], n: int) -> tuple[int, ...]:
    given = list(values)
    if any(i < -n for i in given):
        raise InvalidCapture(
            f"{name} has {min(given)}, but the model has {n}; use -{n} to {n - 1}",
            parameter=name,
        )
    if any(i > INT32_MAX for i in given):  # the core, which knows the model's, has no such number
        raise InvalidCapture(
            f"{name} has {shown(max(given))}, which no model has; leave it out", parameter="capture"
        )
    return tuple(i + n if i < 0 else i for i in given)


_CHECKS: Final[Mapping[str, Callable[[str, Any], object]]] = {
    "kind": _to_choice(Kind), "layers": _to_indices, "heads": _to_indices,
    "reduce": _to_choice(Reduce), "top_k": _to_top_k, "spans": _to_spans,
    "dtype": _to_choice(DType), "prompt": _to_flag, "hidden": _to_indices,
    "vocab_logits": _to_flag, "on_full": _to_choice(OnFull), "wait_s": _to_wait_s,
}  # fmt: skip
_FIELDS: Final = {one.name: (one.default, _CHECKS[one.name]) for one in fields(Capture)}
lists_options("Capture", {name: default for name, (default, _) in _FIELDS.items()})(Capture)
