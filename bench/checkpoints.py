"""How many tokens does a chat over a hybrid model evaluate with checkpoints, and without?

A model with random weights of 24 layers, every second one recurrent, and chats of 20 turns: the
last message of each turn edited once, a stop string in each answer, two users over one slot. Counts
of tokens are the same on every machine; the seconds beside them are one run each.

    python bench/checkpoints.py [--turns N]
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from kqview import Engine

if TYPE_CHECKING:
    from collections.abc import Callable

ROOT = Path(__file__).resolve().parent.parent
IM_END = 258  # of the model's vocabulary
N_MESSAGE = 120
N_ANSWER = 40
N_SYSTEM = 300


def message(seed: int, n: int = N_MESSAGE) -> list[int]:
    """Ids of a message with its end, as a chat template would end it, and the next one's header."""
    return [*np.random.default_rng(seed).integers(97, 123, n).tolist(), IM_END, 10]


def answer(engine: Engine, prompt: list[int], **options: Any) -> list[int]:
    """The text with its answer, whose end the next prompt has."""
    generation = engine.generate(
        prompt, max_tokens=N_ANSWER, temperature=0.0, ignore_eos=True, **options
    )
    generation.read()
    return [*prompt, *generation.tokens, IM_END, 10]


def edited(engine: Engine, n_turns: int) -> None:
    """Each message is sent, then sent again in another version."""
    text = message(0, N_SYSTEM)
    for turn in range(n_turns):
        answer(engine, text + message(1000 + turn))
        text = answer(engine, text + message(2000 + turn))


def stopped(engine: Engine, n_turns: int) -> None:
    """Each answer ends with a stop string, behind which the chat goes on."""
    text = message(0, N_SYSTEM)
    for turn in range(n_turns):
        text = answer(engine, text + message(1000 + turn), stop=["e", "n"])


def shared(engine: Engine, n_turns: int) -> None:
    """Two users take turns in one slot; their chats have the system prompt in common."""
    texts = [message(0, N_SYSTEM)] * 2
    for turn in range(n_turns):
        for user in range(2):
            texts[user] = answer(engine, texts[user] + message(1000 * (user + 1) + turn))


CASES: dict[str, Callable[[Engine, int], None]] = {
    "last message edited": edited,
    "a stop string each turn": stopped,
    "two users, one slot": shared,
}


def measure(model: Path, case: str, n_turns: int, **options: Any) -> tuple[int, float]:
    """Tokens evaluated, and seconds."""
    with Engine(model, n_ctx=16384, **options) as engine:
        begun = time.monotonic()
        CASES[case](engine, n_turns)
        seconds = time.monotonic() - begun
        stats = engine.stats()
        return stats.prefill_tokens + stats.decode_tokens, seconds


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--turns", type=int, default=20)
    n_turns = parser.parse_args().turns
    sys.path.insert(0, str(ROOT))
    from tests.support.tiny_gguf import write_jamba

    with tempfile.TemporaryDirectory() as folder:
        model = write_jamba(Path(folder) / "hybrid.gguf", n_layer=24, n_embd=256)
        print("| chat of", n_turns, "turns | without: tokens, s | with: tokens, s | tokens |")
        print("| --- | --- | --- | --- |")
        for case in CASES:
            before, slow = measure(model, case, n_turns, checkpoint_bytes=0)
            after, fast = measure(model, case, n_turns)
            print(
                f"| {case} | {before:,}, {slow:.1f} | {after:,}, {fast:.1f} | "
                f"{after / before:.2f} x |",
                flush=True,
            )


if __name__ == "__main__":
    main()
