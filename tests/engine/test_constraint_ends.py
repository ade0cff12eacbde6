"""Constraints that end: digits of JSON numbers, and what finish_on_length="close" closes."""

from __future__ import annotations

import json
import re
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import jsonschema_rs
import pytest

from kqview import Engine
from kqview.errors import InvalidSampling
from kqview.mods import Added, Sampled
from tests.support import tiny_gguf
from tests.support.rows import random_ids

if TYPE_CHECKING:
    from collections.abc import Iterator

pytest.importorskip("llguidance")
PROMPT = random_ids(12)
INT64_MAX = 2**63 - 1


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """Its tokens are bytes, and it ends no text of its own accord."""
    path = tmp_path_factory.mktemp("model") / "llama.gguf"
    with Engine(tiny_gguf.write_preset(path, "tiny_llama"), n_ctx=512, n_threads=1) as engine:
        yield engine


def preferring(characters: str) -> dict[int, float]:
    """A logit_bias: the first of *characters* wherever it is allowed, then the next one."""
    no_exponent = {ord(one): -1000.0 for one in "eE"}
    return no_exponent | {ord(one): 1000.0 * i for i, one in enumerate(reversed(characters), 1)}


# ---- numbers


@pytest.mark.parametrize(
    ("schema", "characters", "pattern"),
    [
        ({"type": "number"}, "7", r"7{17}"),
        ({"type": "number"}, "-7", r"-7{17}"),
        ({"type": "number"}, ".7", r"7\.7{16}"),
        ({"type": "number"}, ".0", r"0\.0{23}"),
        ({"type": "number"}, "e7", r"7e7{2}"),
        ({"type": "number"}, "e-2", r"-2e-22[0-9]"),
        ({"type": "number", "minimum": 1}, "7", r"7{17}"),
        ({"type": "number", "minimum": 10**17}, "7", r"7{18}"),
        ({"type": "number", "multipleOf": 0.01}, "17", r"1{15}"),
        ({"const": 1.25}, "7", r"1\.25"),
        ({"type": "integer"}, "7", r"7{19}"),
        ({"type": "integer"}, "-9", r"-9{18}"),
        ({"type": "integer", "maximum": 99}, "7", r"7{2}"),
        ({"type": ["integer", "null"]}, "9", r"9{18}"),
        ({}, "7", r"7{17}"),
        ({"items": {}, "type": "array", "minItems": 2, "maxItems": 2}, "7,]", r"\[7{17},7{17}\]"),
        ({"required": ["a"], "properties": {"a": {}}, "type": "object"}, "7", r'\{"a":7{17}\}'),
        # No numbers: they have the digits that are asked for.
        ({"type": "string", "maxLength": 40}, "7", r'"7{40}"'),
        ({"type": "string", "pattern": "^[0-9]{30,}$", "maxLength": 40}, "7", r'"7{40}"'),
        ({"const": "7" * 30}, "7", r'"7{30}"'),
    ],
)
def test_number_in_json_has_no_more_digits_than_readers_hold(
    model: Engine, schema: dict[str, Any], characters: str, pattern: str
) -> None:
    generation = model.generate(
        PROMPT, json_schema=schema, temperature=0, logit_bias=preferring(characters), max_tokens=99
    )
    text = generation.read()
    assert re.fullmatch(pattern, text), text
    assert generation.finish_reason == "stop"
    jsonschema_rs.validate(schema, json.loads(text))
    if schema.get("type") == "integer":
        assert abs(json.loads(text)) <= INT64_MAX


@pytest.mark.parametrize(("kind", "n"), [("integer", 19), ("number", 17)])
def test_number_in_a_grammar_of_llguidance_ends(model: Engine, kind: str, n: int) -> None:
    lark = f'%llguidance {{}}\nstart: %json {{"type": "{kind}"}} ","'
    bias = preferring("7")
    assert model.generate(PROMPT, grammar=lark, logit_bias=bias).read() == n * "7" + ","


def test_numbers_of_a_regex_are_its_own(model: Engine) -> None:
    text = model.generate(PROMPT, regex="[0-9]{40}", max_tokens=60).read()
    assert re.fullmatch("[0-9]{40}", text)


# ---- closing

