"""Replies under 534 public schemas: each that ends validates, and none ends in digits."""

from __future__ import annotations

import json
import re
from collections import Counter
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import jsonschema_rs
import pytest

from kqview import Engine
from kqview.errors import InvalidSampling
from tests.support import json_suite

if TYPE_CHECKING:
    from collections.abc import Iterator

pytest.importorskip("llguidance")
pytestmark = pytest.mark.needs("json suite")

VALIDATORS: dict[str, Any] = {
    "draft2020-12": jsonschema_rs.Draft202012Validator,
    "draft7": jsonschema_rs.Draft7Validator,
    "draft2019-09": jsonschema_rs.Draft201909Validator,
    "draft6": jsonschema_rs.Draft6Validator,
    "draft4": jsonschema_rs.Draft4Validator,
}
# What llguidance refuses, and how many of the schemas: none of them is passed over in silence.
REFUSED = {
    "Unimplemented keys": 161,
    "is not present in a registry": 61,
    "a oneOf in which one value may fit several schemas": 12,
    "Unsatisfiable schema": 7,
    "Expected positive integer": 6,
    "Anchor .* does not exist": 5,
    "patternProperty regexes .* are not disjoint": 3,
    "Unknown format": 2,  # of schemas elsewhere, to which these refer
    "has too many digits": 1,
}
# llguidance reads the reference against an $id that, beside a $ref of this draft, has no effect.
MISREAD = {"ref.json: $ref prevents a sibling $id from changing the base uri"}


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine.demo(n_ctx=512, n_threads=1) as engine:
        yield engine


def outcome(engine: Engine, draft: str, name: str, schema: str, **options: Any) -> str:
    """The finish reason of a reply, which validates if it has ended; or a key of `REFUSED`."""
    try:
        generation = engine.generate(
            "They saw", json_schema=schema, max_tokens=64, temperature=1, **options
        )
    except InvalidSampling as refusal:
        reasons = [reason for reason in REFUSED if re.search(reason, str(refusal))]
        return reasons[0] if len(reasons) == 1 else f"{name}: {refusal}"
    text = generation.read()
    assert not re.search(r"\d{20}", re.sub(r'"(\\.|[^"\\])*"?', "", text)), text
    if generation.finish_reason == "stop" and name not in MISREAD:
        # Decimal: 9.639 is a multiple of 0.0001, and no float is.
        wanted = json.loads(schema, parse_float=Decimal)
        VALIDATORS[draft](wanted).validate(json.loads(text, parse_float=Decimal))
    return str(generation.finish_reason)


@pytest.mark.parametrize("every", [pytest.param(1, marks=pytest.mark.full), 20])
@pytest.mark.parametrize("finish", ["cut", "close"])
def test_reply_validates_or_its_schema_is_refused_with_the_reason(
    engine: Engine, every: int, finish: str
) -> None:
    schemas = json_suite.schemas()
    assert len(schemas) == 534
    found = Counter(
        outcome(engine, *one, seed=seed, finish_on_length=finish)
        for one in schemas[::every]
        for seed in range(3)
    )
    n_stopped, n_cut = found.pop("stop"), found.pop("length", 0)
    assert found.keys() <= REFUSED.keys(), found
    assert finish == "cut" or n_cut == 0
    if every == 1:
        assert {reason: n / 3 for reason, n in found.items()} == REFUSED
        assert n_stopped > 700
