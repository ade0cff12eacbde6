"""Every event and frame that is sent fits its schema in openapi.json, with no field besides.

What is compared was sent by a server: streams of each dialect with attention in each format, with
logprobs, several samples, reasoning, calls, what mods take back, and failures.
"""

from __future__ import annotations

import contextlib
import copy
import json
import re
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from kqview.server.app import DIALECTS
from kqview.server.web.endpoint import Upload
from kqview.server.web.openapi import describe
from tests.support import mia4
from tests.support.serving import serving

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from kqview.server.web.endpoint import Operation
    from tests.support.serving import Served

pytestmark = pytest.mark.full

jsonschema = pytest.importorskip("jsonschema")

Event = tuple[str, Any]  # name and data
Body = dict[str, Any]

MODS = {
    "rewrite": """
from kqview.mods import Mod
class Rewrite(Mod):
    n = 0
    def on_added(self, event, actions, tokenizer):
        self.n += len(event.added_tokens)
        if self.n == 4:
            self.n = 100
            return actions.backtrack(2, tokenizer.encode(" XY", False))
""",
    "call": """
from kqview.mods import Mod
class Call(Mod):
    def on_added(self, event, actions, tokenizer):
        if event.step == 2:
            call = {"name": "look", "arguments": {"at": "Anna"}}
            return actions.tool_calls({"id": "c1", "type": "function", "function": call})
""",
    "refuse": """
from kqview.mods import Mod
class Refuse(Mod):
    def __call__(self, event, actions, tokenizer):
        if event.step == 2:
            return actions.emit_error("not today")
""",
}
STEERED = [{"mods": [name]} for name in MODS]

BODIES: dict[str, list[Body]] = {
    "/completion": [
        {"prompt": "Anna is a", "n_predict": 6, "temperature": 0, **one}
        for one in (
            {}, {"n_probs": 2, "n": 2, "timings_per_token": True, "return_progress": True},
            {"n_probs": 2, "post_sampling_probs": True}, *STEERED,
        )
    ],
}  # fmt: skip


@pytest.fixture(scope="module")
def described() -> dict[str, Any]:
    table = [one for dialect in DIALECTS for one in dialect.OPERATIONS]
    return strict(describe(table, version="1", has_keys=False))


def strict(description: dict[str, Any]) -> dict[str, Any]:
    """*description* with schemas that take no field that they do not name."""
    closed = copy.deepcopy(description)
    for schema in closed["components"]["schemas"].values():
        if "properties" in schema:
            schema["additionalProperties"] = False
    return closed


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("mods")
    for name, text in MODS.items():
        (folder / f"{name}.py").write_text(text)
    config = mia4.config(
        settings={"mods_dir": str(folder), "mod_time_limit_s": 30.0},
    )
    with serving(config) as one:
        yield one


class Comparison:
    """Compares what is sent with the schemas of a path's samples."""

    def __init__(self, description: dict[str, Any], samples: Sequence[Body]) -> None:
        components = description["components"]
        self.samples = [one for one in samples if "schema" in one]
        self.validators = [
            jsonschema.Draft202012Validator({**one["schema"], "components": components})
            for one in self.samples
        ]
        self.seen: set[int] = set()

    def check(self, sender: str, events: Iterable[Event]) -> None:
        """Each of *events* fits a schema of its sender and name."""
        for name, data in events:
            named = [
                i
                for i, one in enumerate(self.samples)
                if one["from"] == sender and self.is_called(one, name)
            ]
            fitting = [i for i in named if self.validators[i].is_valid(data)]
            self.seen.update(fitting)
            if not fitting:
                errors = [
                    f"{self._type(i)}: {one.json_path}: {one.message[:300]}"
                    for i in named
                    for one in self.validators[i].iter_errors(data)
                ]
                pytest.fail(
                    f"{name} fits no schema: {str(data)[:600]}\n" + "\n".join(errors), False
                )

    @staticmethod
    def is_called(sample: Body, name: str) -> bool:
        """Whether *name* is one of those that the type of *sample* gives its events."""
        return sample["event"] == name or (
            name.startswith("response.") and sample["event"].startswith("response.")
        )

    def unseen(self) -> set[str]:
        """Types that nothing fitted."""
        return {self._type(i) for i in range(len(self.samples))} - {
            self._type(i) for i in self.seen
        }

    def _type(self, i: int) -> str:
        return self.samples[i]["schema"]["$ref"].rpartition("/")[2]