RECORDS: dict[str, Any] = {
    "type": "array",
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "minLength": 2},
            "kind": {"enum": ["cat", "dog"]},
            "when": {"type": "string", "format": "date"},
            "tags": {"type": "array", "items": {"type": "string"}},
        },
        "required": ["name", "kind", "when", "tags"],
    },
}
TREE: dict[str, Any] = {
    "$ref": "#/$defs/node",
    "$defs": {
        "node": {
            "type": "object",
            "properties": {
                "value": {"type": "number"},
                "next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/node"}]},
            },
            "required": ["value", "next"],
        }
    },
}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("n", [26, 70, 200])
@pytest.mark.parametrize(
    ("schema", "characters"),
    [
        (RECORDS, '[{"a,'),
        (RECORDS, "["),
        (TREE, "{"),
        ({"type": "object"}, '{"a:,'),
        ({"type": "object", "properties": {"a": RECORDS, "b": RECORDS}}, '{"[ab'),
        ({"type": "string", "format": "email"}, "a"),
        ({"type": "string", "pattern": "^[a-z]+@[a-z]+[.]com$"}, "a"),
        ({"type": "integer", "multipleOf": 7, "minimum": 5}, "1"),
    ],
    ids=str,
)
def test_json_that_reaches_its_limit_is_closed_as_its_schema_allows(
    model: Engine, schema: dict[str, Any], characters: str, n: int, seed: int
) -> None:
    bias = {ord(one): 8.0 for one in characters}
    generation = model.generate(
        PROMPT, json_schema=schema, max_tokens=n, finish_on_length="close", temperature=1,
        top_k=0, seed=seed, logit_bias=bias,
    )  # fmt: skip
    text = generation.read()
    assert generation.finish_reason == "stop", text
    assert generation.usage.completion_tokens < n
    # Decimal: a number of the text may be larger than any float.
    jsonschema_rs.validate(schema, json.loads(text, parse_float=Decimal))


CLOSED: dict[str, Any] = {"temperature": 0, "finish_on_length": "close"}


def test_what_is_open_gets_all_tokens_that_its_end_leaves(model: Engine) -> None:
    options = {**CLOSED, "logit_bias": preferring('"a'), "max_tokens": 20}
    schema = {"type": "string", "minLength": 1}
    bias = {**preferring("a"), ord('"'): -50.0}
    text = model.generate(PROMPT, json_schema=schema, **{**options, "logit_bias": bias}).read()
    assert text == '"' + 17 * "a" + '"'


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({"regex": "a+ and [0-9]{2}"}, "a{10} and [0-9]{2}"),
        ({"regex": "a+b", "banned_tokens": [ord("b")]}, "a{18}"),
        ({"grammar": '%llguidance {}\nstart: /a+/ "." %json {"type": "null"}'}, r"a{12}\.null"),
    ],
    ids=str,
)
def test_other_constraints_are_closed_as_well(
    model: Engine, options: dict[str, Any], wanted: str
) -> None:
    generation = model.generate(
        PROMPT, max_tokens=18, logit_bias=preferring("a"), **CLOSED, **options
    )
    text = generation.read()
    assert re.fullmatch(wanted, text), text
    assert generation.finish_reason == ("length" if "banned_tokens" in options else "stop")


def test_what_needs_more_than_is_left_ends_by_its_length(model: Engine) -> None:
    schema = {"type": "string", "minLength": 30}
    generation = model.generate(PROMPT, json_schema=schema, max_tokens=20, **CLOSED)
    assert len(generation.read()) <= 20
    assert generation.finish_reason == "length"


def test_full_context_is_a_limit_too(model: Engine) -> None:
    ids = random_ids(model.n_ctx - 12)
    generation = model.generate(
        ids, json_schema={"type": "string"}, logit_bias=preferring("a"), max_tokens=99, **CLOSED
    )
    json.loads(generation.read())
    assert generation.finish_reason == "stop"


def test_steered_answer_is_closed_as_the_plain_one(model: Engine) -> None:
    options: dict[str, Any] = {
        "json_schema": RECORDS, "max_tokens": 90, "finish_on_length": "close", "temperature": 0,
        "logit_bias": {ord(one): 8.0 for one in '[{"a,'},
    }  # fmt: skip
    plain = model.generate(PROMPT, **options)
    jsonschema_rs.validate(RECORDS, json.loads(plain.read()))
    ids: list[int] = []
    taken_back: set[int] = set()

    def take_back(event: Any, actions: Any) -> Any:
        """Each third time, the last tokens: they are added again."""
        if isinstance(event, Added):
            ids.extend(event.added_tokens)
        n = len(ids)
        if not isinstance(event, Sampled) or n % 3 != 2 or n in taken_back:
            return None
        taken_back.add(n)
        again, ids[-2:] = ids[-2:], []
        return actions.backtrack(2, again)

    assert model.generate(PROMPT, mods=[take_back], **options).read() == plain.text
    assert len(taken_back) > 20


@pytest.mark.parametrize("options", [{}, {"grammar": 'root ::= "a"'}])
def test_nothing_is_closed_without_a_constraint_of_llguidance(
    model: Engine, options: dict[str, Any]
) -> None:
    with pytest.raises(InvalidSampling, match=r"finish_on_length.*json_schema, a regex or"):
        model.generate(PROMPT, finish_on_length="close", **options)
