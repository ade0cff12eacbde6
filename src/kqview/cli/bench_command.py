"""``kqview bench``: what capture costs per decoded token, on the user's model and machine."""

from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from kqview.bench import records
from kqview.bench.sweep import CAPTURE_NAMES, SweepPlan, fitting_contexts, sweep
from kqview.cli.option_groups import option, with_groups
from kqview.cli.options import GPU_LAYERS, THREADS, ModelChoice, open_engine, parse_indices
from kqview.cli.outputs import PICTURES, check_output
from kqview.errors import RequestError
from kqview.machine import default_threads
from kqview.types import ModelInfo

if TYPE_CHECKING:
    from kqview import Engine

_QUICK: Final = {"contexts": (64, 128), "n_rounds": 5, "n_tokens": 8}


_SETTINGS: Final = {"both": (True, False), "on": (True,), "off": (False,)}


@with_groups
def bench(
    *,
    source: ModelChoice,
    contexts: str | None = option(None, "Context sizes in tokens. [default: 256,1024,4096]"),
    captures: str | None = option(
        None, "Captures to measure, such as logits,10-heads. [default: all]"
    ),
    flash_attn: Literal["both", "on", "off"] = option(
        "both", "Settings of flash attention to measure."
    ),
    pairs: int | None = option(
        None, "Timed pairs per row; a bound needs at least 5. [default: 10]", min=1
    ),
    tokens: int | None = option(
        None, "Tokens per run; the first 4 are not timed. [default: 16]", min=6
    ),
    quick: bool = option(False, "A short trial: contexts of 64 and 128, 5 pairs.", "--quick"),
    json_file: Path | None = option(
        None,
        "Append the rows to this file as JSON lines.",
        "--output -o --json",
        metavar="FILE.jsonl",
        dir_okay=False,
    ),
    plot: Path | None = option(None, "Draw the rows as .png, .svg or .pdf.", metavar="FILE"),
    threads: int | None = THREADS,
    ngl: int = GPU_LAYERS,
) -> None:
    """Measure what capturing attention costs on this machine.

    For each context size, one prompt of random tokens stays in the cache, and every capture decodes
    the same number of tokens after it. Runs with and without capture are interleaved, and every
    second round runs in reverse order. A cell is the median extra time per token, with the upper
    95 % bound of that median. The row "none, once more" captures nothing: it shows the noise.

    Captures: logits, scores, probs (every layer and head), float16, 10-heads, mean-heads, mean,
    top-8.

    Examples:

    - `kqview bench model.gguf`
    - `kqview bench model.gguf --contexts 1024 --captures logits,10-heads --flash-attn on`
    - `kqview bench --demo --quick --output rows.jsonl --plot rows.png`
    """
    check_output("--plot", plot, PICTURES)
    plan = SweepPlan(captures=_capture_names(captures), flash_attn=_SETTINGS[flash_attn])
    wanted: dict[str, Any] = dict(_QUICK) if quick else {}
    given = {
        "contexts": parse_indices("--contexts", contexts), "n_rounds": pairs, "n_tokens": tokens,
    }  # fmt: skip
    wanted |= {name: value for name, value in given.items() if value is not None}
    if 0 in wanted.get("contexts", ()):
        raise RequestError("--contexts has 0; the minimum is 1")

    model = source.resolve_alone()
    if json_file is not None:
        json_file.open("a").close()  # fail before the first row is measured, not after

    def open_one(n_ctx: int, with_flash: bool) -> "AbstractContextManager[Engine]":
        return open_engine(
            model, n_ctx=n_ctx, n_threads=threads, n_gpu_layers=ngl, flash_attn=with_flash,
        )  # fmt: skip

    with open_one(256, True) as engine:
        info = engine.model
    plan = replace(plan, **wanted)
    fitting, left_out = fitting_contexts(info, plan.contexts)
    plan = replace(plan, contexts=tuple(fitting))
    about = _about(info, plan, threads)
    rows: list[records.SweepRow] = []
    with _progress_line(plan.n_runs) as on_run:
        for row in sweep(open_one, plan, on_run):
            if isinstance(row, records.LeftOut):
                left_out.append(row)
                continue
            rows.append(row)
            if json_file is not None:
                records.append_record(json_file, {**about, **row.to_record()})
    _show(info, rows, left_out)
    if plot is not None and rows:
        from kqview.viz import overhead_plot
        from kqview.viz.figures import save_figure

        title = f"Cost of capture: {info.name or info.architecture}\n{about['cpu']}"
        lines = [{**about, **row.to_record()} for row in rows]
        save_figure(overhead_plot(lines, title=title), plot)
    if any(row.is_failure for row in left_out) or not rows:
        raise typer.Exit(1)


def _capture_names(text: str | None) -> tuple[str, ...]:
    names = CAPTURE_NAMES if text is None else [name.strip() for name in text.split(",")]
    unknown = [name for name in names if name not in CAPTURE_NAMES]
    if unknown:
        raise RequestError(
            f"--captures has {', '.join(map(repr, unknown))}; "
            f"choose from {', '.join(CAPTURE_NAMES)}"
        )
    return tuple(dict.fromkeys(names))


def _about(model: ModelInfo, plan: SweepPlan, threads: int | None) -> dict[str, Any]:
    """The fields that every JSON line starts with."""
    return {
        **records.machine_facts(),
        "model": model.name or model.architecture,
        "model_bytes": model.size_bytes,
        "file_type": model.file_type,
        "flags": f"--threads {threads or default_threads()} --pairs {plan.n_rounds} "
        f"--tokens {plan.n_tokens}",
    }


@contextmanager
def _progress_line(n_runs: int) -> Generator[Callable[[str, int], None]]:
    """Progress on one line of stderr, if that is a terminal: what is measured, the time left."""
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("runs,"),
        TimeElapsedColumn(), TextColumn("elapsed,"), TimeRemainingColumn(), TextColumn("left"),
    )  # fmt: skip
    with Progress(
        *columns, console=console, disable=not console.is_terminal, transient=True
    ) as progress:
        task = progress.add_task("loading the model", total=n_runs)

        def on_run(name: str, n_done: int) -> None:
            progress.update(task, description=name, advance=n_done)

        yield on_run


def _show(
    model: ModelInfo, rows: Sequence[records.SweepRow], left_out: Sequence[records.LeftOut]
) -> None:
    console = Console()
    for found in records.tables(rows):
        flash = "on" if found.flash_attn else "off"
        title = (
            f"{model.name or model.architecture}: time per decoded token, flash attention {flash}"
        )
        table = Table(*found.columns, title=title, caption=records.CELL_LEGEND)
        for column in table.columns[1:]:
            column.justify = "right"
        for cells in found.lines:
            table.add_row(*cells)
        console.print(table)
    for reason, names in records.by_reason(left_out).items():
        console.print(f"skipped: {', '.join(names)}: {reason}", highlight=False, markup=False)
