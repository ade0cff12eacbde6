"""``kqview generate``: streams a text; writes its attention to a file if asked."""

import dataclasses
import json
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol, Self

import typer
from rich.console import Console

from kqview.cli.option_groups import option, with_groups
from kqview.cli.options import (
    CaptureChoice,
    EngineChoice,
    JsonOption,
    PromptChoice,
    SamplingChoice,
)
from kqview.cli.outputs import PAGE, check_drawn, check_output
from kqview.cli.rows_file import RowsFile
from kqview.cli.terminal import show_delta

if TYPE_CHECKING:
    from kqview import Capture, Engine, Generation, Token
    from kqview.types.token import Attention

_SUFFIXES: Final = (".npz", ".safetensors", PAGE)


@with_groups
def generate(
    *,
    source: EngineChoice,
    prompt: PromptChoice,
    max_tokens: int = option(
        256, "Maximum number of tokens to generate.", "--max-tokens", "-n", min=1
    ),
    output: Path | None = option(
        None,
        "Write the captured attention as .npz or .safetensors (kqview.load reads both) "
        "or .html (a page).",
        "--output",
        "-o",
        metavar="FILE",
    ),
    capture: CaptureChoice,
    sampling: SamplingChoice,
    as_json: JsonOption = False,
) -> None:
    """Continue a text; with --capture or --output, capture its attention.

    The text goes to stdout as it is generated, everything else to stderr. Ctrl-C ends it; what was
    captured until then is written.

    Examples:

    - `kqview generate model.gguf "The capital of France is" -n 20 --temperature 0`
    - `kqview generate --demo "Anna has" --layers 0,3 --output rows.npz`
    - `echo "Once upon a time" | kqview generate model.gguf`
    - `kqview generate model.gguf "A cat as JSON: " --json-schema @cat.schema.json`
    - `kqview generate model.gguf "Yes or no?" --regex "yes|no" --json --top-logprobs 3`
    """
    check_output("--output", output, _SUFFIXES)
    plan = capture.plan() if output is not None or capture.is_asked else None
    check_drawn(output, plan)
    options = sampling.sampling()
    model, words = source.resolve(prompt.text)
    text = prompt.read(words)
    with source.open(model) as engine:
        ids = engine.tokenize(text, add_special=True, parse_special=True)
        generation = engine.generate(ids, max_tokens=max_tokens, sampling=options, capture=plan)
        with _rows(output, engine, plan, generation) as file, generation:
            tokens: list[dict[str, Any]] = []
            n_bytes = 0
            for token in generation:
                if as_json:
                    tokens.append(_to_json(token))
                else:
                    show_delta(generation)
                n_bytes += _n_bytes(token)
                if file is not None:
                    file.add(token)
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


def _to_json(token: "Token") -> dict[str, Any]:
    content: dict[str, Any] = {"id": token.id, "text": token.text}
    if token.logprob is not None:
        content["logprob"] = token.logprob
        content["top_logprobs"] = token.top_logprobs
    return content


def _n_bytes(token: "Token") -> int:
    rows: Attention | None = token.attention
    if rows is None:
        return 0
    return sum(heads.nbytes for heads in rows) if isinstance(rows, tuple) else rows.nbytes


class _File(Protocol):
    def add(self, token: "Token") -> None: ...


def _rows(
    path: Path | None,
    engine: "Engine",
    plan: "Capture | None",
    generation: "Generation",
) -> AbstractContextManager[_File | None]:
    """What takes the rows of *generation*: a file of the format that *path* names."""
    if path is None or plan is None:
        return nullcontext()
    if path.suffix.lower() in (".safetensors", PAGE):
        return _SavedFile(path, generation)
    return RowsFile(path, engine, plan, generation)


class _SavedFile:
    """Keeps the tokens and writes them at the end, also after an interruption."""

    def __init__(self, path: Path, generation: "Generation") -> None:
        self._path = path
        self._generation = generation
        self._tokens: list[Token] = []

    def add(self, token: "Token") -> None:
        self._tokens.append(token)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, error_type: object, *_: object) -> None:
        from kqview import save
        from kqview.viz import to_html

        if error_type is not None and not self._tokens:
            return
        if self._path.suffix.lower() == PAGE:
            to_html(self._path, self._tokens)
        else:
            save(self._path, self._generation, self._tokens)
