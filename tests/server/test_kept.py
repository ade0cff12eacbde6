"""Kept attention: bounded, fair between owners, and counted."""

from __future__ import annotations

import pytest

from kqview.server.models.row_cache import CachedRow, PromptText, RowCache
from kqview.server.models.run import AttentionWanted
from kqview.server.web.budget import Budget

ROW = CachedRow(7, "x", (250,), bytes(1000))
WANTED = AttentionWanted()


def kept(most_bytes: int, total_bytes: int = 10**9) -> tuple[RowCache, Budget]:
    budget = Budget(total_bytes)
    return RowCache(budget, most_bytes), budget


def open_(keep: RowCache, owner: str, name: str, n_rows: int) -> None:
    keep.open(owner, name, WANTED, (0, 1), n_choices=1)
    for n in range(n_rows):
        keep.add(owner, name, 0, n, ROW)


def rows_of(keep: RowCache, owner: str, name: str) -> int | None:
    found = keep.find(owner, name)
    return None if found is None else len(found.choices[0])


def test_rows_belong_to_their_owner():
    keep, _ = kept(10**6)
    open_(keep, "a", "reply", 2)
    open_(keep, "b", "reply", 3)
    assert [rows_of(keep, owner, "reply") for owner in ("a", "b", "c")] == [2, 3, None]


def test_oldest_reply_of_who_keeps_most_goes_first():
    keep, budget = kept(20 * ROW.n_bytes)
    open_(keep, "small", "first", 3)
    open_(keep, "large", "old", 7)
    open_(keep, "large", "new", 7)
    open_(keep, "small", "second", 3)
    found = [rows_of(keep, "large", name) for name in ("old", "new")]
    assert found == [None, 7]
    assert [rows_of(keep, "small", name) for name in ("first", "second")] == [3, 3]
    assert keep.n_bytes == budget.used_bytes <= keep.most_bytes


def test_reply_of_the_same_name_takes_the_place_of_the_older_one():
    keep, budget = kept(10**6)
    open_(keep, "a", "reply", 5)
    open_(keep, "a", "other", 1)
    n_bytes = keep.n_bytes
    open_(keep, "a", "reply", 5)
    assert keep.n_bytes == budget.used_bytes == n_bytes
    assert rows_of(keep, "a", "reply") == 5


def test_prompt_is_kept_with_the_rows_and_counted():
    keep, budget = kept(10**6)
    prompt = PromptText([5, 7, 7, 9], ["An", "", "né", "e"])
    keep.open("a", "with", WANTED, (0,), n_choices=1, prompt=prompt)
    keep.open("a", "without", WANTED, (0,), n_choices=1)
    found = keep.find("a", "with")
    assert found is not None
    assert found.prompt is not None
    assert (found.prompt.ids, found.prompt.texts) == ([5, 7, 7, 9], ["An", "", "né", "e"])
    bare = keep.find("a", "without")
    assert bare is not None
    assert bare.prompt is None
    assert budget.used_bytes == 2 * bare.n_bytes + prompt.n_bytes


def test_reply_that_does_not_fit_keeps_its_beginning_and_counts_the_rest():
    keep, _ = kept(4 * ROW.n_bytes)
    open_(keep, "a", "other", 1)
    open_(keep, "a", "long", 9)
    found = keep.find("a", "long")
    assert found is not None
    n_kept = len(found.choices[0])
    assert list(found.choices[0]) == list(range(n_kept))
    assert 1 <= n_kept < 9
    assert found.n_left_out == [9 - n_kept]
    assert rows_of(keep, "a", "other") is None


def test_replies_without_rows_are_counted_too():
    keep, budget = kept(10_000)
    for i in range(1000):
        open_(keep, "a", f"reply-{i}", 0)
    assert budget.used_bytes <= 10_000
    assert rows_of(keep, "a", "reply-0") is None
    assert rows_of(keep, "a", "reply-999") == 0


def test_what_others_need_is_not_kept():
    keep, budget = kept(10**6, total_bytes=10**5)
    assert keep.most_bytes == 10**5 // 4
    with budget.hold("one") as one, budget.hold("two") as two:
        one.take(40_000)
        two.take(25_000)
        open_(keep, "a", "reply", 40)
        found = keep.find("a", "reply")
        assert found is not None
        assert found.n_left_out[0] > 0
        assert keep.n_bytes < keep.most_bytes - ROW.n_bytes


def test_nothing_is_kept_without_memory():
    keep, budget = kept(0)
    open_(keep, "a", "reply", 3)
    assert keep.find("a", "reply") is None
    assert budget.used_bytes == 0


@pytest.mark.parametrize("name", ["gone", ""])
def test_row_of_a_reply_that_is_gone_changes_nothing(name: str):
    keep, budget = kept(10**6)
    keep.add("a", name, 0, 0, ROW)
    assert budget.used_bytes == 0
