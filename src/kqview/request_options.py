"""Checks a caller's arguments and turns them into the core's types."""

import json
import operator
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, Literal, TypedDict, cast

from kqview import _core
from kqview.errors import InvalidToken, RequestError, UnsupportedModel, shown
from kqview.types import Capture, Sampling
from kqview.types.sampling import SamplingOptions, are_ids

_INT32_MAX: Final = 2**31 - 1
_INT64_MAX: Final = 2**63 - 1
_SCALE_MAX: Final = 1e6
_POOLING: Final = ("none", "mean", "cls", "last", "rank")


class GenerateOptions(SamplingOptions, total=False):
    """The options of `Engine.generate`, for what calls it."""

    max_tokens: int
    sampling: Sampling | None
    capture: Capture | str | None
    slot: int | None
    mods: Sequence[Any]
    request_id: str | None
    priority: int
    reuse: Literal["exact", "shift"]
    reuse_min_tokens: int
    context_shift: bool
    n_keep: int
    n_discard: int | None
    add_special: bool
    parse_special: bool


class ShiftOptions(TypedDict):
    """What a request may do with positions, as arguments of ``_core.Engine.submit``."""

    n_reuse_min: int
    n_keep: int
    n_discard: int


NO_SHIFT: Final[ShiftOptions] = {"n_reuse_min": 0, "n_keep": 0, "n_discard": 0}


class CoreOptions(TypedDict):
    """Options of an engine in the form of ``_core.Engine.open``, whose types they fit."""

    n_ctx: int
    n_slots: int
    n_batch: int
    n_ubatch: int
    n_threads: int
    flash_attn: bool | None
    kv_type: str
    swa_full: bool
    pooling: str


def to_core_options(
    *,
    n_ctx: object,
    n_slots: object,
    n_batch: object,
    n_ubatch: object,
    n_threads: object,
    flash_attn: object,
    kv_type: object,
    swa_full: object,
    pooling: object,
) -> CoreOptions:
    """The options of Engine, checked; limits that need the model are checked in the core.

    Raises:
        RequestError: An option is of another type or out of its range.
    """
    if flash_attn != "auto" and not isinstance(flash_attn, bool):
        raise RequestError(
            f"Engine: flash_attn is {shown(flash_attn)}, known are 'auto', True, False"
        )
    if not isinstance(kv_type, str):
        raise RequestError(f"Engine: kv_type is {shown(kv_type)}, a name such as 'f16' is needed")
    if pooling is not None and not (isinstance(pooling, str) and pooling in _POOLING):
        raise RequestError(
            f"Engine: pooling is {shown(pooling)}, known are None, {str(_POOLING)[1:-1]}"
        )
    return {
        "n_ctx": 0 if n_ctx is None else whole_number("Engine", "n_ctx", n_ctx),
        "n_slots": whole_number("Engine", "n_slots", n_slots),
        "n_batch": whole_number("Engine", "n_batch", n_batch),
        "n_ubatch": whole_number("Engine", "n_ubatch", n_ubatch),
        "n_threads": whole_number("Engine", "n_threads", n_threads),
        "flash_attn": flash_attn if isinstance(flash_attn, bool) else None,
        "kv_type": kv_type,
        "swa_full": bool(swa_full),
        "pooling": "" if pooling is None else str(pooling),
    }


def progress_callback(progress: object) -> Callable[[float], object] | None:
    """The ``progress`` option of Engine as what is called with the loaded fraction, or None.

    Raises:
        RequestError: It is neither True nor a callable.
    """
    if progress is True:
        return _print_progress
    if progress and not callable(progress):
        raise RequestError(f"Engine: progress is {shown(progress)}, True or a callable is needed")
    return cast("Callable[[float], object]", progress) if progress else None


def _print_progress(fraction: float) -> None:
    end = "\n" if fraction >= 1.0 else ""
    print(f"\rloading model {fraction:4.0%}", end=end, file=sys.stderr, flush=True)


