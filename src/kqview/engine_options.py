"""Options of Engine: checks them and converts them to the core's."""

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Literal, TypedDict, cast, get_args

import numpy as np

from kqview import _core
from kqview.arguments import INT64_MAX, encode, flag, invalid, to_path, whole_number
from kqview.errors import shown
from kqview.lora import SCALE_MAX, scale_of
from kqview.machine import default_threads, free_memory_bytes, physical_memory_bytes

Lora = str | os.PathLike[str] | tuple[str | os.PathLike[str], float]

KvType = Literal["f16", "f32", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl"]
AttentionKernel = Literal["auto", "kqview", "llama.cpp"]
DeviceRows = Literal["auto", "in graph", "beside"]
Pooling = Literal["none", "mean", "cls", "last", "rank"]

PINNED_BYTES: Final = 2**30

# As the core has them (cpp/llama/context.cpp); all slots together have at most n_ctx tokens.
SIZES_MAX: Final[Mapping[str, int]] = {
    "n_ctx": 2**30, "n_slots": 256, "n_batch": 2**20, "n_ubatch": 2**20, "n_threads": 512,
}  # fmt: skip

_POOLING: Final = get_args(Pooling)
_KERNELS: Final = get_args(AttentionKernel)
_DEVICE_ROWS: Final = get_args(DeviceRows)


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
    run_ahead: int
    progress: Callable[[float], object] | bool | None


def context_options(
    *,
    n_ctx: object = None,
    n_slots: object = 1,
    n_batch: object = 2048,
    n_ubatch: object = 512,
    n_threads: object = None,
    flash_attn: object = "auto",
    attention_kernel: object = "auto",
    device_rows: object = "auto",
    kv_type: object = "f16",
    swa_full: object = True,
    pooling: object = None,
    attention_budget_bytes: object = None,
    pinned_bytes: object = PINNED_BYTES,
) -> _core.EngineOptions:
    """The options of the context; the core checks limits that depend on the model.

    Raises:
        RequestError: An option has the wrong type or is out of range.
    """
    if isinstance(flash_attn, str) and flash_attn == "auto":
        uses_flash = None
    elif isinstance(flash_attn, bool | np.bool_):
        uses_flash = bool(cast("bool", flash_attn))
    else:
        raise invalid("flash_attn", "'auto', True or False", shown(flash_attn))
    if not (isinstance(attention_kernel, str) and attention_kernel in _KERNELS):
        raise invalid("attention_kernel", f"one of {str(_KERNELS)[1:-1]}", shown(attention_kernel))
    if not (isinstance(device_rows, str) and device_rows in _DEVICE_ROWS):
        raise invalid("device_rows", f"one of {str(_DEVICE_ROWS)[1:-1]}", shown(device_rows))
    if not isinstance(kv_type, str):
        raise invalid("kv_type", "a name such as 'f16'", shown(kv_type))
    if pooling is not None and not (isinstance(pooling, str) and pooling in _POOLING):
        raise invalid("pooling", f"None or one of {str(_POOLING)[1:-1]}", shown(pooling))
    memory_bytes = physical_memory_bytes()
    budget = memory_bytes // 4 if attention_budget_bytes is None else attention_budget_bytes
    options = _core.EngineOptions()
    options.n_ctx = 0 if n_ctx is None else _size("n_ctx", n_ctx)
    options.n_slots = _size("n_slots", n_slots)
    options.n_batch = _size("n_batch", n_batch)
    options.n_ubatch = _size("n_ubatch", n_ubatch)
    options.n_threads = _size("n_threads", default_threads() if n_threads is None else n_threads)
    options.flash_attn = uses_flash
    options.attends = attention_kernel != "llama.cpp"
    options.rows_beside = device_rows == "beside"  # "auto": until a GPU has measured both
    options.kv_type = kv_type
    options.swa_full = flag("swa_full", swa_full)
    options.pooling = "" if pooling is None else str(pooling)
    options.host_memory_bytes = memory_bytes
    options.free_memory_bytes = max(1, free_memory_bytes()) if n_ctx is None else 0
    options.attention_budget_bytes = whole_number("attention_budget_bytes", budget, high=INT64_MAX)
    options.pinned_bytes = whole_number("pinned_bytes", pinned_bytes, low=0, high=INT64_MAX)
    return options


def _size(name: str, value: object) -> int:
    return whole_number(name, value, high=SIZES_MAX[name])


def model_options(model: str | os.PathLike[str], n_gpu_layers: object) -> _core.ModelOptions:
    """The options of loading the model.

    Raises:
        RequestError: *model* is no path, is empty, contains a null byte or characters that UTF-8
            cannot express, or *n_gpu_layers* is out of range.
    """
    options = _core.ModelOptions()
    options.path = _path("model", model)
    options.n_gpu_layers = whole_number("n_gpu_layers", n_gpu_layers, low=-1)
    return options


def progress_callback(progress: object) -> Callable[[float], object] | None:
    """The function to call with the loaded fraction, or None.

    Raises:
        RequestError: *progress* is neither True nor a callable.
    """
    if progress is True:
        return _print_progress
    if progress and not callable(progress):
        raise invalid("progress", "True or a callable", shown(progress))
    return cast("Callable[[float], object]", progress) if progress else None


def lora_adapters(value: Lora | Sequence[Lora] | None) -> list[tuple[str, float]]:
    """The ``lora`` option as (path, scale) pairs.

    Raises:
        RequestError: *value* is not a path, a (path, scale) pair or a list of these.
    """
    given: object = value
    match given:
        case None:
            return []
        case list():
            return [_lora_adapter(item) for item in cast("list[object]", given)]
        case tuple() if not _is_pair(cast("tuple[object, ...]", given)):
            return [_lora_adapter(item) for item in cast("tuple[object, ...]", given)]
        case _:
            return [_lora_adapter(given)]


def _is_pair(items: tuple[object, ...]) -> bool:
    return len(items) == 2 and not isinstance(items[1], str | os.PathLike | tuple)


def _lora_adapter(item: object) -> tuple[str, float]:
    path, scale = item, 1.0
    got = shown(item)
    if isinstance(item, tuple) and len(cast("tuple[object, ...]", item)) == 2:
        path, scale = cast("tuple[object, object]", item)
    if not isinstance(path, str | os.PathLike):
        raise invalid("lora", "a path, a (path, scale) pair or a list of these", got)
    number = scale_of(scale)
    if number is None:
        limits = f"a scale from -{SCALE_MAX:g} to {SCALE_MAX:g}"
        raise invalid("lora", f"given with {limits}", got)
    return _path("lora", cast("object", path)), number


def _path(name: str, value: object) -> str:
    path = str(to_path(name, value))
    encode(name, path)
    return path


def _print_progress(fraction: float) -> None:
    end = "\n" if fraction >= 1.0 else ""
    print(f"\rloading model {fraction:4.0%}", end=end, file=sys.stderr, flush=True)
