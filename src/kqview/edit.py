"""Edit: one change of what the model represents or attends to, for one request.

A caller makes edits without a model; `plan_of` checks them against one, before anything runs, and
writes them into the plan that the core carries out. Each gets a key: a hash of all that it does,
and the first position at which it acts. Cells of a KV cache remember keys, never values, and are
reused by requests whose edits would have left them as they are.
"""

import hashlib
import math
import os
import threading
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice, pairwise
from typing import Any, Final, Literal, cast

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kqview import _core
from kqview.arguments import (
    INT32_MAX,
    choice,
    is_iterable,
    to_index,
    to_number,
    to_pair,
    to_path,
)
from kqview.errors import InvalidEdit, shown

MOST_EDITS: Final = 256
MOST_INDICES: Final = 2**20
MOST_SPANS: Final = 512
HOOK_LIMIT_S: Final = 10.0
HOOK_LIMIT_MAX_S: Final = 3600.0
LOG_FACTOR_MAX: Final = 100.0
"""Of an attention bias; exp of it is far beyond what a softmax tells from 1."""
VALUE_MAX: Final = 1e6
"""Of a vector's value, after its scale, and of a head's factor."""

Span = tuple[int, int | None] | range
HookPoint = Literal["residual", "attention_out", "mlp_out"]


@dataclass(frozen=True, slots=True)
class EditTarget:
    """What edits are checked against: facts of the engine, and of the request.

    Attributes:
        n_layer: Number of layers.
        n_embd: Values of a residual stream.
        n_heads: Number of heads of each layer with attention.
        n_prompt: Number of tokens that the prompt has.
        partial_layers: Layers whose cache keeps only what their sliding windows see.
    """

    n_layer: int
    n_embd: int
    n_heads: Mapping[int, int]
    n_prompt: int
    partial_layers: Sequence[int] = ()

    def layers(self, given: Sequence[int]) -> list[int]:
        """*given* counted from 0; InvalidEdit if the model lacks one, or one is there twice."""
        return _different("layers", [self._layer("layers", one) for one in given])

    def attention_layers(self, given: Sequence[int]) -> list[int]:
        """As `layers`, of those with attention."""
        return _different("layers", [self.attention_layer("layers", one) for one in given])

    def attention_layer(self, name: str, given: int) -> int:
        """*given*, of the argument *name*, counted from 0; InvalidEdit if it has no attention."""
        layer = self._layer(name, given)
        if layer not in self.n_heads:
            known = ", ".join(map(str, self.n_heads)) or "none"
            raise _invalid(
                f"{name} has layer {given}, which has no attention; layers that have: {known}"
            )
        return layer

    def head(self, name: str, layer: int, given: int) -> int:
        """*given* counted from 0; InvalidEdit if the layer has no such head."""
        found = f"{name} has head {given} of layer {layer}, which has"
        return _counted(given, self.n_heads[layer], found)

    def positions(self, given: Sequence[int]) -> list[int]:
        """*given* counted from the start of the prompt; InvalidEdit as of `layers`."""
        n = self.n_prompt
        found = [
            _counted(one, n, f"positions has {one}, but the prompt has", " tokens") for one in given
        ]
        return _different("positions", found)

    def _layer(self, name: str, given: int) -> int:
        return _counted(given, self.n_layer, f"{name} has layer {given}, but the model has")


def _counted(given: int, n: int, found: str, what: str = "") -> int:
    """*given* counted from 0; InvalidEdit, which says what was *found*, if there are fewer."""
    if not -n <= given < n:
        raise _invalid(f"{found} {n}{what}; use -{n} to {n - 1}")
    return given % n


def _different(name: str, found: list[Any]) -> list[Any]:
    """*found*; InvalidEdit if one is there twice, such as once counted from the end."""
    if len(set(found)) != len(found):
        raise _invalid(f"{name} has one twice: {found}")
    return found


