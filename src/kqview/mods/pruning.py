"""Pruning while generating: what receives the least attention is removed from the context.

`generate_pruned` generates in parts. Each part is a request that captures attention. The next
part's prompt omits the spans with the least attention, and ``reuse="shift"`` closes all gaps in the
cache in one shift, so only the last token is re-evaluated. What is kept was computed while the
removed tokens were visible, so the result is approximate, as after `Slot.shift`.

The score of a token is the sum of attention that later queries paid to it, as in H2O (Zhang et al.,
NeurIPS 2023, https://arxiv.org/abs/2306.14048); the first tokens stay because they are attention
sinks (Xiao et al., ICLR 2024, https://arxiv.org/abs/2309.17453), the latest because few
queries have seen them.
"""

import codecs
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import numpy as np

from kqview.arguments import invalid, to_index, to_number, whole_number
from kqview.errors import RequestError, shown
from kqview.mods.attention import check_shares, head_rows
from kqview.types import Capture, Token
from kqview.types.capture import Kind
from kqview.types.sampling import N_SEEDS

# The state of the first would start over with each part; the others are set for each.
_REFUSED: Final = (
    "grammar", "json_schema", "regex", "stop", "mods", "context_shift", "slot",
    "reuse", "reuse_min_tokens", "max_tokens", "sampling",
)  # fmt: skip


class PartGeneration(Protocol):
    """A generation; `Generation` is one."""

    def __iter__(self) -> Iterator[Token]: ...
    def close(self) -> None: ...
    @property
    def slot(self) -> int | None: ...
    @property
    def finish_reason(self) -> str | None: ...


class Generates(Protocol):
    """What pruning needs of an engine; `Engine` provides it."""

    @property
    def n_ctx(self) -> int: ...
    def tokenize(self, text: str, *, add_special: bool) -> list[int]: ...
    def token_bytes(self, id: int) -> bytes: ...
    @property
    def generate(self) -> Callable[..., PartGeneration]: ...


