"""``kqview generate``: stream text, and save the attention of every token if asked."""

from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from kqview.cli.loading import open_engine
from kqview.cli.options import (
    ContextOption,
    DemoOption,
    FlashAttention,
    FlashAttentionOption,
    GpuLayersOption,
    HubOption,
    Kind,
    ModelArgument,
    RpcOption,
    ThreadsOption,
    parse_indices,
    take_text,
)
from kqview.cli.rows_file import RowsFile

if TYPE_CHECKING:
    from kqview import Capture, Engine, Sampling


def generate(
    model: ModelArgument = None,
    prompt: Annotated[
        str | None, typer.Argument(metavar="PROMPT", help="Text; - reads standard input.")
    ] = None,
    hf: HubOption = None,
    demo: DemoOption = False,
    max_tokens: Annotated[
        int, typer.Option("--max-tokens", "-n", min=1, help="Most tokens to generate.")
    ] = 256,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.8,
    top_k: Annotated[int, typer.Option(help="Keep the k best tokens; 0 keeps all.")] = 40,
    top_p: Annotated[float, typer.Option(help="Keep this much probability.")] = 0.95,
    min_p: Annotated[float, typer.Option(help="Drop below this share of the best.")] = 0.05,
    repeat_penalty: Annotated[float, typer.Option(help="1 is off.")] = 1.0,
    presence_penalty: Annotated[float, typer.Option(help="0 is off.")] = 0.0,
    frequency_penalty: Annotated[float, typer.Option(help="0 is off.")] = 0.0,
    seed: Annotated[int | None, typer.Option(help="Repeats a run.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="Stop at this text; repeatable.")] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on at the end.")] = False,
    capture: Annotated[Kind | None, typer.Option(help="Capture attention of this kind.")] = None,
    layers: Annotated[
        str | None, typer.Option(help="Capture only these layers, such as 0,3 or 8-11.")
    ] = None,
    heads: Annotated[
        str | None, typer.Option(help="Capture only these heads, such as 0,3 or 8-11.")
    ] = None,
    save: Annotated[
        Path | None,
        typer.Option(metavar="ROWS.NPZ", dir_okay=False, help="Write the captured rows here."),
    ] = None,
    ctx: ContextOption = None,
    threads: ThreadsOption = None,
    ngl: GpuLayersOption = -1,
    rpc: RpcOption = None,
    flash_attn: FlashAttentionOption = FlashAttention.AUTO,
) -> None:
    """Generate text from a prompt.

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
            kind=capture.value,
            layers=parse_indices("--layers", layers),
            heads=parse_indices("--heads", heads),
        )
    sampling = Sampling(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repeat_penalty=repeat_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        seed=seed,
        stop=tuple(stop or ()),
        ignore_eos=ignore_eos,
    )
    with open_engine(
        model,
        from_hub=hf,
        demo=demo,
        n_ctx=ctx,
        n_threads=threads,
        n_gpu_layers=ngl,
        rpc_servers=rpc,
        flash_attn=flash_attn,
    ) as engine:
        _stream(engine, prompt, max_tokens=max_tokens, sampling=sampling, plan=plan, save=save)


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
