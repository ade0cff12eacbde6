"""``kqview generate``: streams a text; writes its attention to a file if asked."""

import contextlib
import dataclasses
import json
import zipfile
from collections.abc import Callable, Generator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

import numpy as np
import typer
from numpy.lib import format as npy_format
from numpy.typing import NDArray
from rich.console import Console

from kqview.cli.option_groups import option, with_groups
from kqview.cli.options import (
    JSON,
    CaptureChoice,
    EditsChoice,
    EngineChoice,
    PromptChoice,
    SamplingChoice,
)
from kqview.cli.outputs import PAGE, check_drawn, check_output, output_to
from kqview.cli.terminal import show_delta
from kqview.durable import WholeFile, remove_leftovers
from kqview.saved import save, streamed_metadata
from kqview.types import Capture, Token

if TYPE_CHECKING:
    from kqview import Engine, Generation
    from kqview.types.token import Attention

_SUFFIXES: Final = (".npz", ".safetensors", PAGE)


@with_groups
def generate(
    *,
    source: EngineChoice,
    prompt: PromptChoice,
    max_tokens: int = option(
        256, "Maximum number of tokens to generate.", "--max-tokens -n", min=1
    ),
    output: Path | None = output_to(
        "Write the captured attention as .npz or .safetensors (kqview.load reads both) "
        "or .html (a page)."
    ),
    capture: CaptureChoice,
    sampling: SamplingChoice,
    edits: EditsChoice,
    as_json: bool = JSON,
) -> None:
    """Continue a text; with --capture or --output, capture its attention.

    The text goes to stdout as it is generated, everything else to stderr. Ctrl-C ends it; what was
    captured until then is written.

    Examples:

    - `kqview generate model.gguf "The capital of France is" -n 20 --temperature 0`
    - `kqview generate --demo "Anna has" --layers 0,3 --output rows.npz`
    - `echo "Once upon a time" | kqview generate model.gguf`
    - `kqview generate model.gguf "A cat as JSON: " --json-schema @cat.schema.json`
    - `kqview generate model.gguf "The cat" --control-vector happy.gguf=1.2`
    - `kqview generate model.gguf "Yes or no?" --regex "yes|no" --json --top-logprobs 3`
    """
    check_output("--output", output, _SUFFIXES)
    plan = capture.plan() if output is not None or capture.is_asked else None
    check_drawn(output, plan)
    options = sampling.sampling()
    changes = edits.read()
    model, words = source.resolve(prompt.text)
    text = prompt.read(words)
    with source.open(model) as engine:
        ids = engine.tokenize(text, add_special=True, parse_special=True)
        generation = engine.generate(
            ids, max_tokens=max_tokens, sampling=options, capture=plan, edits=changes
        )
        with _writing(output, engine, plan, generation) as write, generation:
            tokens: list[dict[str, Any]] = []
            n_bytes = 0
            for token in generation:
                if as_json:
                    tokens.append(_to_json(token))
                else:
                    show_delta(generation)
                n_bytes += _n_bytes(token)
                write(token)
            if not as_json:
                show_delta(generation)
    usage = generation.usage
    if as_json:
        content = {
            "prompt": text,
            "prompt_ids": ids,
            "text": generation.text,
            "tokens": tokens,
            "finish_reason": generation.finish_reason,
            "usage": dataclasses.asdict(usage),
        }
        typer.echo(json.dumps(content))
        return
    typer.echo()
    summary = (
        f"{usage.prompt_tokens} prompt tokens, {usage.completion_tokens} generated, "
        f"{usage.tokens_per_s:.1f} tokens/s, {generation.finish_reason}"
    )
    if plan is not None:
        summary += f"; captured {n_bytes:,} bytes of {plan.kind}"
        summary += "" if output is None else f", written to {output}"
    console = Console(stderr=True)
    if console.is_terminal or plan is not None:
        console.print(summary, style="dim", highlight=False, soft_wrap=True)
    if sampling.has_constraint and generation.finish_reason == "length":
        typer.echo(
            f"note: the text ends at --max-tokens {max_tokens} and may be incomplete", err=True
        )


def _to_json(token: Token) -> dict[str, Any]:
    content: dict[str, Any] = {"id": token.id, "text": token.text}
    if token.logprob is not None:
        content["logprob"] = token.logprob
        content["top_logprobs"] = token.top_logprobs
    return content


