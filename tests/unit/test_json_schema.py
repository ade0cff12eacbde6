"""JSON schemas: closed where they say nothing, made of types, and read back."""

from __future__ import annotations

import copy
import dataclasses
import json
import pickle
import sys
from typing import Any, Literal

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

pytest.importorskip("llguidance")

from kqview import Sampling
from kqview.errors import InvalidSampling
from kqview.types.closed_schema import LINES, N_BYTES_MAX, held
from kqview.types.json_schema import SchemaText, parsed
from tests.support.accepting import schema_accepts

A: dict[str, Any] = {
    "type": "object",
    "properties": {"a": {"type": "integer"}},
    "required": ["a"],
}
B: dict[str, Any] = {"properties": {"b": {"type": "integer"}}, "required": ["b"]}
DEFS = {"$defs": {"A": A}}
TO_A = {"$ref": "#/$defs/A"}


def branch(name: str) -> dict[str, Any]:
    """One of a choice, told apart by ``k``."""
    properties: dict[str, Any] = {name: {"type": "integer"}, "k": {"const": name}}
    return {"properties": properties, "required": ["k", name]}


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        (A, ['{"a":1}'], ['{"a":1,"z":1}', '{"a": 1}', '{"a":"x"}']),
        ({**A, "additionalProperties": True}, ['{"a":1,"z":1}'], ['{"z":1}']),
        ({**A, "additionalProperties": {"type": "null"}}, ['{"a":1,"z":null}'], ['{"a":1,"z":1}']),
        ({"type": "object"}, ["{}", '{"a":[1]}'], ["1", '{"a": 1}']),
        ({"type": "object", "properties": {}}, ["{}"], ['{"a":1}']),
        ({"patternProperties": {"^x": {"type": "null"}}}, ['{"x1":null}'], ['{"y":null}']),
        ({"items": {"type": "null"}}, ["[null]", "[]"], ["1", "{}", "[1]"]),
        # where a schema may be
        ({"type": "array", "items": A}, ['[{"a":1}]'], ['[{"a":1,"z":1}]']),
        ({"prefixItems": [A], "items": B, "type": "array"},
         ['[{"a":1},{"b":1}]'], ['[{"a":1,"b":1}]', '[{"a":1},{"b":1,"z":1}]']),
        ({"properties": {"x": A}, "type": "object"}, ['{"x":{"a":1}}'], ['{"x":{"a":1,"z":1}}']),
        ({"additionalProperties": A, "type": "object"},
         ['{"x":{"a":1}}'], ['{"x":{"a":1,"z":1}}']),
        ({**TO_A, **DEFS}, ['{"a":1}'], ['{"a":1,"z":1}']),
        ({"$ref": "#/definitions/A", "definitions": {"A": A}}, ['{"a":1}'], ['{"a":1,"z":1}']),
        ({"$ref": "#/x/A", "x": {"A": A}}, ['{"a":1}'], ['{"a":1,"z":1}']),
        ({"$ref": "#/$defs/~1%20~0", "$defs": {"/ ~": A}}, ['{"a":1}'], ['{"a":1,"z":1}']),
        ({"type": "object", "properties": {"n": {"$ref": "#"}}},
         ['{"n":{"n":{}}}'], ['{"n":{"z":1}}']),
        ({"anyOf": [TO_A, {"type": "null"}], **DEFS}, ["null", '{"a":1}'], ['{"a":1,"z":1}']),
        ({"allOf": [TO_A], "description": "d", **DEFS}, ['{"a":1}'], ['{"a":1,"z":1}']),
        # schemas that describe one object together
        ({"allOf": [A, B]}, ['{"a":1,"b":2}'], ['{"a":1}', '{"a":1,"b":2,"z":3}']),
        ({"allOf": [TO_A, B], **DEFS}, ['{"a":1,"b":2}'], ['{"a":1}', '{"a":1,"b":2,"z":3}']),
        ({**TO_A, **B, **DEFS}, ['{"a":1,"b":2}'], ['{"b":1}', '{"b":2,"a":1,"z":3}']),
        # the definition of such a one stays closed where it stands alone
        ({"type": "object", "properties": {"m": {"allOf": [TO_A, B]}, "s": TO_A}, **DEFS},
         ['{"m":{"a":1,"b":2},"s":{"a":1}}'],
         ['{"m":{"a":1},"s":{"a":1}}', '{"m":{"a":1,"b":2},"s":{"a":1,"b":2}}']),
        ({"$ref": "#/$defs/C", "$defs": {
            "A": A, "B": {"allOf": [TO_A, B]},
            "C": {"allOf": [{"$ref": "#/$defs/B"}, {"properties": {"c": {"type": "null"}}}]}}},
         ['{"a":1,"b":2,"c":null}', '{"a":1,"b":2}'], ['{"a":1,"b":2,"z":1}', '{"a":1}']),
        ({"allOf": [{"patternProperties": {"^x": {"type": "null"}}}, B]},
         ['{"b":1,"x1":null}'], ['{"b":1,"x1":1}', '{"b":1,"y":null}']),
        ({**A, "anyOf": [{"required": ["a"]}, {"required": ["a", "a"]}]},
         ['{"a":1}'], ['{"a":1,"z":1}']),
        # a choice beside properties: no branch has those of the other
        *(({"type": "object", "properties": {"k": {}}, key: [branch("x"), branch("y")]},
           ['{"k":"x","x":1}', '{"k":"y","y":1}'],
           ['{"k":"x","x":1,"y":1}', '{"k":"x","x":1,"z":1}', '{"k":"x"}'])
          for key in ("anyOf", "oneOf")),
        # what says itself what else there may be stays as it is, and what it is combined with
        ({"allOf": [TO_A, {**B, "additionalProperties": True}], **DEFS},
         ['{"a":1,"b":2,"z":3}'], ['{"b":2}']),
        ({**A, "unevaluatedProperties": True}, ['{"a":1,"z":1}'], []),
        ({"allOf": [A, B], "unevaluatedProperties": False},
         ['{"a":1,"b":2}'], ['{"a":1,"b":2,"z":3}']),
        ({"type": "object", "unevaluatedProperties": False}, ["{}"], ['{"a":1}']),
        # names of keywords as names of properties
        ({"type": "object", "properties": {"$ref": {"type": "null"}, "properties": A}},
         ['{"$ref":null,"properties":{"a":1}}'], ['{"properties":{"a":1,"z":1}}', '{"z":1}']),
        (True, ["[1,2]", '{"a":1}'], ["[1, 2]"]),
    ],
)  # fmt: skip
def test_object_has_the_properties_that_are_listed(schema: Any, good: list[str], bad: list[str]):
    given = json.dumps(schema)
    text = held(given)
    assert [one for one in good if not schema_accepts(text, one)] == []
    assert [one for one in bad if schema_accepts(text, one)] == []
    if "unevaluated" not in given:  # which llguidance does not know: nothing is allowed anew
        assert [one for one in good if not schema_accepts(given, one)] == []


