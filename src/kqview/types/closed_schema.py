"""What a model is held to by a JSON schema: closed, because a model invents what nothing forbids.

In JSON Schema, an object whose schema lists its properties may have others as well. A small model
then writes properties of its own until its tokens are spent. `held` allows none but those listed,
as llama.cpp's own conversion of schemas does, unless the schema says otherwise. White space between
values is a choice of the model in the same way; it leaves none. And digits are: integers get the
bounds of an int64 (other numbers have theirs in constraint_child.py).

Pure. Bounded: nothing recurses into schemas, and the work on one is limited.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, Final, NamedTuple, TypeGuard, cast
from urllib.parse import unquote

from kqview import json_input
from kqview.errors import InvalidSampling
from kqview.types.json_schema import refused

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
# Formats to which llguidance holds a text.
_FORMATS: Final = {
    *("date", "date-time", "time", "duration", "email", "hostname"),
    *("ipv4", "ipv6", "uri", "uuid", "unknown"),
}
_STEPS_MAX: Final = 300_000  # well below a second
_OPEN: Final = "open"  # name of a copy of a definition, with a number


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
        root = _Closing(value).closed()
        given = root.get(_GUIDANCE, {})
        if _is_object(given) and not any(key in given for key in _SPACES):
            root[_GUIDANCE] = {**space, **given}
        text = json.dumps(root, ensure_ascii=False, separators=(",", ":"))
    except json_input.TooDeep as error:
        raise refused(f"json_schema cannot be read: {error}") from None
    except ValueError as error:
        if isinstance(error, InvalidSampling):
            raise
        return schema
    try:
        text.encode()
    except UnicodeEncodeError:  # escapes of lone surrogates
        return json.dumps(root, separators=(",", ":"))
    return text


class _Role(NamedTuple):
    """What becomes of a schema.

    Attributes:
        is_part: Whether it describes an object together with what it combines and refers to.
        is_copy: Whether it is a copy of a definition, or a part of one.
        names: Properties that it allows beside its own; None if it stays open.
        patterns: The same of patterns.
        branches: Key and index of a choice's branch -> properties that this branch allows.
    """

    is_part: bool = False
    is_copy: bool = False
    names: Iterable[str] | None = None
    patterns: Iterable[str] = ()
    branches: Mapping[tuple[str, int], Iterable[str]] = MappingProxyType({})


_PLAIN: Final = _Role()
_SEALED: Final = _Role(names=())
_PART: Final = _Role(is_part=True)
_COPY: Final = _Role(is_part=True, is_copy=True)


class _Closing:
    """Makes a schema of another one in which objects are closed.

    An object schema that stands alone gets ``additionalProperties: false``. Where several schemas
    describe one object (``allOf``, ``$ref``, ``anyOf`` and ``oneOf`` beside properties or each
    other), closing each of them would leave nothing that fits all: they are a group. Its outermost
    schema allows the properties of all of them and no others, each branch of a choice the same
    without those of the other branches, and the rest stays open. A definition that a group uses may
    be used elsewhere too, so the group refers to an open copy of it.
    """

    def __init__(self, root: dict[str, Any]) -> None:
        """*root* is changed: see `_normalized`."""
        self._root = root
        self._n_left = _STEPS_MAX
        self._schemas: set[int] = set()  # of the values: their ids, in a tree that stays as it is
        self._made: dict[int, dict[str, Any]] = {}  # by id, those that are no part of a group
        self._waiting: list[tuple[dict[str, Any], dict[str, Any], _Role | None]] = []  # to fill
        self._copies: dict[str, str] = {}  # reference to a definition -> to its open copy
        self._definitions: dict[str, Any] = {}  # those copies

    def closed(self) -> dict[str, Any]:
        """The schema with every object closed."""
        if not _is_object(self._root.get("$defs", {})):
            return self._root  # llguidance refuses it
        self._schemas = {id(schema) for schema in self._normalized()}
        made = self._copied(self._root)
        while self._waiting:
            self._fill(*self._waiting.pop())
        if self._definitions:
            made["$defs"] = {**made.get("$defs", {}), **self._definitions}
        return made

    def _copied(self, value: Any) -> Any:
        """A copy of *value*, whose objects are filled later."""
        if isinstance(value, list):
            return [self._copied(one) for one in cast("list[object]", value)]
        if not _is_object(value) or not (
            id(value) in self._schemas
            or any(isinstance(one, dict | list) for one in value.values())
        ):
            return value
        if id(value) not in self._made:
            self._made[id(value)] = self._begun(value, None)
        return self._made[id(value)]

    def _begun(self, schema: dict[str, Any], role: _Role | None) -> dict[str, Any]:
        """What *schema* becomes in this *role*, None for that which it has by itself."""
        made: dict[str, Any] = {}
        self._waiting.append((made, schema, role))
        return made

    def _fill(self, made: dict[str, Any], schema: dict[str, Any], role: _Role | None) -> None:
        if role is None:
            role = self._role_of(schema) if id(schema) in self._schemas else _PLAIN
        for key, given in schema.items():
            if role.is_copy and key in _OF_ROOT:
                continue
            if role.is_part and key in _COMBINING and isinstance(given, list):
                made[key] = [
                    self._begun(one, role._replace(names=role.branches.get((key, i)), branches={}))
                    if _is_object(one)
                    else one
                    for i, one in enumerate(cast("list[object]", given))
                ]
            elif role.is_part and key == "$ref" and (target := self._target(schema)) is not None:
                made[key] = self._open_copy(given, target)
            elif key in _BY_NAME and _is_object(given):
                made[key] = {name: self._copied(one) for name, one in given.items()}
            else:
                made[key] = self._copied(given)
        if role.names is None:
            return
        for key, more in (("properties", role.names), ("patternProperties", role.patterns)):
            if added := {name: True for name in more if name not in _object(schema, key)}:
                made[key] = {**_object(made, key), **added}
        made[_CLOSES] = False

    def _role_of(self, schema: dict[str, Any]) -> _Role:
        """The role of a schema that is no part of another one's group."""
        n_combined = 0
        if not _REFERRING.isdisjoint(schema):
            n_combined = len(_branches(schema, "allOf")) + ("$ref" in schema)
            n_combined += sum(bool(_branches(schema, key)) for key in _CHOICES)
        if n_combined == 0:
            return _SEALED if _describes(schema) and _CLOSES not in schema else _PLAIN
        if n_combined == 1 and not _describes(schema):
            return _PLAIN  # it is what it refers to, or one of its branches: closed themselves
        group = self._group(schema)
        if not any(map(_describes, group)):
            return _PLAIN
        # What refers to something that is not in this schema is not known.
        if any(_CLOSES in one or ("$ref" in one and self._target(one) is None) for one in group):
            return _PART
        allowed = _names(group)
        branches: dict[tuple[str, int], Iterable[str]] = {}
        for key in _CHOICES:
            own = {
                i: _names(self._group(branch))
                for i, branch in enumerate(cast("list[object]", schema.get(key) or ()))
                if _is_object(branch)
            }
            if len(own) < 2:
                continue
            rest = _names(self._group(schema, without=key))
            self._spend(len(own) * len(allowed))
            for i, names in own.items():
                fitting = [name for name in allowed if name in rest or name in names]
                if len(fitting) < len(allowed):
                    branches[key, i] = fitting
        patterns = dict.fromkeys(p for one in group for p in _object(one, "patternProperties"))
        return _Role(is_part=True, names=allowed, patterns=patterns, branches=branches)

    def _group(self, schema: dict[str, Any], without: str = "") -> list[dict[str, Any]]:
        """The schemas that may describe an object together with *schema*, which is first.

        *without*: "anyOf" or "oneOf" of *schema* to leave out.
        """
        found: dict[int, dict[str, Any]] = {}
        waiting = [schema]
        while waiting:
            one = waiting.pop()
            if id(one) in found:
                continue
            found[id(one)] = one
            self._spend(1 + len(_object(one, "properties")))
            keys = [key for key in _COMBINING if one is not schema or key != without]
            combined = [branch for key in keys for branch in _branches(one, key)]
            if (target := self._target(one)) is not None:
                combined.insert(0, target)
            waiting += combined[::-1]
        return list(found.values())

    def _open_copy(self, reference: str, target: dict[str, Any]) -> str:
        """A reference to an open copy of the definition *target*."""
        if reference not in self._copies:
            self._spend(_size(target))
            name = f"{_OPEN}-{len(self._copies)}"
            while name in _object(self._root, "$defs"):
                self._spend(1)
                name += "-"
            self._copies[reference] = f"#/$defs/{name}"
            self._definitions[name] = self._begun(target, _COPY)
        return self._copies[reference]

    def _normalized(self) -> list[dict[str, Any]]:
        """Every schema that may describe a value, in the form that the rest of this class reads."""
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
            _forget(schema)
            if _TOUCHED.isdisjoint(schema):
                continue
            found[id(schema)] = schema
            # llguidance does not know it: what `_role_of` says is its meaning.
            if isinstance(is_open := schema.get(_UNEVALUATED), bool):
                del schema[_UNEVALUATED]
                if is_open:
                    schema.setdefault(_CLOSES, True)
                elif _REFERRING.isdisjoint(schema):
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
            raise refused(
                "json_schema combines too many schemas; shorten it, or give its objects "
                "additionalProperties"
            )

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
_REFERRING: Final = frozenset({"$ref", *_COMBINING})
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


def _forget(schema: dict[str, Any]) -> None:
    """Leave out what forbids nothing in JSON Schema, but which llguidance refuses."""
    if isinstance(named := schema.get("format"), str) and named not in _FORMATS:
        del schema["format"]
    if schema.get("uniqueItems") is False:
        del schema["uniqueItems"]


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
