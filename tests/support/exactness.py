"""The figures of EXACTNESS.md, measured: ``python -m tests.support.exactness`` prints them.

The model is the one that ships with kqview, the text one of its own kind; rows are those of every
layer and head. "probs" errors are the largest difference of two probabilities, "logits" errors the
largest difference in a row by the largest value of that row.
"""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING, Any

import numpy as np

from kqview import Capture, Engine

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


TEXT = (
    "Mirelda found a silver key near the old bridge. Then Mirelda went home and showed it to Tom. "
    "Tom said that the key was for the small door behind the mill. They walked to the mill and the "
    "owl saw them. The owl said hello. Mirelda opened the door with the silver key, and behind it "
    "was a red ball."
)
PLAIN: dict[str, Any] = {"kv_type": "f32", "flash_attn": False}
GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True, "max_tokens": 1}
QUANTISED = ("q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl")
N_LAST = 20  # queries whose rows are compared


def open_demo(**options: Any) -> Any:
    """The demo model, closed behind the with statement; one thread, so that sums have one order."""
    return closing(Engine.demo(**{"n_ctx": 256, "n_threads": 1, **options}))


def ids_of(engine: Engine) -> list[int]:
    return engine.tokenize(TEXT, add_special=False)[:110]


def last_rows(engine: Engine, ids: Sequence[int], kind: Any = "probs") -> Any:
    return np.asarray(engine.attend(ids, kind, last=N_LAST).array())


def probs_error(rows: Any, want: Any) -> float:
    return float(np.abs(rows - want).max())


def logits_error(rows: Any, want: Any) -> float:
    shown = np.isfinite(want)
    difference = np.where(shown, np.abs(np.where(shown, rows, 0) - np.where(shown, want, 0)), 0)
    return float((difference.max(-1) / np.abs(np.where(shown, want, 0)).max(-1)).max())


def plain_rows(ids: Sequence[int], kind: Any = "probs") -> Any:
    """Of a fresh engine with an F32 cache and without flash attention."""
    with open_demo(**PLAIN) as engine:
        return last_rows(engine, ids, kind)


def in_parts(**options: Any) -> Callable[[], float]:
    """A prompt of which the cache holds half, against the whole at once."""

    def measure() -> float:
        with open_demo(**options) as engine:
            ids = ids_of(engine)
            whole = last_rows(engine, ids, "logits")
            engine.slots[0].clear()
            engine.generate(ids[:55], **GREEDY).read()
            return logits_error(last_rows(engine, ids, "logits"), whole)

    return measure


def of_cache(kv_type: str) -> Callable[[], float]:
    """A cache of this type with flash attention, against F32 without."""

    def measure() -> float:
        with open_demo(kv_type=kv_type, flash_attn=True) as engine:
            ids = ids_of(engine)
            return probs_error(last_rows(engine, ids), plain_rows(ids))

    return measure


def restored() -> float:
    with open_demo() as engine:
        ids, slot = ids_of(engine), engine.slots[0]
        engine.generate(ids, **GREEDY).read()
        blob = slot.save()
        (want,) = engine.generate([*ids, 5], capture="logits", **GREEDY)
        slot.clear()
        slot.restore(blob, exact=True)
        (token,) = engine.generate([*ids, 5], capture="logits", **GREEDY)
        return probs_error(np.asarray(token.attention), np.asarray(want.attention))


def reuse_shift() -> float:
    """30 of 110 tokens were cut out of the middle; the next token's row against a fresh one."""
    with open_demo(**PLAIN) as engine:
        ids = ids_of(engine)
        engine.generate(ids, **GREEDY).read()
        left = [*ids[:20], *ids[50:], 5]
        (token,) = engine.generate(left, capture="probs", reuse="shift", **GREEDY)
        (want,) = engine.generate(left, capture="probs", **GREEDY)
        return probs_error(np.asarray(token.attention), np.asarray(want.attention))


def context_shift() -> float:
    """The first row after a full slot of 128 made room by half, against a fresh one."""
    with open_demo(**PLAIN, n_ctx=128) as engine:
        ids, slot = ids_of(engine), engine.slots[0]
        options = {**GREEDY, "max_tokens": 40, "capture": "probs", "context_shift": True}
        fed = [*ids]
        for token in engine.generate(ids, n_keep=4, **options):
            if token.discarded:
                break
            fed.append(token.id)
        else:
            raise AssertionError("the slot was never full")
        slot.clear()
        left = [*fed[: token.discarded.start], *fed[token.discarded.stop :]]
        (want,) = engine.generate(left, capture="probs", **GREEDY)
        return probs_error(np.asarray(token.attention), np.asarray(want.attention))


def repeated(kv_type: str, n_shifts: int) -> Callable[[], float]:
    """Keys of the first layer, which depend on positions alone, after so many moves by one."""

    def measure() -> float:
        with open_demo(kv_type=kv_type, flash_attn=kv_type != "f32") as engine:
            ids, slot = ids_of(engine), engine.slots[0]
            engine.generate(ids, **GREEDY).read()
            for _ in range(n_shifts):
                slot.shift(4, 1)
            left = [*slot.tokens, 5]
            capture = Capture("logits", layers=[0])
            (token,) = engine.generate(left, capture=capture, reuse="shift", **GREEDY)
            (want,) = engine.generate(left, capture=capture, **GREEDY)
            return logits_error(np.asarray(token.attention), np.asarray(want.attention))

    return measure


def float16() -> float:
    with open_demo(**PLAIN) as engine:
        ids = ids_of(engine)
        half = last_rows(engine, ids, Capture("logits", dtype="float16")).astype(np.float32)
        return logits_error(half, last_rows(engine, ids, "logits"))


# By the names of EXACTNESS.md.
FIGURES: dict[str, Callable[[], float]] = {
    "parts-plain": in_parts(**PLAIN),
    "parts-default": in_parts(),
    "restored": restored,
    "float16": float16,
    "cache-f16": of_cache("f16"),
    **{f"cache-{name}": of_cache(name) for name in QUANTISED},
    "reuse-shift": reuse_shift,
    "context-shift": context_shift,
    **{
        f"shifts-{kv_type}-{n}": repeated(kv_type, n)
        for kv_type in ("f32", "f16", "q8_0", "q4_0")
        for n in (1, 50)
    },
}


def main() -> None:
    for name, measure in FIGURES.items():
        print(f"{name:16} {measure():.2g}", flush=True)


if __name__ == "__main__":
    main()
