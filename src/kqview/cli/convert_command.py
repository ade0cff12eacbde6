"""``kqview convert-classifier``: makes a GGUF file of a BERT classifier of Hugging Face."""

from pathlib import Path
from typing import Annotated

import typer

from kqview import convert
from kqview.cli.outputs import check_output


def convert_classifier(
    source: Annotated[
        Path,
        typer.Argument(metavar="DIR", file_okay=False, help="Folder of the model."),
    ],
    target: Annotated[
        Path, typer.Argument(metavar="OUT.gguf", dir_okay=False, help="File to write.")
    ],
    weights: Annotated[
        convert.WeightType, typer.Option(help="Type of the matrices; f16 halves the file.")
    ] = "f32",
) -> None:
    """Convert a BertForSequenceClassification of Hugging Face to GGUF, with its whole head.

    The folder needs config.json, *.safetensors, and tokenizer.json or vocab.txt.

    Examples:

    - `kqview convert-classifier ./sentiment sentiment.gguf`
    - `kqview serve --model sentiment.gguf`
    """
    check_output("OUT.gguf", target, (".gguf",))
    n_bytes = convert.convert_classifier(source, target, weight_type=weights)
    typer.echo(f"{target}: {n_bytes:,} bytes")