class Edit(ABC):
    """One change of the model for one request; immutable, and made by the methods of this class.

    ``engine.generate(prompt, edits=[...])`` applies edits in their order, in prefill and while text
    is generated, to that request alone. Attention, scores and hidden states that are captured are
    those after the edit.
    """

    __slots__ = ()

    @classmethod
    def add(
        cls,
        vector: ArrayLike,
        layers: int | Iterable[int],
        scale: float = 1.0,
        positions: Iterable[int] | None = None,
    ) -> "Edit":
        """Add *scale* times *vector* to the output of layers, as ``token.hidden`` shows it.

        Args:
            vector: Floats of shape ``(n_embd,)``, or ``(n_layers, n_embd)`` with one for each of
                *layers*. Copied.
            layers: Layers behind which it is added, negative ones counted from the last.
            scale: Factor of *vector*.
            positions: Tokens of the prompt to which it is added, negative ones counted from the
                prompt's end; None for every token, also generated ones.

        Raises:
            InvalidEdit: The values are not finite or too large, or an index is repeated. The
                engine refuses what its model does not have.
        """
        named = _indices("layers", [layers] if to_index(layers) is not None else layers)
        factor = to_number(scale)
        if factor is None or not abs(factor) <= VALUE_MAX:
            raise _invalid(f"scale must be a number up to {VALUE_MAX:g}, got {shown(scale)}")
        values = _vectors("vector", vector, factor)
        if values.ndim == 2 and len(values) != len(named):
            raise _invalid(
                f"vector has {len(values)} rows, but layers names {len(named)}; pass one row for "
                "each, or one vector for all"
            )
        where = None if positions is None else _indices("positions", positions)
        return _Residual(named, np.atleast_2d(values), where)

    @classmethod
    def set(cls, vectors: ArrayLike, layer: int, positions: Iterable[int]) -> "Edit":
        """Put *vectors* in place of the output of a layer: activation patching.

        Args:
            vectors: Floats of shape ``(n_positions, n_embd)``, or ``(n_embd,)`` for all positions;
                ``token.hidden[i]``, or part of ``engine.attend(...).hidden``. Copied.
            layer: The layer, negative ones counted from the last.
            positions: Tokens of the prompt, negative ones counted from its end.

        Raises:
            InvalidEdit: As of `add`.
        """
        values = _vectors("vectors", vectors, 1.0)
        where = _indices("positions", positions)
        if values.ndim == 2 and len(values) != len(where):
            raise _invalid(
                f"vectors has {len(values)} rows, but positions names {len(where)}; pass one row "
                "for each, or one vector for all"
            )
        return _Residual(_indices("layer", [layer]), np.atleast_2d(values), where, replaces=True)

    @classmethod
    def control_vector(
        cls,
        path: str | os.PathLike[str],
        scale: float = 1.0,
        layers: Iterable[int] | None = None,
    ) -> "Edit":
        """Add the directions of a GGUF control vector, as repeng and llama.cpp write it.

        Args:
            path: The file; its tensor ``direction.<i>`` acts on the output of layer i.
            scale: Factor of all directions.
            layers: Layers of the file to use, counted from 0; None for all.

        Raises:
            InvalidEdit: The file has no direction for one of *layers*.
            ModelLoadError: The file cannot be read, or is no control vector.
        """
        directions = _core.read_control_vector(str(to_path("path", path)))
        named = sorted(directions) if layers is None else _indices("layers", layers)
        missing = [layer for layer in named if layer not in directions]
        if missing:
            known = ", ".join(map(str, sorted(directions)))
            raise _invalid(f"layers has {missing}, but the file has directions for {known}")
        return cls.add(np.concatenate([directions[layer] for layer in named]), named, scale)

    @classmethod
    def scale_heads(cls, factors: Mapping[tuple[int, int], float]) -> "Edit":
        """Multiply what heads give out, before the output projection: 0 ablates a head.

        Args:
            factors: A factor for each (layer, head); negative indices count from the last.

        Raises:
            InvalidEdit: A key is no pair of whole numbers, or a factor is not finite or too large.
        """
        given = cast("object", factors)
        if not isinstance(given, Mapping) or not given:
            got = shown(cast("object", given))
            raise _invalid(f"factors must be a dict such as {{(14, 3): 0.0}}, got {got}")
        found: dict[tuple[int, int], float] = {}
        for key, value in cast("Mapping[object, object]", given).items():
            layer, head = map(to_index, to_pair(key) or (None, None))
            if layer is None or head is None or max(abs(layer), abs(head)) > INT32_MAX:
                raise _invalid(f"a key of factors must be (layer, head), got {shown(key)}")
            factor = to_number(value)
            if factor is None or not abs(factor) <= VALUE_MAX:
                raise _invalid(
                    f"a factor must be a number up to {VALUE_MAX:g}, got {shown(value)} for "
                    f"{shown((layer, head))}"
                )
            found[layer, head] = factor
        return _Heads(tuple(found.items()))

    @classmethod
    def attention_bias(
        cls,
        spans: Iterable[Span],
        log_factor: float,
        layers: Iterable[int] | None = None,
        heads: Iterable[int] | None = None,
    ) -> "Edit":
        """Add *log_factor* to the scores of keys, before the softmax.

        Attention to these tokens is multiplied by ``exp(log_factor)`` and normalised again
        (InstABoost, arXiv 2506.13734).

        Args:
            spans: Ranges of positions, ``[(start, stop), ...]``, disjoint; a stop of None grows
                with the text.
            log_factor: From -100 to 100.
            layers: Layers, negative ones counted from the last; None for all with attention.
            heads: Heads of each of them, negative ones counted from the last; None for all.

        Raises:
            InvalidEdit: A range is empty or overlaps another one, or a number is out of range.
        """
        bias = to_number(log_factor)
        if bias is None or not abs(bias) <= LOG_FACTOR_MAX:
            raise _invalid(
                f"log_factor must be a number from -{LOG_FACTOR_MAX:g} to {LOG_FACTOR_MAX:g}, got "
                f"{shown(log_factor)}"
            )
        if not is_iterable(spans):
            raise _invalid(f"spans must be ranges such as [(0, 25)], got {shown(spans)}")
        given = islice(spans, MOST_SPANS + 1)
        pairs = sorted(_span("a range of spans", one) for one in given)
        if len(pairs) > MOST_SPANS:
            raise _invalid(f"spans has more than {MOST_SPANS} ranges")
        overlaps = any(a[1] < 0 or a[1] > b[0] for a, b in pairwise(pairs))
        if not pairs or overlaps:
            raise _invalid(f"spans must be one or more disjoint ranges, got {shown(spans)}")
        return _Bias((0, -1), tuple(pairs), bias, _some("layers", layers), _some("heads", heads))

    @classmethod
    def block(
        cls,
        queries: Span,
        keys: Span,
        layers: Iterable[int] | None = None,
        heads: Iterable[int] | None = None,
    ) -> "Edit":
        """Hide keys from queries: attention knockout. A token always sees itself.

        Args:
            queries: Range of positions that do not see *keys*: ``(start, stop)``, or
                ``(start, None)`` for all that follow.
            keys: Range of positions that they do not see.
            layers: As of `attention_bias`.
            heads: As of `attention_bias`.

        Raises:
            InvalidEdit: A range is empty, or an index is invalid.
        """
        return _Bias(
            _span("queries", queries),
            (_span("keys", keys),),
            -math.inf,
            _some("layers", layers),
            _some("heads", heads),
        )

    @classmethod
    def hook(
        cls,
        fn: Callable[[NDArray[np.float32]], ArrayLike | None],
        at: HookPoint = "residual",
        layers: int | Iterable[int] = (),
        time_limit_s: float = HOOK_LIMIT_S,
    ) -> "Edit":
        """Call *fn* with the activations of this request's tokens, for exploring.

        The engine waits for each call, one for each layer and step, and so does every request that
        shares the step. *fn* runs on a thread of its own. What it raises, and a call beyond the
        time limit, ends this request with RequestError, and no other. It must not use the engine.
        Nothing that is computed so is reused from a cache.

        Args:
            fn: Gets a float32 array of its own, ``(n_tokens, n_embd)``: the tokens of one step, of
                the last layer only those whose logits are wanted. Returns values of the same shape,
                or None to leave them as they are.
            at: "residual", the output of a layer; "attention_out" or "mlp_out", what its attention
                or its feed-forward part adds to the residual stream, behind its norm if it has one.
            layers: Layers, negative ones counted from the last.
            time_limit_s: Most seconds of one call.

        Raises:
            InvalidEdit: *fn* cannot be called, or an argument is invalid. The engine raises
                UnsupportedModel for a layer that has no such point, or is on a device.
        """
        if not callable(fn):
            raise _invalid(f"fn must be a function, got {shown(fn)}")
        choice("at", at, HookPoint, InvalidEdit)
        limit = to_number(time_limit_s)
        if limit is None or not 0 < limit <= HOOK_LIMIT_MAX_S:
            raise _invalid(
                f"time_limit_s must be above 0 and at most {HOOK_LIMIT_MAX_S:g}, got "
                f"{shown(time_limit_s)}"
            )
        named = _indices("layers", [layers] if to_index(layers) is not None else layers)
        return _Hook(fn, at, named, limit)

    @property
    def has_places(self) -> bool:
        """Whether it names positions of the text, which must then stay where they are."""
        return False

    @abstractmethod
    def write(self, plan: _core.EditPlan, target: EditTarget) -> tuple[object, int]:
        """Add it to *plan*; return all that it does, and the first position at which it acts.

        Raises:
            InvalidEdit: *target* has not what it names.
        """