def test_union_with_a_discriminator_has_it_in_every_value():
    """As pydantic describes a union whose tags have defaults."""
    tagged = {
        name: {"type": "object", "properties": {"kind": {"const": name, "default": name}, name: {}}}
        for name in "ab"
    }
    union = {
        "oneOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}],
        "discriminator": {"propertyName": "kind", "mapping": {"a": "#/$defs/a"}},
    }
    schema = held(json.dumps({"type": "array", "items": union, "$defs": tagged}))
    assert schema_accepts(schema, '[{"kind":"a"},{"kind":"b","b":1}]')
    for wrong in ('[{"a":1}]', "[{}]", '[{"kind":"a","b":1}]'):
        assert not schema_accepts(schema, wrong)
    for tag in (None, 1, "other"):  # which says nothing
        given = {**union, "discriminator": {"propertyName": tag}, "$defs": tagged}
        assert "required" not in held(json.dumps(given))


def test_white_space_is_what_the_schema_says():
    spaced = '{ "a":\n  1 }'
    assert not schema_accepts(held(json.dumps(A)), spaced)
    assert schema_accepts(held(json.dumps(A), LINES), spaced)
    for options in ({"whitespace_flexible": True}, {"whitespace_pattern": "\\s{0,3}"}):
        assert schema_accepts(held(json.dumps({**A, "x-guidance": options})), spaced)
    other = held(json.dumps({**A, "x-guidance": {"key_separator": ": "}}))
    assert schema_accepts(other, '{"a": 1}')
    assert not schema_accepts(other, '{"a":  1}')


def test_format_that_is_not_known_forbids_nothing():
    for name in ("password", "path", "regex", "json-string"):  # as pydantic writes them
        schema = {"items": {"type": "string", "format": name}, "uniqueItems": False}
        assert schema_accepts(held(json.dumps(schema)), '["any","any"]')
    named: dict[str, Any] = {"properties": {"format": {"type": "string", "format": "uuid"}}}
    assert not schema_accepts(held(json.dumps(named)), '{"format":"any"}')
    assert '"uniqueItems":true' in held('{"items": {}, "uniqueItems": true}')


@pytest.mark.parametrize(
    "text",
    ["nope", "[1]", "1", '{"const": NaN', " " * N_BYTES_MAX + "{}"],
    ids=lambda text: text[:12],
)  # fmt: skip
def test_what_is_no_schema_is_left_to_llguidance(text: str):
    assert held(text) == text


def test_half_a_surrogate_pair_stays_an_escape():
    assert json.loads(held(r'{"const": "\ud800", "title": "é"}'))["const"] == "\ud800"
    held(r'{"const": "\ud800"}').encode()


def chain(n: int, *, times: int = 1) -> dict[str, Any]:
    """Definitions, each of which combines the next one with a property."""
    definitions: dict[str, Any] = {
        f"D{i}": {"allOf": [{"$ref": f"#/$defs/D{i + 1}"}] * times, "properties": {f"n{i}": {}}}
        for i in range(n)
    }
    return {"$ref": "#/$defs/D0", "$defs": {**definitions, f"D{n}": A}}


def test_long_chain_of_definitions_is_closed():
    text = held(json.dumps(chain(40, times=2)))
    assert schema_accepts(text, '{"a":1,"n39":1,"n0":1}')
    assert not schema_accepts(text, '{"a":1,"z":1}')


