"""Texts that are too long lose their front, as in KoboldCpp."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from kqview.server.models.texts import room_of, truncated

TEXT = list(range(100))


@pytest.mark.parametrize(
    ("n_memory", "limit", "max_tokens", "expected"),
    [
        (0, 110, 10, TEXT),
        (0, 109, 10, [0, *TEXT[2:]]),
        (0, 50, 10, [0, *TEXT[61:]]),
        (5, 50, 10, [*TEXT[:6], *TEXT[66:]]),
        (0, 50, 1000, [0, *TEXT[76:]]),  # half of it is the prompt's
        (60, 50, 10, [0, *TEXT[26:61], *TEXT[96:]]),  # a long memory leaves the prompt's end
        (98, 50, 10, [0, *TEXT[61:]]),  # behind it is one id only
        (0, 1, 10, TEXT[99:]),
    ],
)
def test_front_goes_and_what_begins_every_text_stays(
    n_memory: int, limit: int, max_tokens: int, expected: list[int]
):
    memory = TEXT[1 : 1 + n_memory]
    assert truncated(TEXT, memory, n_first=1, room=room_of(limit, max_tokens)) == expected


@given(
    st.integers(0, 60), st.integers(0, 70), st.integers(0, 1), st.integers(1, 80),
    st.integers(1, 100),
)  # fmt: skip
def test_result_fits_and_is_in_order(
    n_ids: int, n_memory: int, n_first: int, limit: int, max_tokens: int
):
    ids = list(range(n_ids))
    memory = ids[n_first : n_first + n_memory]
    found = truncated(ids, memory, n_first=n_first, room=room_of(limit, max_tokens))
    room = limit - min(max_tokens, limit // 2)
    assert len(found) == min(n_ids, room)
    assert list(found) == sorted(set(found))
    if n_ids:
        assert found[-1] == n_ids - 1