@dataclass(frozen=True, eq=False)
class _Residual(Edit):
    layers: tuple[int, ...]
    rows: NDArray[np.float32]  # one for all, or one for each layer or position; read-only
    positions: tuple[int, ...] | None
    replaces: bool = False

    def __post_init__(self) -> None:
        self.rows.flags.writeable = False

    @cached_property
    def _digest(self) -> str:
        return hashlib.sha256(self.rows.tobytes()).hexdigest()

    @property
    def has_places(self) -> bool:
        return self.positions is not None

    def write(self, plan: _core.EditPlan, target: EditTarget) -> tuple[object, int]:
        layers = target.layers(self.layers)
        n_rows, n_embd = self.rows.shape
        if n_embd != target.n_embd:
            raise _invalid(
                f"a vector has {n_embd} values, but the model's residual stream {target.n_embd}"
            )
        rows, positions = self.rows, list[int]()
        given = positions  # in the order of the rows
        if self.positions is not None:
            given = target.positions(self.positions)
            order = sorted(range(len(given)), key=given.__getitem__)
            positions = [given[i] for i in order]
            if self.replaces and n_rows > 1:
                rows = np.ascontiguousarray(rows[order])
        if self.replaces or n_rows == 1:
            plan.edit_outputs(layers, rows.ravel(), positions, self.replaces)
        else:
            for layer, row in zip(layers, rows, strict=True):
                plan.edit_outputs([layer], row, positions, False)
        what = ("set" if self.replaces else "add", layers, given, rows.shape, self._digest)
        return what, min(positions, default=0)


