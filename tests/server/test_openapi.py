"""What the server says about itself: the API description, and metrics."""

from __future__ import annotations

import base64
import json
import re
import shutil
import warnings
from typing import TYPE_CHECKING, Any

import httpx
import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from kqview.demo import MODEL_PATH
from kqview.server import Settings
from kqview.server.app import DIALECTS
from kqview.server.endpoint import Upload
from kqview.server.pages import describe
from kqview.types.sampling import OPTIONS
from tests.server import toy_dialect
from tests.server.clients import read_to_close, sse_events, websocket
from tests.server.toy_dialect import serving_toy

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from kqview.server.endpoint import Operation
    from tests.support.serving import Served


with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    schemathesis = pytest.importorskip("schemathesis")
    from schemathesis.checks import not_a_server_error
    from schemathesis.specs.openapi.checks import positive_data_acceptance

ALL: list[Operation] = [
    *toy_dialect.OPERATIONS,
    *(one for dialect in DIALECTS for one in dialect.OPERATIONS),
]
N_EXAMPLES = 4
FAILING = {"/toy/fail", "/toy/large", "/toy/switch"}  # that is their purpose
ENDLESS = {"/events"}
ASKED = [one for one in ALL if one.method != "WS" and one.path not in FAILING | ENDLESS]


@pytest.fixture(scope="module")
def toy() -> Iterator[Served]:
    settings = Settings(n_slots=2, max_tokens=4, request_timeout_s=5.0, n_ctx=128)
    with serving_toy(settings) as served:
        yield served


@pytest.fixture(scope="module")
def description(toy: Served) -> dict[str, Any]:
    with toy.client() as client:
        return client.get("/openapi.json").json()


def shown(path: str) -> str:
    """A path of the route table as the description has it."""
    return path.replace(":path}", "}")


def test_every_operation_is_described_with_its_types(description: dict[str, Any]):
    for one in ALL:
        if one.method == "WS":
            assert one.path in description["x-websockets"]
            continue
        for path in map(shown, (one.path, *one.also)):
            described = description["paths"][path][one.method.lower()]
            assert described["summary"] == one.summary
            assert ("requestBody" in described) == (one.body is not None)
            assert {str(one.status), "401", "429", "500", "503"} <= set(described["responses"])
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


def test_fields_have_the_meaning_that_their_docstring_gives(description: dict[str, Any]):
    schemas = description["components"]["schemas"]
    stream = schemas["StreamBody"]["properties"]  # of a class that it inherits from
    assert [name for name, one in stream.items() if "description" not in one] == []
    assert stream["max_new_tokens"]["description"] == stream["max_length"]["description"]
    assert "Attributes" not in json.dumps(schemas)
    for schema in schemas.values():
        named = {name: one for name, one in schema.get("properties", {}).items() if name in OPTIONS}
        assert all(one["description"] for one in named.values())


def test_examples_of_requests_are_answered(toy: Served):
    with toy.client() as client:
        for one in ALL:
            if one.example is not None:
                reply = client.request(one.method, one.path, json=one.example)
                assert reply.status_code == one.status, (one.path, reply.text)


def test_shown_messages_are_those_that_are_sent(toy: Served):
    shown = {one.path: one.samples for one in ALL if one.samples}
    sent: dict[str, list[dict[str, Any]]] = {}
    with toy.client() as client:
        for one in ALL:
            if one.samples and one.method == "POST":
                sent[one.path] = [*sse_events(client.post(one.path, json=one.example))]
    for path in ("/api/extra/generate/stream/ws", "/api/v1/generate/stream"):
        request = shown[path][0].body
        with websocket(toy, path) as socket:
            socket.send(json.dumps(request))
            sent[path] = []
            while not sent[path] or sent[path][-1]["type"] != "done":
                frame = socket.recv()
                if isinstance(frame, str):
                    sent[path].append(json.loads(frame))
    assert sent.keys() == shown.keys()
    for path, events in sent.items():
        forms = {form_of(event) for event in events}
        drawn = {
            form_of(one.body)
            for one in shown[path]
            if one.sender == "server" and not isinstance(one.body, str)
        }
        assert forms <= drawn, path


def form_of(value: Any) -> str:
    """The names in an object and in those within it."""
    if not isinstance(value, dict):
        return "…"
    return json.dumps({name: form_of(one) for name, one in sorted(value.items())})


@pytest.mark.parametrize("one", [one for one in ASKED if one.method == "POST" and one.body])
def test_errors_have_the_form_of_their_example(toy: Served, one: Operation):
    described = describe([one], version="1", has_keys=False) if one.tag else {}
    if one.body is Upload or not described:
        pytest.skip("its body may be anything")
    path = next(iter(described["paths"]))
    errors = described["paths"][path]["post"]["responses"]
    with toy.client() as client:
        reply = client.post(re.sub(r"{\w+}", "x", one.path), content=b"no JSON")
    if reply.status_code < 400:
        pytest.skip("it takes any body")
    example = errors[str(reply.status_code)]["content"]["application/json"]["example"]
    assert example.keys() <= reply.json().keys()


# ---- what the server does


@pytest.mark.parametrize("one", ASKED, ids=lambda one: f"{one.method} {one.path}")
def test_requests_made_from_the_description_are_answered_as_it_says(
    toy: Served, description: dict[str, Any], one: Operation
):
    """Bodies that fit, bodies that do not, odd headers: no 5xx, and replies as described."""
    import hypothesis
    from schemathesis import GenerationMode

    schema = schemathesis.openapi.from_dict(description)
    schema.config.generation.update(modes=list(GenerationMode))
    operation = schema[shown(one.path)][one.method]
    n_checked = 0
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
            nonlocal n_checked
            n_checked += 1
            check(case, toy.url)

        try:
            ask()
        except hypothesis.errors.Unsatisfiable:
            continue  # nothing about it can be wrong
    assert n_checked
    toy.wait_idle()


