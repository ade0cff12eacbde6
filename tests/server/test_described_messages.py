"""Messages that openapi.json shows, and failures, fit its schemas, with no field besides.

Events and replies are encoded from the types that describe them, so they need no comparison.
"""

from __future__ import annotations

import copy
import json
import re
from typing import TYPE_CHECKING, Any

import pytest

from kqview.server.app import DIALECTS
from kqview.server.web.endpoint import Upload
from kqview.server.web.openapi import describe
from tests.support import mia4
from tests.support.serving import serving

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kqview.server.web.endpoint import Operation
    from tests.support.serving import Served

pytestmark = pytest.mark.full

jsonschema_rs = pytest.importorskip("jsonschema_rs")

REFUSED = [
    one
    for dialect in DIALECTS
    for one in dialect.OPERATIONS
    if one.method == "POST" and one.body not in (None, Upload) and one.access != "admin"
]


@pytest.fixture(scope="module")
def described() -> dict[str, Any]:
    """The description, with schemas that take no field that they do not name."""
    table = [one for dialect in DIALECTS for one in dialect.OPERATIONS]
    closed = copy.deepcopy(describe(table, version="1", has_keys=False))
    for schema in closed["components"]["schemas"].values():
        if "properties" in schema:
            schema["additionalProperties"] = False
    return closed


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving(mia4.config()) as one:
        yield one


def wrong(value: Any, schema: dict[str, Any], described: dict[str, Any]) -> list[str]:
    """What of *value* does not fit."""
    whole = {**schema, "components": described["components"]}
    validator = jsonschema_rs.Draft202012Validator(whole)
    return [f"{one.instance_path}: {one.message[:300]}" for one in validator.iter_errors(value)]


def test_messages_that_are_shown_fit_their_schemas(described: dict[str, Any]):
    operations = [one for methods in described["paths"].values() for one in methods.values()]
    shown = [one["x-events"] for one in operations if "x-events" in one]
    shown += [one["messages"] for one in described["x-websockets"].values()]
    for sample in (one for samples in shown for one in samples):
        assert ("schema" in sample) == ("data" in sample)
        assert "data" not in sample or wrong(sample["data"], sample["schema"], described) == []
    streams = [
        one
        for one in operations
        if "text/event-stream" in one["responses"].get("200", {}).get("content", {})
    ]
    assert [one["operationId"] for one in streams if not one.get("x-events")] == []


@pytest.mark.parametrize("one", REFUSED, ids=lambda one: one.path)
def test_failures_fit_their_schemas(served: Served, described: dict[str, Any], one: Operation):
    assert one.failure is not None
    errors = described["paths"][one.path]["post"]["responses"]
    long = {"prompt": "word " * 3000, "messages": [{"role": "user", "content": "word " * 3000}],
            "input": "word " * 3000, "stream": True}  # fmt: skip
    with served.client() as client:
        replies = [
            client.post(re.sub(r"{\w+}", "x", one.path), content=body)
            for body in (b"no JSON", json.dumps(long).encode())
        ]
    failures = [reply for reply in replies if reply.status_code >= 400]
    assert failures
    for reply in failures:
        name = errors[str(reply.status_code)]["$ref"].rpartition("/")[2]
        content = described["components"]["responses"][name]["content"]
        assert wrong(reply.json(), content["application/json"]["schema"], described) == []
