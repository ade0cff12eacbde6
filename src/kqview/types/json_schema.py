"""JSON schemas made of Python types, and the values of these types read back. Pure.

What a model is held to by a schema is in `kqview.types.closed_schema`.
"""

import json
import types
import typing
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol, cast

from kqview import json_input
from kqview.errors import InvalidSampling, RequestError, shown

if TYPE_CHECKING:
    from typing_extensions import TypeVar  # with a default; checkers know it, nobody installs it

    Parsed = TypeVar("Parsed", default=Any)
    Parsed_co = TypeVar("Parsed_co", covariant=True, default=Any)
else:
    from typing import TypeVar

    Parsed = TypeVar("Parsed")
    Parsed_co = TypeVar("Parsed_co", covariant=True)


class HasJsonSchema(Protocol[Parsed_co]):
    """What makes a JSON schema and reads JSON, such as pydantic's TypeAdapter."""

    def json_schema(self) -> Mapping[str, Any]:
        """The schema."""
        ...

    def validate_json(self, data: str, /) -> Parsed_co:
        """The value that *data* describes."""
        ...


TypeOf = type[Parsed] | HasJsonSchema[Parsed]
"""What ``json_schema`` takes that says the type of `Generation.parsed`."""
SchemaLike = str | Mapping[str, object] | types.UnionType | TypeOf[Parsed]
"""What ``json_schema`` takes: text, a mapping, a type, or a TypeAdapter of pydantic."""


class SchemaText(str):
    """A JSON schema as text that knows the type it was made of."""

    read: Callable[[str], Any]
    """Makes a value of the type from JSON."""


def schema_text(schema: object) -> str:
    """*schema*, the option ``json_schema``, as text; a SchemaText if it is a type.

    Raises:
        InvalidSampling: No schema can be made of it.
    """
    if isinstance(schema, str):
        return schema
    if isinstance(schema, Mapping):
        given = cast("Mapping[str, object]", schema)
        _check_unwrapped(given)
        return _dumped(given)
    made, read = _of_type(schema)
    text = SchemaText(_dumped(made))
    text.read = read
    return text


def parsed(schema: str | None, text: str, finish_reason: str | None) -> Any:
    """The value in *text*, an answer that follows *schema*; of its type if it is a SchemaText.

    Raises:
        RequestError: There is no schema, the answer has not ended, or it ended before its JSON did.
        ValueError: What the type itself raises about the value.
    """
    if schema is None:
        raise RequestError(
            "parsed needs json_schema, and this generation has none; pass one, or use text",
            parameter="json_schema",
        )
    if finish_reason is None:
        raise RequestError(
            "parsed is known when the generation has ended; call read() or iterate to the end"
        )
    try:
        value = json_input.loads(text)
        # Further digits of a number may have been to come.
        is_whole = finish_reason != "length" or type(value) not in (int, float)
    except ValueError:
        value, is_whole = None, False
    if not is_whole:
        raise RequestError(
            f"the text ended with finish reason {finish_reason!r} before its JSON did: "
            f"{shown(text)}; raise max_tokens, or shorten what json_schema describes"
        )
    return schema.read(text) if isinstance(schema, SchemaText) else value


def _dumped(schema: Mapping[str, object]) -> str:
    try:
        json_input.check_value(schema)
        return json.dumps(schema, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise refused(f"json_schema cannot be written as JSON: {error}") from error


def _of_type(given: object) -> tuple[Mapping[str, Any], Callable[[str], Any]]:
    """Its schema, and how to read a value of it."""
    source: Any = given
    kind: type[object] = type(given)
    is_type = isinstance(given, type)
    try:
        if is_type and callable(getattr(source, "model_json_schema", None)):
            return source.model_json_schema(), source.model_validate_json
        if not is_type and hasattr(kind, "model_json_schema"):
            name = kind.__name__
            raise refused(f"json_schema is an instance of {name}; pass the class {name} itself")
        if not is_type and callable(getattr(source, "validate_json", None)):
            return source.json_schema(), source.validate_json
        if is_type or isinstance(source, types.UnionType) or typing.get_origin(source) is not None:
            adapter: Any = import_module("pydantic").TypeAdapter(source)
            return adapter.json_schema(), adapter.validate_json
    except ModuleNotFoundError as missing:
        if (missing.name or "").partition(".")[0] != "pydantic":
            raise
        raise refused(
            f"json_schema is {shown(source)}, a type, and pydantic, which makes schemas of types, "
            "is not installed; run pip install pydantic, or pass a JSON schema"
        ) from missing
    except InvalidSampling:
        raise
    except Exception as error:  # pydantic has many kinds, and types bring code of their own
        reason = " ".join(str(error).split())[:300]
        raise refused(f"json_schema: {shown(source)} has no JSON schema: {reason}") from error
    if isinstance(source, list | tuple | set | frozenset):
        raise refused(
            f"json_schema is {shown(cast('object', source))}, and no schema; for one of several "
            'values pass {"enum": [...]}'
        )
    raise refused(
        "json_schema must be a JSON schema as text or a mapping, or a type such as a pydantic "
        f"model, got {shown(source)}"
    )


def _check_unwrapped(schema: Mapping[str, object]) -> None:
    """Refuse what OpenAI's API has around a schema, which as a schema would mean something else."""
    kind = schema.get("type")
    if kind == "json_object":
        raise refused(
            'json_schema is a response_format of OpenAI\'s API; pass {"type": "object"} for any '
            "object"
        )
    inner = schema.get("json_schema")
    wrapper, path = schema, "['schema']"
    if kind == "json_schema" and isinstance(inner, Mapping):
        wrapper, path = cast("Mapping[str, object]", inner), "['json_schema']['schema']"
    is_wrapper = kind == "json_schema" or {"name", "strict"} & schema.keys()
    if is_wrapper and isinstance(wrapper.get("schema"), Mapping) and "properties" not in wrapper:
        raise refused(
            f"json_schema is a response_format of OpenAI's API; pass what is in its {path}"
        )


def refused(message: str) -> InvalidSampling:
    """The error of a schema."""
    return InvalidSampling(message, parameter="json_schema")
