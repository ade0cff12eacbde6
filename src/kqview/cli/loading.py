"""Opens the engine for a command: finds the model, shows the progress of loading, closes it."""

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

from kqview.cli import hub
from kqview.cli.options import FlashAttention

if TYPE_CHECKING:
    from kqview import Engine


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
        model = hub.fetch(from_hub)
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
