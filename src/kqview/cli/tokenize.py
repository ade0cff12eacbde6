"""``kqview tokenize``: the tokens of a text."""

import json
from typing import Annotated

import typer

from kqview.cli.loading import open_engine
from kqview.cli.options import DemoOption, HubOption, ModelArgument, take_text


def tokenize(
    model: ModelArgument = None,
    text: Annotated[
        str | None, typer.Argument(metavar="TEXT", help="Text; - reads standard input.")
    ] = None,
    hf: HubOption = None,
    demo: DemoOption = False,
    add_special: Annotated[
        bool, typer.Option("--add-special", help="Add the tokens that start a text.")
    ] = False,
    parse_special: Annotated[
        bool,
        typer.Option(
            "--parse-special/--no-parse-special", help="Read special tokens in the text as such."
        ),
    ] = True,
    ids_only: Annotated[bool, typer.Option("--ids", help="Print the ids alone.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show the tokens of a text: one line a token, its id and its piece.

    Examples:

    - `kqview tokenize model.gguf "The capital of France is"`
    - `kqview tokenize --demo --ids - < prompt.txt`
    """
    model, text = take_text(model, text, has_source=demo or hf is not None, name="TEXT")
    with open_engine(model, from_hub=hf, demo=demo, n_ctx=256, n_gpu_layers=0) as engine:
        ids = engine.tokenize(text, add_special=add_special, parse_special=parse_special)
        pieces = [] if ids_only else [_piece(engine.token_bytes(i)) for i in ids]
    if as_json:
        typer.echo(json.dumps({"ids": ids} if ids_only else {"ids": ids, "pieces": pieces}))
    elif ids_only:
        typer.echo(" ".join(map(str, ids)))
    else:
        for token_id, piece in zip(ids, pieces, strict=True):
            typer.echo(f"{token_id:>7}  {piece!r}")


def _piece(data: bytes) -> str:
    # Part of a character shows as escapes, so that different tokens look different.
    return data.decode("utf-8", "backslashreplace")
