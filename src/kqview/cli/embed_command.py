"""``kqview embed``: vectors of texts, printed or written to a file."""

import contextlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

import numpy as np
import typer

from kqview.cli.option_groups import option, with_groups
from kqview.cli.options import ADD_SPECIAL, JSON, EngineChoice, TextsChoice
from kqview.cli.outputs import ARRAYS, check_output, output_to
from kqview.saved import write_arrays
from kqview.viz.terminal import label

if TYPE_CHECKING:
    from kqview import Engine

_DEFAULT_POOLING: Final = "mean"
_CELLS: Final = 30


@with_groups
def embed(
    *,
    source: EngineChoice,
    texts: TextsChoice,
    pooling: Literal["mean", "cls", "last"] | None = option(
        None, "How token vectors become one vector. [default: the model's, else mean]"
    ),
    normalize: bool = option(True, "Give vectors the length 1.", "--normalize/--no-normalize"),
    similarity: bool = option(
        False, "Print the cosine similarity of each pair instead.", "--similarity"
    ),
    output: Path | None = output_to("Write the vectors as .npy, .npz or .safetensors instead."),
    add_special: bool = ADD_SPECIAL,
    as_json: bool = JSON,
) -> None:
    """Compute the embedding of texts: a line of numbers for each.

    Examples:

    - `kqview embed model.gguf "A red ball" "A blue box" --similarity`
    - `kqview embed model.gguf --lines -f titles.txt --output titles.npy`
    - `kqview embed --demo --json "Anna has a ball."`
    """
    check_output("--output", output, ARRAYS)
    model, words = source.resolve(*(texts.texts or ()))
    given = texts.read(words)
    with contextlib.ExitStack() as stack:
        engine: Engine = stack.enter_context(source.open(model, pooling=pooling))
        if engine.pooling is None:  # known only when the file has been read
            stack.close()
            engine = stack.enter_context(source.open(model, pooling=_DEFAULT_POOLING))
        vectors = np.asarray(
            engine.embed([text for _, text in given], normalize=normalize, add_special=add_special)
        )
        name, used = engine.model.name, engine.pooling
    if output is not None:
        arrays = {"vectors": vectors}
        write_arrays(output, "vectors", arrays, {"texts": [text for _, text in given]})
        typer.echo(f"written to {output}", err=True)
    if as_json:
        content: dict[str, Any] = {"model": name, "pooling": used, "vectors": vectors.tolist()}
        if similarity:
            content["similarity"] = _similarities(vectors).tolist()
        typer.echo(json.dumps(content))
    elif similarity:
        labels = [label(text, _CELLS) for _, text in given]
        for i, row in enumerate(_similarities(vectors)):
            typer.echo(f"{labels[i]}  {' '.join(f'{value:>6.3f}' for value in row)}")
    elif output is None:
        for vector in vectors:
            typer.echo(" ".join(f"{value:.7g}" for value in vector))


def _similarities(vectors: "np.ndarray[Any, np.dtype[np.float32]]") -> Any:
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    unit = vectors / np.where(lengths > 0, lengths, 1)
    return unit @ unit.T
