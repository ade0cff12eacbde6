"""JSON schemas: made of Python types, and closed, because a model invents what nothing forbids.

In JSON Schema, an object whose schema lists its properties may have others as well. A small model
then writes properties of its own until its tokens are spent. `closed` allows none but those listed,
as llama.cpp's own conversion of schemas does, unless the schema says otherwise. White space between
values is a choice of the model in the same way; `held` leaves it none. And digits are: integers get
the bounds of an int64 (other numbers have theirs in constraint_child.py).

Pure. Bounded: nothing recurses, and the work on a schema is limited.
"""

import json
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeGuard, cast
from urllib.parse import unquote

from kqview import json_input
from kqview.errors import InvalidSampling, RequestError, shown

N_BYTES_MAX: Final = 2**20
"""Most bytes of a schema, as the core takes it."""

COMPACT: Final[Mapping[str, Any]] = {"whitespace_flexible": False}
"""Option ``x-guidance`` of a schema: no white space between values."""
LINES: Final[Mapping[str, Any]] = {"whitespace_pattern": r" |\n[ \t]{0,20}"}
"""The same: none, a space, or a newline and up to 20 blanks."""

_GUIDANCE: Final = "x-guidance"
_SPACES: Final = ("whitespace_flexible", "whitespace_pattern")
_CLOSES: Final = "additionalProperties"
_UNEVALUATED: Final = "unevaluatedProperties"
# llguidance reads bounds as float64, and fails at the smallest int64.
_INTEGERS: Final = (-(2**63) + 1024, 2**63 - 1)
_MULTIPLES: Final = (-(10**15), 10**15)
_STEPS_MAX: Final = 300_000  # well below a second
_OPEN: Final = "open"  # name of a copy of a definition, with a number


# ---- schemas of Python types

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
SchemaLike = str | Mapping[str, object] | type[Any] | types.UnionType | HasJsonSchema[Any]
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
        # Further digits may have been to come.
        is_whole = finish_reason != "length" or not isinstance(value, int | float)
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
        return json.dumps(schema, ensure_ascii=False, allow_nan=False)
    except RecursionError:
        limit = json_input.DEPTH_MAX
        raise _invalid(f"json_schema is nested too deep, the limit is {limit}") from None
    except (TypeError, ValueError) as error:
        raise _invalid(f"json_schema cannot be written as JSON: {error}") from error


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
            raise _invalid(f"json_schema is an instance of {name}; pass the class {name} itself")
        if not is_type and callable(getattr(source, "validate_json", None)):
            return source.json_schema(), source.validate_json
        if is_type or isinstance(source, types.UnionType) or typing.get_origin(source) is not None:
            adapter: Any = import_module("pydantic").TypeAdapter(source)
            return adapter.json_schema(), adapter.validate_json
    except ModuleNotFoundError as missing:
        if (missing.name or "").partition(".")[0] != "pydantic":
            raise
        raise _invalid(
            f"json_schema is {shown(source)}, a type, and pydantic, which makes schemas of types, "
            "is not installed; run pip install pydantic, or pass a JSON schema"
        ) from missing
    except InvalidSampling:
        raise
    except Exception as error:  # pydantic has many kinds, and types bring code of their own
        reason = " ".join(str(error).split())[:300]
        raise _invalid(f"json_schema: {shown(source)} has no JSON schema: {reason}") from error
    if isinstance(source, list | tuple | set | frozenset):
        raise _invalid(
            f"json_schema is {shown(cast('object', source))}, and no schema; for one of several "
            'values pass {"enum": [...]}'
        )
    raise _invalid(
        "json_schema must be a JSON schema as text or a mapping, or a type such as a pydantic "
        f"model, got {shown(source)}"
    )


def _check_unwrapped(schema: Mapping[str, object]) -> None:
    """Refuse what OpenAI's API has around a schema, which as a schema would mean something else."""
    kind = schema.get("type")
    if kind == "json_object":
        raise _invalid(
            'json_schema is a response_format of OpenAI\'s API; pass {"type": "object"} for any '
            "object"
        )
    inner = schema.get("json_schema")
    wrapper, path = schema, "['schema']"
    if kind == "json_schema" and isinstance(inner, Mapping):
        wrapper, path = cast("Mapping[str, object]", inner), "['json_schema']['schema']"
    is_wrapper = kind == "json_schema" or {"name", "strict"} & schema.keys()
    if is_wrapper and isinstance(wrapper.get("schema"), Mapping) and "properties" not in wrapper:
        raise _invalid(
            f"json_schema is a response_format of OpenAI's API; pass what is in its {path}"
        )