@dataclass(frozen=True)
class _Heads(Edit):
    factors: tuple[tuple[tuple[int, int], float], ...]

    def write(self, plan: _core.EditPlan, target: EditTarget) -> tuple[object, int]:
        heads: list[tuple[int, int]] = []
        for (given_layer, given_head), factor in self.factors:
            layer = target.attention_layer("factors", given_layer)
            heads.append((layer, target.head("factors", layer, given_head)))
            plan.scale_head(*heads[-1], factor)
        _different("factors", heads)
        return ("scale_heads", heads, [factor for _, factor in self.factors]), 0


@dataclass(frozen=True)
class _Bias(Edit):
    queries: tuple[int, int]  # a stop of -1 has no end
    keys: tuple[tuple[int, int], ...]
    bias: float
    layers: tuple[int, ...] | None
    heads: tuple[int, ...] | None

    @property
    def has_places(self) -> bool:
        return True

    def write(self, plan: _core.EditPlan, target: EditTarget) -> tuple[object, int]:
        for name, (start, _) in (("queries", self.queries), *(("keys", one) for one in self.keys)):
            if start >= target.n_prompt:
                raise _invalid(
                    f"a range of {name} starts at {start}, but the prompt has {target.n_prompt} "
                    f"tokens; start at 0 to {target.n_prompt - 1}"
                )
        layers = list(target.n_heads) if self.layers is None else self.layers
        layers = target.attention_layers(layers)
        if refused := [one for one in target.partial_layers if one in layers]:
            raise _invalid(
                f"attention of layers {', '.join(map(str, refused))} cannot be edited: they have "
                "sliding windows and swa_full is off, so columns are not positions; name other "
                "layers, or open the Engine with swa_full=True"
            )
        if self.heads is None:
            named = [] if self.layers is None else layers
            plan.bias_scores(self.queries, self.keys, self.bias, named, [])
            heads = []
        else:
            heads = [
                _different("heads", [target.head("heads", layer, one) for one in self.heads])
                for layer in layers
            ]
            for layer, of_layer in zip(layers, heads, strict=True):
                plan.bias_scores(self.queries, self.keys, self.bias, [layer], of_layer)
        what = ("bias", self.queries, self.keys, self.bias, layers, heads)
        return what, max(self.queries[0], min(start for start, _ in self.keys))


