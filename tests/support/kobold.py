"""What the tests of the kobold dialect share: its goldens, and a client that checks SSE framing."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import httpx

FOLDER = Path(__file__).parents[1] / "server" / "kobold" / "goldens"


def golden(name: str) -> Any:
    """The value of ``goldens/NAME.json``."""
    return json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))


PATH = "/api/extra/generate/stream"
TEXT = "Mirelda found a silver key near the old bridge. Then Mirel"
ATTENTION = {"output_attentions": True}
# More rows than the buffers of a socket hold.
LONG = {"prompt": TEXT, "max_length": 450, "ban_eos_token": True, **ATTENTION}


def stream(client: httpx.Client, **body: Any) -> list[dict[str, Any]]:
    """Every event of a stream that ends well."""
    body = {"temperature": 0, **body}
    reply = client.post(PATH, json=body)
    assert reply.status_code == 200, reply.text
    assert reply.headers["content-type"].startswith("text/event-stream")
    blocks = reply.text.split("\n\n")
    assert blocks.pop() == ""
    heads = [block.split("\n", 1)[0] for block in blocks]
    assert {*heads} == {"event: message"}
    return [json.loads(block.split("\n", 1)[1].removeprefix("data: ")) for block in blocks]


def typed(client: httpx.Client, **body: Any) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Token events, and the done event."""
    *tokens, done = stream(client, **{"output_attentions": False, "request_id": "r", **body})
    assert done["type"] == "done"
    assert done["total_tokens"] == len(tokens)
    return tokens, done


def texts(tokens: list[dict[str, Any]]) -> str:
    return "".join(one["token"]["text"] for one in tokens)


def ids(tokens: list[dict[str, Any]]) -> list[int]:
    return [one["token"]["token_id"] for one in tokens]


def rows(event: dict[str, Any]) -> np.ndarray:
    attention = event["attention"]
    assert attention["encoding"] == "base64"
    data = base64.b64decode(attention["data"], validate=True)
    return np.frombuffer(data, attention["dtype"]).reshape(attention["shape"])