def model_path(model: str | os.PathLike[str]) -> str:
    """*model* as the text of a path.

    Raises:
        RequestError: It has a zero byte, or characters that UTF-8 cannot express.
    """
    path = os.fsdecode(os.fspath(model))
    encode("Engine", path)
    if "\0" in path:
        raise RequestError(
            f"Engine: the path {shown(path)} has a zero byte, no file has; correct it"
        )
    return path


def lora_adapters(value: object) -> list[tuple[str, float]]:
    """The ``lora`` option of Engine as (path, scale) pairs.

    Raises:
        RequestError: It is no path, no (path, scale) pair and no list of these.
    """
    match value:
        case None:
            return []
        case list():
            return [_lora_adapter(item) for item in cast("list[object]", value)]
        case tuple() if not _is_pair(cast("tuple[object, ...]", value)):
            return [_lora_adapter(item) for item in cast("tuple[object, ...]", value)]
        case _:
            return [_lora_adapter(value)]


def _is_pair(items: tuple[object, ...]) -> bool:
    return len(items) == 2 and not isinstance(items[1], str | os.PathLike | tuple)


def _lora_adapter(item: object) -> tuple[str, float]:
    path, scale = item, 1.0
    got = shown(item)
    if isinstance(item, tuple) and len(cast("tuple[object, ...]", item)) == 2:
        path, scale = cast("tuple[object, object]", item)
    if not isinstance(path, str | os.PathLike):
        raise RequestError(f"Engine: lora has {got}, a path or a (path, scale) pair is needed")
    number = _to_float(scale)
    if number is None or not abs(number) <= _SCALE_MAX:
        raise RequestError(
            f"Engine: lora has {got}, a scale from -{_SCALE_MAX:g} to {_SCALE_MAX:g} is needed"
        )
    return model_path(cast("str | os.PathLike[str]", path)), number


def _to_float(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value)
    except OverflowError:  # an int beyond every float
        return None


def encode(who: str, text: str) -> bytes:
    """UTF-8 of *text*; RequestError where it has none (surrogates)."""
    if not isinstance(text, str):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise RequestError(f"{who}: got {type(text).__name__}, a str is needed")
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(
            f"{who}: character {error.start} of the text is a surrogate, which UTF-8 cannot "
            "express; decode the text with errors='replace' where it comes from"
        ) from None


def whole_number(who: str, name: str, value: object, low: int = 1, high: int = _INT32_MAX) -> int:
    """*value* as an int from *low* to *high*; RequestError otherwise."""
    number = _to_index(value)
    if number is None or not low <= number <= high:
        raise RequestError(
            f"{who}: {name} is {shown(value)}, a whole number {low}..{high} is needed"
        )
    return number


def byte_count(who: str, name: str, value: object) -> int:
    """As `whole_number`, for sizes of memory."""
    return whole_number(who, name, value, high=_INT64_MAX)


def token_limit(who: str, value: object) -> int:
    """*value* as ``max_tokens``: from 1, and what no slot can hold means all of the slot."""
    return min(whole_number(who, "max_tokens", value, high=_INT64_MAX), _INT32_MAX)


