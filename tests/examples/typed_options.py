"""Options that are passed on, numpy ids, and the names of kinds and reasons, for type checkers."""

import numpy as np
from numpy.typing import NDArray

from kqview import Capture, Engine, EngineOptions, GenerateOptions, Sampling

Row = NDArray[np.float32]


def open_small() -> Engine:
    settings: EngineOptions = {"n_ctx": 256, "n_slots": 2, "kv_type": "q8_0", "flash_attn": "auto"}
    return Engine.demo(**settings)


def answer(engine: Engine, ids: NDArray[np.int64], options: GenerateOptions) -> str:
    generation = engine.generate(ids, **options)
    text = generation.read()
    match generation.finish_reason:
        case "stop" | "stop_token" | "stop_sequence":
            return text
        case "length" | "cancelled" | "error" | "tool_calls" | None:
            return text + "..."


def lookback(engine: Engine, ids: list[int]) -> list[float]:
    """The share of attention that stays in the prompt, one number per generated token."""
    capture = Capture("probs", layers=[1, 2], heads=[0, 5], dtype="float16")
    return [
        float(token.rows[..., : len(ids)].sum() / token.rows.sum())
        for token in engine.generate(ids, max_tokens=4, capture=capture)
    ]


with open_small() as engine:
    ids = np.array(engine.tokenize("Anna is a"))
    print(answer(engine, ids, {"max_tokens": 3, "temperature": 0, "banned_tokens": ids[-1:]}))
    print(engine.token_text(ids[-1]), engine.detokenize(ids), engine.detokenize(ids.tolist()))
    print(len(lookback(engine, ids.tolist())))
    tokenized = engine.tokenize("Anna", offsets=True)
    print(tokenized.ids, tokenized.offsets)
    best = next(engine.generate(ids, sampling=Sampling(seed=1), capture=Capture(top_k=2)))
    print(best.attention_positions.shape)
    score = engine.score(ids)
    print(f"{score.perplexity:.0f}", [slot.state == "idle" for slot in engine.stats().slots])