@dataclass(eq=False, kw_only=True, repr=False)
class PrunedGeneration:
    """Iterator of Token whose context stays within a limit; see `generate_pruned`.

    Attributes:
        ids: All ids: the prompt, then the generated ones.
        places: Index in *ids* of each token in the context, ascending.
        removed: The indices in *ids* that each pruning removed.
        finish_reason: As of a Generation; None while it runs.
    """

    engine: Generates
    ids: list[int]
    max_context: int
    n_left: int
    n_prune: int
    span_tokens: int
    n_first: int
    n_last: int
    capture: Capture
    options: dict[str, Any]

    def __post_init__(self) -> None:
        self._n_prompt = len(self.ids)
        self.places = list(range(self._n_prompt))
        self.removed: list[list[int]] = []
        self.finish_reason: str | None = None
        self._scores = np.zeros(self._n_prompt, np.float32)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._tokens = self._generate()

    def __iter__(self) -> "PrunedGeneration":
        return self

    def __next__(self) -> Token:
        return next(self._tokens)

    def close(self) -> None:
        """End the generation."""
        self._tokens.close()

    def __enter__(self) -> "PrunedGeneration":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def tokens(self) -> list[int]:
        """Ids generated so far."""
        return self.ids[self._n_prompt :]

    def _generate(self) -> Generator[Token]:
        slot: int | None = None
        part: PartGeneration | None = None
        seed = to_index(self.options.get("seed"))
        if seed is not None and not 0 <= seed < N_SEEDS:  # at random, or refused
            seed = None
        try:
            while self.finish_reason is None:
                if len(self.places) >= self.max_context:
                    self._prune()
                seeds = {} if seed is None else {"seed": (seed + len(self.removed)) % N_SEEDS}
                part = self.engine.generate(
                    [self.ids[place] for place in self.places],
                    max_tokens=min(self.n_left, self.max_context - len(self.places)),
                    capture=self.capture,
                    slot=slot,
                    reuse="shift",
                    reuse_min_tokens=self.span_tokens,
                    **{**self.options, **seeds},
                )
                for token in part:
                    self._note(token)
                    yield token
                slot = part.slot
                if part.finish_reason != "length" or self.n_left == 0:
                    self.finish_reason = part.finish_reason
        finally:
            if part is not None:
                part.close()
            self.finish_reason = self.finish_reason or "cancelled"

    def _note(self, token: Token) -> None:
        rows = head_rows(token.attention, len(self.places), positions=token.attention_positions)
        self._scores += rows.mean(axis=0)
        self._scores = np.append(self._scores, np.float32(0))
        token.index = len(self.ids) - self._n_prompt
        # A character may begin in one part and end in the next.
        token.text = self._decoder.decode(self.engine.token_bytes(token.id))
        self.places.append(len(self.ids))
        self.ids.append(token.id)
        self.n_left -= 1

    def _prune(self) -> None:
        """Remove the spans with the smallest mean score."""
        stop = len(self.places) - self.n_last
        starts = np.arange(self.n_first, stop - self.span_tokens + 1, self.span_tokens)
        spans = starts[:, None] + np.arange(self.span_tokens)
        n_spans = -(-self.n_prune // self.span_tokens)
        worst = np.argsort(self._scores[spans].mean(axis=1), kind="stable")[:n_spans]
        gone = np.sort(spans[worst].reshape(-1))
        self.removed.append([self.places[i] for i in gone.tolist()])
        self._scores = np.delete(self._scores, gone)
        self.places = np.delete(self.places, gone).tolist()


def generate_pruned(
    engine: Generates,
    prompt: str | Sequence[int],
    *,
    max_context: int | None = None,
    max_tokens: int = 256,
    prune: float = 0.25,
    span_tokens: int = 8,
    n_first: int = 4,
    n_last: int = 16,
    capture: Capture | Kind = "probs",
    **options: Any,
) -> PrunedGeneration:
    """Generate with a context that is pruned whenever it is full.

    Args:
        engine: The engine; its model's positions must be movable, see `Slot.shift`.
        prompt: Text or ids, as in `generate`.
        max_context: Maximum number of tokens in the context; None for the size of a slot.
        max_tokens: Maximum number of tokens to generate.
        prune: Share of *max_context* that each pruning removes, above 0 and at most 0.75.
        span_tokens: Number of adjacent tokens that are kept or removed together.
        n_first: Number of tokens at the beginning that are always kept.
        n_last: Number of latest tokens that are always kept, at least *span_tokens*.
        capture: The attention that decides: "probs" or a Capture of that kind, such as one of some
            layers, or one with ``top_k`` for less memory.
        **options: Further options of `generate`, applied to each part. Not supported: stop strings,
            grammars, JSON schemas, regular expressions, mods and slots.

    Returns:
        An iterator of Token. The columns of ``token.attention`` are the context at that token, see
        ``places``. ``token.index`` counts over all parts.

    Raises:
        RequestError: An option is out of range or not supported with pruning. May be
            InvalidCapture. Iterating raises the errors of `generate`.
    """
    refused = [name for name in _REFUSED if name in options]
    if refused:
        raise RequestError(
            f"{', '.join(refused)} cannot be used: the text is generated in parts, which set "
            "them or would not share their state; leave them out",
            parameter=refused[0],
        )
    span_tokens = whole_number("span_tokens", span_tokens)
    n_first = whole_number("n_first", n_first, low=0)
    n_last = whole_number("n_last", n_last)
    if n_last < span_tokens:
        raise RequestError(
            f"n_last is {n_last}, but spans have {span_tokens} tokens; raise n_last",
            parameter="n_last",
        )
    limit = engine.n_ctx if max_context is None else whole_number("max_context", max_context)
    limit = min(limit, engine.n_ctx)
    share = to_number(prune)
    if share is None or not 0 < share <= 0.75:
        raise invalid("prune", "a number above 0 and at most 0.75", shown(prune))
    ids = engine.tokenize(prompt, add_special=True) if isinstance(prompt, str) else list(prompt)
    n_prune = max(span_tokens, int(limit * share))
    n_removable = (limit - n_first - n_last) // span_tokens * span_tokens
    if n_removable < n_prune:
        raise RequestError(
            f"a context of {limit} tokens has {n_removable} that can be removed, but a pruning "
            f"removes {n_prune}; raise max_context, or lower n_first, n_last or prune",
            parameter="max_context",
        )
    if len(ids) > limit:
        raise RequestError(
            f"the prompt has {len(ids)} tokens, but max_context is {limit}; raise it or shorten "
            "the prompt",
            parameter="prompt",
        )
    wanted = Capture.of(capture) or Capture("probs")
    check_shares("generate_pruned", wanted)
    return PrunedGeneration(
        engine=engine,
        ids=ids,
        max_context=limit,
        n_left=whole_number("max_tokens", max_tokens),
        n_prune=n_prune,
        span_tokens=span_tokens,
        n_first=n_first,
        n_last=n_last,
        capture=wanted,
        options=options,
    )
