"""``kqview info``: the machine and this build, or what a model file says about itself."""

import dataclasses
import json
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kqview.cli.loading import open_engine
from kqview.cli.options import DemoOption, HubOption, ModelArgument
from kqview.cli.system import show_system

if TYPE_CHECKING:
    from kqview import ModelInfo

_N_CONTEXT: Final = 4096
_LONG: Final = ("special_tokens", "chat_template", "metadata")


def info(
    model: ModelArgument = None,
    hf: HubOption = None,
    demo: DemoOption = False,
    metadata: Annotated[
        bool, typer.Option("--metadata", help="Show the file's metadata too.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
) -> None:
    """Show this build and its devices; or a model: shape, vocabulary, what a capture takes.

    Examples:

    - `kqview info`
    - `kqview info model.gguf`
    - `kqview info --demo --json`
    """
    from kqview import Capture

    if model is None and hf is None and not demo:
        if metadata:
            raise typer.BadParameter("--metadata is about a model; name one: MODEL, --hf or --demo")
        show_system(as_json=as_json)
        return
    with open_engine(model, from_hub=hf, demo=demo, n_ctx=256, n_gpu_layers=0) as engine:
        facts = engine.model
        system = engine.system_info()
        capture_bytes = Capture().bytes_per_token(facts, _N_CONTEXT)
    if as_json:
        content: dict[str, Any] = {
            "model": {f.name: _to_json(getattr(facts, f.name)) for f in dataclasses.fields(facts)},
            "capture": {"n_context": _N_CONTEXT, "bytes_per_token": capture_bytes},
            "system": system,
        }
        typer.echo(json.dumps(content, indent=2, default=str))
        return
    table = Table(show_header=False, box=None)
    for name, value in _rows(facts):
        table.add_row(name, Text(value))
    table.add_row(
        f"bytes per token at {_N_CONTEXT}", Text(f"{capture_bytes:,} (every layer and head)")
    )
    table.add_row("llama.cpp", Text(str(system["llama_cpp_commit"])))
    if metadata:
        for name, value in sorted(facts.metadata.items()):
            table.add_row(name, Text(value))
    Console(soft_wrap=True).print(table)


def _rows(facts: "ModelInfo") -> list[tuple[str, str]]:
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
    # dataclasses.asdict would deep-copy, which read-only mappings do not allow.
    return dict(value) if hasattr(value, "keys") else value  # pyright: ignore
