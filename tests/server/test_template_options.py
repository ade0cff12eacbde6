"""Variables of the chat template: those of the server, and those of a request in every API."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from kqview.server import Settings
from tests.support.serving import serving

if TYPE_CHECKING:
    from collections.abc import Iterator

    import httpx

pytest.importorskip("jinja2")

# As many letters as say what the template was given.
TEMPLATE = "{{ 'a' * (5 if enable_thinking else 3) + 'b' * (n or 0) }}"
TALK = [{"role": "user", "content": "Hi"}]
APIS: dict[str, dict[str, Any]] = {
    "/apply-template": {"messages": TALK},
    "/v1/chat/completions/input_tokens": {"messages": TALK},
    "/v1/responses/input_tokens": {"input": "Hi"},
    "/v1/messages/count_tokens": {"messages": TALK, "model": "m"},
}


@pytest.fixture(scope="module")
def client() -> Iterator[httpx.Client]:
    settings = Settings(
        demo=True, n_threads=1, chat_template=TEMPLATE, reasoning="off", template_options=("n=2",)
    )
    with serving(settings) as served, served.client() as client:
        yield client


@pytest.mark.parametrize("path", APIS)
@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, "aaabb"),
        ({"enable_thinking": True}, "aaaaabb"),
        ({"n": 0}, "aaa"),
        ({"enable_thinking": True, "n": 4}, "aaaaabbbb"),
    ],
)
def test_request_wins_over_the_server_in_every_api(
    client: httpx.Client, path: str, given: dict[str, Any], expected: str
):
    reply = client.post(path, json={**APIS[path], "chat_template_kwargs": given}).json()
    if path == "/apply-template":
        assert reply == {"prompt": expected}
    else:
        counted = client.post("/tokenize", json={"content": expected, "add_special": True}).json()
        assert reply["input_tokens"] == len(counted["tokens"])


@pytest.mark.parametrize("path", APIS)
def test_text_where_the_template_wants_true_or_false_is_refused(client: httpx.Client, path: str):
    body = {**APIS[path], "chat_template_kwargs": {"enable_thinking": "false"}}
    reply = client.post(path, json=body)
    assert reply.status_code == 400
    assert "chat_template_kwargs has enable_thinking as text, 'false'" in reply.text


def test_reasoning_goes_where_the_server_was_told_to_put_it():
    template = "{{ messages[0].content }}<think>"
    body = {"messages": TALK, "max_tokens": 4, "temperature": 0}
    forms: dict[Any, str] = {"auto": "reasoning_content", "none": "content"}
    for form, name in forms.items():
        settings = Settings(demo=True, n_threads=1, chat_template=template, reasoning_format=form)
        with serving(settings) as served, served.client() as client:
            reply = client.post("/v1/chat/completions", json=body).json()
            message = reply["choices"][0]["message"]
            assert [key for key in ("content", "reasoning_content") if message.get(key)] == [name]
            other = {**body, "reasoning_format": "none"}
            message = client.post("/v1/chat/completions", json=other).json()["choices"][0]
            assert message["message"]["content"]