def choices(n: int) -> dict[str, Any]:
    """Properties beside as many branches."""
    branches: list[dict[str, Any]] = [{"properties": {f"b{i}": {}}} for i in range(n)]
    return {"properties": {f"p{i}": {} for i in range(n)}, "anyOf": branches}


@pytest.mark.parametrize("schema", [chain(5000), choices(3000)], ids=["chain", "choices"])
def test_schema_that_combines_too_much_is_refused(schema: dict[str, Any]):
    with pytest.raises(InvalidSampling, match="combines too many") as failure:
        held(json.dumps(schema))
    assert failure.value.parameter == "json_schema"


def test_large_schema_without_combinations_is_closed():
    many: dict[str, Any] = {"type": "object", "properties": {f"p{i}": {} for i in range(60_000)}}
    assert json.loads(held(json.dumps(many)))["additionalProperties"] is False


KEYS = st.sampled_from(
    ["properties", "allOf", "anyOf", "oneOf", "$ref", "items", "a", "$defs", "patternProperties",
     "additionalProperties", "unevaluatedProperties", "x-guidance", "type"]
)  # fmt: skip
LEAVES = st.none() | st.booleans() | st.sampled_from(["#", "#/$defs/a", "#/a/0", "#/allOf/1", "x"])


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.recursive(
        LEAVES,
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=4),
        max_leaves=20,
    )
)
def test_any_json_stays_json(schema: Any):
    given = json.dumps(schema)
    json.loads(held(given))


# ---- types


@dataclasses.dataclass
class Place:
    name: str
    height: int | None = None


def test_schema_of_a_type_reads_values_of_it_back():
    pydantic = pytest.importorskip("pydantic")
    person: Any = pydantic.create_model("Person", name=(str, ...), age=(int, ...))
    cases: list[tuple[Any, str, Any]] = [
        (person, '{"name":"Tom","age":7}', person(name="Tom", age=7)),
        (Place, '{"name":"Rila","height":null}', Place("Rila")),
        (list[Place], '[{"name":"Rila"}]', [Place("Rila")]),
        (Literal["x", "y"], '"y"', "y"),
        (int | None, "null", None),
        (pydantic.TypeAdapter(dict[str, int]), '{"a":1}', {"a": 1}),
    ]
    for source, text, value in cases:
        sampling = Sampling(json_schema=source)
        schema = sampling.json_schema
        assert isinstance(schema, SchemaText)
        assert schema_accepts(held(schema), text)
        assert parsed(schema, text, "stop") == value
        again = dataclasses.replace(sampling, seed=1).json_schema
        assert isinstance(again, SchemaText)
        assert parsed(again, text, "stop") == value
    assert not schema_accepts(held(schema_of(person)),
                              '{"name":"Tom","age":7,"z":1}')  # fmt: skip
    with pytest.raises(ValueError, match="height"):
        parsed(schema_of(Place), '{"name":"x","height":"y"}', "stop")


def schema_of(source: Any) -> str:
    schema = Sampling(json_schema=source).json_schema
    assert isinstance(schema, str)
    return schema


def test_sampling_with_a_type_can_be_copied_and_pickled():
    pytest.importorskip("pydantic")
    sampling = Sampling(json_schema=list[int])
    for twin in (copy.deepcopy(sampling), pickle.loads(pickle.dumps(sampling))):
        assert twin == sampling
        assert isinstance(twin.json_schema, SchemaText)
        assert parsed(twin.json_schema, "[1]", "stop") == [1]


class NotAType:
    def __repr__(self) -> str:
        return "NotAType()"


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (7, "must be a JSON schema as text or a mapping, or a type .* got 7"),
        (NotAType(), r"must be a JSON schema .* got NotAType\(\)"),
        (NotAType, "NotAType.* has no JSON schema"),
        ({"type": "json_schema", "json_schema": {"name": "x", "schema": {}}},
         r"response_format .* \['json_schema'\]\['schema'\]"),
        ({"type": "json_object"}, r'response_format .* pass \{"type": "object"\}'),
        (["yes", "no"], r'for one of several values pass \{"enum"'),
        ({"name": "x", "strict": True, "schema": {"type": "object"}},
         r"response_format .* \['schema'\]"),
    ],
)  # fmt: skip
def test_what_has_no_schema_is_refused(given: Any, words: str):
    pytest.importorskip("pydantic")
    with pytest.raises(InvalidSampling, match=words) as failure:
        Sampling(json_schema=given)
    assert failure.value.parameter == "json_schema"


def test_instance_of_a_model_is_told_to_be_a_class():
    pydantic = pytest.importorskip("pydantic")
    person: Any = pydantic.create_model("Person", name=(str, ...))
    with pytest.raises(InvalidSampling, match="pass the class Person itself"):
        Sampling(json_schema=person(name="Tom"))


def test_missing_pydantic_is_told_with_what_to_install(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "pydantic", None)
    with pytest.raises(InvalidSampling, match="pip install pydantic, or pass a JSON schema"):
        Sampling(json_schema=list[int])
