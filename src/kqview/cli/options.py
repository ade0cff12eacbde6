"""Arguments and options that several commands share, and the engine they open."""

import sys
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

from kqview.errors import RequestError
from kqview.hub import fetch_model

if TYPE_CHECKING:
    from kqview import Engine


FLASH_ATTN: Final[Mapping[str, Literal["auto"] | bool]] = {"auto": "auto", "on": True, "off": False}
"""Setting of `Engine` for each value of --flash-attn."""

ModelArgument = Annotated[
    str | None,
    typer.Argument(metavar="MODEL", help="GGUF file. Omit it with --hf or --demo."),
]
HubOption = Annotated[
    str | None,
    typer.Option(
        "--hf", metavar="OWNER/REPO/FILE", help="Download the model from the Hugging Face Hub."
    ),
]
DemoOption = Annotated[bool, typer.Option("--demo", help="Use the bundled demo model.")]
ContextOption = Annotated[
    int | None,
    typer.Option("--ctx", min=1, help="Context size in tokens. [default: the model's]"),
]
ThreadsOption = Annotated[
    int | None,
    typer.Option("--threads", min=1, help="Compute threads. [default: the available CPUs]"),
]
GpuLayersOption = Annotated[
    int, typer.Option("--ngl", min=-1, help="Layers to offload to the GPU; -1 offloads all.")
]
RpcOption = Annotated[
    list[str] | None,
    typer.Option(
        "--rpc", metavar="HOST:PORT", help="Offload layers to this RPC server; repeatable."
    ),
]
FlashAttentionOption = Annotated[
    Literal["auto", "on", "off"], typer.Option("--flash-attn", help="Use flash attention.")
]


def take_text(
    model: str | None, text: str | None, *, has_source: bool, name: str
) -> tuple[str | None, str]:
    """Resolve the positional arguments ``MODEL TEXT``; with --hf or --demo the only one is TEXT.

    ``-`` reads standard input and strips one trailing newline.

    Args:
        model: First positional argument.
        text: Second positional argument.
        has_source: Whether --hf or --demo names the model.
        name: Name of the text argument in the help.

    Raises:
        typer.BadParameter: An argument is missing.
    """
    if has_source and text is None:
        model, text = None, model
    if text is None:
        raise typer.BadParameter(
            f"{name} is missing; pass it in quotes, or - to read standard input"
        )
    return model, sys.stdin.read().removesuffix("\n") if text == "-" else text


def parse_indices(name: str, text: str | None) -> list[int] | None:
    """Parse a list such as ``0,3,8-11``; None stays None.

    Raises:
        typer.BadParameter: *text* is not such a list.
    """
    if text is None:
        return None
    indices: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise typer.BadParameter(f"{name} is {text!r}; write a list such as 0,3 or 8-11")
        indices.extend(range(int(first), int(last if dash else first) + 1))
    return indices


# ---- models


def fetch(name: str) -> str:
    """Return the local path of ``OWNER/REPO/FILE``; download it unless it is cached.

    Raises:
        RequestError: *name* is not of that form.
        ModelLoadError: huggingface_hub is missing, or the download failed.
    """
    owner, _, rest = name.partition("/")
    repo, _, file = rest.partition("/")
    if not (owner and repo and file):
        raise RequestError(
            f"--hf is {name!r}; write OWNER/REPO/FILE, with the file's path in the repository"
        )
    return fetch_model(f"{owner}/{repo}", file)


@contextmanager
def open_engine(
    model: str | None,
    *,
    from_hub: str | None = None,
    demo: bool = False,
    **options: Any,
) -> "Generator[Engine]":
    """Open the one model that is named; close the engine at the end of the block.

    Args:
        model: Path of a GGUF file.
        from_hub: ``OWNER/REPO/FILE`` on the Hugging Face Hub.
        demo: Whether to open the bundled demo model.
        **options: Options of `Engine`.

    Raises:
        typer.BadParameter: No model or more than one is named.
        ModelError: The model cannot be downloaded or loaded.
    """
    if sum([model is not None, from_hub is not None, demo]) != 1:
        raise typer.BadParameter("name one model: MODEL, --hf or --demo")
    from kqview import Engine

    if from_hub is not None:
        model = fetch(from_hub)

    with load_progress() as progress:
        options["progress"] = progress
        engine = Engine.demo(**options) if model is None else Engine(model, **options)
    with engine:
        yield engine


@contextmanager
def load_progress() -> Generator[Callable[[float], None] | None]:
    """A callback that shows loading as a progress bar on stderr; None without a terminal."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("loading the model", total=1.0)

        def show(fraction: float) -> None:
            bar.update(task, completed=fraction)

        yield show
