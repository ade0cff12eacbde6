"""``kqview demo``: generates with the bundled demo model, draws and times its attention."""

from collections.abc import Sequence
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING, Final

import typer
from rich.console import Console
from rich.table import Table

from kqview.cli.option_groups import option
from kqview.cli.options import DEMO, THREADS, open_engine
from kqview.cli.outputs import PAGE, PICTURES, check_drawn, check_output
from kqview.cli.terminal import argument_text, show_delta
from kqview.errors import RequestError
from kqview.types.capture import Kind
from kqview.viz import heatmap, to_html
from kqview.viz.figures import save_figure
from kqview.viz.heads import probabilities, select_head
from kqview.viz.terminal import terminal_heatmap

if TYPE_CHECKING:
    from kqview import Capture, Engine, ModelInfo, Token
    from kqview.types.token import Attention

_N_TOKENS: Final = 24
_N_MODS_TOKENS: Final = 40
_MODS_PROMPT: Final = "Mirelda found a silver key near the old bridge. One day, Mirelda"


def demo(
    prompt: str | None = option(
        None, "Text to continue. [default: a built-in one]", "--prompt", "-p", metavar="TEXT"
    ),
    max_tokens: int | None = option(
        None,
        "Maximum number of tokens to generate. [default: 24; 40 with --mods]",
        "--max-tokens",
        "-n",
        min=2,
    ),
    layer: int | None = option(
        None, "Layer to draw. [default: that of the sharpest head]", "--layer", "-l", min=0
    ),
    head: int | None = option(None, "Head to draw. [default: the sharpest]", min=0),
    kind: Kind = option("probs", "Values to capture.", "--capture"),
    runs: int = option(5, "Number of timed runs, with and without capture each.", min=1),
    output: Path | None = option(
        None,
        "Write the heat map as .png, .svg or .pdf as well, or all heads as .html.",
        "--output",
        "-o",
        metavar="FILE",
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
    from kqview import Capture
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
        layer_index = _find_layer(engine.model, layer)
        if head is not None and head >= engine.model.n_head:
            raise RequestError(f"--head is {head}, but the model has {engine.model.n_head} heads")
        copied_before = engine.stats().copied_bytes
        text = PROMPT if prompt is None else argument_text(prompt)
        ids = engine.tokenize(text)
        tokens, rows = _generate(engine, text, ids, max_tokens, capture)
        if not rows:
            return
        labels = [engine.token_text(i) for i in [*ids, *(token.id for token in tokens)]]
        place = _draw(console, engine.model, rows, labels, kind, layer_index, head)
        if output is not None and output.suffix.lower() == PAGE:
            to_html(output, tokens)
        elif output is not None:
            _write_picture(output, engine.model, tokens, labels, capture, place)
        copied_bytes = engine.stats().copied_bytes - copied_before
        with notes.status(f"measuring {2 * runs} runs"):
            rates = _measure(engine, ids, max_tokens, capture, runs)
        console.print(_summary(engine, rows[-1], capture, rates, copied_bytes))


def _find_layer(model: "ModelInfo", layer: int | None) -> int | None:
    if layer is None:
        return None
    if layer not in model.attention_layers:
        known = ", ".join(map(str, model.attention_layers))
        raise RequestError(f"--layer is {layer}; choose a layer with attention: {known}")
    return model.attention_layers.index(layer)


def _generate(
    engine: "Engine", text: str, ids: list[int], max_tokens: int, capture: "Capture"
) -> tuple[list["Token"], list["Attention"]]:
    """Stream the prompt and its continuation to stdout; return the tokens and their attention."""
    tokens: list[Token] = []
    rows: list[Attention] = []
    typer.echo(text, nl=False)
    with engine.generate(ids, max_tokens=max_tokens, temperature=0.0, capture=capture) as stream:
        for token in stream:
            show_delta(stream)
            if token.attention is not None:
                tokens.append(token)
                rows.append(token.attention)
    typer.echo("\n")
    return tokens, rows


def _draw(
    console: Console,
    model: "ModelInfo",
    rows: Sequence["Attention"],
    labels: Sequence[str],
    kind: Kind,
    layer_index: int | None,
    head: int | None,
) -> tuple[int, int]:
    """Print the heat map; return the indices of the layer and the head that it shows."""
    # For "probs" these are the captured views themselves.
    weights = [
        [probabilities(heads, kind, model.attention_scale) for heads in layers] for layers in rows
    ]
    i_layer, i_head = select_head(weights, layer=layer_index, head=head)
    console.print(
        f"layer {model.attention_layers[i_layer]}, head {i_head}: each line is a generated token, "
        "each column a token before it",
        highlight=False,
    )
    drawn = [layers[i_layer][i_head] for layers in weights]
    console.print(terminal_heatmap(drawn, labels[-len(rows) :], labels, width=console.width))
    console.print()
    return i_layer, i_head


def _write_picture(
    path: Path,
    model: "ModelInfo",
    tokens: Sequence["Token"],
    labels: Sequence[str],
    capture: "Capture",
    place: tuple[int, int],
) -> None:
    layer, head = place
    figure = heatmap(
        tokens, labels, layer=model.attention_layers[layer], head=head, kind=capture.kind,
        title=f"{model.name}, layer {model.attention_layers[layer]}, head {head}: "
        "attention of each generated token (row)",
    )  # fmt: skip
    save_figure(figure, path)


def _measure(
    engine: "Engine", ids: list[int], max_tokens: int, capture: "Capture", runs: int
) -> tuple[float, float]:
    """Median tokens/s without and with capture of interleaved greedy runs after a warm-up."""
    plans = (None, capture)
    rates: tuple[list[float], list[float]] = ([], [])
    for i_run in range(runs + 1):
        for plan, measured in zip(plans, rates, strict=True):
            rate = _decode_rate(engine, ids, max_tokens, plan)
            if i_run > 0:
                measured.append(rate)
    return median(rates[0]), median(rates[1])


def _decode_rate(
    engine: "Engine", ids: list[int], max_tokens: int, plan: "Capture | None"
) -> float:
    """Tokens/s from the first token to the last."""
    times_s: list[float] = []
    with engine.generate(ids, max_tokens=max_tokens, temperature=0.0, capture=plan) as stream:
        for _ in stream:
            times_s.append(perf_counter())
    elapsed_s = times_s[-1] - times_s[0] if times_s else 0.0
    return (len(times_s) - 1) / elapsed_s if elapsed_s > 0 else 0.0


def _summary(
    engine: "Engine",
    last: "Attention",
    capture: "Capture",
    rates: tuple[float, float],
    copied_bytes: int,
) -> Table:
    table = Table(show_header=False, box=None)
    heads = last[0]
    n_context = heads.shape[-1]
    if isinstance(last, tuple):
        shape = ", ".join(str(layer.shape) for layer in last)
    else:
        shape = str(last.shape)
    flags = last[0].flags if isinstance(last, tuple) else last.flags
    without, with_capture = rates
    n_bytes = capture.bytes_per_token(engine.model, n_context)
    rows = [
        ("attention of the last token", f"{shape} {heads.dtype}, {capture.kind}"),
        ("memory of the view", f"owndata {flags.owndata}, writeable {flags.writeable}"),
        ("captured per token", f"{n_bytes:,} bytes at a context of {n_context} tokens"),
        ("copied by Python", f"{copied_bytes:,} bytes"),
        ("tokens/s without capture", f"{without:,.0f}"),
        ("tokens/s with capture", f"{with_capture:,.0f}"),
        ("llama.cpp", str(engine.system_info()["llama_cpp_commit"])),
    ]
    for name, value in rows:
        table.add_row(name, value)
    return table
