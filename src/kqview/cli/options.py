"""Arguments and options that several commands share, and the engine that they open."""

import importlib
import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

from kqview.errors import ModelLoadError, RequestError

if TYPE_CHECKING:
    from kqview import Engine


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


# ---- models


def fetch(name: str) -> str:
    """Return the local path of ``OWNER/REPO/FILE``, downloading it unless it is cached.

    Raises:
        RequestError: *name* has another form.
        ModelLoadError: huggingface_hub is missing, or the download failed.
    """
    owner, _, rest = name.partition("/")
    repo, _, file = rest.partition("/")
    if not (owner and repo and file):
        raise RequestError(
            f"hub.fetch: {name!r}, the form is OWNER/REPO/FILE; name the file in the repository"
        )
    try:
        huggingface_hub = importlib.import_module("huggingface_hub")
    except ModuleNotFoundError as missing:
        raise ModelLoadError(
            "hub.fetch: huggingface_hub is not installed, --hf needs it; "
            'pip install "kqview[hf]", or download the file and pass its path'
        ) from missing
    try:
        return str(huggingface_hub.hf_hub_download(repo_id=f"{owner}/{repo}", filename=file))
    except Exception as error:  # its errors have no common base, and each means "not fetched"
        reason = next(iter(str(error).splitlines()), "")
        raise ModelLoadError(
            f"hub.fetch: {name} failed with {type(error).__name__}: {reason}, it is not in the "
            "local cache; check the name and the network, or pass the path of a local file"
        ) from error


@contextmanager
def open_engine(
    model: str | None,
    *,
    from_hub: str | None = None,
    demo: bool = False,
    n_ctx: int | None = None,
    n_threads: int | None = None,
    n_gpu_layers: int = -1,
    rpc_servers: Sequence[str] | None = None,
    flash_attn: FlashAttention = FlashAttention.AUTO,
) -> "Generator[Engine]":
    """Yield the engine of the one model that is named, and close it afterwards.

    Args:
        model: Path of a GGUF file.
        from_hub: ``OWNER/REPO/FILE`` on the hub.
        demo: The bundled model.
        n_ctx: Context in tokens, None for the model's own.
        n_threads: Threads, None for what is granted.
        n_gpu_layers: Layers on the GPU, -1 for all, which have to fit.
        rpc_servers: Machines that take layers, ``HOST:PORT`` each.
        flash_attn: Setting of flash attention.

    Raises:
        typer.BadParameter: Not exactly one model is named.
        ModelError: The model cannot be fetched or loaded.
    """
    if sum([model is not None, from_hub is not None, demo]) != 1:
        raise typer.BadParameter("name one model: MODEL, --hf or --demo")
    from kqview import Engine

    if from_hub is not None:
        model = fetch(from_hub)
    with load_progress() as progress:
        options: dict[str, Any] = {
            "n_ctx": n_ctx,
            "n_threads": n_threads,
            "n_gpu_layers": n_gpu_layers,
            "rpc_servers": rpc_servers,
            "flash_attn": flash_attn.to_engine(),
            "progress": progress,
        }
        engine = Engine.demo(**options) if model is None else Engine(model, **options)
    with engine:
        yield engine


@contextmanager
def load_progress() -> Generator[Callable[[float], None] | None]:
    """A progress bar for the loading of a model; None where there is no terminal."""
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
