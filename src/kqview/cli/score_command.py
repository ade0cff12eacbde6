"""``kqview score``: how probable a model finds given texts, token by token; their perplexity."""

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import typer
from numpy.typing import NDArray

from kqview.cli.option_groups import option, with_groups
from kqview.cli.options import ADD_SPECIAL, JSON, EngineChoice, TextsChoice
from kqview.viz.terminal import label

if TYPE_CHECKING:
    from kqview import Engine

_CELLS: Final = 20
_BAR: Final = 10


@with_groups
def score(
    *,
    source: EngineChoice,
    texts: TextsChoice,
    top: int = option(0, "Also show the K likeliest tokens.", min=0, max=100, metavar="K"),
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
    found: list[dict[str, Any]] = []
    with source.open(model) as engine:
        for name, text in given:
            scored = _score(engine, text, top, add_special=add_special)
            if as_json:
                found.append({"name": name, **scored.to_json(engine, summary=summary)})
                continue
            if not summary:
                for line in scored.lines(engine):
                    typer.echo(line)
            typer.echo(f"{name}: {scored.totals()}" if len(given) > 1 else scored.totals())
    if as_json:
        typer.echo(json.dumps(found))


@dataclass(frozen=True)
class _Scored:
    """The scores of a text, in windows that overlap."""

    ids: list[int]
    logprobs: NDArray[np.float32]  # NaN without a score
    ranks: NDArray[np.int32]
    top: list[list[tuple[int, float]]]
    n_windows: int

    @property
    def n_scored(self) -> int:
        return int((self.ranks >= 0).sum())

    @property
    def total(self) -> float:
        return float(self.logprobs[self.ranks >= 0].sum(dtype=np.float64))

    @property
    def perplexity(self) -> float:
        return math.exp(-self.total / self.n_scored) if self.n_scored else math.nan

    def totals(self) -> str:
        parts = [f"{len(self.ids)} tokens", f"logprob {self.total:.3f}"]
        if self.n_scored:
            parts.append(f"perplexity {self.perplexity:.3f}")
        if self.n_windows > 1:
            parts.append(f"{self.n_windows} windows")
        return ", ".join(parts)

    def lines(self, engine: "Engine") -> Iterator[str]:
        yield f"{'id':>7}  {'token':<{_CELLS}}  {'prob':>7}  {'logprob':>8}  {'rank':>6}"
        for i, token_id in enumerate(self.ids):
            line = f"{token_id:>7}  {label(engine.token_text(token_id), _CELLS)}"
            if self.ranks[i] >= 0:
                logprob = float(self.logprobs[i])
                line += f"  {_percent(logprob)}  {logprob:>8.3f}  {self.ranks[i] + 1:>6}"
                others = (
                    f"{label(engine.token_text(j))} {_percent(p).strip()}" for j, p in self.top[i]
                )
                line += "  " + ", ".join(others) if self.top[i] else ""
            yield line.rstrip()

    def to_json(self, engine: "Engine", *, summary: bool) -> dict[str, Any]:
        content: dict[str, Any] = {
            "n_tokens": len(self.ids),
            "n_scored": self.n_scored,
            "logprob": self.total,
            "perplexity": self.perplexity if self.n_scored else None,
        }
        if summary:
            return content
        has = self.ranks >= 0
        content["ids"] = self.ids
        content["tokens"] = [engine.token_text(i) for i in self.ids]
        content["logprobs"] = [
            float(p) if h else None for p, h in zip(self.logprobs, has, strict=True)
        ]
        content["ranks"] = [int(r) + 1 if h else None for r, h in zip(self.ranks, has, strict=True)]
        if any(self.top):
            content["top_logprobs"] = self.top
        return content


def _percent(logprob: float) -> str:
    share = math.exp(logprob)
    return f"{share:>7.1%}" if share >= 0.001 else f"{'<0.1%':>7}"


def _score(engine: "Engine", text: str, n_top: int, *, add_special: bool) -> _Scored:
    """Score *text*, in windows that overlap by half if it is longer than the context."""
    ids = engine.tokenize(text, add_special=add_special)
    size = engine.n_ctx
    scored = _Scored(
        ids,
        np.full(len(ids), np.nan, np.float32),
        np.full(len(ids), -1, np.int32),
        [[] for _ in ids],
        1 if len(ids) <= size else 1 + math.ceil((len(ids) - size) / (size - size // 2)),
    )
    done = 0
    for i in range(scored.n_windows):
        end = min(len(ids), size + i * (size - size // 2))
        begin = max(0, end - size)
        n_new = end - max(done, 1) if done == 0 else end - done
        if n_new < 1:
            break
        one = engine.score(ids[begin:end], last=n_new, top_logprobs=n_top or None)
        at = slice(end - n_new, end)
        scored.logprobs[at], scored.ranks[at] = one.logprobs[-n_new:], one.ranks[-n_new:]
        if one.top_logprobs is not None:
            scored.top[at] = one.top_logprobs[-n_new:]
        done = end
    return scored
