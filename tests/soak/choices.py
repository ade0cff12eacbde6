"""Random requests: prompts that meet each other's beginnings, every kind of capture, sampling."""

from __future__ import annotations

from random import Random
from typing import Any

from kqview import Capture, errors

N_CTX = 192
N_LAYER = 3
N_HEAD = 4
# Prompts are beginnings of these, so that slots are reused, cut back and copied.
FAMILIES = [[i * 7, *Random(i).choices(range(256), k=N_CTX - 1)] for i in range(5)]


def random_prompt(rng: Random) -> list[int]:
    n_tokens = rng.choice((1, rng.randrange(1, 20), rng.randrange(1, 120), rng.randrange(1, N_CTX)))
    prompt = rng.choice(FAMILIES)[:n_tokens]
    if rng.random() < 0.4:
        prompt = [*prompt, *rng.choices(range(256), k=rng.randrange(8))]
    if rng.random() < 0.02:
        prompt = rng.choice(FAMILIES)  # fills the slot
    return prompt[:N_CTX]


def random_capture(rng: Random, *, prompt: bool = False) -> Capture | None:
    """Any capture, or None; with *prompt* always one."""
    if not prompt and rng.random() < 0.3:
        return None
    options: list[dict[str, Any]] = [
        {},
        {"dtype": "float16"},
        {"layers": rng.sample(range(N_LAYER), rng.randrange(1, N_LAYER + 1))},
        {"heads": rng.sample(range(N_HEAD), rng.randrange(1, N_HEAD + 1))},
        {"reduce": rng.choice(("mean_heads", "max_heads", "mean", "max"))},
        {"top_k": rng.randrange(1, 9)},
    ]
    if not prompt:
        options.append({"hidden": rng.sample(range(N_LAYER), rng.randrange(1, N_LAYER + 1))})
    return Capture(
        rng.choice(("logits", "scores", "probs")),
        on_full=rng.choice(("raise", "wait", "drop")),
        wait_s=rng.choice((0.0, 0.02, 0.2)),
        prompt=prompt or rng.random() < 0.1,
        **rng.choice(options),
    )


def random_options(rng: Random, n_slots: int) -> dict[str, Any]:
    """Options of ``generate`` except the prompt; *n_slots* 0: no slot of its own."""
    options: dict[str, Any] = {
        "max_tokens": rng.choice((1, rng.randrange(1, 12), rng.randrange(1, 60), 500)),
        "capture": random_capture(rng),
        "priority": rng.randrange(-1, 3),
        "temperature": rng.choice((0, 0.7, 1.5)),
        "seed": rng.randrange(1000),
        "ignore_eos": rng.random() < 0.8,
    }
    if options["capture"] and options["capture"].hidden:
        options["capture"] = without_prompt(options["capture"])
    if n_slots and rng.random() < 0.15:
        options["slot"] = rng.randrange(n_slots)
    more: list[dict[str, Any]] = [
        {},
        {},
        {},
        {"stop": ("e", "ab")},
        {"stop_tokens": rng.sample(range(256), 3)},
        {"top_logprobs": rng.randrange(4)},
        {"repeat_penalty": 1.3, "dry_multiplier": 0.8},
        {"mirostat": 2},
        {"grammar": "root ::= [a-z]*"},
    ]
    return {**options, **rng.choice(more)}


def without_prompt(capture: Capture) -> Capture:
    """Rows of the prompt and hidden states do not go together."""
    return Capture(
        capture.kind, hidden=capture.hidden, on_full=capture.on_full, wait_s=capture.wait_s
    )


def bad_requests(rng: Random) -> list[tuple[dict[str, Any], type[errors.KqviewError]]]:
    """Requests that cannot work, and what they raise before anything runs."""
    prompt = FAMILIES[0][:5]
    return [
        ({"prompt": []}, errors.RequestError),
        ({"prompt": [*FAMILIES[1], 1, 2, 3]}, errors.PromptTooLong),
        ({"prompt": [1, 320 + rng.randrange(10**6)]}, errors.InvalidToken),
        ({"prompt": prompt, "slot": 256 + rng.randrange(100)}, errors.UnknownSlot),
        ({"prompt": prompt, "capture": Capture("probs", layers=[99])}, errors.InvalidCapture),
        ({"prompt": prompt, "temperature": -1.0}, errors.InvalidSampling),
        ({"prompt": prompt, "grammar": "root ::= ["}, errors.RequestError),
    ]
