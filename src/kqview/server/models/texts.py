"""Texts of a model: ids of texts and texts of ids, in threads if they are long, and what fits."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

from kqview.engine import Engine
from kqview.errors import RequestError
from kqview.server.errors import renamed
from kqview.server.web.budget import Reservation, Workers
from kqview.stop_strings import TextStream

# Below this, a hop to another thread takes longer than the work itself.
_OFFLOAD_TEXT: Final = 32 * 1024  # characters: about a millisecond to tokenize
OFFLOAD_ITEMS: Final = 4096
"""Ids and biases of which reading takes about a millisecond."""
ID_BYTES: Final = 40
"""Most bytes that a character and its ids take."""
_PIECE_BYTES: Final = 240  # an id with its text
_LEAST_PROMPT: Final = 4  # tokens that a long memory leaves to the prompt, as in KoboldCpp


class ModelTexts:
    """Texts of one model."""

    def __init__(self, engine: Callable[[], Engine], threads: Workers) -> None:
        """Read and write them with *engine*, long ones in *threads*."""
        self._engine = engine
        self._threads = threads

    async def tokenize(
        self, text: str, *, add_special: bool, hold: Reservation
    ) -> list[tuple[int, str]]:
        """Ids of *text*, each with the text that it completes; the texts join to the whole.

        A character spread over several ids is the text of the last one; the others have "". Their
        memory is counted in *hold*.
        """
        engine = self._engine()
        ids = await self.ids(text, add_special=add_special, hold=hold)
        hold.take(_PIECE_BYTES * len(ids))
        if len(ids) < OFFLOAD_ITEMS:
            return pieces_of(engine, ids)
        return await self._threads.run(hold.client, pieces_of, engine, ids)

    async def ids(self, text: str, *, add_special: bool, hold: Reservation) -> list[int]:
        """Ids of *text*; their memory is counted in *hold*."""
        hold.take(ID_BYTES * len(text))
        tokenize = partial(self._engine().tokenize, text, add_special=add_special)
        if len(text) < _OFFLOAD_TEXT:
            return tokenize()
        return await self._threads.run(hold.client, tokenize)

    async def ids_of_each(self, texts: Sequence[str], *, hold: Reservation) -> list[list[int]]:
        """Ids of each of *texts* with special ones around it alone; counted in *hold*."""
        n_characters = sum(map(len, texts))
        hold.take(ID_BYTES * (n_characters + 2 * len(texts)))
        tokenize = partial(self._engine().tokenize, parse_special=False)
        if n_characters + 8 * len(texts) < _OFFLOAD_TEXT:
            return list(map(tokenize, texts))
        return await self._threads.run(hold.client, lambda: list(map(tokenize, texts)))

    async def detokenize(self, ids: Sequence[int], *, name: str = "ids", client: str) -> str:
        """Text of *ids*, which errors call *name*."""
        engine = self._engine()
        try:
            if len(ids) < OFFLOAD_ITEMS:
                return engine.detokenize(ids)
            return await self._threads.run(client, engine.detokenize, ids)
        except RequestError as error:
            raise renamed(error, {"ids": name}) from None


def room_of(limit: int, max_tokens: int) -> int:
    """Tokens of a prompt that fit into *limit* together with what is generated from it.

    As in KoboldCpp, *max_tokens* are left for that; but no more than half of *limit*, because a
    client that asks for very much would lose its whole prompt.
    """
    return limit - min(max_tokens, limit // 2)


def truncated(
    ids: Sequence[int], memory: Sequence[int], *, n_first: int, room: int
) -> Sequence[int]:
    """The last of *ids* that fit into *room* tokens, after the first ones and the memory.

    Args:
        ids: Of the whole text; returned as they are if they fit.
        memory: Of the part that follows the first ids, which stays: only if it leaves no room for
            the text behind it, it loses its own front.
        n_first: How many ids at the beginning stay.
        room: Most tokens, at least 1.
    """
    if len(ids) <= room:
        return ids
    n_first = min(n_first, room - 1)
    n_behind = max(0, len(ids) - n_first - len(memory))
    n_memory = max(0, min(len(memory), room - n_first - min(_LEAST_PROMPT, n_behind)))
    n_end = room - n_first - n_memory
    return [*ids[:n_first], *memory[len(memory) - n_memory :], *ids[len(ids) - n_end :]]


def pieces_of(engine: Engine, ids: Sequence[int]) -> list[tuple[int, str]]:
    """*ids*, each with the text that it completes; the texts join to the whole."""
    stream = TextStream()
    pieces = [(id_, stream.feed(engine.token_bytes(id_))) for id_ in ids]
    rest = stream.flush()
    if rest:
        last, piece = pieces[-1]
        pieces[-1] = last, piece + rest
    return pieces
