"""Text batch: many texts as requests of one engine, some of them queued ahead.

Shared by `Embedding` and `Scoring`: tells one text from several, and keeps every slot busy.
"""

from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Any, Final, TypeVar, cast

from kqview.arguments import invalid, to_index
from kqview.errors import QueueFull
from kqview.generation.stream import Generation
from kqview.types.text import Ids

Text = str | Ids
Requests = Generator[tuple[int, Generation], None, None]  # index of the text, its request
_Result = TypeVar("_Result")

# Texts submitted before the first result is taken, at least: fewer than the queue.
_N_AHEAD: Final = 32


def items_of(texts: object) -> tuple[bool, list[Any]]:
    """(whether it is one text, list of the texts), which may be empty; RequestError otherwise."""
    if isinstance(texts, str):
        return True, [texts]
    kind = type(texts).__name__
    if isinstance(texts, bytes | dict) or not isinstance(texts, Iterable):
        raise invalid("texts", "a str, a sequence of token ids, or a list of these", kind)
    items: list[Any] = list(cast("Iterable[Any]", texts))
    if not items:
        return False, []
    is_ids = isinstance(items[0], bool) or to_index(items[0]) is not None
    return (True, [items]) if is_ids else (False, items)


def in_turn(
    texts: Sequence[Sequence[int]], n_slots: int, submit: Callable[[int], Generation]
) -> Requests:
    """Yield the index and the request of each text; take its result before the next one.

    Short texts come first, because some models share a step only among texts of one length. Some
    are submitted ahead; closing the generator cancels those that were not yielded.

    Args:
        texts: The ids of each.
        n_slots: Of the engine.
        submit: Begins the request of the text with this index.
    """
    pending: deque[tuple[int, Generation]] = deque()
    n_ahead = max(_N_AHEAD, 2 * n_slots)
    try:
        for i in sorted(range(len(texts)), key=lambda i: len(texts[i])):
            if len(pending) >= n_ahead:
                yield pending.popleft()
            while True:
                try:
                    pending.append((i, submit(i)))
                    break
                except QueueFull:
                    if not pending:
                        raise
                yield pending.popleft()
        while pending:
            yield pending.popleft()
    finally:
        for _, one in pending:
            one.cancel()


def ordered(found: dict[int, _Result]) -> list[_Result]:
    """Results in the order of their texts."""
    return [found[i] for i in range(len(found))]