def streamed(client: httpx.Client, path: str, body: Body) -> list[Event]:
    """The events of a stream; those without a name are called "message"."""
    found: list[Event] = []
    name = "message"
    with client.stream("POST", path, json={**body, "stream": True}) as reply:
        assert reply.status_code == 200, reply.read()
        with contextlib.suppress(httpx.RemoteProtocolError):  # it is cut after a failure
            for line in reply.iter_lines():
                field, _, value = line.partition(": ")
                if field == "event":
                    name = value
                elif field == "data" and value != "[DONE]":
                    found.append((name, json.loads(value)))
    assert found
    return found


@pytest.mark.parametrize("path", BODIES)
def test_events_of_each_stream_fit_their_schemas(
    served: Served, described: dict[str, Any], path: str
):
    operation = described["paths"][path]["post"]
    reply_schema = operation["responses"]["200"]["content"].get("application/json", {})
    comparison = Comparison(described, operation["x-events"])
    replies = Comparison(described, [{"from": "server", "event": "reply", **reply_schema}])
    with served.client() as client:
        for body in BODIES[path]:
            comparison.check("server", streamed(client, path, body))
            if reply_schema and body.get("mods") != ["refuse"]:
                replies.check("server", [("reply", client.post(path, json=body).json())])
    assert comparison.unseen() == set()
    served.wait_idle()


def test_messages_that_are_shown_fit_their_schemas(described: dict[str, Any]):
    operations = [one for methods in described["paths"].values() for one in methods.values()]
    shown = [one["x-events"] for one in operations if "x-events" in one]
    shown += [one["messages"] for one in described["x-websockets"].values()]
    for samples in shown:
        comparison = Comparison(described, samples)
        for one in samples:
            assert ("schema" in one) == ("data" in one)
            if "data" in one:
                comparison.check(one["from"], [(one["event"], one["data"])])
    streams = [
        one
        for one in operations
        if "text/event-stream" in one["responses"].get("200", {}).get("content", {})
    ]
    assert [one["operationId"] for one in streams if not one.get("x-events")] == []


# ---- failures


REFUSED = [
    one
    for dialect in DIALECTS
    for one in dialect.OPERATIONS
    if one.method == "POST" and one.body not in (None, Upload) and one.access != "admin"
]


@pytest.mark.parametrize("one", REFUSED, ids=lambda one: one.path)
def test_failures_fit_their_schemas(served: Served, described: dict[str, Any], one: Operation):
    assert one.failure is not None
    errors = described["paths"][one.path]["post"]["responses"]
    path = re.sub(r"{\w+}", "x", one.path)
    long = {"prompt": "word " * 3000, "messages": [{"role": "user", "content": "word " * 3000}],
            "input": "word " * 3000, "stream": True}  # fmt: skip
    n_failures = 0
    with served.client() as client:
        for body in (b"no JSON", json.dumps(long).encode()):
            reply = client.post(path, content=body)
            if reply.status_code >= 400:
                n_failures += 1
                name = errors[str(reply.status_code)]["$ref"].rpartition("/")[2]
                found = described["components"]["responses"][name]
                schema = found["content"]["application/json"]["schema"]
                failures = Comparison(
                    described, [{"from": "server", "event": "", "schema": schema}]
                )
                failures.check("server", [("", reply.json())])
    assert n_failures
