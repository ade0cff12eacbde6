"""Prompts of llama.cpp's server, which are texts to embed as well: every form, and their ids."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated, Any, Final, cast

from msgspec import Struct

from kqview.errors import RequestError
from kqview.server.errors import NotSupported
from kqview.server.models.service import Call
from kqview.server.models.texts import ID_BYTES
from kqview.server.web.described import about

Parts = Sequence[int | str]
"""A prompt: ids and texts, which follow one another."""

_COST: Final = 4  # short texts take longer to tokenize than bytes to check


TEXTS: Final = about(
    'A text, ids, {"content": [{"type": "text", "text": "Anna"}]}, or a list of these.',
    "Anna is a teacher.",
)
"""What texts to embed are, in a body."""


class TextsUsage(Struct):
    """Tokens of all texts, with the special ones."""

    prompt_tokens: Annotated[int, about("Tokens of all texts.", 14)]
    total_tokens: Annotated[int, about("The same.", 14)]


def pooling_of(call: Call) -> str:
    """How the model makes vectors of texts.

    Raises:
        NotSupported: It makes none.
    """
    pooling = call.model.engine.pooling
    if pooling is None or pooling == "rank":
        raise NotSupported(
            f"{call.model.name} gives no embeddings as it is served; serve an embedding model, "
            "or start the server with --pooling mean"
        )
    return pooling


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
        call.hold.take(ID_BYTES * len(part))
        ids += engine.tokenize(
            part, add_special=add_special and i == 0, parse_special=parse_special
        )
    return ids


def prompts_of(name: str, value: object) -> list[Parts]:
    """The prompts of a field in any of its forms; a list without ids is a list of prompts.

    Args:
        name: The field, for messages.
        value: A text, a list of ids and texts, ``{"prompt_string": text}``, ``{"content": [{"type":
            "text", "text": text}]}``, or a list of these.

    Raises:
        RequestError: It is none of them.
        NotSupported: It has images or sound.
    """
    items = cast("list[object]", value) if isinstance(value, list) else [value]
    if any(map(_is_id, items)):  # one prompt
        items: list[object] = [value]
    prompts = [_parts_of(name, one) for one in items]
    if not prompts:
        raise _no_prompt(name, "an empty list")
    return prompts


def _parts_of(name: str, value: object) -> Parts:
    if isinstance(value, dict):
        fields = cast("dict[str, object]", value)
        if fields.get("multimodal_data"):
            raise NotSupported(f"{name} has multimodal_data, but this model reads text only")
        if isinstance(content := fields.get("content"), list):
            return ["".join(_text_of(name, part) for part in cast("list[object]", content))]
        value = fields.get("prompt_string")
    if isinstance(value, str):
        return [value]
    if isinstance(value, list):
        parts = cast("list[Any]", value)
        if all(_is_id(one) or isinstance(one, str) for one in parts):
            return parts
    got: str = type(cast("object", value)).__name__
    raise _no_prompt(name, "missing" if value is None else f"a {got}")


def _text_of(name: str, part: object) -> str:
    fields = cast("dict[str, object]", part) if isinstance(part, dict) else {}
    if fields.get("type") == "text" and isinstance(text := fields.get("text"), str):
        return text
    raise RequestError(
        f"{name} has a content whose type is {fields.get('type')!r}; send parts of type text, as "
        "this model reads text only",
        parameter=name,
    )


def _is_id(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _no_prompt(name: str, got: str) -> RequestError:
    return RequestError(
        f"{name} is {got}; send a text, a list of ids and texts, an object with prompt_string or "
        "content, or a list of these",
        parameter=name,
    )
