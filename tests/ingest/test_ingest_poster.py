"""What kqview itself posts arrives as it was; the description holds for anything that is sent."""

from __future__ import annotations

import contextlib
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from kqview.ingest import IngestSettings
from kqview.trace.post import Poster
from tests.support.receiving import Receiving, receiving, sqlite_url
from tests.support.traces import read_trace

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.full

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    hypothesis = pytest.importorskip("hypothesis")
    schemathesis = pytest.importorskip("schemathesis")
    from schemathesis.specs.openapi.checks import positive_data_acceptance

TRACES = sorted((Path(__file__).parent / "traces").glob("*.json"))
ARRIVES_WITHIN_S = 60.0
N_EXAMPLES = 3


@pytest.fixture(scope="module")
def received(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Receiving]:
    folder = tmp_path_factory.mktemp("poster")
    with receiving(IngestSettings(database=sqlite_url(folder / "traces.db"))) as one:
        yield one


def test_traces_of_every_action_arrive_as_they_were_posted(received: Receiving) -> None:
    traces = [read_trace(path.read_bytes()) for path in TRACES]
    assert len(traces) >= 9
    with Poster(f"{received.url}/ingest") as poster:
        for trace in traces:
            poster.post(trace)
        assert poster.flush(ARRIVES_WITHIN_S)
        assert poster.stats().n_sent == len(traces)
    with received.client() as client:
        for trace in traces:
            read = client.get(f"/v1/traces/{trace.request.request_id}").content
            assert read_trace(read).to_payload() == trace.to_payload()


@pytest.fixture(scope="module")
def description(received: Receiving) -> dict[str, Any]:
    with received.client() as client:
        return client.get("/openapi.json").json()


def test_description_has_every_path_and_the_form_of_a_trace(description: dict[str, Any]) -> None:
    paths = description["paths"]
    assert {path: sorted(paths[path]) for path in paths} == {
        "/ingest": ["post"], "/v1/ingest": ["post"], "/v1/traces": ["get"],
        "/v1/traces/{request_id}": ["delete", "get"], "/v1/stream": ["get"],
        "/v1/values": ["get"], "/health": ["get"], "/metrics": ["get"], "/openapi.json": ["get"],
    }  # fmt: skip
    body = paths["/ingest"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert body == {"$ref": "#/components/schemas/Trace"}
    assert "201" in paths["/ingest"]["post"]["responses"]


@pytest.mark.parametrize(
    ("path", "method"),
    [
        ("/ingest", "POST"), ("/v1/traces", "GET"), ("/v1/traces/{request_id}", "GET"),
        ("/v1/traces/{request_id}", "DELETE"), ("/v1/values", "GET"),
    ],
)  # fmt: skip
def test_requests_made_from_the_description_are_answered_as_it_says(
    received: Receiving, description: dict[str, Any], path: str, method: str
) -> None:
    from schemathesis import GenerationMode

    described = schemathesis.openapi.from_dict(description)
    described.config.generation.update(modes=list(GenerationMode))
    operation = described[path][method]
    n_checked = 0
    for mode in GenerationMode:

        @hypothesis.settings(
            max_examples=N_EXAMPLES, deadline=None, derandomize=True, database=None,
            suppress_health_check=list(hypothesis.HealthCheck),
            phases=[hypothesis.Phase.generate],
        )  # fmt: skip
        @hypothesis.given(case=operation.as_strategy(generation_mode=mode))
        def check(case: Any) -> None:
            nonlocal n_checked
            n_checked += 1
            reply = case.call(base_url=received.url, timeout=60)
            # What fits the types may still link to nothing.
            case.validate_response(reply, excluded_checks=[positive_data_acceptance])

        with contextlib.suppress(hypothesis.errors.Unsatisfiable):  # nothing of it can be wrong
            check()
    assert n_checked
