"""``kqview attend``: the attention of a text's own tokens, as a heat map, a table or a file."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import typer
from numpy.typing import NDArray
from rich.console import Console

from kqview.cli.option_groups import option, with_groups
from kqview.cli.options import (
    ADD_SPECIAL,
    JSON,
    CaptureChoice,
    EditsChoice,
    EngineChoice,
    PromptChoice,
)
from kqview.cli.outputs import ARRAYS, PAGE, PICTURES, check_drawn, check_output, output_to
from kqview.coloured.rows import layers_of
from kqview.errors import RequestError
from kqview.saved import save_prompt, write_arrays
from kqview.types import Capture
from kqview.viz.figures import heatmap, save_figure
from kqview.viz.source import N_LATEST, probabilities
from kqview.viz.terminal import TerminalHeatmap, label
from kqview.viz.tokens import to_html

if TYPE_CHECKING:
    from kqview import Engine

_SUFFIXES: Final = (*PICTURES, PAGE, *ARRAYS)
_N_SHOWN: Final = 3
_LABEL_CELLS: Final = 14
Values = NDArray[np.floating[Any]]


@with_groups
def attend(
    *,
    source: EngineChoice,
    prompt: PromptChoice,
    layer: int | None = option(
        None, "Layer to show; -1 is the last. [default: the sharpest head's]", "--layer -l"
    ),
    head: int | None = option(None, "Head to show. [default: the sharpest]", min=0),
    last: int | None = option(None, "Only the rows of the last N tokens.", min=1, metavar="N"),
    table: bool = option(False, "List what each token attends to instead.", "--table"),
    output: Path | None = output_to(
        "Write the shown head as .png, .svg or .pdf, or all that is captured as .html "
        "(a page), .npz, .npy or .safetensors."
    ),
    capture: CaptureChoice,
    edits: EditsChoice,
    add_special: bool = ADD_SPECIAL,
    as_json: bool = JSON,
) -> None:
    """Show what each token of a text attends to, without generating.

    Draws one head: a line for each token, a column for each token that it may attend to. The
    sharpest head is the one with the largest mean weight on tokens that are neither the first nor
    among the latest four.

    Examples:

    - `kqview attend model.gguf "The cat sat on the mat because it was tired"`
    - `kqview attend --demo "Anna has a ball. Anna" --layer 1 --head 0 --table`
    - `kqview attend model.gguf -f text.txt --layers 0-3 --output rows.npz`
    - `kqview attend --demo "Anna has a ball. Anna" --reduce mean --output mean.png`
    """
    check_output("--output", output, _SUFFIXES)
    plan = capture.plan()
    changes = edits.read()
    check_drawn(output, plan)
    model, words = source.resolve(prompt.text)
    text = prompt.read(words)
    if not text:  # as `kqview score` says it
        raise RequestError("the text is missing: text 1 is empty")
    with source.open(model) as engine:
        asked: dict[str, Any] = {"last": last, "add_special": add_special, "edits": changes}
        shown = _Shown(engine, text, plan, asked)
        if output is not None:
            shown.write(output, layer, head)
            typer.echo(f"written to {output}", err=True)
    if as_json:
        typer.echo(json.dumps(shown.to_json()))
    elif table:
        shown.print_table(layer, head)
    else:
        shown.print_map(layer, head)


@dataclass(frozen=True)
class _Head:
    """One head, or what several were reduced to: a row for each query."""

    title: str
    matrix: Values  # as captured, (n_rows, n_columns)
    rows: list[Values]  # probabilities of the columns that each query sees


class _Shown:
    """The attention of a text, in memory."""

    def __init__(self, engine: "Engine", text: str, plan: Capture, asked: dict[str, Any]) -> None:
        self._found = found = engine.attend(text, plan, **asked)
        self._model = engine.model
        self._capture = found.capture
        self._layers, self._heads = found.layers, found.heads
        self._ids, self._texts, self._start = found.column_ids, found.column_texts, found.start
        taken: tuple[Any, Any] = (found.array(), None) if plan.top_k is None else found.top_k()
        self._values, self._positions = taken

    # ---- one head

    def _pick(self, layer: int | None, head: int | None) -> _Head:
        """The head to show: the sharpest of those that are not excluded."""
        values = layers_of(self._values, 2)
        positions = [] if self._positions is None else layers_of(self._positions, 2)
        reduce = self._capture.reduce
        layers = () if reduce in ("mean", "max") else self._layers
        heads = () if reduce is not None else self._heads
        places = [
            (i, j)
            for i in _chosen("--layer", layer, layers, len(values))
            for j in _chosen("--head", head, heads[: len(values[i])], len(values[i]))
        ]
        i, j = max(
            places,
            key=lambda at: self._sharpness(
                values[at[0]][at[1]], positions[at[0]][at[1]] if positions else None
            ),
        )
        parts = [f"layer {layers[i]}"] if layers else [f"{reduce} of all layers and heads"]
        if layers:
            parts.append(f"head {heads[j]}" if heads else f"{reduce}".replace("_", " of "))
        matrix = values[i][j]
        if positions:
            whole = np.zeros((len(matrix), len(self._ids)), matrix.dtype)
            np.put_along_axis(whole, positions[i][j], matrix, axis=-1)
            matrix = whole
        return _Head(", ".join(parts), matrix, self._rows(matrix))

    def _sharpness(self, values: Values, positions: NDArray[np.int32] | None) -> float:
        """Mean over the queries of the largest weight that is neither first nor recent."""
        if self._capture.spans is not None:
            return float(values.max(axis=-1).mean())
        query = np.arange(self._start, self._start + len(values))[:, None]
        every = np.arange(values.shape[-1], dtype=np.int32)
        columns = every[None] if positions is None else positions
        weights = probabilities(values, self._capture.kind, self._model.attention_scale)
        counted = (columns > 0) & (columns <= query - N_LATEST)
        return float(np.where(counted, weights, 0).max(axis=-1).mean())

    def _rows(self, matrix: Values) -> list[Values]:
        if self._capture.spans is not None:
            return list(matrix)
        weights = probabilities(matrix, self._capture.kind, self._model.attention_scale)
        is_causal = not np.triu(weights, self._start + 1).any()
        return [row[: self._start + i + 1] if is_causal else row for i, row in enumerate(weights)]

    @property
    def _columns(self) -> Sequence[str]:
        if self._capture.spans is None:
            return self._texts
        return [f"{start}:{'' if stop is None else stop}" for start, stop in self._capture.spans]

    # ---- what is printed and written

    def print_map(self, layer: int | None, head: int | None) -> None:
        """Draw the head."""
        console = Console()
        picked = self._pick(layer, head)
        what = "a token before it" if self._capture.spans is None else "a range of tokens"
        console.print(f"{picked.title}: each line is a token, each column {what}", highlight=False)
        labels = self._texts[self._start :]
        console.print(TerminalHeatmap(picked.rows, labels, self._columns, width=console.width))

    def print_table(self, layer: int | None, head: int | None) -> None:
        """Print a line for each token: the columns with the largest weights."""
        picked = self._pick(layer, head)
        typer.echo(f"{picked.title}: each token, and what it attends to most")
        for i, row in enumerate(picked.rows):
            best: list[int] = np.argsort(-row, kind="stable")[:_N_SHOWN].tolist()
            parts = [f"{row[j]:4.0%} {label(self._columns[j], _LABEL_CELLS)}" for j in best]
            own = label(self._texts[self._start + i], _LABEL_CELLS)
            typer.echo(f"{self._start + i:>5} {own}  {'  '.join(parts)}".rstrip())

    def to_json(self) -> dict[str, Any]:
        """Everything that was captured."""
        content: dict[str, Any] = {
            "model": self._model.name,
            "kind": self._capture.kind,
            "layers": list(self._layers),
            "heads": list(self._heads),
            "ids": self._ids,
            "tokens": self._texts,
            "start": self._start,
            "attention": _nested(self._values),
        }
        if self._positions is not None:
            content["positions"] = _nested(self._positions)
        return content

    def write(self, path: Path, layer: int | None, head: int | None) -> None:
        """Write a picture of the head, or everything as a page or as arrays."""
        if path.suffix.lower() == PAGE:
            to_html(path, self._found)
        elif path.suffix.lower() in PICTURES:
            picked = self._pick(layer, head)
            title = f"{self._model.name}, {picked.title}"
            kind = self._capture.kind
            save_figure(heatmap(picked.matrix, self._texts, kind=kind, title=title), path)
        elif path.suffix.lower() == ".npy":
            if isinstance(self._values, tuple):
                raise RequestError(
                    "--output ends in .npy, but the layers differ in heads; use .npz"
                )
            write_arrays(path, "attention", {"attention": self._values}, {})
        else:
            save_prompt(path, self._found, self._values, self._positions)


def _chosen(name: str, wanted: int | None, known: Sequence[int], n: int) -> Sequence[int]:
    """Indices that *wanted* allows into an axis of *n*, which stands for *known*."""
    if wanted is None or not known:
        return range(n)
    if name == "--layer" and wanted < 0:
        wanted = known[max(wanted, -len(known))]
    if wanted not in known:
        raise RequestError(f"{name} is {wanted}; choose from {', '.join(map(str, known))}")
    return (known.index(wanted),)


def _nested(values: Any) -> Any:
    """*values* as nested lists; -inf, which JSON lacks, as null."""
    if isinstance(values, tuple):
        return [_nested(one) for one in values]  # pyright: ignore[reportUnknownVariableType]
    content = values.astype(object)
    content[~np.isfinite(values)] = None
    return content.tolist()
