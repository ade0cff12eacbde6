"""``kqview generate``: streams text and, with --save, writes the attention rows to a file."""

import contextlib
import inspect
import zipfile
from collections.abc import Generator
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Self

import numpy as np
import typer
from numpy.lib import format as npy_format
from numpy.typing import NDArray
from rich.console import Console

from kqview.cli.options import (
    FLASH_ATTN,
    ContextOption,
    DemoOption,
    FlashAttentionOption,
    GpuLayersOption,
    HubOption,
    ModelArgument,
    RpcOption,
    ThreadsOption,
    open_engine,
    parse_indices,
    take_text,
)
from kqview.state.durable import WholeFile, remove_leftovers
from kqview.types.capture import Kind
from kqview.types.sampling import OPTIONS

if TYPE_CHECKING:
    from kqview import Capture, Engine, Sampling, Token


class RowsFile:
    """An .npz file to which the captured rows of one generation are written as they arrive.

    Members: ``attention_00000`` and so on by token index, each as in ``token.attention`` (with
    ``_layer_000`` appended where layers differ in heads); ``ids`` int32 and ``texts`` of the
    generated tokens; ``prompt_ids`` int32; ``layers`` int32, the model layer of each index;
    ``kind``. A token without attention has no member.

    Memory holds only ids and texts. The file appears under its name when it is closed; after an
    interruption it holds the rows so far. If the disk fills up, or an error comes before the first
    token, an old file of that name stays.
    """

    def __init__(self, path: Path, engine: "Engine", capture: "Capture", prompt: list[int]) -> None:
        """Start the file that is going to be *path*.

        Raises:
            OSError: *path* cannot be written.
        """
        remove_leftovers(path.parent)
        self._file = WholeFile(path)
        self._zip = zipfile.ZipFile(self._file.stream, "w", zipfile.ZIP_STORED)
        self._is_discarded = False
        self._ids: list[int] = []
        self._texts: list[str] = []
        layers = engine.model.attention_layers if capture.layers is None else capture.layers
        self._write("prompt_ids", np.array(prompt, dtype=np.int32))
        self._write("layers", np.array(layers, dtype=np.int32))
        self._write("kind", np.array(capture.kind))

    def add(self, token: "Token") -> None:
        """Write the rows of one token."""
        self._ids.append(token.id)
        self._texts.append(token.text)
        name = f"attention_{token.index:05d}"
        if isinstance(token.attention, tuple):
            for i, heads in enumerate(token.attention):
                self._write_view(f"{name}_layer_{i:03d}", heads)
        elif token.attention is not None:
            self._write_view(name, token.attention)

    def close(self) -> None:
        """Write the ids and texts, then give the file its name.

        Raises:
            OSError: The file cannot be written; an old file stays.
        """
        self._write("ids", np.array(self._ids, dtype=np.int32))
        self._write("texts", np.array(self._texts, dtype=np.str_))
        with self._discarding():
            self._zip.close()
            self._file.commit()

    def __enter__(self) -> Self:
        """Return self."""
        return self

    def __exit__(self, error_type: object, *_: object) -> None:
        """Close the file, after an error as well if it holds any row."""
        if self._is_discarded:
            return
        if error_type is not None and not self._ids:
            self._discard()
        else:
            self.close()

    @contextlib.contextmanager
    def _discarding(self) -> Generator[None]:
        """Discard the file if writing fails."""
        try:
            yield
        except OSError:
            self._discard()
            raise

    def _discard(self) -> None:
        self._is_discarded = True
        self._zip.fp = None  # else the garbage collector would finish it
        self._file.discard()

    def _write(self, name: str, array: NDArray[Any]) -> None:
        with self._discarding(), self._zip.open(f"{name}.npy", "w") as member:
            npy_format.write_array(member, array, allow_pickle=False)

    def _write_view(self, name: str, array: NDArray[Any]) -> None:
        # numpy's writer copies through a buffer when the target is no plain file. A view of the
        # attention goes out as it lies in memory.
        array = np.ascontiguousarray(array)  # as it is, unless somebody else made it
        with self._discarding(), self._zip.open(f"{name}.npy", "w", force_zip64=True) as member:
            header = npy_format.header_data_from_array_1_0(array)
            npy_format.write_array_header_1_0(member, header)
            if array.size:
                member.write(array.data.cast("B"))


