"""``kqview convert-classifier``: makes a GGUF file of a BERT classifier of Hugging Face."""

from pathlib import Path

import typer

from kqview import convert
from kqview.cli.option_groups import argument, option
from kqview.cli.outputs import check_output


def convert_classifier(
    source: Path = argument(..., "Folder of the model.", metavar="DIR", file_okay=False),
    target: Path = argument(..., "File to write.", metavar="OUT.gguf", dir_okay=False),
    weights: convert.WeightType = option("f32", "Type of the matrices; f16 halves the file."),
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