def check(case: Any, url: str) -> None:
    """Send one request and compare the reply with the description."""
    response = case.call(base_url=url, timeout=60)
    assert response.status_code < 500 or response.status_code in (501, 503), response.text
    case.validate_response(response, excluded_checks=EXCLUDED)


# What fits the types may still be out of a range that only the model knows: a token id, a length.
# 501 says what a model cannot do; `check` refuses other failures of the server itself.
EXCLUDED: list[Any] = [positive_data_acceptance, not_a_server_error]


# ---- wrong types, generated from the types themselves

WRONG: dict[str, Any] = {
    "null": None, "true": True, "number": 7, "fraction": 1.5, "huge": 10**30, "negative": -(10**30),
    "text": "text", "list": [], "nested": [[1]], "texts": ["a"], "object": {}, "keyed": {"a": "b"},
}  # fmt: skip
# An administrator's bodies are not read before his key.
BODIES = [
    one
    for one in ALL
    if one.body not in (None, Upload)
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
                assert reply.status_code < 500 or reply.status_code == 501, what
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


# ---- Metrics: every byte that was copied, every token of every engine, and nothing made up


@pytest.fixture
def toy_metrics() -> Iterator[Served]:
    with serving_toy(Settings(n_slots=2)) as served:
        yield served


def samples(served: Served) -> dict[str, float]:
    """Values by name, labels as in the text."""
    with served.client() as client:
        reply = client.get("/metrics")
    assert reply.headers["content-type"].startswith("text/plain; version=")
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(reply.text):
        for one in family.samples:
            labels = ",".join(f"{k}={v}" for k, v in sorted(one.labels.items()))
            found[f"{one.name}{{{labels}}}" if labels else one.name] = one.value
    return found


def test_bytes_sent_as_rows_are_the_bytes_copied(toy_metrics: Served):
    n_sent = 0
    body = {"prompt": "Tom has", "max_tokens": 20}
    with toy_metrics.client() as client, client.stream("POST", "/toy/stream", json=body) as reply:
        for event in sse_events(reply):
            n_sent += len(base64.b64decode(event.get("data", "")))
    with websocket(toy_metrics, "/toy/ws") as socket:
        socket.send(json.dumps({**body, "prompt_rows": True}))
        frames, _ = read_to_close(socket)
    n_sent += sum(len(frame) for frame in frames if isinstance(frame, bytes))
    assert n_sent > 0
    # One copy a row, no matter how it travelled.
    assert samples(toy_metrics)["kqview_attention_copied_bytes_total"] == n_sent


def test_nothing_is_copied_where_nobody_asked(toy_metrics: Served):
    with toy_metrics.client() as client:
        client.post("/toy/generate", json={"prompt": "Tom", "attention": False})
        client.post("/toy/generate", json={"prompt": "Tom", "attention": True})
    assert samples(toy_metrics)["kqview_attention_copied_bytes_total"] == 0


def test_requests_tokens_and_ends_are_counted(toy_metrics: Served):
    with toy_metrics.client() as client:
        client.post("/toy/generate", json={"prompt": [1, 2, 3], "max_tokens": 5})
        client.post("/toy/generate", json={"prompt": "Tom", "max_tokens": 0})
        client.get("/nowhere")
        client.get("/nowhere/else")
    found = samples(toy_metrics)
    assert found["kqview_generated_tokens_total"] == 5
    assert found["kqview_prompt_tokens_total"] == 3
    assert found["kqview_generations_total{reason=length}"] == 1
    assert found["kqview_generation_seconds_count"] == 1
    assert found["kqview_http_requests_total{path=/toy/generate,status=200}"] == 1
    assert found["kqview_http_requests_total{path=/toy/generate,status=400}"] == 1
    assert found["kqview_http_requests_total{path=other,status=404}"] == 2
    assert found["kqview_running_requests"] == found["kqview_busy_slots"] == 0


def test_paths_and_codes_of_strangers_add_no_series(toy_metrics: Served):
    with toy_metrics.client() as client:
        before = len(samples(toy_metrics))
        for i in range(20):
            client.get(f"/x{i}")
            client.request(f"M{i}", "/health")
    for code in range(3000, 3020):
        with websocket(toy_metrics, "/toy/ws") as socket:
            socket.close(code)
    toy_metrics.wait_until(lambda: len(samples(toy_metrics)) > before)
    assert len(samples(toy_metrics)) - before <= 8


def test_counters_sum_over_the_engines_that_served(tmp_path: Path):
    shutil.copy(MODEL_PATH, tmp_path / "b.gguf")
    settings = Settings(demo=True, n_threads=1, models_dir=str(tmp_path))
    with serving_toy(settings) as served, served.client() as client:
        body = {"prompt": "Tom", "max_tokens": 6, "attention": False}
        client.post("/toy/generate", json=body)
        before = samples(served)
        assert client.post("/toy/switch", json={"text": "b.gguf"}).status_code == 200
        client.post("/toy/generate", json=body)
        after = samples(served)
    assert before["kqview_generated_tokens_total"] == 6
    assert after["kqview_generated_tokens_total"] == 12
    grown = {name for name in before if re.search("_total|_count|_sum|_bucket", name)}
    assert all(after[name] >= before[name] for name in grown)
