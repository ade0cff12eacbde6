"""Hostile calls of the Python API: arguments of every wrong type, size and value.

What may come of one is its documented result, an error of kqview's, or Python's own TypeError for a
name or a number of arguments that no function has. Afterwards the engine still generates what it
generated before.
"""

from __future__ import annotations

import contextlib
import math
import random
import time
from typing import TYPE_CHECKING, Any

import numpy as np

from kqview import Capture, Edit, Engine, Sampling, errors
from tests.attack.summary import Summary, main

if TYPE_CHECKING:
    from collections.abc import Callable

PROMPT = [1, 2, 3, 4, 5, 6]
CHECK_EVERY = 200
N_TAKEN_MOST = 4


class OwnError(Exception):
    """What a caller's own object raises; it comes back to the caller."""


class Liar:
    """Claims a length, an order and a value that it does not have."""

    def __len__(self) -> int:
        return 2**62

    def __getitem__(self, index: int) -> int:
        raise IndexError(index)

    def __index__(self) -> int:
        raise OwnError("no number")

    def __repr__(self) -> str:
        return "Liar()"


def numbers(rng: random.Random) -> Any:
    """One number that is at a limit, beyond it, or none at all."""
    return rng.choice(
        [0, 1, -1, 2, 7, 255, 256, 257, 511, 512, 513, 2**15, 2**31 - 1, 2**31, 2**32 - 1, 2**63,
         2**64, 2**200, 10**5000, -(2**31), -(2**63), -(2**80),
         0.0, -0.0, 0.5, 1.5, 1e-45, 1e38, 1e39, 1e308,
         math.inf, -math.inf, math.nan, True, False, np.int64(3), np.float32(0.5), np.uint64(2**63),
         np.array(3), np.nan, 3 + 0j, "3", b"3", None]
    )  # fmt: skip


def texts(rng: random.Random) -> Any:
    """One text that a tokenizer, a parser or a log may trip over."""
    piece = rng.choice(
        ["", " ", "a", "\0", "\n", "\r\n", "\x1b[0m", "\ud800", "é", "🙂", "\u202e", "<|im_end|>",
         "<|endoftext|>", "%s%n", "{}", "[", '"', "\\", "\ufffd", "\u0300", "ﷺ", "\uffff", "0"]
    )  # fmt: skip
    return piece * rng.choice([1, 1, 1, 2, 10, 1000, 5000])


def sequences(rng: random.Random) -> Any:
    """Ids, or what somebody takes for ids."""
    kind = rng.randrange(12)
    if kind == 0:
        return [numbers(rng) for _ in range(rng.randrange(5))]
    if kind == 1:
        return np.arange(rng.randrange(40), dtype=rng.choice([np.int8, np.int64, np.uint64]))
    if kind == 2:
        return np.zeros((2, 3), np.float64)
    if kind == 3:
        return (i for i in (1, 2, "x"))
    if kind == 4:
        return {1: 2.0, -1: 1.0}
    if kind == 5:
        return [[1]]
    if kind == 6:
        return bytes(range(rng.randrange(30)))
    if kind == 7:
        return range(rng.randrange(10**6))
    if kind == 8:
        return memoryview(b"abc")
    return [rng.randrange(700) for _ in range(rng.randrange(60))]


def values(rng: random.Random) -> Any:
    """Anything."""
    kind = rng.randrange(8)
    if kind < 3:
        return numbers(rng)
    if kind == 3:
        return texts(rng)
    if kind < 6:
        return sequences(rng)
    return rng.choice([None, Liar(), object, (), {}, set(), Ellipsis, lambda: 1, [None], {"a": []}])


SAMPLING_NAMES = tuple(Sampling.__dataclass_fields__)
CAPTURE_NAMES = tuple(Capture.__dataclass_fields__)
GENERATE_NAMES = (
    "max_tokens", "sampling", "capture", "slot", "mods", "request_id", "priority", "reuse",
    "reuse_min_tokens", "context_shift", "n_keep", "n_discard", "add_special", "parse_special",
    "mod_time_limit_s", "mods_strict", "trace", "edits",
)  # fmt: skip
MESSAGES: tuple[Any, ...] = (
    [],
    [{}],
    [{"role": "user"}],
    [{"role": "user", "content": None}],
    [{"role": "user", "content": [{"type": "text", "text": "a"}]}],
    [{"role": "user", "content": "a" * 3000}],
    [{"role": 3, "content": "a"}],
    [{"role": "assistant", "content": None, "tool_calls": [{"function": {"name": None}}]}],
    [{"role": "user", "content": "<|im_end|>" * 50}],
    {"role": "user"},
    "text",
    [["user", "a"]],
)


