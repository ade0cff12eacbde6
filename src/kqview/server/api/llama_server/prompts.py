"""Prompts of ids and texts in any order, as ids."""

from collections.abc import Sequence

from kqview.server.endpoint import Call


async def ids_of(
    call: Call, parts: Sequence[int | str], *, add_special: bool, parse_special: bool = True
) -> list[int]:
    """Ids of parts that follow one another; special ones are added to a text that is the first."""
    ids: list[int] = []
    for i, part in enumerate(parts):
        if isinstance(part, int):
            ids.append(part)
            continue
        ids += await call.service.ids(
            part, add_special=add_special and i == 0, parse_special=parse_special, hold=call.hold
        )
    return ids
