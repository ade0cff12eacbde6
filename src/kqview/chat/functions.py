"""Functions as tools: what a Python function's name, hints and docstring say, as a tool. Pure."""

import enum
import inspect
import json
import re
import types
import typing
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Final, Literal, Union, cast

from kqview.errors import InvalidSampling, RequestError
from kqview.types.json_schema import schema_text

ToolLike = Mapping[str, Any] | type[Any] | Callable[..., Any]
"""What ``tools`` takes: a tool as in OpenAI's API, a pydantic model, or a Python function."""

_BASIC: Final[Mapping[Any, Mapping[str, Any]]] = {
    str: {"type": "string"},
    int: {"type": "integer"},
    float: {"type": "number"},
    bool: {"type": "boolean"},
    None: {"type": "null"},
    types.NoneType: {"type": "null"},
    list: {"type": "array"},
    dict: {"type": "object"},
    Any: {},
}
_ARGUMENTS: Final = re.compile(
    r"^(?:Args|Arguments|Parameters):[ \t]*\n((?:[ \t]+\S.*\n?|\n)+)", re.M
)
_SECTION: Final = re.compile(r"^[A-Z]\w+:[ \t]*$", re.M)
_ENTRY: Final = re.compile(r"(\*{0,2}\w+)\s*(?:\([^)]*\))?\s*:\s*(.*)")


def tool_of(where: str, function: Callable[..., Any]) -> dict[str, Any]:
    """*function* as a function of OpenAI's API.

    Its parameters follow from the hints, and those without a default are required. Descriptions are
    the docstring's: its text, and the entries of its section ``Args`` in Google's style; or the
    text in ``Annotated[int, "how many"]``.

    Raises:
        RequestError: It has no name, or a parameter has no hint or one that JSON cannot express;
            *where* begins the message.
    """
    name = getattr(function, "__name__", "")
    if not name.isidentifier():
        raise _refused(f"{where} is a function without a name; write it with def")
    about, entries = _described(inspect.getdoc(function) or "")
    try:
        hints = typing.get_type_hints(function, include_extras=True)
        parameters = inspect.signature(function).parameters.values()
    except (NameError, TypeError, ValueError) as error:
        raise _refused(
            f"{where}: the hints of {name} cannot be read: {error}; mend them"
        ) from error
    definitions: dict[str, Any] = {}
    properties: dict[str, Any] = {}
    required: list[str] = []
    for one in parameters:
        if one.kind not in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY):
            raise _refused(f"{where}: {name} takes {one}, and a call names all arguments; drop it")
        if one.name not in hints:
            raise _refused(
                f"{where}: parameter {one.name!r} of {name} has no type hint; add one, such as "
                f"{one.name}: str"
            )
        schema = _schema(f"{where}: parameter {one.name!r} of {name}", hints[one.name], definitions)
        if one.name in entries:
            schema = {**schema, "description": entries[one.name]}
        properties[one.name] = schema
        if one.default is one.empty:
            required.append(one.name)
    whole: dict[str, Any] = {"type": "object", "properties": properties, "required": required}
    if definitions:
        whole["$defs"] = definitions
    return {"name": name, **({"description": about} if about else {}), "parameters": whole}


def _described(doc: str) -> tuple[str, dict[str, str]]:
    """The text of a docstring before its sections, and its entries for arguments."""
    section, found = _SECTION.search(doc), _ARGUMENTS.search(doc)
    entries: dict[str, str] = {}
    name = ""
    lines = inspect.cleandoc("\n" + found[1]).splitlines() if found is not None else []
    for line in lines:
        entry = None if line[:1].isspace() else _ENTRY.fullmatch(line)
        if entry is not None:
            name = entry[1]
            entries[name] = entry[2]
        elif name:
            entries[name] = f"{entries[name]} {line.strip()}".strip()
    return (doc[: section.start()] if section else doc).strip(), entries


def _schema(where: str, hint: Any, definitions: dict[str, Any]) -> dict[str, Any]:
    """The JSON schema of a hint; what it defines is added to *definitions*."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        words = next((one for one in inner[1:] if isinstance(one, str)), None)
        schema = _schema(where, inner[0], definitions)
        return schema if words is None else {**schema, "description": words}
    if origin in (Union, types.UnionType):
        return {"anyOf": [_schema(where, one, definitions) for one in inner]}
    if origin is list:
        return {"type": "array", "items": _schema(where, inner[0], definitions)}
    if origin is dict and inner[0] is str:
        return {"type": "object", "additionalProperties": _schema(where, inner[1], definitions)}
    if origin is Literal:
        return _choices(inner)
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return _choices([one.value for one in hint])
    try:
        if hint in _BASIC:
            return dict(_BASIC[hint])
        made: dict[str, Any] = json.loads(schema_text(cast("object", hint)))
    except (InvalidSampling, TypeError) as error:
        raise _refused(f"{where} is {hint!r}, which has no JSON schema: {error}") from error
    definitions.update(made.pop("$defs", {}))
    return made


def _choices(values: Any) -> dict[str, Any]:
    kinds = {type(one) for one in cast("list[object]", values)}
    kind = _BASIC.get(kinds.pop(), {}) if len(kinds) == 1 else {}
    return {**kind, "enum": list(values)}


def _refused(message: str) -> RequestError:
    return RequestError(message, parameter="tools")