def shift_options(
    core: _core.Engine,
    n_prompt: int,
    reuse: object,
    reuse_min_tokens: object,
    context_shift: object,
    n_keep: object,
    n_discard: object,
) -> ShiftOptions:
    """The options of `Engine.generate` that move positions, checked.

    Raises:
        RequestError: One of them is of another type or out of its range.
        UnsupportedModel: The model's positions cannot be moved.
    """
    who = "generate"
    if not isinstance(reuse, str) or reuse not in ("exact", "shift"):
        raise RequestError(f"{who}: reuse is {shown(reuse)}, known are 'exact' and 'shift'")
    if not isinstance(context_shift, bool):
        raise RequestError(
            f"{who}: context_shift is {shown(context_shift)}, True or False is needed"
        )
    n_run_min = whole_number(who, "reuse_min_tokens", reuse_min_tokens)
    wanted = "reuse='shift'" if reuse == "shift" else "context_shift" if context_shift else None
    if wanted and core.shift_obstacle:
        raise UnsupportedModel(
            f"{who}: {wanted} moves positions, this model keeps {core.shift_obstacle}; "
            "leave it out and send the ids that are to be seen"
        )
    chosen: ShiftOptions = {**NO_SHIFT, "n_reuse_min": n_run_min if reuse == "shift" else 0}
    n_keep = whole_number(who, "n_keep", n_keep, low=-1, high=_INT64_MAX)
    if n_discard is not None:
        n_discard = whole_number(who, "n_discard", n_discard, high=_INT64_MAX)
    if not context_shift:
        if n_keep != 0 or n_discard is not None:
            raise RequestError(
                f"{who}: n_keep is {n_keep} and n_discard {n_discard}, which say how a full slot "
                "is shifted; pass context_shift=True with them"
            )
        return chosen
    if n_keep > n_prompt:
        raise RequestError(
            f"{who}: n_keep is {n_keep}, the prompt has {n_prompt} tokens; -1 keeps all of them"
        )
    n_keep = n_prompt if n_keep < 0 else n_keep
    n_rest = core.n_ctx - n_keep
    if n_discard is None:
        n_discard = max(1, n_rest // 2)
    if n_discard > n_rest:
        raise RequestError(
            f"{who}: n_keep is {n_keep} and n_discard {n_discard}, the slot holds {core.n_ctx} "
            "tokens; keep or discard less, or raise n_ctx"
        )
    return {**chosen, "n_keep": n_keep, "n_discard": n_discard}


def sampling_of(
    who: str, sampling: object, options: Mapping[str, Any], mods: Sequence[object]
) -> Sampling:
    """The Sampling that was given, or is made of its fields given one by one.

    Raises:
        RequestError: Both were given, or something else; or *mods*, which are not there yet.
    """
    if not isinstance(mods, Sequence) or mods:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise RequestError(f"{who}: mods are not in this version; leave mods out")
    if sampling is None:
        return Sampling(**options)
    if not isinstance(sampling, Sampling):
        raise RequestError(
            f"{who}: sampling is of type {type(sampling).__name__}, a Sampling is needed"
        )
    if options:
        raise RequestError(
            f"{who}: sampling= and {', '.join(options)} are both given; put them into Sampling"
        )
    return sampling


def checked_ids(who: str, ids: Iterable[object]) -> list[int]:
    """*ids* as ints that fit the core; the vocabulary's bounds are checked there."""
    if isinstance(ids, str | bytes) or not isinstance(ids, Iterable):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise RequestError(f"{who}: got {type(ids).__name__}, a sequence of token ids is needed")
    given = list(ids)
    if are_ids(given):
        return cast("list[int]", given)
    checked: list[int] = []
    for value in given:
        token_id = _to_index(value)
        if token_id is None:
            raise InvalidToken(
                f"{who}: token id {shown(value)} is no whole number; take ids from tokenize"
            )
        if not 0 <= token_id <= _INT32_MAX:
            raise InvalidToken(f"{who}: token id {shown(token_id)}, ids are 0 and above")
        checked.append(token_id)
    return checked


def _to_index(value: object) -> int | None:
    # True would be token 1: a mistake that nobody means.
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)  # pyright: ignore[reportArgumentType]
    except TypeError:
        return None


def to_core(sampling: Sampling) -> _core.SamplingParams:
    """The core's sampling parameters."""
    if isinstance(sampling.json_schema, str):
        sampling = replace(sampling, json_schema=_bounded_space(sampling.json_schema))
    return _core.SamplingParams(sampling)


def _bounded_space(schema: str) -> str:
    """*schema* with a limit to white space between values, unless it says something about that.

    JSON allows white space without end, and a weak model may write nothing else from there on.
    """
    try:
        value: object = json.loads(schema)
    except (ValueError, RecursionError):
        return schema  # llguidance says what is wrong with it
    if not isinstance(value, dict) or "x-guidance" in value:
        return schema
    return json.dumps({**value, "x-guidance": {"whitespace_pattern": _SPACE}}, ensure_ascii=False)


_SPACE: Final = r" |\n[ \t]{0,20}"  # or none: as llama.cpp's own grammars of JSON have it
