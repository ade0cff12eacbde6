"""Who takes from which generation: what is known of it, and that knowing it holds nothing."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from kqview.errors import BusyError
from kqview.generation.waiting import Taker, Turns


class Held:
    """Stands for a generation."""


def add(turns: Turns, core_id: int) -> tuple[Any, Taker]:
    held, taker = Held(), Taker(f"r{core_id}")
    turns.add(core_id, held, taker)  # type: ignore[arg-type]
    return held, taker


def test_a_holder_that_is_dropped_is_gone_at_once_though_somebody_looks() -> None:
    turns = Turns()
    held, taker = add(turns, 1)
    assert turns.name_of(1) == "r1"
    # `taker` is all that a look in another thread has a hold of.
    del held
    assert turns.name_of(1) is None
    assert not turns.is_of_thread([1], "r2", is_late=True)
    assert taker.request_id == "r1"


def test_only_who_takes_from_every_holder_is_refused() -> None:
    turns = Turns()
    mine, taker = add(turns, 1)
    others, others_taker = add(turns, 2)
    thread = threading.Thread(target=others_taker.note)
    thread.start()
    thread.join()
    taker.has_taken = others_taker.has_taken = True
    assert not turns.is_of_thread([1, 2], "r3", is_late=True)
    with pytest.raises(BusyError, match="r3 waits for a slot, and r1 keeps it"):
        turns.is_of_thread([1], "r3", is_late=False)
    del mine, others


def test_one_that_nobody_took_from_may_be_handed_over_until_it_is_late() -> None:
    turns = Turns()
    held, _ = add(turns, 1)
    assert turns.is_of_thread([1], "r2", is_late=False)
    with pytest.raises(BusyError):
        turns.is_of_thread([1], "r2", is_late=True)
    del held
