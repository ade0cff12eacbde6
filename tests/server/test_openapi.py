"""What the server says about itself: the API description, and metrics."""

from __future__ import annotations

import base64
import inspect
import json
import re
import shutil
import warnings
from typing import TYPE_CHECKING, Any, cast

import httpx
import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from kqview.demo import MODEL_PATH
from kqview.server import Settings
from kqview.server.app import DIALECTS
from kqview.server.apps import status
from kqview.server.web import pages
from kqview.server.web.endpoint import Upload
from kqview.server.web.openapi import describe
from kqview.types.sampling import OPTIONS
from tests.server import toy_dialect
from tests.server.clients import read_to_close, sse_events, websocket
from tests.server.toy_dialect import serving_toy

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from kqview.server.web.endpoint import Operation
    from tests.support.serving import Served

pytestmark = pytest.mark.full


jsonschema_rs = pytest.importorskip("jsonschema_rs")
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


@pytest.fixture(scope="module")
def described() -> dict[str, Any]:
    """The description of what kqview has, without the toy dialect."""
    return describe(operations(), version="1", has_keys=False)


def operations() -> list[Operation]:
    table = [one for dialect in DIALECTS for one in dialect.OPERATIONS]
    return table + pages.operations(lambda: b"") + status.operations(cast("Any", None))


# Their replies are bytes, text, a redirection or an object without fields.
NOT_DESCRIBED = {
    "/v1/attention/{id}/{n}", "/generate/{request_id}/attention/{seq}", "/api",
    "/api/extra/preloadstory",
}  # fmt: skip


def test_every_body_and_reply_has_a_type():
    table = [one for dialect in DIALECTS for one in dialect.OPERATIONS if one.method != "WS"]
    untyped = {
        one.path
        for one in table
        if one.reply is None and not one.streams and one.status not in (202, 204)
    }
    assert untyped == NOT_DESCRIBED
    assert [one.path for one in table if one.body is Upload and one.upload is None] == []
    assert [one.path for one in table if one.failure is None] == []


def fields_of(description: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    for name, schema in description["components"]["schemas"].items():
        for field, one in schema.get("properties", {}).items():
            yield f"{name}.{field}", one


def test_every_field_says_what_it_is_and_shows_a_value(described: dict[str, Any]):
    fields = dict(fields_of(described))
    assert len(fields) > 1000
    assert [name for name, one in fields.items() if not one.get("description")] == []
    assert [name for name, one in fields.items() if not shows_a_value(one)] == []
    assert "Attributes" not in json.dumps(described)


def test_indentation_of_docstrings_does_not_matter(
    described: dict[str, Any], monkeypatch: pytest.MonkeyPatch
):
    """Python 3.13 and later take it away when they compile."""
    n_dedented, waiting = 0, [msgspec.Struct]
    while waiting:
        kind = waiting.pop()
        waiting += kind.__subclasses__()
        if kind.__module__.startswith("kqview.") and kind.__doc__:
            monkeypatch.setattr(kind, "__doc__", inspect.cleandoc(kind.__doc__))
            n_dedented += 1
    assert n_dedented > 100
    assert describe(operations(), version="1", has_keys=False) == described


def shows_a_value(one: dict[str, Any]) -> bool:
    """Whether one sees what to write: an example, a default, or that it is one of a few values."""
    if one.get("examples") or one.get("default") not in (None, [], {}):
        return True
    return any(
        "enum" in kind or "$ref" in kind or kind.get("type") == "boolean"
        for one_of in (one, *one.get("anyOf", ()))
        for kind in (one_of, one_of.get("items", {}), *one_of.get("items", {}).get("anyOf", ()))
    )


def test_values_that_are_shown_fit_their_fields(described: dict[str, Any]):
    for name, one in fields_of(described):
        for value in (*one.get("examples", ()), *([one["default"]] if "default" in one else ())):
            assert wrong(value, one, described) is None, name
    for path, methods in described["paths"].items():
        for method, operation in methods.items():
            replies = [one.get("content", {}) for one in operation["responses"].values()]
            assert all(one["description"] for one in operation.get("parameters", ()))
            for content in (operation.get("requestBody", {}).get("content", {}), *replies):
                one = content.get("application/json", {})
                if "example" in one:
                    assert wrong(one["example"], one["schema"], described) is None, (method, path)

    for name, failure in described["components"]["responses"].items():
        content = failure["content"]["application/json"]
        assert wrong(content["example"], content["schema"], described) is None, name


def wrong(value: Any, schema: dict[str, Any], description: dict[str, Any]) -> str | None:
    """What about *value* does not fit *schema*, None if nothing."""
    whole = {**schema, "components": description["components"]}
    return next(map(str, jsonschema_rs.Draft202012Validator(whole).iter_errors(value)), None)


def test_names_of_sampling_options_mean_the_same_everywhere(described: dict[str, Any]):
    body = described["components"]["schemas"]["ChatBody"]["properties"]
    for name in set(OPTIONS) & set(body) - {"top_logprobs", "stop", "logit_bias", "json_schema"}:
        option = OPTIONS[name]
        assert body[name]["description"] == option.doc.replace("\n", " ")
        if option.default not in (None, (), {}):
            assert json.dumps(body[name]["default"]) == json.dumps(option.default)
    stream = described["components"]["schemas"]["StreamBody"]["properties"]
    assert stream["max_new_tokens"]["description"] == stream["max_length"]["description"]
    assert (stream["temperature"]["default"], stream["top_k"]["default"]) == (0.7, 40)
    assert body["max_tokens"]["examples"] == body["n_predict"]["examples"]


def test_limit_of_time_is_described_where_it_has_an_effect(described: dict[str, Any]):
    components = described["components"]["schemas"]
    named = {name for name in components if "t_max_predict_ms" in json.dumps(components[name])}
    assert {"ChatBody", "MessagesBody", "ResponsesBody"}.isdisjoint(named)
    assert "InfillBody" in named


OTHER_MODELS = {"/infill", "/rerank"}  # they need a model for code, and one that ranks


def test_messages_and_tools_of_a_chat_are_described(described: dict[str, Any]):
    components = described["components"]["schemas"]
    for name in ("ChatBody", "TemplateBody"):
        body = components[name]["properties"]
        for field, item in (("messages", "ChatMessage"), ("tools", "ChatTool")):
            assert f"#/components/schemas/{item}" in json.dumps(body[field])
    assert {"role", "content", "tool_calls"} <= components["ChatMessage"]["properties"].keys()
    called = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    parts = [{"type": "text", "text": "a"}]
    for message in ({"role": "user", "content": parts}, {"role": "a", "tool_calls": [called]}):
        assert wrong(message, components["ChatMessage"], described) is None
    for message in ({"content": "a"}, {"role": "user", "content": 1}, {"role": "no role"}):
        assert wrong(message, components["ChatMessage"], described)


def test_every_example_of_a_body_says_something(described: dict[str, Any]):
    examples = {
        path: content["example"]
        for path, methods in described["paths"].items()
        for one in methods.values()
        for content in one.get("requestBody", {}).get("content", {}).values()
        if "example" in content
    }
    assert len(examples) > 40
    assert [path for path, example in examples.items() if not example] == []


def test_examples_of_requests_are_answered(toy: Served):
    with toy.client() as client:
        for one in ALL:
            if one.example is not None and one.path not in OTHER_MODELS:
                reply = client.request(one.method, one.path, json=one.example)
                assert reply.status_code == one.status, (one.path, reply.text)


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