def _n_bytes(token: Token) -> int:
    rows: Attention | None = token.attention
    if rows is None:
        return 0
    return sum(heads.nbytes for heads in rows) if isinstance(rows, tuple) else rows.nbytes


@contextlib.contextmanager
def _writing(
    path: Path | None, engine: "Engine", plan: Capture | None, generation: "Generation"
) -> Generator[Callable[[Token], object]]:
    """What takes the tokens of *generation*; their rows go into the file *path*, if there is one.

    After an interruption the file holds the rows so far, if there are any.
    """
    if path is None or plan is None:
        yield lambda _token: None
        return
    if path.suffix.lower() not in (".safetensors", PAGE):
        with rows_file(path, engine, plan, generation) as add:
            yield add
        return
    from kqview.viz import to_html

    tokens: list[Token] = []
    is_whole = False
    try:
        yield tokens.append
        is_whole = True
    finally:
        if (tokens or is_whole) and path.suffix.lower() == PAGE:
            to_html(path, tokens)
        elif tokens or is_whole:
            save(path, generation, tokens)


@contextlib.contextmanager
def rows_file(
    path: Path, engine: "Engine", capture: Capture, generation: "Generation"
) -> Generator[Callable[[Token], None]]:
    """An .npz file to which the captured rows of one generation are written as they arrive.

    Members: ``attention_00000`` and so on by token index, each as in ``token.attention`` (with
    ``_layer_000`` appended where layers differ in heads); ``positions_00000`` likewise with
    ``top_k``; ``ids`` int32 and ``texts`` of the generated tokens; ``prompt_ids`` int32; ``layers``
    int32, the model layer of each index; ``spans`` int32, -1 for an open end; ``kind`` and
    ``reduce``. A token without attention has no member. ``kqview`` is what `kqview.load` reads.

    Memory holds only ids and texts. The file appears under its name at the end of the block; after
    an interruption it holds the rows so far. If the disk fills up, or an error comes before the
    first token, an old file of that name stays.

    Yields:
        Writes the rows of one token.
    """
    remove_leftovers(path.parent)
    capture = capture.resolved(engine.model)
    ids: list[int] = []
    texts: list[str] = []
    is_broken = False  # whether a write has failed

    def write(name: str, array: NDArray[Any]) -> None:
        nonlocal is_broken
        array = np.asarray(array, order="C")  # as it is, unless somebody else made it
        try:
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                header = npy_format.header_data_from_array_1_0(array)
                npy_format.write_array_header_1_0(member, header)
                # numpy's writer would copy. A view of the attention goes out as it lies in memory.
                member.write(array.reshape(-1).view(np.uint8).data)
        except OSError:
            is_broken = True
            raise

    def add(token: Token) -> None:
        ids.append(token.id)
        texts.append(token.text)
        given: tuple[Any, Any] = token.attention, token.attention_positions
        for what, views in zip(("attention", "positions"), given, strict=True):
            name = f"{what}_{token.index:05d}"
            if isinstance(views, tuple):
                for i, heads in enumerate(cast("tuple[NDArray[Any], ...]", views)):
                    write(f"{name}_layer_{i:03d}", heads)
            elif views is not None:
                write(name, views)

    def finish() -> None:
        write("ids", np.array(ids, np.int32))
        write("texts", np.array(texts, np.str_))
        column_texts = {one: engine.token_text(one) for one in {*generation.prompt_ids, *ids}}
        write("kqview", np.array(streamed_metadata(texts, generation, capture, column_texts)))

    with WholeFile(path) as file, zipfile.ZipFile(file.stream, "w") as archive:
        write("prompt_ids", np.array(generation.prompt_ids, np.int32))
        write("layers", np.array(capture.layers, np.int32))
        write("kind", np.array(capture.kind))
        if capture.reduce is not None:
            write("reduce", np.array(capture.reduce))
        if capture.spans is not None:
            spans = [(start, -1 if stop is None else stop) for start, stop in capture.spans]
            write("spans", np.array(spans, np.int32))
        try:
            yield add
        except BaseException:
            if ids and not is_broken:
                finish()
                archive.close()
                file.commit()
            raise
        finish()
