"""Activation patching: which heads carry what distinguishes one prompt from another."""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from numpy.typing import NDArray

from kqview.arguments import invalid, is_iterable, to_pair, whole_number
from kqview.edit import Edit, HeadRecord, SetHead
from kqview.errors import RequestError, shown
from kqview.types import Capture

if TYPE_CHECKING:
    from kqview import _core
    from kqview.engine import Engine
    from kqview.generation.stream import Generation

Metric = Callable[[NDArray[np.float32]], float]

_CAPTURE = Capture("probs", layers=[], vocab_logits=True)


def patch(
    engine: "Engine",
    clean: str | Sequence[int],
    corrupted: str | Sequence[int],
    metric: Metric | tuple[str | int, str | int],
    *,
    layers: Iterable[int] | None = None,
    positions: Iterable[int] | None = None,
) -> NDArray[np.float64]:
    """Put each head's output of the *clean* prompt into a run of the *corrupted* one.

    One pass for each head, several at a time in all slots. An effect of 0 leaves the corrupted
    result, 1 gives the clean one back: the head alone carries the difference.

    Args:
        engine: The engine.
        clean: A prompt that gives the wanted result.
        corrupted: One of as many tokens that does not.
        metric: Computes a number from the logits behind the prompt, float32 ``(n_vocab,)``; or the
            two tokens, ids or texts, whose difference of logits it is.
        layers: Layers to patch, of those with attention; None for all.
        positions: Tokens at which a head is patched, negative ones counted from the prompt's end;
            None for all.

    Returns:
        Effects, float64 ``(n_layers, n_heads)``, a row for each of *layers*; NaN where a layer has
        fewer heads than another.

    Raises:
        RequestError: The prompts differ in length, their metrics do not differ, or a token of
            *metric* is not one. InvalidEdit for layers or positions that are not there.
        KqviewError: As of `Engine.generate`.
    """
    measure = metric if callable(metric) else _difference(engine, metric)
    ids, others = (
        engine.tokenize(one) if isinstance(one, str) else list(one) for one in (clean, corrupted)
    )
    if len(ids) != len(others):
        raise RequestError(
            f"clean has {len(ids)} tokens and corrupted {len(others)}; patching needs as many of "
            "each",
            parameter="corrupted",
        )
    where: Any = list(positions) if is_iterable(positions) else positions

    def started(prompt: list[int], edits: list[Edit]) -> "Generation":
        options: Any = {"max_tokens": 1, "temperature": 0.0, "ignore_eos": True}
        return engine.generate(prompt, capture=_CAPTURE, edits=edits, **options)

    def measured(generation: "Generation") -> float:
        return float(measure(next(generation).logits))

    heads = HeadRecord(engine.model.attention_layers if layers is None else layers)
    at_clean = measured(started(ids, [heads]))
    record = cast("_core.HeadRecord", heads.record)
    at_corrupted = measured(started(others, []))
    if at_clean == at_corrupted:
        raise RequestError(
            f"metric is {at_clean} for both prompts; choose one that tells them apart",
            parameter="metric",
        )
    wanted = heads.layers
    n_heads = [record.n_heads(layer) for layer in wanted]
    waiting = deque((i, head) for i, n in enumerate(n_heads) for head in range(n))
    effects = np.full((len(wanted), max(n_heads)), np.nan)
    running: deque[tuple[int, int, Generation]] = deque()
    while waiting or running:
        if waiting and len(running) < len(engine.slots):
            i, head = waiting.popleft()
            edit = SetHead(wanted[i], head, record.head(wanted[i], head), where)
            running.append((i, head, started(others, [edit])))
        else:
            i, head, generation = running.popleft()
            effects[i, head] = measured(generation)
    return (effects - at_corrupted) / (at_clean - at_corrupted)


def _difference(engine: "Engine", tokens: tuple[str | int, str | int]) -> Metric:
    """The difference of two tokens' logits."""
    pair = to_pair(tokens)
    if pair is None:
        raise invalid("metric", "a function, or two tokens", shown(tokens))
    ids: list[int] = []
    for token in pair:
        if not isinstance(token, str):
            ids.append(whole_number("a token of metric", token, 0, engine.model.n_vocab - 1))
            continue
        found = engine.tokenize(token, add_special=False)
        if len(found) != 1:
            raise RequestError(
                f"metric has {shown(token)}, which is {len(found)} tokens; name single tokens",
                parameter="metric",
            )
        ids += found
    return lambda logits: float(logits[ids[0]]) - float(logits[ids[1]])
