"""Requests and streams of OpenAI's API, as any HTTP client sends and reads them."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.support.serving import Served

CHAT: dict[str, Any] = {
    "messages": [{"role": "user", "content": "Who is Anna?"}],
    "max_tokens": 8,
    "temperature": 0,
}
TEXT: dict[str, Any] = {
    "prompt": "Mirelda found a key. Then Mirel",
    "max_tokens": 4,
    "temperature": 0,
}


def asked(served: Served, path: str, key: str | None = None, **body: Any) -> dict[str, Any]:
    """The reply, which has to be good."""
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    with served.client(headers=headers) as client:
        reply = client.post(path, json=body)
    assert reply.status_code == 200, reply.text
    return reply.json()


def chat(served: Served, **body: Any) -> dict[str, Any]:
    """The reply to a chat."""
    return asked(served, "/v1/chat/completions", **{**CHAT, **body})


def text(served: Served, **body: Any) -> dict[str, Any]:
    """The reply to a completion."""
    return asked(served, "/v1/completions", **{**TEXT, **body})


def refused(served: Served, path: str, **body: Any) -> tuple[int, dict[str, Any]]:
    """Status and error of a request that is refused."""
    with served.client() as client:
        reply = client.post(path, json=body)
    assert reply.status_code >= 400, reply.text
    return reply.status_code, reply.json()["error"]


def chunks(served: Served, path: str, **body: Any) -> list[dict[str, Any]]:
    """The chunks of a stream, which has to end with the mark of the end."""
    with served.client() as client:
        reply = client.post(path, json={**body, "stream": True})
    assert reply.status_code == 200, reply.text
    assert reply.headers["content-type"].startswith("text/event-stream")
    events = reply.text.strip().split("\n\n")
    assert all(event.startswith("data: ") for event in events)
    assert events[-1] == "data: [DONE]"
    return [json.loads(event.removeprefix("data: ")) for event in events[:-1]]


def chat_chunks(served: Served, **body: Any) -> list[dict[str, Any]]:
    """The chunks of a chat."""
    return chunks(served, "/v1/chat/completions", **{**CHAT, **body})


def text_chunks(served: Served, **body: Any) -> list[dict[str, Any]]:
    """The chunks of a completion."""
    return chunks(served, "/v1/completions", **{**TEXT, **body})


def joined(stream: list[dict[str, Any]], name: str, index: int = 0) -> str:
    """A field of the deltas of one choice, put together."""
    deltas = [
        choice["delta"]
        for chunk in stream
        for choice in chunk["choices"]
        if choice["index"] == index
    ]
    return "".join(delta.get(name) or "" for delta in deltas)