def options_of(rng: random.Random) -> dict[str, Any]:
    """Options of generate, one or a few of them hostile."""
    options: dict[str, Any] = {"max_tokens": 3}
    for _ in range(rng.randrange(1, 4)):
        kind = rng.randrange(5)
        if kind == 0:
            options[rng.choice(GENERATE_NAMES)] = values(rng)
        elif kind == 1:
            names = rng.sample(CAPTURE_NAMES, rng.randrange(1, 4))
            options["capture"] = Capture(**{name: values(rng) for name in names})
        elif kind == 2:
            options["logit_bias"] = {numbers(rng): numbers(rng) for _ in range(3)}
        else:
            options[rng.choice(SAMPLING_NAMES)] = values(rng)
    return options


_KEPT: list[Any] = []  # views that hooks did not give back


def hooks(engine: Engine, rng: random.Random) -> Edit:
    """A function of the caller's that raises, hangs, keeps, lies, or uses the engine."""

    def fail(rows: Any) -> Any:
        raise OwnError("a hook")

    def hang(rows: Any) -> Any:
        time.sleep(0.05)

    def keep(rows: Any) -> Any:
        _KEPT.append(rows)
        del _KEPT[:-9]
        rows *= 0.5
        return rows

    fn = rng.choice(
        [fail, hang, keep, lambda rows: values(rng), lambda rows: rows[:, :1],
         lambda rows: engine.generate(PROMPT, max_tokens=1).read(), lambda rows: engine.close]
    )  # fmt: skip
    at: Any = rng.choice(["residual", "attention_out", "mlp_out"])
    return Edit.hook(fn, at, rng.choice([[0], [1, -1], range(4)]), time_limit_s=0.02)


def edits_of(engine: Engine, rng: random.Random) -> Any:
    """Edits, right ones, wrong ones and many of them."""
    n_embd = engine.model.n_embd
    pick = rng.choice
    head = (rng.randrange(-5, 6), rng.randrange(-9, 10))
    kinds: list[Callable[[], Any]] = [
        lambda: Edit.add(np.full(n_embd, pick([0.0, 1e-30, 3.0, 1e6])), pick([0, [1, -1]])),
        lambda: Edit.add(values(rng), values(rng), numbers(rng), values(rng)),
        lambda: Edit.set(np.zeros((2, n_embd)), -1, pick([[0, 5], [-1, 0], [4, 9], [3, 3]])),
        lambda: Edit.scale_heads({head: pick([0, -1e6, 2])}),
        lambda: Edit.scale_heads({(numbers(rng), 0): numbers(rng)}),
        lambda: Edit.attention_bias(
            [(0, pick([1, 3, None]))], pick([-100, 2, 100]), heads=pick([None, [0], [7, -8]])
        ),
        lambda: Edit.attention_bias(values(rng), numbers(rng)),
        lambda: Edit.block((0, None), (0, None), layers=pick([None, [0], [3]])),
        lambda: Edit.block(values(rng), values(rng), values(rng), values(rng)),
        lambda: hooks(engine, rng),
    ]
    if rng.random() < 0.1:
        return rng.choice([values(rng), [kinds[0]()] * rng.choice([255, 256, 257, 5000])])
    return [rng.choice(kinds)() for _ in range(rng.randrange(1, 4))]


def take(generation: Any, rng: random.Random) -> None:
    """Take a few tokens, then leave it in one of the ways there are."""
    for _ in range(rng.randrange(N_TAKEN_MOST)):
        if next(generation, None) is None:
            return
    how = rng.randrange(3)
    if how == 0:
        generation.close()
    elif how == 1:
        generation.cancel()