def _invalid(message: str) -> InvalidSampling:
    return InvalidSampling(message, parameter="json_schema")


# ---- what a model is held to


def held(schema: str, space: Mapping[str, Any] = COMPACT) -> str:
    """*schema* as a model is held to it: `closed`, with white space as *space* unless it says how.

    A schema that is not JSON, or too long for llguidance, is returned as it is: llguidance says
    what is wrong.

    Raises:
        InvalidSampling: It is nested too deeply, or closing it takes too much work.
    """
    if len(schema) > N_BYTES_MAX:
        return schema
    try:
        value: object = json_input.loads(schema)
        if value is True:
            value = {}
        if not _is_object(value):
            return schema
        root = value
        _Closing(root).run()
        given = root.get(_GUIDANCE, {})
        if _is_object(given) and not any(key in given for key in _SPACES):
            root[_GUIDANCE] = {**space, **given}
        text = json.dumps(root, ensure_ascii=False, separators=(",", ":"))
    except json_input.TooDeep as error:
        raise _invalid(f"json_schema cannot be read: {error}") from None
    except ValueError as error:
        if isinstance(error, InvalidSampling):
            raise
        return schema
    try:
        text.encode()
    except UnicodeEncodeError:  # escapes of lone surrogates
        return json.dumps(root, separators=(",", ":"))
    return text


