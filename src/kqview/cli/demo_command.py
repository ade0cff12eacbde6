"""``kqview demo``: generates with the bundled demo model, draws and times its attention."""

from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Final

import typer
from rich.console import Console
from rich.table import Table

from kqview.cli.option_groups import option
from kqview.cli.options import DEMO, THREADS, open_engine
from kqview.cli.outputs import PAGE, PICTURES, check_drawn, check_output, output_to
from kqview.cli.terminal import argument_text, show_delta
from kqview.errors import RequestError
from kqview.types import Capture, Token
from kqview.types.capture import Kind
from kqview.viz import heatmap, to_html
from kqview.viz.figures import save_figure
from kqview.viz.source import probabilities, select_head
from kqview.viz.terminal import TerminalHeatmap

if TYPE_CHECKING:
    from kqview import Engine

_N_TOKENS: Final = 24
_N_MODS_TOKENS: Final = 40
_MODS_PROMPT: Final = "Mirelda found a silver key near the old bridge. One day, Mirelda"


def demo(
    prompt: str | None = option(
        None, "Text to continue. [default: a built-in one]", "--prompt -p", metavar="TEXT"
    ),
    max_tokens: int | None = option(
        None,
        "Maximum number of tokens to generate. [default: 24; 40 with --mods]",
        "--max-tokens -n",
        min=2,
    ),
    layer: int | None = option(
        None, "Layer to draw. [default: that of the sharpest head]", "--layer -l", min=0
    ),
    head: int | None = option(None, "Head to draw. [default: the sharpest]", min=0),
    kind: Kind = option("probs", "Values to capture.", "--capture"),
    runs: int = option(5, "Number of timed runs, with and without capture each.", min=1),
    output: Path | None = output_to(
        "Write the heat map as .png, .svg or .pdf as well, or all heads as .html."
    ),
    mods: bool = option(False, "Show mods that steer the text instead.", "--mods"),
    threads: int | None = THREADS,
) -> None:
    """Generate with the bundled demo model and draw what each new token attends to.

    The sharpest head is the one with the largest mean weight on tokens that are neither the first
    nor among the latest four. The speeds are medians of interleaved runs.

    Examples:

    - `kqview demo`
    - `kqview demo --prompt "Anna has a red ball." --layer 2 --head 1`
    - `kqview demo --output attention.png`
    - `kqview demo --mods`
    """
    from kqview.demo import PROMPT

    check_output("--output", output, (*PICTURES, PAGE))
    check_drawn(output, Capture(kind))
    console, notes = Console(), Console(stderr=True)
    notes.print("The bundled demo model, a small teller of stories, goes on:\n", style="dim")
    if mods:
        from kqview.cli.mods_demo import show_mods

        with open_engine(DEMO, n_threads=threads) as engine:
            text = _MODS_PROMPT if prompt is None else argument_text(prompt)
            show_mods(console, engine, text, max_tokens or _N_MODS_TOKENS)
        return
    capture = Capture(kind)
    max_tokens = max_tokens or _N_TOKENS
    with open_engine(DEMO, n_threads=threads) as engine:
        model = engine.model
        if layer is not None and layer not in model.attention_layers:
            known = ", ".join(map(str, model.attention_layers))
            raise RequestError(f"--layer is {layer}; choose a layer with attention: {known}")
        if head is not None and head >= model.n_head:
            raise RequestError(f"--head is {head}, but the model has {model.n_head} heads")
        copied_before = engine.stats().copied_bytes
        text = PROMPT if prompt is None else argument_text(prompt)
        ids = engine.tokenize(text)
        tokens = _generate(engine, text, ids, max_tokens, capture)
        if not tokens:
            return
        labels = [engine.token_text(i) for i in [*ids, *(token.id for token in tokens)]]
        rows = [token.rows for token in tokens]
        # For "probs" these are the captured views themselves.
        weights = [probabilities(row, kind, model.attention_scale) for row in rows]
        at = None if layer is None else model.attention_layers.index(layer)
        i_layer, head = select_head(weights, layer=at, head=head)
        place = f"layer {model.attention_layers[i_layer]}, head {head}"
        console.print(
            f"{place}: each line is a generated token, each column a token before it",
            highlight=False,
        )
        drawn = [row[i_layer, head] for row in weights]
        console.print(TerminalHeatmap(drawn, labels[-len(rows) :], labels, width=console.width))
        console.print()
        if output is not None and output.suffix.lower() == PAGE:
            to_html(output, tokens)
        elif output is not None:
            figure = heatmap(
                tokens, labels, layer=model.attention_layers[i_layer], head=head, kind=kind,
                title=f"{model.name}, {place}: attention of each generated token (row)",
            )  # fmt: skip
            save_figure(figure, output)
        copied_bytes = engine.stats().copied_bytes - copied_before
        with notes.status(f"measuring {2 * runs} runs"):
            rates = _rates(engine, ids, max_tokens, capture, runs)
        last, commit = rows[-1], engine.system_info()["llama_cpp_commit"]
        n_bytes, n_context = capture.bytes_per_token(model, last.shape[-1]), last.shape[-1]
        table = Table(show_header=False, box=None)
        for name, value in (
            ("attention of the last token", f"{last.shape} {last.dtype}, {kind}"),
            (
                "memory of the view",
                f"owndata {last.flags.owndata}, writeable {last.flags.writeable}",
            ),
            ("captured per token", f"{n_bytes:,} bytes at a context of {n_context} tokens"),
            ("copied by Python", f"{copied_bytes:,} bytes"),
            ("tokens/s without capture", f"{rates[0]:,.0f}"),
            ("tokens/s with capture", f"{rates[1]:,.0f}"),
            ("llama.cpp", str(commit)),
        ):
            table.add_row(name, value)
        console.print(table)


def _generate(
    engine: "Engine", text: str, ids: list[int], max_tokens: int, capture: Capture
) -> list[Token]:
    """Stream the prompt and its continuation to stdout; return the tokens with attention."""
    tokens: list[Token] = []
    typer.echo(text, nl=False)
    with engine.generate(ids, max_tokens=max_tokens, temperature=0.0, capture=capture) as stream:
        for token in stream:
            show_delta(stream)
            if token.attention is not None:
                tokens.append(token)
    typer.echo("\n")
    return tokens


def _rates(
    engine: "Engine", ids: list[int], max_tokens: int, capture: Capture, n_runs: int
) -> list[float]:
    """Median tokens/s without and with *capture*, of interleaved greedy runs after a warm-up."""
    from kqview.bench.pairs import mean_step_ms, rounds
    from kqview.bench.sweep import DecodeRuns

    runs = DecodeRuns(engine, ids)

    def rate(plan: Capture | None) -> float:
        return 1000 / mean_step_ms(runs.stamps_s(max_tokens, capture=plan))

    ways = {"without": partial(rate, None), "with": partial(rate, capture)}
    for way in ways.values():
        way()
    found = list(rounds(ways, n_runs))
    return [median(rates[name] for rates in found) for name in ways]
