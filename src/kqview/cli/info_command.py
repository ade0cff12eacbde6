"""``kqview info`` and ``kqview tokenize``: facts about the build, a model and its vocabulary."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kqview.cli.option_groups import option, with_groups
from kqview.cli.options import (
    ADD_SPECIAL,
    JSON,
    ModelChoice,
    PromptChoice,
    gpu_layers,
    naming_options,
    open_engine,
)
from kqview.errors import RequestError
from kqview.types import Capture, ModelInfo

_N_CONTEXT: Final = 4096
_LONG: Final = ("special_tokens", "chat_template", "metadata")


@with_groups
def info(
    *,
    source: ModelChoice,
    metadata: bool = option(False, "Show the metadata of the file as well.", "--metadata"),
    ngl: int = gpu_layers(0),
    as_json: bool = JSON,
) -> None:
    """Show this build and its devices; or the shape, vocabulary and capture size of a model.

    Examples:

    - `kqview info`
    - `kqview info model.gguf`
    - `kqview info model.gguf --ngl -1`
    - `kqview info --demo --json`
    """
    if not source.is_named:
        if metadata:
            raise RequestError("--metadata needs a model; name one: MODEL, --hf or --demo")
        _show_system(as_json=as_json)
        return
    model = source.resolve_alone()
    with naming_options(), open_engine(model, n_ctx=256, n_gpu_layers=ngl) as engine:
        facts = engine.model
        system = engine.system_info()
        kernel = engine.attention_kernel
        capture_bytes = Capture().bytes_per_token(facts, _N_CONTEXT)
    if as_json:
        content: dict[str, Any] = {
            "model": {f.name: _to_json(getattr(facts, f.name)) for f in dataclasses.fields(facts)},
            "capture": {"n_context": _N_CONTEXT, "bytes_per_token": capture_bytes},
            "attention_kernel": kernel,
            "system": system,
        }
        typer.echo(json.dumps(content, indent=2, default=str))
        return
    table = Table(show_header=False, box=None)
    for name, value in _model_rows(facts):
        table.add_row(name, Text(value))
    table.add_row(
        f"bytes per token at {_N_CONTEXT}", Text(f"{capture_bytes:,} (every layer and head)")
    )
    table.add_row("attention on the CPU", Text(kernel))
    table.add_row(f"capture with --ngl {ngl}", Text(str(system["capture"])))
    table.add_row("llama.cpp", Text(str(system["llama_cpp_commit"])))
    table.add_row("threads", Text(str(system["n_threads"])))
    if metadata:
        for name, value in sorted(facts.metadata.items()):
            table.add_row(name, Text(value))
    Console(soft_wrap=True).print(table)


def _model_rows(facts: ModelInfo) -> list[tuple[str, str]]:
    rows = [
        (field.name, _to_text(getattr(facts, field.name)))
        for field in dataclasses.fields(facts)
        if field.name not in _LONG
    ]
    rows.append(
        ("special_tokens", ", ".join(f"{k} {v!r}" for k, v in facts.special_tokens.items()))
    )
    n_template = len(facts.chat_template or "")
    rows.append(("chat_template", f"{n_template} characters" if n_template else "none"))
    return rows


def _to_text(value: object) -> str:
    if value is None:
        return "none"
    if isinstance(value, tuple):
        return ", ".join(map(str, value)) or "none"  # pyright: ignore[reportUnknownArgumentType]
    return f"{value:,}" if isinstance(value, int) else str(value)


def _to_json(value: object) -> object:
    # dataclasses.asdict deep-copies, which read-only mappings do not allow.
    return dict(value) if hasattr(value, "keys") else value  # pyright: ignore


# ---- the build


_GIB = 2**30


def _show_system(*, as_json: bool) -> None:
    """Print `kqview.system_info` as tables or as JSON."""
    from kqview import system_info

    info = system_info()
    if as_json:
        typer.echo(json.dumps(info, indent=2))
        return
    console = Console(soft_wrap=True)
    about = Table(show_header=False, box=None)
    for name, value in _build_rows(info):
        about.add_row(name, Text(value))
    console.print(about)
    console.print()
    console.print(_device_table(info["devices"]))
    has_gpu = any(device["type"] in ("GPU", "IGPU") for device in info["devices"])
    if (info["gpu_backends"] is not None or info["backend_packages"]) and not has_gpu:
        console.print("no GPU found: models run on the CPU")


def _device_table(devices: Sequence[Mapping[str, Any]]) -> Table:
    table = Table("device", "type", "description", "memory free", box=None)
    has_capability = any(device["compute_capability"] for device in devices)
    if has_capability:
        table.add_column("compute capability")
    table.add_column("capture")
    has_kernel = any(device["row_kernel"] for device in devices)
    if has_kernel:
        table.add_column("rows by")
    for device in devices:
        rows_by = "kqview" if device["row_kernel"] or device["type"] == "CPU" else "ggml"
        total = device["memory_total_bytes"]
        memory = f"{device['memory_free_bytes'] / _GIB:.1f} of {total / _GIB:.1f} GiB"
        cells = [
            *(device[name] for name in ("name", "type", "description")),
            memory if total else "unknown",
            *([device["compute_capability"] or ""] if has_capability else []),
            device["capture"],
            *([rows_by] if has_kernel else []),
        ]
        table.add_row(*map(Text, cells))
    return table


def _build_rows(info: Mapping[str, Any]) -> list[tuple[str, str]]:
    gpus = (info["gpu_backends"] or "no GPU").replace(",", ", ")
    if info["cuda_version"] is not None:
        gpus = gpus.replace("CUDA", f"CUDA {info['cuda_version']} for {info['cuda_architectures']}")
    cpu = "any CPU of its kind" if info["is_portable"] else "this kind of CPU"
    others = [name for name in info["cpu_variants"] if name != info["cpu_variant"]]
    rows = [
        ("kqview", info["kqview_version"]),
        ("llama.cpp", info["llama_cpp_commit"]),
        ("built for", f"{cpu}; {gpus}"),
        ("CPU variant", info["cpu_variant"] + (f" (also {', '.join(others)})" if others else "")),
    ]
    for backend in info["backends"]:
        flags = " ".join(f"{k}={v}" for k, v in info["backend_features"][backend].items())
        rows.append((f"backend {backend}", flags))
    for package, problem in info["backend_packages"].items():
        rows.append((f"package {package}", problem or "loaded"))
    driver = info["nvidia_driver"]
    if info["nvidia_driver_cuda"] is not None:
        driver = f"{driver or 'unknown'}, runs CUDA {info['nvidia_driver_cuda']}"
    if driver or info["cuda_version"] is not None:
        rows.append(("NVIDIA driver", driver or "none"))
    return [*rows, ("threads", str(info["n_threads_default"]))]


# ---- tokens


@with_groups
def tokenize(
    *,
    source: ModelChoice,
    prompt: PromptChoice,
    add_special: bool = ADD_SPECIAL,
    parse_special: bool = option(
        True,
        "Treat the text of special tokens as these tokens.",
        "--parse-special/--no-parse-special",
    ),
    ids_only: bool = option(False, "Print only the ids.", "--ids"),
    as_json: bool = JSON,
) -> None:
    """Show the tokens of a text, one per line: id and text.

    Examples:

    - `kqview tokenize model.gguf "The capital of France is"`
    - `kqview tokenize --demo --ids < prompt.txt`
    """
    model, words = source.resolve(prompt.text)
    text = prompt.read(words)
    with open_engine(model, n_ctx=256, n_gpu_layers=0) as engine:
        ids = engine.tokenize(text, add_special=add_special, parse_special=parse_special)
        # Incomplete characters become escapes, so that different tokens look different.
        pieces = [engine.token_bytes(one).decode("utf-8", "backslashreplace") for one in ids]
    if as_json:
        typer.echo(json.dumps({"ids": ids} if ids_only else {"ids": ids, "pieces": pieces}))
    elif ids_only:
        typer.echo(" ".join(map(str, ids)))
    else:
        for token_id, piece in zip(ids, pieces, strict=True):
            typer.echo(f"{token_id:>7}  {piece!r}")
