"""``kqview score``: how probable a model finds given texts, token by token; their perplexity."""

import json
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

import typer

from kqview.cli.option_groups import option, with_groups
from kqview.cli.options import ADD_SPECIAL, JSON, EditsChoice, EngineChoice, TextsChoice
from kqview.errors import RequestError
from kqview.types import Score
from kqview.viz.terminal import label

if TYPE_CHECKING:
    from kqview import Edit, Engine

_CELLS: Final = 20


@with_groups
def score(
    *,
    source: EngineChoice,
    texts: TextsChoice,
    top: int = option(0, "Also show the K likeliest tokens.", min=0, max=100, metavar="K"),
    edits: EditsChoice,
    summary: bool = option(False, "Print only the totals of each text.", "--summary"),
    add_special: bool = ADD_SPECIAL,
    as_json: bool = JSON,
) -> None:
    """Show how probable each token of a text is, and the perplexity of the text.

    A line for each token: its probability given the tokens before it, its logprob (natural), its
    rank among all tokens (1 is the model's first choice). The first token has none, as nothing
    precedes it. A text longer than the context is scored in windows that overlap by half, so every
    token has at least half a context before it.

    Examples:

    - `kqview score model.gguf "The capital of France is Paris."`
    - `kqview score model.gguf --summary -f wiki.txt`
    - `kqview score --demo --top 3 "Anna has a red ball."`
    - `cat answers.txt | kqview score model.gguf --lines --summary`
    """
    model, words = source.resolve(*(texts.texts or ()))
    given = texts.read(words)
    changes = edits.read()
    found: list[dict[str, Any]] = []
    with source.open(model) as engine:
        for name, text in given:
            scored, n_windows = _score(engine, text, top, add_special=add_special, edits=changes)
            if as_json:
                found.append({"name": name, **_to_json(scored, engine, summary=summary)})
                continue
            if not summary:
                for line in _lines(scored, engine):
                    typer.echo(line)
            totals = _totals(scored, n_windows)
            typer.echo(f"{name}: {totals}" if len(given) > 1 else totals)
    if as_json:
        typer.echo(json.dumps(found))


def _totals(score: Score, n_windows: int) -> str:
    parts = [f"{len(score.ids)} tokens", f"logprob {score.total:.3f}"]
    if score.n_scored:
        parts.append(f"perplexity {score.perplexity:.3f}")
    if n_windows > 1:
        parts.append(f"{n_windows} windows")
    return ", ".join(parts)


def _lines(score: Score, engine: "Engine") -> Iterator[str]:
    yield f"{'id':>7}  {'token':<{_CELLS}}  {'prob':>7}  {'logprob':>8}  {'rank':>6}"
    for i, token_id in enumerate(score.ids):
        line = f"{token_id:>7}  {label(engine.token_text(token_id), _CELLS)}"
        if score.ranks[i] >= 0:
            logprob = float(score.logprobs[i])
            line += f"  {_percent(logprob)}  {logprob:>8.3f}  {score.ranks[i] + 1:>6}"
            if score.top_logprobs is not None:
                others = (
                    f"{label(engine.token_text(j))} {_percent(p).strip()}"
                    for j, p in score.top_logprobs[i]
                )
                line += "  " + ", ".join(others)
        yield line.rstrip()


def _to_json(score: Score, engine: "Engine", *, summary: bool) -> dict[str, Any]:
    content: dict[str, Any] = {
        "n_tokens": len(score.ids),
        "n_scored": score.n_scored,
        "logprob": score.total,
        "perplexity": score.perplexity if score.n_scored else None,
    }
    if summary:
        return content
    found = zip(score.logprobs.tolist(), score.ranks.tolist(), strict=True)
    given = [(logprob, rank + 1) if rank >= 0 else (None, None) for logprob, rank in found]
    content["ids"] = score.ids
    content["tokens"] = [engine.token_text(i) for i in score.ids]
    content["logprobs"] = [logprob for logprob, _ in given]
    content["ranks"] = [rank for _, rank in given]
    if score.top_logprobs is not None and score.n_scored:
        content["top_logprobs"] = score.top_logprobs
    return content


def _percent(logprob: float) -> str:
    share = math.exp(logprob)
    return f"{share:>7.1%}" if share >= 0.001 else f"{'<0.1%':>7}"


def _score(
    engine: "Engine", text: str, n_top: int, *, add_special: bool, edits: "list[Edit] | None"
) -> tuple[Score, int]:
    """The score of *text*, and in how many windows, which overlap by half, it was evaluated."""
    ids = engine.tokenize(text, add_special=add_special)
    size = engine.n_ctx
    if edits and len(ids) > size:
        raise RequestError(
            f"the text has {len(ids)} tokens, more than the context of {size}, and edits count "
            "positions from its start; raise --ctx or shorten it"
        )
    score = Score.empty(ids, has_top=n_top > 0)
    n_windows = 1 if len(ids) <= size else 1 + math.ceil((len(ids) - size) / (size - size // 2))
    done = 1  # nothing precedes the first token
    for i in range(n_windows):
        end = min(len(ids), size + i * (size - size // 2))
        if end <= done:
            break
        one = engine.score(
            ids[max(0, end - size) : end],
            last=end - done,
            top_logprobs=n_top or None,
            edits=edits,
        )
        new, at = slice(done - end, None), slice(done, end)
        score.logprobs[at], score.ranks[at] = one.logprobs[new], one.ranks[new]
        if score.top_logprobs is not None and one.top_logprobs is not None:
            score.top_logprobs[at] = one.top_logprobs[new]
        done = end
    return score, n_windows