class _Closing:
    """Closes the objects of one schema in place.

    An object schema that stands alone gets ``additionalProperties: false``. Where several schemas
    describe one object (``allOf``, ``$ref``, ``anyOf`` and ``oneOf`` beside properties or each
    other), closing each of them would leave nothing that fits all: they are a group. Its outermost
    schema allows the properties of all of them and no others, each branch of a choice the same
    without those of the other branches, and the rest stays open. A definition that a group uses may
    be used elsewhere too, so the group refers to an open copy of it.
    """

    def __init__(self, root: dict[str, Any]) -> None:
        self._root = root
        self._n_left = _STEPS_MAX
        self._before: dict[int, dict[str, Any]] = {}  # schemas that were changed, as they were
        self._parts: set[int] = set()  # schemas that belong to a group, by id
        self._copies: dict[str, str] = {}  # reference to a definition -> to its open copy

    def run(self) -> None:
        """Close every object."""
        if not _is_object(self._root.get("$defs", {})):
            return  # llguidance refuses it
        for schema in self._schemas():
            if id(schema) not in self._parts:
                self._close(schema)

    def _schemas(self) -> list[dict[str, Any]]:
        """Every schema that may describe a value, each before those inside of it."""
        found: dict[int, dict[str, Any]] = {}
        waiting: list[object] = [self._root]
        while waiting:
            schema = waiting.pop()
            if not _is_object(schema) or id(schema) in found:
                continue
            self._spend(1 + len(schema))
            if not _SAYING & schema.keys() and _LISTING & schema.keys():
                schema["type"] = "array"  # as llama.cpp reads it
            _bound(schema)
            if _TOUCHED.isdisjoint(schema):
                continue
            found[id(schema)] = schema
            # llguidance does not know it: what `_close` does is its meaning.
            if isinstance(is_open := schema.get(_UNEVALUATED), bool):
                del schema[_UNEVALUATED]
                if is_open:
                    schema.setdefault(_CLOSES, True)
                elif not {"$ref", *_COMBINING} & schema.keys():
                    schema.setdefault(_CLOSES, False)
                elif not _describes(schema):
                    schema["properties"] = {}
            self._require_tag(schema)
            waiting += _inner(schema)
            if "$ref" in schema:
                waiting.append(self._target(schema))
        return list(found.values())

    def _require_tag(self, schema: dict[str, Any]) -> None:
        """Require the property by which OpenAPI and pydantic tell the branches of a union apart.

        Pydantic does not name it as required where it has a default, but reads no value without it;
        and llguidance takes only a ``oneOf`` whose branches exclude each other.
        """
        tag = _object(schema, "discriminator").get("propertyName")
        if not isinstance(tag, str):
            return
        for branch in _branches(schema, "oneOf"):
            target = self._target(branch) or branch
            required = target.get("required", [])
            if tag in _object(target, "properties") and isinstance(required, list):
                names = cast("list[object]", required)
                self._spend(1 + len(names))
                if tag not in names:
                    target["required"] = [*names, tag]

    def _spend(self, n: int) -> None:
        self._n_left -= n
        if self._n_left < 0:
            raise _invalid(
                "json_schema combines too many schemas; shorten it, or give its objects "
                "additionalProperties"
            )

    def _close(self, schema: dict[str, Any]) -> None:
        n_combined = len(_branches(schema, "allOf")) + ("$ref" in schema)
        n_combined += sum(bool(_branches(schema, key)) for key in _CHOICES)
        if n_combined == 0:
            if _describes(schema) and _CLOSES not in schema:
                self._seal(schema)
            return
        if n_combined == 1 and not _describes(schema):
            return  # it is what it refers to, or one of its branches: these are closed themselves
        group = self._group(schema)
        if not any(map(_describes, group)):
            return
        is_stated = any(_CLOSES in one or self._is_unknown(one) for one in group)
        allowed = _names(group)
        sealed: list[tuple[dict[str, Any], Iterable[str]]] = [(schema, allowed)]
        for key in _CHOICES:
            branches = _branches(schema, key)
            if len(branches) < 2:
                continue
            rest = _names(self._group(schema, without=key))
            own = [_names(self._group(branch)) for branch in branches]
            self._spend(len(branches) * len(allowed))
            for branch, names in zip(branches, own, strict=True):
                fitting = [name for name in allowed if name in rest or name in names]
                if len(fitting) < len(allowed):
                    sealed.append((branch, fitting))
        patterns = dict.fromkeys(p for one in group for p in _object(one, "patternProperties"))
        self._open(schema)
        if not is_stated:
            for one, names in sealed:
                self._seal(one, names, patterns)

    def _group(self, schema: dict[str, Any], without: str = "") -> list[dict[str, Any]]:
        """The schemas that may describe an object together with *schema*, which is first.

        As they were before any change. *without*: "anyOf" or "oneOf" of *schema* to leave out.
        """
        found: dict[int, dict[str, Any]] = {}
        waiting = [schema]
        while waiting:
            one = waiting.pop()
            if id(one) in found:
                continue
            found[id(one)] = was = self._was(one)
            self._spend(1 + len(_object(was, "properties")))
            keys = [key for key in _COMBINING if one is not schema or key != without]
            combined = [branch for key in keys for branch in _branches(was, key)]
            if (target := self._target(was)) is not None:
                combined.insert(0, target)
            waiting += combined[::-1]
        return list(found.values())

    def _was(self, schema: dict[str, Any]) -> dict[str, Any]:
        return self._before.get(id(schema), schema)

    def _seal(
        self, schema: dict[str, Any], names: Iterable[str] = (), patterns: Iterable[str] = ()
    ) -> None:
        """Allow *schema* its own properties, *names* and *patterns*, and nothing else."""
        self._before.setdefault(id(schema), dict(schema))
        for key, more in (("properties", names), ("patternProperties", patterns)):
            if added := {name: True for name in more if name not in _object(schema, key)}:
                schema[key] = {**_object(schema, key), **added}
        schema[_CLOSES] = False

    def _open(self, schema: dict[str, Any]) -> None:
        """Leave the parts of a group open, *schema* and what it combines."""
        waiting = [schema]
        while waiting:
            one = waiting.pop()
            if id(one) in self._before:  # a reference had led to it before
                was = dict(self._before[id(one)])
                one.clear()
                one.update(was)
            self._parts.add(id(one))
            if self._target(one) is not None:
                self._before.setdefault(id(one), dict(one))
                one["$ref"] = self._open_copy(one["$ref"])
            waiting += [part for key in _COMBINING for part in _branches(one, key)]

    def _open_copy(self, reference: str) -> str:
        """A reference to an open copy of a definition."""
        waiting: list[dict[str, Any]] = []

        def copied(schema: dict[str, Any]) -> dict[str, Any]:
            copy = {key: part for key, part in self._was(schema).items() if key not in _OF_ROOT}
            waiting.append(copy)
            return copy

        def referred(wanted: str) -> str:
            if wanted not in self._copies:
                target = self._target({"$ref": wanted})
                assert target is not None
                self._spend(_size(target))
                definitions = self._root.setdefault("$defs", {})
                name = f"{_OPEN}-{len(self._copies)}"
                while name in definitions:
                    self._spend(1)
                    name += "-"
                self._copies[wanted] = f"#/$defs/{name}"
                definitions[name] = copied(target)
            return self._copies[wanted]

        made = referred(reference)
        while waiting:
            copy = waiting.pop()
            if self._target(copy) is not None:
                copy["$ref"] = referred(copy["$ref"])
            for key in _COMBINING:
                if branches := _branches(copy, key):
                    copy[key] = [copied(one) for one in branches]
        return made

    def _is_unknown(self, schema: dict[str, Any]) -> bool:
        """Whether it refers to something that is not in this schema."""
        return "$ref" in schema and self._target(schema) is None

    def _target(self, schema: dict[str, Any]) -> dict[str, Any] | None:
        """What *schema* refers to, if that is in this document."""
        reference = schema.get("$ref")
        if not isinstance(reference, str) or not (reference == "#" or reference[:2] == "#/"):
            return None
        found: object = self._root
        for step in reference.split("/")[1:]:
            self._spend(1)
            key = unquote(step).replace("~1", "/").replace("~0", "~")
            if _is_object(found):
                found = found.get(key)
            elif isinstance(found, list) and key.isdecimal() and len(key) < 7:
                items = cast("list[object]", found)
                found = items[int(key)] if int(key) < len(items) else None
            else:
                return None
        return found if _is_object(found) else None


