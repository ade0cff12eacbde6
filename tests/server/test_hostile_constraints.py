"""Hostile schemas and grammars over HTTP: 400 with the field, and the others are served meanwhile.

What llguidance does with each of them is in tests/engine/test_constraints.py.
"""

from __future__ import annotations

import json
import os
import threading
import time
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from tests.support.hostile_grammars import (
    LATE,
    chained_lark,
    chained_schema,
    joined_lark,
    joined_schema,
)
from tests.support.processes import command_of, processes_below
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.support.serving import Served

pytest.importorskip("llguidance")
COSTLY = joined_schema("a.{#}b", 31)
"""891 bytes that take seconds of CPU time until they are refused."""
DEEP = chained_lark(60_000, "r")
WITHIN_S = 60.0


def of_completion(schema: Any) -> tuple[str, dict[str, Any]]:
    return "/completion", {"prompt": "a", "n_predict": 4, "json_schema": schema}


def of_chat(schema: Any) -> tuple[str, dict[str, Any]]:
    wanted = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    asked = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 4}
    return "/v1/chat/completions", {**asked, "response_format": wanted}


def of_response(schema: Any) -> tuple[str, dict[str, Any]]:
    wanted = {"format": {"type": "json_schema", "name": "a", "schema": schema}}
    return "/v1/responses", {"input": "a", "max_output_tokens": 16, "text": wanted}


def of_message(schema: Any) -> tuple[str, dict[str, Any]]:
    asked = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 4}
    wanted = {"format": {"type": "json_schema", "schema": schema}}
    return "/v1/messages", {**asked, "output_config": wanted}


ROUTES: dict[str, tuple[Callable[[Any], tuple[str, dict[str, Any]]], str]] = {
    "completion": (of_completion, "json_schema"),
    "chat": (of_chat, "response_format"),
    "response": (of_response, "text.format"),
    "message": (of_message, "output_config.format"),
}


def is_working() -> bool:
    """Whether llguidance works on a constraint: a process that one with a vocabulary has forked."""
    helpers = [one for one in processes_below(os.getpid()) if "constraint_child" in command_of(one)]
    return any(len(processes_below(one)) > 1 for one in helpers)


@pytest.mark.parametrize("name", ROUTES)
def test_chain_of_definitions_is_followed(demo: Served, name: str) -> None:
    of, _ = ROUTES[name]
    path, body = of(chained_schema(1000, "properties"))
    with demo.client() as client:
        assert client.post(path, json=body).status_code == 200
        assert client.get("/health").status_code == 200


@pytest.mark.parametrize(
    "name", ["completion", *(pytest.param(one, marks=pytest.mark.full) for one in list(ROUTES)[1:])]
)
def test_costly_schema_gets_400_with_the_field_and_others_are_served(
    demo: Served, name: str
) -> None:
    of, field = ROUTES[name]
    path, body = of(COSTLY)
    replies: list[httpx.Response] = []

    def ask() -> None:
        with demo.client() as client:
            replies.append(client.post(path, json=body))

    asking = threading.Thread(target=ask)
    asking.start()
    n_served = 0
    with demo.client() as client:
        while asking.is_alive():
            wanted = {"prompt": "a", "n_predict": 20, "json_schema": {"enum": ["yes"]}}
            served = client.post("/completion", json=wanted)
            assert (served.status_code, served.json()["content"]) == (200, '"yes"')
            assert client.get("/health").status_code == 200
            n_served += 1
    assert replies[0].status_code == 400
    assert field in replies[0].text
    assert "the limit" in replies[0].text
    assert "panic" not in replies[0].text
    assert n_served >= 2


@pytest.mark.parametrize("path", ["/completion", "/api/v1/generate"])
def test_grammar_deeper_than_any_stack_gets_400(demo: Served, path: str) -> None:
    with demo.client() as client:
        reply = client.post(path, json={"prompt": "a", "grammar": DEEP})
        assert reply.status_code in (400, 422)
        assert "grammar is nested too deeply" in reply.text
        assert client.get("/health").status_code == 200


def test_grammar_that_never_ends_after_its_first_token_ends_the_request(demo: Served) -> None:
    body = {"prompt": "a", "n_predict": 20, "grammar": joined_lark(LATE, 29)}
    with demo.client() as client:
        reply = client.post("/completion", json={**body, "logit_bias": [["x", 60.0]]})
        assert "grammar" in reply.text
        assert "the limit" in reply.text
        assert client.post("/completion", json={"prompt": "a", "n_predict": 1}).status_code == 200


def test_client_that_leaves_ends_the_work_on_its_constraint(demo: Served) -> None:
    with demo.client() as client:
        path, body = of_completion({"enum": ["a"]})
        assert client.post(path, json=body).status_code == 200
        wait_until(lambda: not is_working())
        path, body = of_completion(COSTLY)

        def leave() -> None:
            with pytest.raises(httpx.ReadTimeout):
                client.post(path, json=body, timeout=1)

        asking = threading.Thread(target=leave)
        asking.start()
        wait_until(is_working)
        asking.join()
        left_s = time.monotonic()
        wait_until(lambda: not is_working())
    # It would have worked for 5 s of CPU time.
    assert time.monotonic() - left_s < 2.5


@pytest.mark.parametrize("name", ROUTES)
def test_deeply_nested_body_gets_400_before_it_is_decoded(demo: Served, name: str) -> None:
    of, _ = ROUTES[name]
    path, body = of("SCHEMA")
    raw = json.dumps(body).replace('"SCHEMA"', '{"items":' * 300 + "{}" + "}" * 300)
    with demo.client() as client:
        reply = client.post(path, content=raw, headers={"content-type": "application/json"})
    assert reply.status_code == 400
    assert "deep, the limit is 128" in reply.text
