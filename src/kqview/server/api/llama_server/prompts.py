"""Prompts of ids and texts in any order, as ids."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

from kqview.server.endpoint import Call

Parts = Sequence[int | str]

_ID_BYTES: Final = 40  # a character and its ids
_COST: Final = 4  # short texts take longer to tokenize than bytes to check


async def ids_of(
    call: Call, parts: Parts, *, add_special: bool, parse_special: bool = True
) -> list[int]:
    """Ids of parts that follow one another; special ones are added to a text that is the first."""
    ids_of_parts = partial(_ids, call, parts, add_special=add_special, parse_special=parse_special)
    return await call.service.converted(_COST * call.n_body_bytes, call.hold, ids_of_parts)


async def ids_of_each(call: Call, prompts: Callable[[], Sequence[Parts]]) -> list[list[int]]:
    """Ids of each of *prompts*, with the special ones; there may be as many as a body has values.

    Args:
        call: The request.
        prompts: Reads them, maybe in another thread.
    """

    def ids_of_prompts() -> list[list[int]]:
        return [_ids(call, parts, add_special=True, parse_special=True) for parts in prompts()]

    return await call.service.converted(_COST * call.n_body_bytes, call.hold, ids_of_prompts)


def _ids(call: Call, parts: Parts, *, add_special: bool, parse_special: bool) -> list[int]:
    engine = call.model.engine
    ids: list[int] = []
    for i, part in enumerate(parts):
        if isinstance(part, int):
            ids.append(part)
            continue
        call.hold.take(_ID_BYTES * len(part))
        ids += engine.tokenize(
            part, add_special=add_special and i == 0, parse_special=parse_special
        )
    return ids
