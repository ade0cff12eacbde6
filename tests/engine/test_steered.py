"""Steered requests at the binding: roll-back and forced chunks are exact, and so is the sampler.

The consumer gets a ForwardEvent for each forward pass and answers it. What mods make of that is in
``test_mods.py``, the handshake with a fake model in ``tests/native/test_steered.cpp``.
"""

from __future__ import annotations

import gc
from random import Random
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from kqview import Capture, Engine, Sampling, _core, errors
from kqview.submission import set_sampling
from tests.support import tiny_gguf
from tests.support.rows import near, random_ids

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from tests.engine.conftest import MakeEngine

PROMPT = random_ids(24)
EXACT: dict[str, Any] = {"kv_type": "f32", "flash_attn": False, "n_ctx": 128}
LIMIT = near(1e-5)  # where the same ids were evaluated in other steps


@pytest.fixture(scope="module")
def engine(tiny_llama: Path) -> Iterator[Engine]:
    with Engine(tiny_llama, n_slots=2, n_threads=1, **EXACT) as opened:
        yield opened


class Passes:
    """The forward passes of one steered request."""

    def __init__(
        self,
        engine: Engine,
        prompt: Sequence[int],
        *,
        max_tokens: int = 100,
        capture: str | None = None,
        shift: tuple[int, int] = (0, 0),
        **sampling: Any,
    ) -> None:
        core = engine._core  # pyright: ignore[reportPrivateUsage]
        options = _core.RequestOptions()
        options.prompt = list(prompt)
        options.max_tokens = max_tokens
        options.run_ahead = 8
        options.is_steered = True
        settings: dict[str, Any] = {"ignore_eos": True, **sampling}
        set_sampling(options, Sampling(**settings), 512)
        if capture:
            options.set_capture(core, Capture(capture))  # pyright: ignore[reportArgumentType]
        options.n_keep, options.n_discard = shift
        self._handle = core.submit(options)

    def next(self) -> _core.ForwardEvent:
        event = self._handle.next()
        assert isinstance(event, _core.ForwardEvent)
        return event

    def end(self) -> str:
        event = self._handle.next()
        assert isinstance(event, _core.EndEvent)
        return event.finish_reason

    def pick(self, n_tokens: int) -> list[int]:
        """Go on as a plain request would."""
        picked: list[int] = []
        for _ in range(n_tokens):
            event = self.next()
            picked.append(event.pick().id)
            event.answer(ids=picked[-1:])
        return picked

    def close(self) -> None:
        self._handle.cancel()
        self._handle.wait_settled()


def plain(engine: Engine, prompt: Sequence[int], n_tokens: int, **options: Any) -> list[int]:
    """What a request without a consumer's answers generates."""
    options = {"ignore_eos": True, **options}
    return [token.id for token in engine.generate(prompt, max_tokens=n_tokens, **options)]


def fresh(engine: Engine, ids: Sequence[int], capture: str | None) -> tuple[Any, Any]:
    """Logits and attention after one prefill of *ids* into an empty slot."""
    engine.slots[0].clear()
    passes = Passes(engine, ids, capture=capture)
    event = passes.next()
    logits, attention = event.logits, event.attention
    passes.close()
    return logits, attention


def layers(attention: Any) -> Any:
    """The arrays of a row: one, one a layer where these have different heads, or none."""
    return [attention] if hasattr(attention, "shape") else attention or ()


def difference(got: NDArray[np.float32], wanted: NDArray[np.float32]) -> float:
    assert got.shape == wanted.shape
    return float(np.abs(got - wanted).max() / np.abs(wanted).max())


# ---- the cache


