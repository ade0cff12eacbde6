"""Pruning while generating: which spans go, and what the parts are asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from kqview.errors import RequestError
from kqview.mods.pruning import generate_pruned
from kqview.types import Token

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import NDArray


class Part:
    """A generation of a `Fake`."""

    slot = 3

    def __init__(self, fake: Fake, prompt: Sequence[int], options: dict[str, Any]) -> None:
        self.prompt = list(prompt)
        self.options = options
        self.finish_reason: str | None = None
        self.is_closed = False
        self._fake = fake

    def __iter__(self) -> Iterator[Token]:
        ids = list(self.prompt)
        for i in range(self.options["max_tokens"]):
            self._fake.n_generated += 1
            id_ = 1000 + self._fake.n_generated
            token = Token(id_, "?", i, attention=self._fake.attention(ids)[None, None])
            ids.append(id_)
            if self._fake.n_generated == self._fake.ends_at:
                self.finish_reason = "stop"
                yield token
                return
            yield token
        self.finish_reason = "length"

    def close(self) -> None:
        self.is_closed = True


class Fake:
    """An engine whose tokens are 1001, 1002 and so on, and which looks at what it is told to."""

    n_ctx = 100

    def __init__(
        self, attention: Callable[[list[int]], NDArray[np.float32]], ends_at: int = 0
    ) -> None:
        self.attention = attention
        self.ends_at = ends_at
        self.n_generated = 0
        self.parts: list[Part] = []

    def tokenize(self, text: str, *, add_special: bool) -> list[int]:
        return [0] * add_special + [ord(c) for c in text]

    def token_bytes(self, id: int) -> bytes:
        return "é".encode()[id % 2 :][:1]  # a character is an even and an odd id

    def generate(self, prompt: Sequence[int], **options: Any) -> Part:
        self.parts.append(Part(self, prompt, options))
        return self.parts[-1]


def likes(*ids: int) -> Callable[[list[int]], NDArray[np.float32]]:
    """Attention to these ids alone."""
    return lambda context: np.isin(context, ids).astype(np.float32)


PROMPT = list(range(12))
SMALL: dict[str, Any] = {
    "max_context": 16,
    "span_tokens": 2,
    "n_first": 2,
    "n_last": 4,
    "prune": 0.25,
}


def test_spans_that_nothing_looks_at_are_removed_first():
    fake = Fake(likes(4, 5, 8))
    generation = generate_pruned(fake, PROMPT, max_tokens=6, **SMALL)
    list(generation)
    # Of the spans 2-3, 4-5 ... 10-11, all but 4-5 and 8-9 are looked at by nothing.
    assert generation.removed == [[2, 3, 6, 7]]
    assert fake.parts[1].prompt == [0, 1, 4, 5, 8, 9, 10, 11, 1001, 1002, 1003, 1004]
    assert [generation.ids[place] for place in generation.places] == [
        *fake.parts[1].prompt, 1005, 1006,
    ]  # fmt: skip


def test_context_stays_within_the_limit_however_long_the_text():
    fake = Fake(likes(0))
    generation = generate_pruned(fake, PROMPT, max_tokens=100, **SMALL)
    rows: list[Any] = [token.attention for token in generation]
    sizes = [row.shape[-1] for row in rows]
    assert max(sizes) < 16
    assert len(generation.tokens) == 100
    assert generation.finish_reason == "length"
    assert [len(part.prompt) for part in fake.parts[1:]] == [12] * (len(fake.parts) - 1)
    first, last = generation.places[:2], generation.places[-4:]
    assert (first, last) == ([0, 1], [108, 109, 110, 111])


def test_parts_use_one_slot_and_move_its_cache():
    fake = Fake(likes(0))
    list(generate_pruned(fake, PROMPT, max_tokens=6, seed=7, temperature=0.5, **SMALL))
    first, second = (part.options for part in fake.parts)
    assert (first["slot"], second["slot"]) == (None, 3)
    assert (first["seed"], second["seed"]) == (7, 8)
    assert (second["reuse"], second["reuse_min_tokens"], second["temperature"]) == ("shift", 2, 0.5)
    # The largest seed, then one at random.
    for seed, seeds in ((2**32 - 2, [2**32 - 2, 0]), (-1, [-1, -1])):
        fake = Fake(likes(0))
        list(generate_pruned(fake, PROMPT, max_tokens=6, seed=seed, **SMALL))
        assert [part.options["seed"] for part in fake.parts] == seeds


def test_tokens_are_numbered_and_their_characters_whole_across_parts():
    fake = Fake(likes(0))
    tokens = list(generate_pruned(fake, PROMPT[:11], max_tokens=9, **SMALL))
    assert len(fake.parts[0].prompt) + fake.parts[0].options["max_tokens"] == 16
    assert [token.index for token in tokens] == list(range(9))
    # 1001 is the second byte of a character, 1002 and 1003 are one, and so on.
    assert "".join(token.text for token in tokens) == "\ufffd" + "é" * 4


def test_end_of_the_text_ends_the_generation():
    fake = Fake(likes(0), ends_at=6)
    generation = generate_pruned(fake, PROMPT, **SMALL)
    assert len(list(generation)) == 6
    assert generation.finish_reason == "stop"


def test_closing_ends_the_part_that_runs():
    fake = Fake(likes(0))
    with generate_pruned(fake, PROMPT, **SMALL) as generation:
        next(generation)
    assert fake.parts[0].is_closed
    assert generation.finish_reason == "cancelled"
    assert list(generation) == []


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"stop": ["x"]}, "stop"),
        ({"regex": "a"}, "regex"),
        ({"mods": []}, "mods"),
        ({"reuse": "exact"}, "reuse"),
        ({"prune": 0}, "prune"),
        ({"n_last": 1}, "n_last"),
        ({"max_context": 7}, "max_context"),
        ({"max_context": 11, "prune": 0.1}, "prompt"),
    ],
)
def test_option_that_does_not_go_with_pruning_is_refused(options: dict[str, Any], name: str):
    with pytest.raises(RequestError) as refused:
        generate_pruned(Fake(likes(0)), PROMPT, **{**SMALL, **options})
    assert refused.value.parameter == name