_CHOICES: Final = ("anyOf", "oneOf")
_COMBINING: Final = ("allOf", *_CHOICES)
# What lists the elements of an array, and what says otherwise what a value is.
_LISTING: Final = {"items", "prefixItems"}
_SAYING: Final = {"type", "const", "enum", "properties", "$ref", *_COMBINING}
_OF_ROOT: Final = frozenset({"$defs", "definitions", "$id", "$schema", _GUIDANCE})
# What holds further schemas of values; those of conditions (not, if, contains) stay as they are.
_BY_NAME: Final = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_LISTS: Final = (*_COMBINING, "prefixItems", "items")
_SINGLE: Final = ("items", _CLOSES, "additionalItems", "unevaluatedItems")
_TOUCHED: Final = frozenset({"$ref", _UNEVALUATED, *_BY_NAME, *_LISTS, *_SINGLE})


def _inner(schema: dict[str, Any]) -> Iterator[object]:
    """The schemas of values inside of *schema*."""
    for key, given in schema.items():
        if key in _BY_NAME and _is_object(given):
            yield from given.values()
        if key in _LISTS and isinstance(given, list):
            yield from cast("list[object]", given)
        if key in _SINGLE:
            yield given


def _bound(schema: dict[str, Any]) -> None:
    """Bound integers, and multiples of a number, on each side where the schema does not."""
    given = schema.get("type")
    types = cast("list[object]", given) if isinstance(given, list) else [given]
    is_integer = "integer" in types and "number" not in types
    if not (is_integer or "multipleOf" in schema) or {"const", "enum"} & schema.keys():
        return
    low, high = _INTEGERS if is_integer else _MULTIPLES
    for name, exclusive, bound in (
        ("minimum", "exclusiveMinimum", low),
        ("maximum", "exclusiveMaximum", high),
    ):
        if exclusive not in schema:
            schema.setdefault(name, bound)


def _describes(schema: dict[str, Any]) -> bool:
    """Whether it lists properties, by name or by pattern."""
    return any(_is_object(schema.get(key)) for key in ("properties", "patternProperties"))


def _names(schemas: Iterable[dict[str, Any]]) -> dict[str, None]:
    """Properties that *schemas* list, in their order."""
    return dict.fromkeys(name for one in schemas for name in _object(one, "properties"))


def _branches(schema: dict[str, Any], key: str) -> list[dict[str, Any]]:
    given = schema.get(key)
    items = cast("list[object]", given) if isinstance(given, list) else []
    return [one for one in items if _is_object(one)]


def _object(schema: dict[str, Any], key: str) -> dict[str, Any]:
    given = schema.get(key)
    return given if _is_object(given) else {}


def _is_object(value: object) -> TypeGuard[dict[str, Any]]:
    return isinstance(value, dict)


def _size(value: object) -> int:
    """How many values are in *value*."""
    n, waiting = 0, [value]
    while waiting:
        one = waiting.pop()
        n += 1
        if isinstance(one, dict):
            waiting += cast("dict[str, object]", one).values()
        elif isinstance(one, list):
            waiting += cast("list[object]", one)
    return n