def calls_of(engine: Engine, rng: random.Random) -> dict[str, Callable[[], object]]:
    """Each way in, with arguments of its own every time."""
    slot = engine.slots[0]
    model = engine.model
    return {
        "generate": lambda: take(engine.generate(values(rng), max_tokens=3), rng),
        "generate options": lambda: take(engine.generate(PROMPT, **options_of(rng)), rng),
        "generate edits": lambda: take(
            engine.generate(PROMPT, max_tokens=3, edits=edits_of(engine, rng)), rng
        ),
        "attend edits": lambda: engine.attend(PROMPT, "probs", edits=edits_of(engine, rng)).array(),
        "score edits": lambda: engine.score(PROMPT, edits=edits_of(engine, rng)),
        "attend": lambda: engine.attend(values(rng), values(rng), last=numbers(rng)).array(),
        "attend ids": lambda: engine.attend(PROMPT, Capture("probs"), last=numbers(rng)).array(),
        "chat": lambda: take(engine.chat(rng.choice(MESSAGES), max_tokens=3), rng),
        "chat tools": lambda: take(
            engine.chat(MESSAGES[5], tools=rng.choice([values(rng), [{}], [{"x": 1}]])), rng
        ),
        "template": lambda: engine.apply_chat_template(rng.choice([values(rng), *MESSAGES])),
        "tokenize": lambda: engine.tokenize(
            rng.choice([texts, values])(rng), add_special=bool(rng.randrange(2))
        ),
        "detokenize": lambda: engine.detokenize(values(rng)),
        "token_bytes": lambda: engine.token_bytes(values(rng)),
        "token_text": lambda: engine.token_text(numbers(rng)),
        "embed": lambda: engine.embed(values(rng)),
        "classify": lambda: engine.classify(values(rng)),
        "sampling": lambda: Sampling(**{rng.choice(SAMPLING_NAMES): values(rng)}),
        "capture": lambda: Capture(**{rng.choice(CAPTURE_NAMES): values(rng)}),
        "bytes_per_token": lambda: Capture(top_k=3).bytes_per_token(model, numbers(rng)),
        "shift": lambda: slot.shift(numbers(rng), numbers(rng)),
        "truncate": lambda: slot.truncate(numbers(rng)),
        "restore": lambda: slot.restore(rng.choice([values(rng), b"SES1" + rng.randbytes(40)])),
        "save": lambda: slot.restore(slot.save()),
        "clear": slot.clear,
        "stats": lambda: engine.stats().since(engine.stats()),
    }


# What Python says where a signature was not met, and what the arguments themselves raise.
_PYTHONS = (TypeError, OwnError)


def run(seconds: float, seed: int) -> Summary:
    """Call for *seconds*."""
    summary = Summary("calls", seed)
    rng = random.Random(seed)
    ends_s = time.monotonic() + seconds
    with Engine.demo(n_ctx=64, n_slots=2, n_threads=1, kv_type="f32", flash_attn=False) as engine:
        calls = calls_of(engine, rng)
        right = engine.generate(PROMPT, max_tokens=8, temperature=0).read()
        names = list(calls)
        n_calls = 0
        while time.monotonic() < ends_s or n_calls < CHECK_EVERY:
            name = rng.choice(names)
            n_calls += 1
            try:
                calls[name]()
            except errors.InternalError as error:
                summary.fail(f"{name}: {type(error).__name__}: {error}")
            except errors.KqviewError as error:
                summary.count(type(error).__name__)
            except _PYTHONS as error:
                summary.count(type(error).__name__)
            except Exception as error:
                summary.fail(f"call {n_calls}, {name}: {type(error).__name__}: {error}")
            else:
                summary.count("done")
            if n_calls % CHECK_EVERY == 0:
                check(engine, right, summary)
        check(engine, right, summary)
        # Views are gone with their tokens; what is left over would be a leak.
        with contextlib.suppress(errors.KqviewError):
            engine.slots[0].clear()
        if engine.stats().pool.n_leased:
            summary.fail(f"{engine.stats().pool.n_leased} blocks are still leased")
    return summary


def check(engine: Engine, right: str, summary: Summary) -> None:
    """The engine still does what it did."""
    # A hook that has asked the engine for a text gets it once its own request has ended.
    ends_s = time.monotonic() + 10
    while engine.generations and time.monotonic() < ends_s:
        time.sleep(0.01)
    try:
        for slot in engine.slots:
            slot.clear()
        text = engine.generate(PROMPT, max_tokens=8, temperature=0).read()
    except errors.KqviewError as error:
        summary.fail(f"an ordinary request failed: {type(error).__name__}: {error}")
        return
    if text != right:
        summary.fail(f"an ordinary request gave {text!r} in place of {right!r}")
    summary.count("checks")


if __name__ == "__main__":
    raise SystemExit(main(run))
