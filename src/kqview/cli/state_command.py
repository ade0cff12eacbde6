"""``kqview state``: checks state files of saved slots and shows what they hold."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import typer

from kqview.cli.option_groups import argument, option
from kqview.cli.options import scaled_file
from kqview.state.files import StateReport, check_file
from kqview.state.fingerprint import ModelFiles
from kqview.state.ses1 import checkpoints_in

app = typer.Typer(
    help="Check and show state files of saved slots.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
)

FILES: Any = argument(..., "State files.", metavar="FILE...")
JSON: Any = option(False, "Print a JSON list with one object per file.", "--json")


@app.command()
def check(
    files: list[Path] = FILES,
    model: Path | None = option(
        None, "GGUF file the slots should belong to.", "--model -m", metavar="FILE"
    ),
    lora: list[str] | None = option(
        None, "LoRA adapter the model was loaded with; repeatable.", metavar="FILE[=SCALE]"
    ),
    as_json: bool = JSON,
) -> None:
    """Check state files: one line each; exit status 1 if any of them is damaged.

    Checks the structure and the checksum; with --model, the fingerprint of the model as well, for
    which all of its files are read. A raw blob has no checksum, so altered values go unnoticed.

    Examples:

    - `kqview state check chat.ses1`
    - `kqview state check sessions/*.ses1 --model model.gguf --lora adapter.gguf=0.5`
    """
    if lora and model is None:
        raise typer.BadParameter("--lora needs --model; name the model of the adapters")
    adapters = [scaled_file(text) for text in lora or ()]
    owner = None if model is None else ModelFiles(str(model), adapters)
    _report(files, owner, None if as_json else _line)


@app.command("inspect")
def show(files: list[Path] = FILES, as_json: bool = JSON) -> None:
    """Show what state files contain; exit status as for check.

    Examples:

    - `kqview state inspect chat.ses1`
    """
    _report(files, None, None if as_json else _facts)


def _report(
    files: list[Path], model: ModelFiles | None, write: Callable[[StateReport], str] | None
) -> None:
    """Print what *write* says of each file, or all of it as JSON."""
    reports = [check_file(file, model) for file in files]
    if write is None:
        typer.echo(json.dumps([_to_json(report) for report in reports], indent=2))
    else:
        for report in reports:
            typer.echo(write(report))
    if any(report.problems for report in reports):
        raise typer.Exit(1)


def _line(report: StateReport) -> str:
    if report.problems:
        return f"{report.path}: FAILED: {'; '.join(report.problems)}"
    assert report.state is not None
    parts = ["intact", f"{report.state.n_tokens} tokens", f"{report.n_bytes:,} bytes"]
    parts.append("checksum correct" if report.trailer else "raw blob without a checksum")
    if report.is_of_model:
        parts.append("matches the model")
    return f"{report.path}: {', '.join(parts)}"


def _facts(report: StateReport) -> str:
    rows = [("file", report.path), *(("problem", problem) for problem in report.problems)]
    if report.n_bytes is not None:
        rows.append(("size", f"{report.n_bytes:,} bytes"))
    if state := report.state:
        flash = {True: "on", False: "off", None: "unknown"}[state.flash_attn]
        rows += [
            ("tokens", f"{state.n_tokens:,}"),
            ("cache", f"{state.kv_bytes:,} bytes, {state.n_layer} layers of {state.kv_type}"),
            ("flash attention", flash),
        ]
    if trailer := report.trailer:
        n_exact, data = trailer.marks.n_exact, trailer.marks.checkpoints
        at = ", ".join(map(str, checkpoints_in(data)))
        rows += [
            ("checksum", "correct"),
            ("exact tokens", "unknown" if n_exact is None else f"{n_exact:,}"),
            ("checkpoints", f"at {at} tokens, {len(data):,} bytes" if at else "none"),
            ("model", trailer.facts.model),
        ]
    elif not report.has_trailer and report.state:
        rows.append(("checksum", "none: a raw blob, so the model is unknown as well"))
    return "\n".join(f"{name:<16} {value}" for name, value in rows)


def _to_json(report: StateReport) -> dict[str, Any]:
    content: dict[str, Any] = {
        "path": report.path,
        "problems": list(report.problems),
        "n_bytes": report.n_bytes,
        "has_trailer": report.has_trailer,
        "is_of_model": report.is_of_model,
    }
    if report.state:
        content |= {**dataclasses.asdict(report.state), "tokens": list(report.state.tokens)}
        content["n_bytes"] = report.n_bytes
        content["n_tokens"] = report.state.n_tokens
    if report.trailer:
        content["model"] = report.trailer.facts.model
        content["n_exact"] = report.trailer.marks.n_exact
        content["checkpoints"] = checkpoints_in(report.trailer.marks.checkpoints)
        content["checkpoint_bytes"] = len(report.trailer.marks.checkpoints)
    return content