@dataclass(frozen=True, eq=False)
class _Hook(Edit):
    fn: Callable[[NDArray[np.float32]], ArrayLike | None]
    at: HookPoint
    layers: tuple[int, ...]
    limit_s: float

    def write(self, plan: _core.EditPlan, target: EditTarget) -> tuple[object, int]:
        layers = target.layers(self.layers)
        channel = plan.hook(layers, self.at, self.limit_s)
        # The channel is closed when the plan and the request are gone.
        threading.Thread(
            target=_answer, args=(channel, self.fn), name="kqview-hook", daemon=True
        ).start()
        return ("hook", uuid.uuid4().hex), 0


def _answer(channel: "_core.HookChannel", fn: Callable[[NDArray[np.float32]], Any]) -> None:
    """Answer the calls of a hook until there are no more; runs on its thread."""
    while (call := channel.next()) is not None:
        rows = cast("NDArray[np.float32]", call.rows)
        shape = rows.shape
        try:
            returned = fn(rows)
            if returned is not None:
                with np.errstate(over="ignore", invalid="ignore"):
                    returned = np.ascontiguousarray(returned, np.float32)
                if returned.shape != shape or not np.all(np.abs(returned) <= VALUE_MAX):
                    channel.fail(
                        f"of layer {call.layer} returned shape {returned.shape} or values that are "
                        f"not finite, or beyond {VALUE_MAX:g}; return {shape} or None"
                    )
                    return
                returned = returned.ravel()
        except BaseException as error:  # whatever the function raises ends its request
            channel.fail(f"of layer {call.layer} raised {type(error).__name__}: {error}")
            return
        channel.answer(returned)


class HeadRecord(Edit):
    """Changes nothing, and keeps what heads give out, for `kqview.patch`."""

    def __init__(self, layers: Iterable[int]) -> None:
        self.layers: Sequence[int] = _indices("layers", layers)
        self.record: _core.HeadRecord | None = None

    def write(self, plan: _core.EditPlan, target: EditTarget) -> tuple[object, int]:
        """As of Edit. Nothing comes from a cache, whose heads gave out their values before."""
        self.layers = target.attention_layers(self.layers)
        self.record = plan.record_heads(self.layers)
        return ("record", uuid.uuid4().hex), 0


class SetHead(Edit):
    """Puts what a head has given out elsewhere in place of what it gives out, for `kqview.patch`.

    Args:
        layer: Layer of the head, counted from 0.
        head: The head, counted from 0.
        values: Float32 ``(n_tokens, n_values)``.
        positions: Which of the tokens, negative ones counted from the last; None for all.
    """

    def __init__(
        self, layer: int, head: int, values: NDArray[np.float32], positions: Iterable[int] | None
    ) -> None:
        self._layer, self._head, self._values = layer, head, values
        self._positions = (
            range(len(values)) if positions is None else _indices("positions", positions)
        )

    @property
    def has_places(self) -> bool:
        """As of Edit."""
        return True

    def write(self, plan: _core.EditPlan, target: EditTarget) -> tuple[object, int]:
        """As of Edit."""
        positions = sorted(target.positions(self._positions))
        values = np.ascontiguousarray(self._values[positions]).ravel()
        plan.set_head(self._layer, self._head, values, positions)
        digest = hashlib.sha256(values.tobytes()).hexdigest()
        return ("set_head", self._layer, self._head, positions, digest), positions[0]


