"""Options of Engine: checks them and converts them to the core's."""

import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final, Literal, TypedDict, cast

import numpy as np

from kqview import _core, backends
from kqview.arguments import (
    INT64_MAX,
    choice,
    encode,
    flag,
    invalid,
    seconds,
    to_number,
    to_path,
    whole_number,
)
from kqview.chat.turn import checked_options
from kqview.errors import shown
from kqview.lora import SCALE_MAX, scale_of
from kqview.machine import default_threads, free_memory_bytes, physical_memory_bytes
from kqview.option_names import unknown_option
from kqview.rpc import rpc_endpoints

Lora = str | os.PathLike[str] | tuple[str | os.PathLike[str], float]

KvType = Literal["f16", "f32", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl"]
AttentionKernel = Literal["auto", "kqview", "llama.cpp"]
DeviceRows = Literal["auto", "in graph", "beside"]
Draft = Literal["prompt-lookup", "mtp"]
PROMPT_LOOKUP: Final = "prompt-lookup"
MTP: Final = "mtp"
Pooling = Literal["none", "mean", "cls", "last", "rank"]

PINNED_BYTES: Final = 2**30

# As the core checks them once more (cpp/llama/context_params.cpp), after the model has been loaded;
# all slots together have at most n_ctx tokens.
SIZES_MAX: Final[Mapping[str, int]] = {
    "n_ctx": 2**30, "n_slots": 256, "n_batch": 2**20, "n_ubatch": 2**20, "n_threads": 512,
}  # fmt: skip


class EngineOptions(TypedDict, total=False):
    """The options of `Engine`, for callers that pass them on."""

    n_ctx: int | None
    n_slots: int
    n_batch: int
    n_ubatch: int
    n_threads: int | None
    n_gpu_layers: int
    flash_attn: Literal["auto"] | bool
    attention_kernel: AttentionKernel
    device_rows: DeviceRows
    kv_type: KvType
    swa_full: bool
    pooling: Pooling | None
    chat_template: str | None
    template_options: Mapping[str, Any] | None
    lora: Lora | Sequence[Lora] | None
    rpc_servers: str | Sequence[str] | None
    rpc_timeout_s: float
    attention_budget_bytes: int | None
    pinned_bytes: int
    max_gap_ms: float | None
    checkpoint_bytes: int | None
    checkpoint_every: int
    draft: str | os.PathLike[str] | None
    run_ahead: int | None
    progress: Callable[[float], object] | bool | None


def _to_size(name: str, value: object) -> int:
    return whole_number(name, value, high=SIZES_MAX[name])


def _to_flash(name: str, value: object) -> bool | None:
    if isinstance(value, str) and value == "auto":
        return None
    if isinstance(value, bool | np.bool_):
        return bool(cast("bool", value))
    raise invalid(name, "'auto', True or False", shown(value))


def _to_kv_type(name: str, value: object) -> str:
    if not isinstance(value, str):  # the core knows the names
        raise invalid(name, "a name such as 'f16'", shown(value))
    return value


def _to_bytes(name: str, value: object, low: int = 0) -> int:
    return whole_number(name, value, low=low, high=INT64_MAX)


def _to_text(name: str, value: Any) -> str:
    encode(name, value)
    return value


def _to_draft(name: str, value: object) -> str:
    path = str(to_path(name, value))
    if isinstance(value, os.PathLike) or path.endswith(".gguf"):
        return _path(name, path)
    return choice(name, value, Draft)


def _to_gap(name: str, value: object) -> float:
    gap = to_number(value)
    if gap is None or not 0 < gap < math.inf:
        raise invalid(name, "a number of milliseconds above 0, or None", shown(value))
    return gap


def _to_progress(name: str, value: object) -> Callable[[float], object] | None:
    if value is True:
        return _print_progress
    if value and not callable(value):
        raise invalid(name, "True or a callable", shown(value))
    return cast("Callable[[float], object]", value) if value else None


def _print_progress(fraction: float) -> None:
    end = "\n" if fraction >= 1.0 else ""
    print(f"\rloading model {fraction:4.0%}", end=end, file=sys.stderr, flush=True)


def _to_adapters(name: str, value: object) -> list[tuple[str, float]]:
    """(path, scale) of each adapter."""
    items = cast("Sequence[object]", value if isinstance(value, list | tuple) else [value])
    if isinstance(value, tuple) and len(items) == 2:  # a pair, or two of them
        items = items if isinstance(items[1], str | os.PathLike | tuple) else [items]
    return [_to_adapter(name, item) for item in items]


def _to_adapter(name: str, item: object) -> tuple[str, float]:
    path, scale, got = item, 1.0, shown(item)
    if isinstance(item, tuple) and len(cast("tuple[object, ...]", item)) == 2:
        path, scale = cast("tuple[object, object]", item)
    if not isinstance(path, str | os.PathLike):
        raise invalid(name, "a path, a (path, scale) pair or a list of these", got)
    number = scale_of(scale)
    if number is None:
        raise invalid(name, f"given with a scale from -{SCALE_MAX:g} to {SCALE_MAX:g}", got)
    return _path(name, cast("object", path)), number


# The default of each option, and what makes the core's value of one that is given. The core checks
# limits that depend on the model.
_OPTIONS: Final[Mapping[str, tuple[Any, Callable[[str, Any], Any]]]] = {
    "n_ctx": (None, _to_size),
    "n_slots": (1, _to_size),
    "n_batch": (2048, _to_size),
    "n_ubatch": (512, _to_size),
    "n_threads": (None, _to_size),
    "n_gpu_layers": (-1, lambda name, value: whole_number(name, value, low=-1)),
    "flash_attn": ("auto", _to_flash),
    "attention_kernel": ("auto", partial(choice, choices=AttentionKernel)),
    "device_rows": ("auto", partial(choice, choices=DeviceRows)),
    "kv_type": ("f16", _to_kv_type),
    "swa_full": (True, flag),
    "pooling": (None, partial(choice, choices=Pooling)),
    "chat_template": (None, _to_text),
    "template_options": (None, lambda _, value: checked_options(value)),
    "lora": (None, _to_adapters),
    "rpc_servers": (None, lambda _, value: rpc_endpoints(value)),
    "rpc_timeout_s": (300.0, partial(seconds, low=0.001, high=86_400)),
    "attention_budget_bytes": (None, lambda name, value: _to_bytes(name, value, 1)),
    "pinned_bytes": (PINNED_BYTES, _to_bytes),
    "max_gap_ms": (None, _to_gap),
    "checkpoint_bytes": (None, _to_bytes),
    "checkpoint_every": (2048, lambda name, value: whole_number(name, value, low=0)),
    "draft": (None, _to_draft),
    "run_ahead": (None, lambda name, value: whole_number(name, value, low=0)),
    "progress": (None, _to_progress),
}
DEFAULTS: Final[Mapping[str, Any]] = {name: default for name, (default, _) in _OPTIONS.items()}
"""The options of `Engine`."""


def checked(options: Mapping[str, Any], who: str = "Engine") -> dict[str, Any]:
    """The core's value of every option of `Engine`; None stands for a default.

    Raises:
        RequestError: There is no such option, or it has the wrong type or is out of range.
    """
    for name in options:
        if name not in _OPTIONS:
            raise unknown_option(who, name, (*_OPTIONS, "model"), unlisted=["model"])
    found: dict[str, Any] = {}
    for name, (default, check) in _OPTIONS.items():
        given = options.get(name)
        value = default if given is None else given
        found[name] = None if value is None else check(name, value)
    return found


def context_options(given: Mapping[str, Any]) -> _core.EngineOptions:
    """The options of the context, of those that `checked` returns."""
    n_ctx, n_threads, budget = given["n_ctx"], given["n_threads"], given["attention_budget_bytes"]
    memory_bytes = physical_memory_bytes()
    options = _core.EngineOptions()
    for name in (
        "n_slots", "n_batch", "n_ubatch", "flash_attn", "kv_type", "swa_full", "pinned_bytes",
        "checkpoint_bytes", "checkpoint_every",
    ):  # fmt: skip
        setattr(options, name, given[name])
    options.n_ctx = n_ctx or 0
    options.n_threads = _to_size("n_threads", n_threads or default_threads())
    options.attends = given["attention_kernel"] != "llama.cpp"
    rows_beside = {"auto": None, "in graph": False, "beside": True}
    options.rows_beside = rows_beside[given["device_rows"]]
    options.guesses = given["draft"] is not None
    options.max_gap_ms = given["max_gap_ms"] or 0.0
    options.pooling = given["pooling"] or ""
    options.host_memory_bytes = memory_bytes
    options.free_memory_bytes = max(1, free_memory_bytes()) if n_ctx is None else 0
    options.attention_budget_bytes = memory_bytes // 4 if budget is None else budget
    return options


def model_options(
    model: str | os.PathLike[str], n_gpu_layers: int, draft: str | None = None
) -> _core.ModelOptions:
    """The options of loading the model.

    Raises:
        RequestError: *model* is no path, is empty, contains a null byte or characters that UTF-8
            cannot express.
        UnsupportedModel: A package with a backend is for another kqview or llama.cpp.
    """
    backends.load()
    options = _core.ModelOptions()
    options.path = _path("model", model)
    options.n_gpu_layers = n_gpu_layers
    options.predicts = draft == MTP
    return options


def _path(name: str, value: object) -> str:
    path = str(to_path(name, value))
    encode(name, path)
    return path
