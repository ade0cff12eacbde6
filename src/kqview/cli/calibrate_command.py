"""``kqview calibrate``: which heads of a model do a task, written to a head file."""

from pathlib import Path

import typer

from kqview.cli.option_groups import argument, option, with_groups
from kqview.cli.options import JSON, EngineChoice
from kqview.cli.outputs import check_output
from kqview.errors import RequestError
from kqview.heads import Task, calibrate as calibrated, made_examples, read_examples

_N_MADE = 60


@with_groups
def calibrate(
    *,
    task: Task = argument(..., "What the heads shall do.", metavar="TASK"),
    source: EngineChoice,
    data: str | None = argument(
        None, "Examples, an object of JSON a line. [default: made ones]", metavar="DATA"
    ),
    output: Path | None = option(
        None, "File to write. [default: TASK.heads.json]", "--output -o", metavar="FILE"
    ),
    examples: int = option(_N_MADE, "How many examples to make without DATA.", min=12),
    slots: int = option(2, "Examples that are evaluated at once.", min=1),
    as_json: bool = JSON,
) -> None:
    """Find the attention heads of a model that do a task, and write them to a head file.

    TASK is needle (copy what was asked for from a text), rerank (find the document that answers),
    injection (notice orders inside of data), grounding (tell what a source says from what it does
    not), or cite (name the source of a sentence). Heads are chosen on some examples and judged on
    others; the figures printed are of those. `kqview.guards` uses the file.

    Examples:

    - `kqview calibrate injection model.gguf`
    - `kqview calibrate rerank model.gguf queries.jsonl --output rerank.json`
    - `kqview calibrate needle --demo --examples 24`
    """
    target = Path(f"{task}.heads.json") if output is None else output
    check_output("--output", target, (".json",))
    model, words = source.resolve(data)
    if len(words) > 1:
        raise RequestError(f"name one file of examples, got {', '.join(words)}")
    given = read_examples(task, words[0]) if words else made_examples(task, examples)
    where = Path(words[0]).name if words else "made by kqview"
    with source.open(model, n_slots=slots) as engine:
        found = calibrated(engine, task, given, source=where, progress=True)
    found.save(target)
    if as_json:
        typer.echo(target.read_text(encoding="utf-8"), nl=False)
    else:
        for name, one in found.figures.items():
            typer.echo(f"{name}: {one.value:.3f} ({one.low:.3f} to {one.high:.3f}), n {one.n}")
    typer.echo(f"{len(found.heads)} heads written to {target}", err=True)