def listed(edits: object) -> list[Edit]:
    """*edits* of a call as a list.

    Raises:
        InvalidEdit: It is no list of edits, or has too many.
    """
    if edits is None:
        return []
    given = [edits] if isinstance(edits, Edit) else edits
    if not isinstance(given, Sequence) or isinstance(given, str | bytes):
        raise _invalid(f"edits must be a list of Edit, got {shown(edits)}")
    found = list(cast("Sequence[object]", given))
    if len(found) > MOST_EDITS:
        raise _invalid(f"edits has {len(found)}, at most {MOST_EDITS} act on one request")
    for i, one in enumerate(found):
        if not isinstance(one, Edit):
            raise _invalid(f"edits[{i}] must be an Edit, such as Edit.add(...), got {shown(one)}")
    return cast("list[Edit]", found)


def plan_of(edits: Sequence[Edit], target: EditTarget) -> _core.EditPlan:
    """The plan of *edits* for one request; raises InvalidEdit for what *target* does not have."""
    plan = _core.EditPlan()
    for i, edit in enumerate(edits):
        try:
            what, first = edit.write(plan, target)
        except InvalidEdit as error:
            raise _invalid(f"edits[{i}]: {error}") from None
        plan.add_key(_core.EditKey(hashlib.sha256(repr(what).encode()).hexdigest(), first))
    return plan


# ---- checks of single arguments


def _invalid(message: str) -> InvalidEdit:
    return InvalidEdit(message, parameter="edits")


def _indices(name: str, values: object) -> tuple[int, ...]:
    if not is_iterable(values):
        raise _invalid(f"{name} must be whole numbers such as [0, 1], got {shown(values)}")
    found: list[int] = []
    given = list(islice(values, MOST_INDICES + 1))
    for value in given[:MOST_INDICES]:
        index = to_index(value)
        if index is None or not -INT32_MAX <= index <= INT32_MAX:
            raise _invalid(f"an index of {name} must be a whole number, got {shown(value)}")
        found.append(index)
    if not found or len(set(found)) != len(given):
        raise _invalid(f"{name} must be 1 to {MOST_INDICES} different indices, got {shown(given)}")
    return tuple(found)


def _some(name: str, values: object) -> tuple[int, ...] | None:
    return None if values is None else _indices(name, values)


def _span(name: str, span: object) -> tuple[int, int]:
    """*span* as (start, stop), -1 for no stop."""
    pair = to_pair(span)
    if pair is not None:
        start, stop = to_index(pair[0]), to_index(pair[1])
        if start is not None and 0 <= start <= INT32_MAX:
            if pair[1] is None:
                return start, -1
            if stop is not None and start < stop <= INT32_MAX:
                return start, stop
    raise _invalid(
        f"{name} must be (start, stop) with 0 <= start < stop, or stop None, got {shown(span)}"
    )


def _vectors(name: str, values: ArrayLike, scale: float) -> NDArray[np.float32]:
    """A copy of *values* times *scale*, of one or two dimensions."""
    try:
        found = np.array(values, np.float64)
    except (TypeError, ValueError, OverflowError, MemoryError):
        raise _invalid(f"{name} must be an array of floats, got {shown(values)}") from None
    if found.ndim not in (1, 2) or found.size == 0:
        raise _invalid(f"{name} must have shape (n_embd,) or (n, n_embd), got {found.shape}")
    with np.errstate(over="ignore", invalid="ignore"):
        found *= scale
    if not np.all(np.abs(found) <= VALUE_MAX):  # False for NaN
        raise _invalid(f"{name} has values that are not finite, or beyond {VALUE_MAX:g}")
    return found.astype(np.float32, order="C")
