"""The figures of EXACTNESS.md, measured: ``python -m tests.support.exactness`` prints them.

The model is the one that ships with kqview, the text one of its own kind; rows are those of every
layer and head. "probs" errors are the largest difference of two probabilities, "logits" errors the
largest difference in a row by the largest value of that row, "vectors" errors the same of vectors.
"texts" are those of 200 that differ, "logprobs" errors the largest difference up to there.
"""

from __future__ import annotations

import math
import tempfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gguf
import numpy as np

from kqview import Capture, Engine
from kqview.demo import MODEL_PATH

from .reference import BertReference, Reference, gelu_tanh, relative_error
from .rows import random_ids
from .tiny_gguf import write_bert, write_copy

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kqview import Token

    from .tiny_gguf import WeightType


TEXT = (
    "Mirelda found a silver key near the old bridge. Then Mirelda went home and showed it to Tom. "
    "Tom said that the key was for the small door behind the mill. They walked to the mill and the "
    "owl saw them. The owl said hello. Mirelda opened the door with the silver key, and behind it "
    "was a red ball."
)
PLAIN: dict[str, Any] = {"kv_type": "f32", "flash_attn": False}
GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True, "max_tokens": 1}
QUANTISED = ("q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl")
SAMPLED: dict[str, Any] = {"temperature": 1, "top_k": 0, "top_p": 1, "min_p": 0, "max_tokens": 24}
N_LAST = 20  # queries whose rows are compared
N_TEXTS = 200
N_SLOTS = 4


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


def of_weights(weight_type: WeightType) -> Callable[[], float]:
    """The demo with its weights in this type, against a float64 transformer of the same values."""

    def measure() -> float:
        with tempfile.TemporaryDirectory() as folder:
            model = write_copy(Path(folder) / "model.gguf", MODEL_PATH, weight_type)
            with closing(Engine(model, n_ctx=256, n_threads=1, **PLAIN)) as engine:
                ids = ids_of(engine)
                rows = last_rows(engine, ids)
            want = Reference.load(model).forward(ids, angle_type="f32")
            return probs_error(rows, want.probs[:, :, -N_LAST:])

    return measure


def of_gelu(gelu: Callable[[Any], Any]) -> Callable[[], float]:
    """A random BERT of 3 layers against a float64 one with this GELU."""

    def measure() -> float:
        with tempfile.TemporaryDirectory() as folder:
            model = write_bert(Path(folder) / "model.gguf")
            ids = random_ids(110)
            with closing(Engine(model, n_ctx=256, n_threads=1, **PLAIN)) as engine:
                rows = np.asarray(engine.attend(ids, "probs").array())
            return probs_error(rows, BertReference(model, gelu).forward(ids)[1])

    return measure


def gelu_erf(x: Any) -> Any:
    return 0.5 * x * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))


@cache
def beside_others(is_f32: bool = False, **options: Any) -> tuple[int, float]:
    """Of texts that were sampled again beside others: those that differ, largest error.

    With the defaults, or with weights and cache in F32 and without flash attention.
    """
    with tempfile.TemporaryDirectory() as folder:
        model = write_copy(Path(folder) / "model.gguf", MODEL_PATH, "F32" if is_f32 else "F16")
        how = {"n_ctx": 256, "n_threads": 1, "n_slots": N_SLOTS, **(PLAIN if is_f32 else {})}
        with closing(Engine(model, **how)) as engine:
            ids = ids_of(engine)

            def answer(i: int) -> list[Token]:
                prompt = ids[: 6 + 7 * i % 90]
                asked = {**SAMPLED, "top_logprobs": 0, "ignore_eos": True, **options}
                return list(engine.generate(prompt, seed=i, **asked))

            alone = [answer(i) for i in range(N_TEXTS)]
            with ThreadPoolExecutor(N_SLOTS) as pool:
                beside = list(pool.map(answer, range(N_TEXTS)))
    n_texts, error = 0, 0.0
    for texts in zip(alone, beside, strict=True):
        for one, other in zip(*texts, strict=True):
            if one.id != other.id:
                n_texts += 1
                break
            error = max(error, abs(one.logprob - other.logprob))
    return n_texts, error


def beside_encoders() -> float:
    """Vectors of a random BERT of 3 layers, of many texts in a step against one by one."""
    with tempfile.TemporaryDirectory() as folder:
        model = write_bert(Path(folder) / "model.gguf", pooling=gguf.PoolingType.MEAN)
        with closing(Engine(model, n_ctx=256, n_threads=1, n_slots=N_SLOTS)) as engine:
            texts = [random_ids(5 + i % 40, seed=i) for i in range(N_TEXTS)]
            return relative_error(engine.embed(texts), np.stack([engine.embed(t) for t in texts]))


# By the names of EXACTNESS.md.
FIGURES: dict[str, Callable[[], float]] = {
    "parts-plain": in_parts(**PLAIN),
    "parts-default": in_parts(),
    "restored": restored,
    "float16": float16,
    "beside-texts": lambda: beside_others()[0],
    "beside-logprobs": lambda: beside_others()[1],
    "beside-f32": lambda: beside_others(is_f32=True)[1],
    "beside-encoders": beside_encoders,
    "beside-deterministic": lambda: beside_others(deterministic=True)[0],
    **{f"weights-{name.lower()}": of_weights(name) for name in ("F32", "F16", "Q8_0")},
    "cache-f16": of_cache("f16"),
    **{f"cache-{name}": of_cache(name) for name in QUANTISED},
    "reuse-shift": reuse_shift,
    "context-shift": context_shift,
    **{
        f"shifts-{kv_type}-{n}": repeated(kv_type, n)
        for kv_type in ("f32", "f16", "q8_0", "q4_0")
        for n in (1, 50)
    },
    "gelu-tanh": of_gelu(gelu_tanh),
    "gelu-erf": of_gelu(gelu_erf),
}


def main() -> None:
    for name, measure in FIGURES.items():
        print(f"{name:20} {measure():.2g}", flush=True)


if __name__ == "__main__":
    main()
