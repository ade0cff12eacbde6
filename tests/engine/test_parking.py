"""Parking: a generation whose consumer is behind gives its slot to one whose consumer waits.

What the consumers see does not change. An F32 cache without flash attention: tokens that are
evaluated again, in another shape, differ in their last bits.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from kqview import Capture, errors, mod
from kqview.generation import source
from kqview.mods import Added, Backtrack, ForceTokens, ForwardPass
from tests.support import tiny_gguf
from tests.support.engines import KEPT, REFUSED, keep_slot
from tests.support.rows import check_tokens, near, random_ids

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from kqview import Engine, Generation, Token
    from tests.engine.conftest import MakeEngine

pytestmark = pytest.mark.usefixtures("backend")
PROMPTS = [random_ids(n, seed=n) for n in (20, 31, 47)]
EXACT: dict[str, Any] = {"kv_type": "f32", "flash_attn": False}
GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True}
SAMPLED: dict[str, Any] = {"temperature": 1.0, "top_k": 0, "seed": 5, "ignore_eos": True}


def alone(engine: Engine, prompt: list[int], n: int, **options: Any) -> list[int]:
    return [token.id for token in engine.generate(prompt, max_tokens=n, **options)]


@pytest.mark.parametrize("options", [GREEDY, SAMPLED, SAMPLED | {"deterministic": True}])
@pytest.mark.parametrize("run_ahead", [0, 1, 8])
def test_generations_taken_in_turn_in_one_slot_have_the_tokens_of_each_alone(
    make_engine: MakeEngine, tiny_llama: Path, options: dict[str, Any], run_ahead: int
) -> None:
    want = [alone(make_engine(tiny_llama, **EXACT), one, 24, **options) for one in PROMPTS]
    engine = make_engine(tiny_llama, run_ahead=run_ahead, **EXACT)
    generations = [engine.generate(one, max_tokens=24, **options) for one in PROMPTS]
    found: list[list[int]] = [[], [], []]
    for _ in range(24):
        for taken, generation in zip(found, generations, strict=True):
            taken.append(next(generation).id)
    assert found == want
    for generation, prompt in zip(generations, PROMPTS, strict=True):
        assert next(generation, None) is None
        usage = generation.usage
        assert (usage.prompt_tokens, usage.completion_tokens) == (len(prompt), 24)
    assert engine.stats().n_parkings >= 3
    assert engine.stats().n_requests == 3


def test_rows_logits_and_logprobs_go_on_where_they_were(
    make_engine: MakeEngine, tiny_llama: Path
) -> None:
    options: dict[str, Any] = {
        "max_tokens": 30, "capture": Capture("probs", vocab_logits=True), "top_logprobs": 2,
        **GREEDY,
    }  # fmt: skip
    want = list(make_engine(tiny_llama, **EXACT).generate(PROMPTS[0], **options))
    engine = make_engine(tiny_llama, **EXACT)
    generation = engine.generate(PROMPTS[0], **options)
    found: list[Token] = []
    for token in generation:
        found.append(token)
        if token.index % 9 == 4:
            alone(engine, PROMPTS[1], 12, **GREEDY)
    assert engine.stats().n_parkings >= 2
    check_tokens(found, want, logprob=1e-4)


@pytest.mark.parametrize("taken_between", [0, 1])
def test_blocks_of_a_prompt_go_on_where_they_were(
    make_engine: MakeEngine, tiny_llama: Path, taken_between: int
) -> None:
    prompt = random_ids(100)
    engine = make_engine(tiny_llama, n_ubatch=16, **EXACT)
    want = make_engine(tiny_llama, n_ubatch=16, **EXACT).attend(prompt).array()
    rows = engine.attend(prompt)
    blocks = [next(rows)]
    blocks += [next(rows) for _ in range(taken_between)]
    alone(engine, PROMPTS[1], 5, **GREEDY)
    assert engine.stats().n_parked == 1
    blocks += rows
    found = np.concatenate([np.asarray(block.rows) for block in blocks], axis=2)
    np.testing.assert_allclose(found, want, atol=near(1e-5))


def test_grammar_and_penalties_go_on_where_they_were(
    make_engine: MakeEngine, tiny_llama: Path
) -> None:
    options: dict[str, Any] = {
        "temperature": 1.0, "seed": 3, "repeat_penalty": 1.3, "grammar": 'root ::= [a-z ]{40}',
    }  # fmt: skip
    want = make_engine(tiny_llama, **EXACT).generate(PROMPTS[0], max_tokens=60, **options)
    engine = make_engine(tiny_llama, **EXACT)
    found = engine.generate(PROMPTS[0], max_tokens=60, **options)
    ids: list[int] = []
    for token in found:
        ids.append(token.id)
        if token.index in (3, 20):
            alone(engine, PROMPTS[1], 10, **GREEDY)
    assert ids == [token.id for token in want]
    assert found.text == want.text
    assert engine.stats().n_parkings == 2


def test_recurrent_state_is_computed_again(make_engine: MakeEngine, tmp_path: Path) -> None:
    model = tiny_gguf.write_mamba(tmp_path / "mamba.gguf")
    want = alone(make_engine(model), PROMPTS[0], 20, **GREEDY)
    engine = make_engine(model)
    generation = engine.generate(PROMPTS[0], max_tokens=20, **GREEDY)
    ids: list[int] = []
    for token in generation:
        ids.append(token.id)
        if token.index in (4, 11):
            alone(engine, PROMPTS[1], 3, **GREEDY)
    assert ids == want


# ---- whatever is held

SHIFTING: dict[str, Any] = {"context_shift": True, "n_keep": 4}


@mod(name="writer")
def writer(event: Any) -> Any:
    """Forces runs of ids and takes some back."""
    if isinstance(event, ForwardPass) and event.step % 5 == 2:
        return ForceTokens([65, 66, 67])
    if isinstance(event, Added) and event.step % 7 == 3:
        return Backtrack(2, [70])
    return None


KINDS: dict[str, dict[str, Any]] = {
    "mods": {"mods": [writer]},
    "logits_processor": {"logits_processor": lambda *_: None},
    "stopping": {"stopping": lambda *_: False},
    "forcing": {"forcing": lambda ids, _: [65, 66] if len(ids) % 4 == 1 else []},
    "trace": {"trace": True},
    "deterministic": {"trace": True, "deterministic": True},
    "shifted": SHIFTING,
    "shifted mods": {"mods": [writer], **SHIFTING},
}


@pytest.mark.parametrize("kind", KINDS)
def test_held_generations_of_every_kind_go_on_as_if_each_were_alone(
    make_engine: MakeEngine, tiny_llama: Path, kind: str
) -> None:
    options: dict[str, Any] = {"max_tokens": 50, "capture": "probs", **SAMPLED, **KINDS[kind]}
    want = [
        list(make_engine(tiny_llama, n_ctx=64, **EXACT).generate(one, **options)) for one in PROMPTS
    ]
    engine = make_engine(tiny_llama, n_ctx=64, **EXACT)
    generations = [engine.generate(one, **options) for one in PROMPTS]
    found: list[list[Token]] = [[], [], []]
    while any(len(taken) < len(tokens) for taken, tokens in zip(found, want, strict=True)):
        for taken, generation in zip(found, generations, strict=True):
            taken.extend(token for token in (next(generation, None),) if token)
    assert engine.stats().n_parkings >= 9
    for tokens, expected in zip(found, want, strict=True):
        for token, other in zip(tokens, expected, strict=True):
            assert (token.id, token.forced, token.n_removed, token.discarded) == (
                other.id, other.forced, other.n_removed, other.discarded,
            )  # fmt: skip
            assert (token.attention is None) == (other.attention is None)
            if token.attention is not None and kind == "deterministic":
                np.testing.assert_array_equal(token.attention, other.attention)
            elif token.attention is not None:
                np.testing.assert_allclose(token.attention, other.attention, atol=1e-5)


def in_thread(call: Callable[[], Any]) -> list[Any]:
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(call()), daemon=True)
    thread.start()
    thread.join(30)
    return found


async def read(generation: Generation) -> int:
    return len([token async for token in generation])


OTHERS: dict[str, Callable[[Engine], Any]] = {
    "map": lambda engine: len(list(engine.map(["Tom"], max_tokens=2))) == 1,
    "thread": lambda engine: in_thread(lambda: len(alone(engine, PROMPTS[1], 2, **GREEDY))) == [2],
    "task": lambda engine: asyncio.run(read(engine.generate("Tom", max_tokens=2, **GREEDY))) == 2,
    "same thread": lambda engine: len(alone(engine, PROMPTS[1], 2, **GREEDY)) == 2,
    "mods": lambda engine: len(alone(engine, PROMPTS[1], 4, mods=[writer], **GREEDY)) >= 4,
    "score": lambda engine: engine.score("Tom and Anna").perplexity > 0,
    "attend": lambda engine: engine.attend(PROMPTS[1]).array().size > 0,
    "embed": lambda engine: engine.embed("Tom").shape == (64,),
}


@pytest.mark.parametrize(
    ("kind", "other"),
    [
        *(("logits_processor", other) for other in OTHERS),
        *((kind, "map") for kind in ("mods", "deterministic", "shifted")),
    ],
)
def test_held_generation_of_any_kind_keeps_nobody_waiting(
    make_engine: MakeEngine, tiny_llama: Path, kind: str, other: str
) -> None:
    options: dict[str, Any] = {"max_tokens": 70, **GREEDY, **KINDS[kind]}
    n_ctx = 64 if kind == "shifted" else 256
    engine = make_engine(tiny_llama, n_ctx=n_ctx, pooling="mean", **EXACT)
    want = [token.id for token in engine.generate(PROMPTS[0], **options)]
    keep = engine.generate(PROMPTS[0], **options)
    ids = [next(keep).id for _ in range(50)]  # the slot is full by then
    assert OTHERS[other](engine)
    assert engine.stats().n_parkings == 1
    assert [*ids, *(token.id for token in keep)] == want


@pytest.mark.parametrize("how", ["map", "thread", "task"])
def test_wait_for_a_slot_that_cannot_be_freed_is_logged_and_ends(
    make_engine: MakeEngine,
    tiny_llama: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    how: str,
) -> None:
    monkeypatch.setattr(source, "BUSY_WAIT_S", 0.3)
    engine = make_engine(tiny_llama, **KEPT)
    *_, holder = held = keep_slot(engine, PROMPTS[0])
    found: list[Any] = []

    def wait() -> None:
        one = engine.generate(PROMPTS[1], max_tokens=2, request_id="late", **REFUSED, **GREEDY)
        for _ in range(2):  # it may be iterated again
            try:
                if how == "map":
                    list(engine.map({"late": PROMPTS[1]}, max_tokens=2, **REFUSED))
                elif how == "task":
                    asyncio.run(read(one))
                else:
                    next(one)
            except errors.BusyError as error:
                found.append(str(error))
        engine.cancel_all()

    with caplog.at_level(logging.WARNING, "kqview"):
        in_thread(wait)
    assert len(found) == 2
    for message in found:
        for part in ("late", holder.request_id, "engine.cancel_all()"):
            assert part in message
    logged = [one.getMessage() for one in caplog.records if one.name == "kqview"]
    assert len(logged) == (2 if how == "map" else 1)  # once a pair
    assert all("late" in one and holder.request_id in one for one in logged)
    assert all(one.finish_reason == "cancelled" for one in held)


def test_consumer_that_is_slow_but_takes_does_not_end_the_wait(
    make_engine: MakeEngine, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source, "BUSY_WAIT_S", 1.0)
    engine = make_engine(tiny_llama, **KEPT)
    *parked, holder = keep_slot(engine, PROMPTS[0])
    found: list[Any] = []

    def wait() -> None:
        found.append(len(alone(engine, PROMPTS[1], 2, **REFUSED, **GREEDY)))

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    for _ in range(6):
        thread.join(0.25)
        next(holder)
    for one in (holder, *parked):
        one.close()
    thread.join(30)
    assert found == [2]


# ---- ends of parked ones


def parked(engine: Engine) -> Generation:
    """A generation that has lost its slot after its first token."""
    generation = engine.generate(PROMPTS[0], max_tokens=300, **GREEDY)
    next(generation)
    alone(engine, PROMPTS[1], 2, **GREEDY)
    assert engine.stats().n_parked == 1
    return generation


async def test_tasks_that_read_at_different_speeds_share_one_slot(
    make_engine: MakeEngine, tiny_llama: Path
) -> None:
    want = [alone(make_engine(tiny_llama, **EXACT), one, 25, **GREEDY) for one in PROMPTS]
    engine = make_engine(tiny_llama, **EXACT)

    async def read(prompt: list[int], pause: int) -> list[int]:
        ids: list[int] = []
        async for token in engine.generate(prompt, max_tokens=25, **GREEDY):
            ids.append(token.id)
            for _ in range(pause):
                await asyncio.sleep(0)
        return ids

    found = await asyncio.gather(*(read(one, i * 40) for i, one in enumerate(PROMPTS)))
    assert found == want
