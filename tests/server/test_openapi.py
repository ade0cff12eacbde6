"""The description: valid, complete, and what the server does when it is asked in every way."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import httpx
import msgspec
import pytest

from kqview.server import Settings
from kqview.server.app import DIALECTS
from kqview.server.pages import describe
from tests.server import toy_dialect
from tests.server.toy_dialect import serving_toy

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kqview.server.endpoint import Operation
    from tests.support.serving import Served

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    schemathesis = pytest.importorskip("schemathesis")
    from schemathesis.specs.openapi.checks import positive_data_acceptance

ALL: list[Operation] = [
    *toy_dialect.OPERATIONS,
    *(one for dialect in DIALECTS for one in dialect.OPERATIONS),
]
N_EXAMPLES = 4
FAILING = {"/toy/fail", "/toy/large", "/toy/switch"}  # that is their purpose
SECOND_PATHS = {path for one in ALL for path in one.also}


@pytest.fixture(scope="module")
def toy() -> Iterator[Served]:
    settings = Settings(n_slots=2, max_tokens=4, request_timeout_s=5.0, n_ctx=128)
    with serving_toy(settings) as served:
        yield served


@pytest.fixture(scope="module")
def description(toy: Served) -> dict[str, Any]:
    with toy.client() as client:
        return client.get("/openapi.json").json()


def test_every_operation_is_described_with_its_types(description: dict[str, Any]):
    for one in ALL:
        if one.method == "WS":
            assert one.path in description["x-websockets"]
            continue
        for path in (one.path, *one.also):
            described = description["paths"][path][one.method.lower()]
            assert described["summary"] == one.summary
            assert ("requestBody" in described) == (one.body is not None)
            assert {"200", "401", "429", "500", "503"} <= set(described["responses"])
            if one.streams:
                assert "text/event-stream" in described["responses"]["200"]["content"]


def test_every_reference_leads_somewhere(description: dict[str, Any]):
    def references(value: Any) -> Iterator[str]:
        if isinstance(value, dict):
            for key, inner in value.items():
                if key == "$ref":
                    yield inner
                yield from references(inner)
        elif isinstance(value, list):
            for inner in value:
                yield from references(inner)

    for reference in references(description):
        target: Any = description
        for part in reference.removeprefix("#/").split("/"):
            target = target[part]


def test_names_of_operations_differ(description: dict[str, Any]):
    names = [
        one["operationId"] for methods in description["paths"].values() for one in methods.values()
    ]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("has_keys", [True, False])
def test_keys_are_described_where_there_are_some(has_keys: bool):
    described = describe(toy_dialect.OPERATIONS, version="1", has_keys=has_keys)
    schemes = described["components"].get("securitySchemes", {})
    assert bool(schemes) == has_keys
    used = [
        name
        for methods in described["paths"].values()
        for one in methods.values()
        for each in one.get("security", ())
        for name in each
    ]
    assert set(used) == set(schemes)


# ---- what the server does


def test_requests_made_from_the_description_are_answered_as_it_says(
    toy: Served, description: dict[str, Any]
):
    """Bodies that fit, bodies that do not, odd headers: no 5xx, and replies as described."""
    import hypothesis
    from schemathesis import GenerationMode

    schema = schemathesis.openapi.from_dict(description)
    schema.config.generation.update(modes=list(GenerationMode))
    checked: dict[str, int] = {}
    for result in schema.get_all_operations():
        operation = result.ok()
        if operation.path in FAILING or operation.path in SECOND_PATHS:
            continue

        for mode in GenerationMode:

            @hypothesis.settings(
                max_examples=N_EXAMPLES,
                deadline=None,
                derandomize=True,
                database=None,
                suppress_health_check=list(hypothesis.HealthCheck),
                phases=[hypothesis.Phase.generate],
            )
            @hypothesis.given(case=operation.as_strategy(generation_mode=mode))
            def ask(case: Any) -> None:
                label = f"{case.operation.method.upper()} {case.operation.path}"
                checked[label] = checked.get(label, 0) + 1
                check(case, toy.url)

            try:
                ask()
            except hypothesis.errors.Unsatisfiable:
                continue  # nothing about it can be wrong
    assert len(checked) >= 8
    toy.wait_idle()


def check(case: Any, url: str) -> None:
    """Send one request and compare the reply with the description."""
    response = case.call(base_url=url, timeout=10)
    assert response.status_code < 500 or response.status_code == 503, response.text
    case.validate_response(response, excluded_checks=EXCLUDED)


# What fits the types may still be out of a range that only the model knows: a token id, a length.
EXCLUDED: list[Any] = [positive_data_acceptance]


# ---- wrong types, generated from the types themselves

WRONG: dict[str, Any] = {
    "null": None, "true": True, "number": 7, "fraction": 1.5, "huge": 10**30, "negative": -(10**30),
    "text": "text", "list": [], "nested": [[1]], "texts": ["a"], "object": {}, "keyed": {"a": "b"},
}  # fmt: skip
# An administrator's bodies are not read before his key.
BODIES = [
    one
    for one in ALL
    if one.body is not None
    and one.access != "admin"
    and one.path not in ("/toy/fail", "/toy/switch")
]
LARGE = {"max_tokens", "max_length", "max_new_tokens", "num_samples", "n_samples"}


def smallest(kind: Any) -> dict[str, Any]:
    """The required fields of a body, so that one field alone is wrong."""
    known = {"prompt": "Tom has", "input_ids": [1, 2], "text": "a", "token_ids": [1], "name": "x"}
    fields = {field.encode_name: field for field in msgspec.structs.fields(kind)}
    body = {name: value for name, value in known.items() if name in fields}
    if "input_ids" in body:
        body.pop("prompt", None)
    for name in LARGE & set(fields):
        body[name] = 1
    return body


@pytest.mark.parametrize("one", BODIES, ids=lambda one: f"{one.method} {one.path}")
def test_wrong_type_of_any_field_is_refused_and_nothing_else_happens(toy: Served, one: Operation):
    base = smallest(one.body)
    with toy.client() as client:
        for field in msgspec.structs.fields(one.body):
            for name, value in WRONG.items():
                body = {**base, field.encode_name: value}
                fits = True
                try:
                    msgspec.convert(body, one.body)
                except msgspec.ValidationError:
                    fits = False
                reply = client.request(one.method, one.path, content=msgspec.json.encode(body))
                what = f"{field.encode_name}={name}: {reply.status_code} {reply.text[:300]}"
                assert reply.status_code < 500, what
                if not fits:
                    assert reply.status_code == 400, what
                if reply.status_code == 400:
                    assert msgspec.json.encode(reply.json()), what
    toy.wait_idle()


def test_reply_of_httpx_is_not_compressed_unless_asked(toy: Served):
    with httpx.Client(base_url=toy.url) as client:
        reply = client.post("/toy/tokenize", json={"text": "a"})
        assert "content-encoding" not in reply.headers
        packed = client.post("/toy/tokenize?compression=gzip", json={"text": "a" * 300})
        assert packed.headers["content-encoding"] == "gzip"
        assert packed.json()["ids"]
        headers = {"accept-encoding": "identity"}
        plain = client.post("/toy/tokenize?compression=gzip", json={"text": "a"}, headers=headers)
        assert "content-encoding" not in plain.headers
