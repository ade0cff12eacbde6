"""Text batch: many texts as requests of one engine, some of them queued ahead.

Tells one text from several, keeps every slot busy, and takes the results with or without an event
loop.
"""

from asyncio import to_thread
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any, Final, Generic, TypedDict, TypeVar, cast

from kqview.arguments import invalid, to_index
from kqview.errors import QueueFull
from kqview.generation.stream import Generation
from kqview.types import PromptBlock
from kqview.types.text import Ids

Text = str | Ids
Requests = Generator[tuple[int, Generation], None, None]  # index of the text, its request
_Result = TypeVar("_Result")


class TextOptions(TypedDict, total=False):
    """Options of every method of `Engine` that takes texts; of `classify` all."""

    priority: int
    add_special: bool
    parse_special: bool


@dataclass(frozen=True, slots=True)
class Batch(Generic[_Result]):
    """The texts of one call, whose requests are made as results are taken.

    Attributes:
        requests: Index and request of each text.
        put: Takes each block of a text, with the index of the text.
        finish: Makes the result of the call, once all texts are done.
    """

    requests: Requests
    put: Callable[[int, PromptBlock], object]
    finish: Callable[[], _Result]

    def result(self) -> _Result:
        """Wait for all texts, without the GIL."""
        with closing(self.requests):
            for i, one in self.requests:
                while (block := one.next_block()) is not None:
                    self.put(i, block)
        return self.finish()

    async def aresult(self) -> _Result:
        """Like `result`, without blocking the event loop."""
        with closing(self.requests):
            for i, one in self.requests:
                while (block := await one.anext_block()) is not None:
                    self.put(i, block)
        return self.finish()


async def awaited(begin: Callable[..., Batch[_Result]], texts: object, **options: Any) -> _Result:
    """The result of the batch that *begin*, a method of a part of the engine, makes of *texts*."""
    return await (await to_thread(begin, texts, **options)).aresult()


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
    are submitted ahead; closing the generator cancels those that were not yielded. *submit* begins
    the request of the text with an index.
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
