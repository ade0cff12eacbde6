"""Arguments and options that several commands share, and how their text is read."""

import sys
from enum import StrEnum
from typing import Annotated, Literal

import typer


class Kind(StrEnum):
    """Kinds of capture on the command line."""

    LOGITS = "logits"
    SCORES = "scores"
    PROBS = "probs"


class FlashAttention(StrEnum):
    """Settings of flash attention on the command line."""

    AUTO = "auto"
    ON = "on"
    OFF = "off"

    def to_engine(self) -> Literal["auto"] | bool:
        """Value that Engine takes."""
        return "auto" if self is FlashAttention.AUTO else self is FlashAttention.ON


ModelArgument = Annotated[
    str | None,
    typer.Argument(metavar="MODEL", help="GGUF file; left out with --hf or --demo."),
]
HubOption = Annotated[
    str | None,
    typer.Option("--hf", metavar="OWNER/REPO/FILE", help="Fetch MODEL from the Hugging Face hub."),
]
DemoOption = Annotated[
    bool, typer.Option("--demo", help="Use the model that comes with kqview as MODEL.")
]
ContextOption = Annotated[
    int | None,
    typer.Option("--ctx", min=1, help="Context in tokens. The default is the model's own."),
]
ThreadsOption = Annotated[
    int | None,
    typer.Option("--threads", min=1, help="Threads. The default is what the machine grants."),
]
GpuLayersOption = Annotated[
    int, typer.Option("--ngl", min=-1, help="Layers on the GPU; -1 is all, which have to fit.")
]
RpcOption = Annotated[
    list[str] | None,
    typer.Option("--rpc", metavar="HOST:PORT", help="Put layers on this RPC server; repeatable."),
]
FlashAttentionOption = Annotated[
    FlashAttention, typer.Option("--flash-attn", help="Flash attention.")
]


def take_text(
    model: str | None, text: str | None, *, has_source: bool, name: str
) -> tuple[str | None, str]:
    """Sort out the positional arguments ``MODEL TEXT``; with --hf or --demo the first is TEXT.

    ``-`` reads standard input, without the one newline that ends it.

    Args:
        model: First positional argument.
        text: Second positional argument.
        has_source: An option names the model.
        name: What the text is called in the help.

    Raises:
        typer.BadParameter: An argument is missing.
    """
    if has_source and text is None:
        model, text = None, model
    if text is None:
        raise typer.BadParameter(f"{name} is missing; give it in quotes, or - for standard input")
    return model, sys.stdin.read().removesuffix("\n") if text == "-" else text


def parse_indices(name: str, text: str | None) -> list[int] | None:
    """Read a list like ``0,3,8-11``; None stays None.

    Raises:
        typer.BadParameter: *text* is something else.
    """
    if text is None:
        return None
    indices: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise typer.BadParameter(f"{name} is {text!r}; write indices as 0,3 or 8-11")
        indices.extend(range(int(first), int(last if dash else first) + 1))
    return indices
