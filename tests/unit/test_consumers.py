"""Who takes from which generation: what is known of it, and that knowing it holds nothing."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from kqview.errors import BusyError
from kqview.generation.source import Consumer, Consumers


class Held:
    """Stands for a generation."""


def add(consumers: Consumers, core_id: int) -> tuple[Any, Consumer]:
    held, consumer = Held(), Consumer(f"r{core_id}")
    consumers.add(core_id, held, consumer)  # type: ignore[arg-type]
    return held, consumer


def test_a_holder_that_is_dropped_is_gone_at_once_though_somebody_looks() -> None:
    consumers = Consumers()
    held, consumer = add(consumers, 1)
    assert consumers.name_of(1) == "r1"
    # `consumer` is all that a look in another thread has a hold of.
    del held
    assert consumers.name_of(1) is None
    assert not consumers.is_of_thread([1], "r2", is_late=True)
    assert consumer.request_id == "r1"


def test_only_who_takes_from_every_holder_is_refused() -> None:
    consumers = Consumers()
    mine, consumer = add(consumers, 1)
    others, others_consumer = add(consumers, 2)
    thread = threading.Thread(target=others_consumer.note)
    thread.start()
    thread.join()
    consumer.has_taken = others_consumer.has_taken = True
    assert not consumers.is_of_thread([1, 2], "r3", is_late=True)
    with pytest.raises(BusyError, match="r3 waits for a slot, and r1 keeps it"):
        consumers.is_of_thread([1], "r3", is_late=False)
    del mine, others


def test_one_that_nobody_took_from_may_be_handed_over_until_it_is_late() -> None:
    consumers = Consumers()
    held, _ = add(consumers, 1)
    assert consumers.is_of_thread([1], "r2", is_late=False)
    with pytest.raises(BusyError):
        consumers.is_of_thread([1], "r2", is_late=True)
    del held