@pytest.mark.parametrize(
    ("write", "capture", "options"),
    [
        pytest.param(None, "probs", {}, id="plain"),
        pytest.param(None, "probs", {"flash_attn": True}, id="flash"),
        pytest.param(tiny_gguf.write_gemma4, "probs", {"swa_full": True}, id="windows"),
        pytest.param(tiny_gguf.write_gemma4, None, {"swa_full": False}, id="small-windows"),
        pytest.param(tiny_gguf.write_mamba, None, {}, id="recurrent"),
    ],
)
def test_removed_and_forced_ids_leave_what_a_fresh_prefill_computes(
    make_engine: MakeEngine,
    tiny_llama: Path,
    tmp_path: Path,
    write: Callable[[Path], Path] | None,
    capture: str | None,
    options: dict[str, Any],
) -> None:
    model = write(tmp_path / "model.gguf") if write else tiny_llama
    # More norms, more rounding: 1.8e-4 where vectors are those of AVX2.
    limit = 30 * LIMIT if write is tiny_gguf.write_gemma4 else LIMIT
    engine = make_engine(model, **{**EXACT, **options}, attention_kernel="llama.cpp")
    reference = make_engine(model, **{**EXACT, **options}, attention_kernel="llama.cpp")
    passes = Passes(engine, PROMPT, capture=capture)
    random = Random(1)
    text = list(PROMPT)
    for _ in range(12):
        event = passes.next()
        n_generated = len(text) - len(PROMPT)
        assert (event.n_tokens, event.n_removable) == (len(text), n_generated)
        logits, attention = fresh(reference, text, capture)
        assert difference(event.logits, logits) <= limit
        for row, wanted in zip(layers(event.attention), layers(attention), strict=True):
            assert row.shape[-1] == len(text)
            assert difference(row, wanted) <= limit
        n_removed = random.choice([0, 0, 1, n_generated // 2, n_generated])
        n_removed = min(n_removed, n_generated)
        added = [random.randrange(256) for _ in range(random.choice([0, 1, 1, 5, 9]))]
        event.answer(n_removed, added)
        text = text[: len(text) - n_removed] + added
    passes.next()
    assert engine.slots[0].tokens == text
    passes.close()


@pytest.mark.parametrize(
    "write",
    [None, tiny_gguf.write_gemma3n, tiny_gguf.write_mamba],
    ids=["plain", "windows", "recurrent"],
)
def test_forced_chunk_is_bit_equal_where_the_steps_are(
    make_engine: MakeEngine,
    tiny_llama: Path,
    tmp_path: Path,
    write: Callable[[Path], Path] | None,
) -> None:
    model = write(tmp_path / "model.gguf") if write else tiny_llama
    engine = make_engine(model, **EXACT)
    passes = Passes(engine, PROMPT)
    passes.next().answer(ids=[1, 2, 3, 4])
    passes.next().answer(4, [5, 6, 7])
    rolled_back = passes.next().logits
    passes.close()
    engine.slots[0].clear()
    if (
        write is tiny_gguf.write_mamba
    ):  # its state cannot drop a tail: the slot has evaluated everything again
        # A request of its own evaluates the last token on its own.
        wanted = fresh(engine, [*PROMPT, 5, 6, 7], None)[0]
        np.testing.assert_allclose(rolled_back, wanted, atol=1e-5)
        return
    again = Passes(engine, PROMPT)
    again.next().answer(ids=[5, 6, 7])
    wanted = again.next().logits
    again.close()
    np.testing.assert_array_equal(rolled_back, wanted)


def test_answer_without_ids_gives_the_same_logits_again(engine: Engine) -> None:
    passes = Passes(engine, PROMPT, capture="probs")
    passes.pick(3)
    first = passes.next()
    first.answer()
    second = passes.next()
    assert second.n_tokens == first.n_tokens
    np.testing.assert_array_equal(first.logits, second.logits)
    np.testing.assert_array_equal(first.attention, second.attention)
    passes.close()


def test_full_slot_discards_as_that_of_a_plain_request(engine: Engine) -> None:
    wanted = plain(engine, PROMPT, 150, seed=5, context_shift=True, n_keep=4, n_discard=40)
    engine.slots[0].clear()
    engine.slots[1].clear()
    passes = Passes(engine, PROMPT, max_tokens=150, seed=5, shift=(4, 40))
    assert passes.pick(60) == wanted[:60]
    # One chunk across the end of the slot.
    event = passes.next()
    assert event.n_left == 90
    event.answer(ids=wanted[60:120])
    event = passes.next()
    assert 0 < event.n_discarded <= 80
    assert event.n_removable <= event.n_tokens - 4
    with pytest.raises(errors.RequestError, match=str(event.n_removable)):
        event.answer(event.n_removable + 1)
    event.answer(event.n_removable)
    assert passes.next().n_tokens >= 4
    passes.close()


def test_slot_is_reused_forked_and_saved_after_roll_backs(
    make_engine: MakeEngine, tiny_llama: Path
) -> None:
    engine = make_engine(tiny_llama, n_slots=2, **EXACT)
    prompt = random_ids(60)
    passes = Passes(engine, prompt)
    passes.next().answer(ids=[1, 2, 3, 4])
    passes.next().answer(2, [9])
    text = [*prompt, 1, 2, 9]
    event = passes.next()
    event.answer(end="stop")
    assert passes.end() == "stop"
    slot = next(one for one in engine.slots if one.tokens == text)
    wanted = plain(make_engine(tiny_llama, **EXACT), [*text, 5], 8, temperature=0)
    generation = engine.generate([*text, 5], max_tokens=8, temperature=0, ignore_eos=True)
    assert [token.id for token in generation] == wanted
    assert generation.usage.cached_tokens == len(text)
    slot.truncate(len(text))
    other = engine.slots[1 - slot.id]
    other.restore(slot.save())
    assert plain(engine, [*text, 5], 8, temperature=0, slot=other.id) == wanted


# ---- the sampler

NUMBERS = {"type": "array", "items": {"type": "integer"}, "minItems": 6}
SAMPLING: dict[str, dict[str, Any]] = {
    "seed": {"seed": 3},
    "penalties": {"seed": 3, "repeat_penalty": 1.5, "presence_penalty": 0.5, "repeat_last_n": 9},
    "dry": {"seed": 3, "dry_multiplier": 0.8, "dry_allowed_length": 1},
    "xtc": {"seed": 3, "xtc_probability": 0.5, "xtc_threshold": 0.05, "min_p": 0.0},
    "mirostat": {"seed": 3, "mirostat": 2},
    "greedy": {"temperature": 0.0, "repeat_penalty": 1.5},
    "grammar": {"seed": 3, "grammar": 'root ::= ("ab" [cd] "e"?)+'},
    "json": {"seed": 3, "ignore_eos": False, "json_schema": NUMBERS},
}


@pytest.mark.needs("host layers")
@pytest.mark.parametrize("name", SAMPLING)
def test_sampler_goes_on_as_if_the_ids_had_been_picked(engine: Engine, name: str) -> None:
    if name == "json":
        pytest.importorskip("llguidance")
    options = SAMPLING[name]
    wanted = plain(engine, PROMPT, 24, **options)
    n = len(wanted)  # the JSON may end
    passes = Passes(engine, PROMPT, **options)
    assert passes.pick(n // 2) == wanted[: n // 2]
    event = passes.next()
    event.pick()  # dropped
    event.answer(n // 3)
    if name != "mirostat":  # which follows the surprise of what was picked
        passes.next().answer(ids=wanted[n // 2 - n // 3 : n // 2 + 2])
        assert passes.pick(n - n // 2 - 2) == wanted[n // 2 + 2 :]
        passes.close()
        return
    assert passes.pick(n - n // 2 + n // 3) == wanted[n // 2 - n // 3 :]
    passes.close()


@pytest.mark.needs("host layers")
@pytest.mark.parametrize("name", [*SAMPLING, "logprobs"])
def test_choice_from_equal_logits_is_the_choice_at_any_step(engine: Engine, name: str) -> None:
    """Choices are made ahead unless the last one was from other logits: it shows nowhere."""
    if name == "json":
        pytest.importorskip("llguidance")
    options = SAMPLING.get(name, {"seed": 3, "top_logprobs": 3})
    wanted = plain(engine, PROMPT, 12, **options)
    passes = Passes(engine, PROMPT, **options)
    for i, id_ in enumerate(wanted):
        event = passes.next()
        if i % 3 != 2 or name == "mirostat":  # whose target does not move for a given id
            logits = None if i % 3 else event.logits.copy()
            picked = event.pick(logits)
            assert picked.id == id_
            assert len(picked.top_logprobs or ()) == (3 if name == "logprobs" else 0)
        event.answer(ids=[id_])
    passes.close()


@pytest.mark.parametrize("name", ["grammar", "json"])
def test_id_that_the_grammar_does_not_allow_is_refused_without_effect(
    engine: Engine, name: str
) -> None:
    if name == "json":
        pytest.importorskip("llguidance")
    wanted = plain(engine, PROMPT, 12, **SAMPLING[name])
    passes = Passes(engine, PROMPT, **SAMPLING[name])
    assert passes.pick(2) == wanted[:2]
    event = passes.next()
    with pytest.raises(errors.InvalidSampling, match=f"{ord('!')}.*allow"):
        event.answer(1, [wanted[1], ord("!")])
    assert event.pick().id == wanted[2]
    event.answer(ids=[wanted[2]])
    assert passes.pick(len(wanted) - 3) == wanted[3:]
    passes.close()


def test_choice_leaves_the_logits_as_they_are(engine: Engine) -> None:
    passes = Passes(engine, PROMPT, repeat_penalty=2.0, logit_bias={1: 5.0}, temperature=0)
    event = passes.next()
    before = event.logits.copy()
    adjusted = np.zeros_like(before)
    adjusted[77] = 1.0
    adjusted.setflags(write=False)
    assert event.pick(adjusted).id == 1  # the bias holds for adjusted logits too
    np.testing.assert_array_equal(event.logits, before)
    assert adjusted.sum() == 1.0
    with pytest.raises(ValueError, match="read-only"):
        event.logits[0] = 0
    passes.close()


def test_temperature_is_for_one_choice(engine: Engine) -> None:
    passes = Passes(engine, PROMPT, temperature=50.0, top_k=0, top_p=1.0, min_p=0.0, seed=1)
    event = passes.next()
    assert event.pick(temperature=0.0).id == int(event.logits.argmax())
    event.answer(ids=[7])
    assert passes.next().pick(temperature=1e-6).id is not None
    passes.close()
    greedy = Passes(engine, PROMPT, temperature=0, top_k=0, top_p=1.0, min_p=0.0)
    picked: set[int] = set()
    for _ in range(8):
        event = greedy.next()
        picked.add(event.pick(temperature=1e6).id)
        event.answer(ids=[7])
    assert len(picked) > 1
    event = greedy.next()
    assert event.pick().id == int(event.logits.argmax())
    greedy.close()


# ---- what is refused, and ends


def test_wrong_calls_are_refused_by_name(engine: Engine) -> None:
    passes = Passes(engine, PROMPT, max_tokens=5)
    event = passes.next()
    n_vocab = engine.model.n_vocab
    with pytest.raises(errors.RequestError, match=f"3 .*{n_vocab}"):
        event.pick(np.zeros(3, np.float32))
    with pytest.raises(errors.RequestError, match="n_vocab"):
        event.pick("no array")
    with pytest.raises(errors.RequestError, match="n_vocab"):
        event.pick(np.zeros((1, n_vocab), np.float32))
    with pytest.raises(errors.RequestError, match="NaN"):
        event.pick(np.full(n_vocab, np.nan, np.float32))
    with pytest.raises(errors.RequestError, match="no token is left"):
        event.pick(np.full(n_vocab, -np.inf, np.float32))
    with pytest.raises(errors.RequestError, match="temperature"):
        event.pick(temperature=-1.0)
    with pytest.raises(errors.RequestError, match="n_removed is 1, "):
        event.answer(1)
    with pytest.raises(errors.RequestError, match=r"ids has 6 .* 5 "):
        event.answer(ids=[1] * 6)
    with pytest.raises(errors.InvalidToken, match=str(n_vocab)):
        event.answer(ids=[n_vocab])
    with pytest.raises(errors.RequestError, match="cancelled"):
        event.answer(end="cancelled")
    picked = event.pick()
    with pytest.raises(errors.RequestError, match="has been picked"):
        event.pick()
    event.answer(ids=[picked.id])
    with pytest.raises(errors.RequestError, match="has been answered"):
        event.answer(ids=[picked.id])
    passes.close()
    with pytest.raises(errors.RequestError, match="has been answered"):
        event.pick()


def test_id_that_ends_the_text_ends_it_inside_a_chunk(engine: Engine) -> None:
    passes = Passes(engine, PROMPT, ignore_eos=False, stop_tokens=(9,))
    event = passes.next()
    assert event.ends(tiny_gguf.END_OF_TEXT) == "stop"
    assert event.ends(9) == "stop_token"
    assert event.ends(8) is None
    event.answer(ids=[1, 2, 9, 3])
    assert passes.end() == "stop_token"
    full = Passes(engine, PROMPT, max_tokens=3)
    full.next().answer(ids=[1, 2, 3])
    assert full.end() == "length"


@pytest.mark.parametrize("how", ["cancel", "drop", "close"])
def test_request_that_waits_for_an_answer_ends(
    make_engine: MakeEngine, tiny_llama: Path, how: str
) -> None:
    engine = make_engine(tiny_llama, **EXACT)
    passes = Passes(engine, PROMPT)
    passes.pick(2)
    event = passes.next()
    if how == "cancel":
        passes.close()
        assert engine.slots[0].n_tokens == len(PROMPT) + 1  # without the last id
    elif how == "drop":
        del passes
        gc.collect()
        assert len(plain(engine, PROMPT, 3)) == 3
    else:
        engine.close()
    with pytest.raises(errors.ClosedError):
        event.answer(ids=[1])
    with pytest.raises(errors.ClosedError):
        event.pick()
    assert np.isfinite(event.logits).all()  # the row is the event's own


def test_steered_request_costs_no_node_and_a_plain_one_nothing(engine: Engine) -> None:
    plain(engine, PROMPT, 4)
    before = engine.stats()
    plain(engine, PROMPT, 8)
    between = engine.stats()
    passes = Passes(engine, PROMPT, max_tokens=8)
    passes.pick(8)
    assert passes.end() == "length"
    after = engine.stats()
    assert after.graph_nodes_added == before.graph_nodes_added
    assert after.n_decodes - between.n_decodes == between.n_decodes - before.n_decodes