def generate(
    model: ModelArgument = None,
    prompt: Annotated[
        str | None, typer.Argument(metavar="PROMPT", help="Prompt text; - reads standard input.")
    ] = None,
    hf: HubOption = None,
    demo: DemoOption = False,
    max_tokens: Annotated[
        int, typer.Option("--max-tokens", "-n", min=1, help="Maximum number of tokens to generate.")
    ] = 256,
    stop: Annotated[
        list[str] | None, typer.Option(help="Stop before this text; repeatable.")
    ] = None,
    capture: Annotated[
        Kind | None, typer.Option(help="Capture attention: raw, scaled or as probabilities.")
    ] = None,
    layers: Annotated[
        str | None, typer.Option(help="Capture only these layers, such as 0,3 or 8-11.")
    ] = None,
    heads: Annotated[
        str | None, typer.Option(help="Capture only these heads, such as 0,3 or 8-11.")
    ] = None,
    save: Annotated[
        Path | None,
        typer.Option(
            metavar="ROWS.NPZ", dir_okay=False, help="Write the captured rows to this file."
        ),
    ] = None,
    ctx: ContextOption = None,
    threads: ThreadsOption = None,
    ngl: GpuLayersOption = -1,
    rpc: RpcOption = None,
    flash_attn: FlashAttentionOption = "auto",
    **sampling: Any,
) -> None:
    """Generate text from a prompt and, if asked, capture its attention.

    Examples:

    - `kqview generate model.gguf "The capital of France is" -n 20 --temperature 0`
    - `kqview generate --demo "Anna has" --capture probs --layers 0,3 --save rows.npz`
    - `echo "Once upon a time" | kqview generate model.gguf -`
    """
    from kqview import Capture, Sampling

    if capture is None and not (save is None and layers is None and heads is None):
        raise typer.BadParameter("--save, --layers and --heads need --capture; add --capture probs")
    model, prompt = take_text(model, prompt, has_source=demo or hf is not None, name="PROMPT")
    plan = None
    if capture is not None:
        plan = Capture(
            kind=capture,
            layers=parse_indices("--layers", layers),
            heads=parse_indices("--heads", heads),
        )
    options = Sampling(stop=tuple(stop or ()), **sampling)
    with open_engine(
        model,
        from_hub=hf,
        demo=demo,
        n_ctx=ctx,
        n_threads=threads,
        n_gpu_layers=ngl,
        rpc_servers=rpc,
        flash_attn=FLASH_ATTN[flash_attn],
    ) as engine:
        _stream(engine, prompt, max_tokens=max_tokens, sampling=options, plan=plan, save=save)


def _signature() -> inspect.Signature:
    """That of `generate`, with an option for each number and flag of `Sampling`."""
    *named, _ = inspect.signature(generate).parameters.values()
    for row in OPTIONS.values():
        if row.type in (float, int, bool) or row.name == "seed":
            flag = "--" + row.name.replace("_", "-")
            option = typer.Option(flag, help=row.doc, rich_help_panel="Sampling")
            named.append(
                inspect.Parameter(
                    row.name,
                    inspect.Parameter.KEYWORD_ONLY,
                    default=row.default,
                    annotation=Annotated[row.type, option],
                )
            )
    return inspect.Signature(named)


generate.__signature__ = _signature()  # pyright: ignore[reportFunctionMemberAccess]


def _stream(
    engine: "Engine",
    prompt: str,
    *,
    max_tokens: int,
    sampling: "Sampling",
    plan: "Capture | None",
    save: Path | None,
) -> None:
    ids = engine.tokenize(prompt, add_special=True, parse_special=True)
    rows = nullcontext() if plan is None or save is None else RowsFile(save, engine, plan, ids)
    attention_bytes = 0
    with (
        rows as file,
        engine.generate(ids, max_tokens=max_tokens, sampling=sampling, capture=plan) as generation,
    ):
        for token in generation:
            typer.echo(token.text, nl=False)
            if isinstance(token.attention, tuple):
                attention_bytes += sum(heads.nbytes for heads in token.attention)
            elif token.attention is not None:
                attention_bytes += token.attention.nbytes
            if file is not None:
                file.add(token)
    typer.echo()
    usage = generation.usage
    summary = (
        f"{usage.prompt_tokens} prompt tokens, {usage.completion_tokens} generated, "
        f"{usage.tokens_per_s:.1f} tokens/s, {generation.finish_reason}"
    )
    if plan is not None:
        summary += f"; captured {attention_bytes:,} bytes of {plan.kind}"
    console = Console(stderr=True)
    if console.is_terminal or plan is not None:
        console.print(summary, style="dim", highlight=False, soft_wrap=True)
