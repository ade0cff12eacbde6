"""Banned phrases: never in the text, whatever their tokens are, and never sent and taken back."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

from kqview import Capture, Engine, Sampling, mod
from kqview.errors import RequestError
from kqview.mods.events import Added
from kqview.server import Settings
from kqview.server.models.phrases import Held, PhraseBan, Phrases
from kqview.server.models.run import AttentionWanted, GenerateRequest
from kqview.server.models.service import Service
from kqview.server.web.budget import Budget

if TYPE_CHECKING:
    from kqview import Token
    from kqview.server.models.run import Run

TEXT = "Mirelda found a silver key near the old bridge. Then Mirel"


def request(phrases: tuple[str, ...], **changes: Any) -> GenerateRequest:
    fields: dict[str, Any] = {
        "prompt": TEXT, "max_tokens": 40, "sampling": Sampling(temperature=0, ignore_eos=True),
        "request_id": "r", "banned_phrases": phrases,
    }  # fmt: skip
    return GenerateRequest(**{**fields, **changes})


def generated(engine: Engine, wanted: GenerateRequest) -> tuple[Run, list[Token]]:
    """The run of *wanted*, and copies of what it yields."""

    async def take() -> tuple[Run, list[Token]]:
        service = Service(engine, Settings())
        tokens: list[Token] = []
        async with await service.start(wanted, hold=Budget(2**30).hold("")) as run:
            async for step in run:
                assert step.removal is None
                tokens.append(step.token)
        await service.drain(0)
        return run, tokens

    return asyncio.run(take())


def free_text(engine: Engine) -> str:
    return engine.generate(TEXT, max_tokens=40, temperature=0, ignore_eos=True).read()


# ---- what is found


@pytest.mark.parametrize(
    ("phrases", "data", "at", "n_clear"),
    [
        (["old bridge"], "the Old BRIDGE", 4, 14),
        (["old bridge"], "the old brid", None, 4),
        (["old bridge", "bride"], "the old brid", None, 4),
        (["bride"], "the old brid", None, 8),
        (["aab"], "aaa", None, 1),
        (["é"], "x\u00e9", 1, 3),
        ([], "anything", None, 8),
        (["", "x"], "y", None, 1),
    ],
)
def test_phrases_are_found_in_either_case(
    phrases: list[str], data: str, at: int | None, n_clear: int
):
    found = Phrases(phrases)
    assert found.find(data.encode()) == at
    if at is None:
        assert found.n_clear(data.encode()) == n_clear


@given(st.text("ab<", max_size=20), st.lists(st.text("ab<", min_size=1, max_size=4), max_size=3))
def test_what_is_clear_cannot_become_a_phrase(text: str, texts: list[str]):
    phrases = Phrases(texts)
    data = text.encode()
    if phrases.find(data) is not None:
        return
    n = phrases.n_clear(data)
    may_begin = [at for at in range(len(text)) if any(p.startswith(text[at:]) for p in texts if p)]
    assert n == min(may_begin, default=len(text))


def test_items_are_held_until_their_bytes_are_clear():
    held = Held[str](Phrases(["bridge"]))
    assert held.add("a", b"the ") == ["a"]
    assert held.add("b", b"br") == []
    assert held.add("c", b"i") == []
    assert list(held) == ["b", "c"]
    assert held.add("d", b"ef") == ["b", "c", "d"]
    assert held.add("e", b"b") == []
    assert held.add("f", b"r") == []
    assert held.drop(1) == ["f"]
    assert held.drop(5) == ["e"]
    assert held.add("g", b"bri") == []
    assert held.rest() == ["g"]


# ---- what is generated


@pytest.mark.parametrize(
    "phrases",
    [("Mirelda",), ("MIRELDA", "the "), ("e",), (slice(3, 30), slice(40, 50))],
    ids=str,
)
def test_phrase_is_never_in_the_text(engine: Engine, phrases: tuple[Any, ...]):
    before = free_text(engine).lower()
    phrases = tuple(before[one] if isinstance(one, slice) else one for one in phrases)
    assert any(phrase.lower() in before for phrase in phrases)
    run, tokens = generated(engine, request(phrases))
    text = "".join(token.text for token in tokens)
    assert text == run.text
    assert not any(phrase.lower() in text.lower() for phrase in phrases)
    assert [token.index for token in tokens] == list(range(40))
    assert engine.detokenize([token.id for token in tokens]) == text


def test_text_without_the_phrase_is_that_of_a_request_without_it(engine: Engine):
    run, _ = generated(engine, request(("dragon", "Mireldaa")))
    assert run.text == free_text(engine)


def test_text_before_the_phrase_stays(engine: Engine):
    before = free_text(engine)
    phrase = " the old bridge"
    run, _ = generated(engine, request((phrase,)))
    assert run.text.startswith(before[: before.index(phrase)])


def test_rows_are_those_of_the_text_that_stays(engine: Engine):
    wanted = request(("Mirelda", "tower"), attention=AttentionWanted("probs"))
    run, tokens = generated(engine, wanted)
    ids = [*run.generations[0].prompt_ids, *(token.id for token in tokens)]
    n_prompt = len(ids) - len(tokens)
    own = engine.attend(ids, "probs").array()
    for i, token in enumerate(tokens):
        rows = token.attention
        assert isinstance(rows, np.ndarray)
        assert rows.shape[-1] == n_prompt + i
        np.testing.assert_allclose(rows, own[:, :, n_prompt + i - 1, : n_prompt + i], atol=1e-3)


def test_phrase_at_the_end_is_taken_back_too(engine: Engine):
    before = free_text(engine)
    ids = engine.generate(TEXT, max_tokens=40, temperature=0, ignore_eos=True)
    pieces = [token.text for token in ids]
    last = "".join(pieces[5:8])
    run, tokens = generated(engine, request((last,), max_tokens=8))
    assert before.startswith("".join(pieces[:8]))
    assert last not in run.text
    assert len(tokens) == 8
    assert run.finish_reason == "length"


def test_every_sample_is_without_the_phrase(engine: Engine):
    sampling = Sampling(temperature=1.5, seed=3, ignore_eos=True)
    wanted = request(("e",), n_samples=3, sampling=sampling)
    run, _ = generated(engine, wanted)
    texts = [one.text for one in run.generations]
    assert len(set(texts)) == 3
    assert not any("e" in text.lower() for text in texts)


def test_grammar_that_allows_nothing_else_ends_the_request(engine: Engine):
    sampling = Sampling(temperature=0, grammar='root ::= "abc"')
    with pytest.raises(RequestError, match="no token is left"):
        generated(engine, request(("bc",), sampling=sampling))
    assert engine.generate(TEXT, max_tokens=2, temperature=0).read()


def test_what_other_mods_add_is_banned_too(engine: Engine):
    forced = engine.tokenize(" dragon", add_special=False)
    done: list[bool] = []

    @mod
    def adds(event: Any, actions: Any) -> Any:
        if isinstance(event, Added) and not done:
            done.append(True)
            return actions.force_tokens(forced)
        return None

    # It comes first, so that it is not told what the other one adds.
    ban = PhraseBan(Phrases(["dragon"]), engine.token_bytes)
    generation = engine.generate(
        TEXT, max_tokens=12, temperature=0, mods=[ban, adds], capture=Capture("probs")
    )
    watched = next(one for one in generation.mods if isinstance(one, PhraseBan))
    watched.watch(generation)
    generation.read()
    assert done
    assert "dragon" not in generation.text
