"""The field ``mods`` of every API, and what mods add to replies. Pure.

A request names mods of the server's folder: ``["brief", {"name": "ban", "word": "no"}]``; further
fields of an entry are options of that mod.
"""

import contextlib
import json
import uuid
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, cast

import msgspec
from msgspec import UNSET, UnsetType

from kqview import json_input
from kqview.errors import RequestError
from kqview.generation.stream import Generation
from kqview.server.api.wire.event_parts import CalledFunction, ModCall
from kqview.server.models.run import ModWanted, Removal
from kqview.trace.record import cleaned_text

Object = dict[str, Any]
ModsField = Annotated[list[str | Object], msgspec.Meta(max_length=64)]


def mods_of(field: Sequence[str | Object] | None) -> tuple[ModWanted, ...]:
    """The mods of a request, in their order.

    Raises:
        RequestError: An entry has no name.
    """
    return tuple(_wanted(i, one) for i, one in enumerate(field or ()))


def _wanted(i: int, given: str | Object) -> ModWanted:
    if isinstance(given, str):
        return ModWanted(given)
    name = given.get("name")
    if not isinstance(name, str):
        raise RequestError(
            f"mods[{i}].name is {name!r}; send the name of a mod, see GET /v1/mods",
            parameter="mods",
        )
    return ModWanted(name, {key: value for key, value in given.items() if key != "name"})


# ---- replies


def removed(removal: Removal, n_characters: int | None = None) -> Object:
    """``removed`` of a stream: how many tokens mods took back, and characters to drop.

    *n_characters* is given if the client has received another number than the tokens had.
    """
    n = removal.n_characters if n_characters is None else n_characters
    return {"tokens": removal.n_tokens, "characters": n}


def tool_calls_of(generation: Generation) -> list[ModCall] | UnsetType:
    """``tool_calls`` of a reply in an API that has none itself; UNSET without any."""
    return UNSET if generation.tool_calls is None else calls_of(generation.tool_calls)


def calls_of(payload: object) -> list[ModCall]:
    """The calls in what a mod gave to ``actions.tool_calls``: one, or a list of them.

    A call is ``{"id", "type", "function": {"name", "arguments"}}``, with arguments as JSON or as an
    object; ``{"name", "arguments"}`` is accepted too. Anything else becomes the arguments of one
    call of a function with an empty name.
    """
    if isinstance(payload, str):
        with contextlib.suppress(ValueError):
            payload = json_input.loads(payload)
    given = cast("list[object]", payload) if isinstance(payload, list) else [payload]
    return [_call(one) for one in given]


def _call(one: object) -> ModCall:
    whole: Mapping[str, Any] = cast("Object", one) if isinstance(one, dict) else {}
    inner = whole.get("function")
    function: Mapping[str, Any] = cast("Object", inner) if isinstance(inner, dict) else whole
    name, id_ = function.get("name"), whole.get("id")
    arguments: object = function.get("arguments", {})
    if not isinstance(name, str):
        name, arguments = "", cast("object", one)
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    if not isinstance(id_, str) or not id_:
        id_ = f"call_{uuid.uuid4().hex[:24]}"
    # What a mod decoded may have surrogates, which no reply can.
    called = CalledFunction(name=cleaned_text(name), arguments=cleaned_text(arguments))
    return ModCall(id=cleaned_text(id_), type="function", function=called)
