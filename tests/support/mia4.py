"""What tests of the MIA4 dialect share: requests to ``/generate`` and the frames of streams."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    import httpx

    from tests.support.serving import Served

Frame = tuple[str, dict[str, Any]]

GREEDY: dict[str, Any] = {"temperature": 0, "max_output_tokens": 6}
QUESTION: dict[str, Any] = {"prompt": "Who is Anna?", "overrides": GREEDY}


def frames_of(lines: Iterable[str]) -> Iterator[Frame]:
    """Name and data of each event in the lines of a stream; comments are left out."""
    name = ""
    for line in lines:
        field, _, value = line.partition(": ")
        if field == "event":
            name = value
        elif field == "data":
            yield name, json.loads(value)


def generate(served: Served, *, key: str = "", **body: Any) -> list[Frame]:
    """The frames of a request that succeeds, which are all there at once."""
    reply = post(served, key=key, **body)
    assert reply.status_code == 200, reply.text
    assert reply.headers["content-type"] == "text/event-stream; charset=utf-8"
    return list(frames_of(reply.text.splitlines()))


def post(served: Served, *, key: str = "", **body: Any) -> httpx.Response:
    """The reply to ``POST /generate``."""
    with served.client(headers=headers(key)) as client:
        return client.post("/generate", json={**QUESTION, **body})


def headers(key: str) -> dict[str, str]:
    """What a request with this API key sends."""
    return {"x-api-key": key} if key else {}


def named(frames: Iterable[Frame], name: str) -> list[dict[str, Any]]:
    """The data of every frame of this name."""
    return [data for one, data in frames if one == name]


def text_of(frames: Iterable[Frame], name: str = "token") -> str:
    """The text of all frames of this name together."""
    return "".join(data["text"] for data in named(frames, name))
