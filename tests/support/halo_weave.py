"""Halo Weave's client as a Python port: what a browser page does with the kobold dialect.

It follows the client's rules, its faults included: a line that is not ``data: `` and a space is
skipped, a last line without a newline is lost, an error event is ignored, what throws inside an
event drops the token. So a test that passes here shows that the page would have worked.
"""

from __future__ import annotations

import base64
import codecs
import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import httpx
import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

STOPS = ["<|im_start|>user", "<|im_start|>system", ")  user\n", ")  system\n", "</tool>"]


@dataclass
class Heard:
    """What the page's callbacks were given."""

    tokens: list[tuple[int | None, str, np.ndarray | None]] = field(default_factory=list)
    done: dict[str, Any] | None = None
    error: str | None = None
    n_dropped: int = 0

    @property
    def text(self) -> str:
        """The only copy of the text that the page keeps."""
        return "".join(text for id_, text, _ in self.tokens if id_ is not None)

    @property
    def ids(self) -> list[int]:
        """What it sends as context the next time."""
        return [id_ for id_, _, _ in self.tokens if id_ is not None]


def lines(chunks: Iterable[bytes]) -> Iterator[str]:
    """Lines of a body; what stands behind the last newline is lost."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    rest = ""
    for chunk in chunks:
        *whole, rest = (rest + decoder.decode(chunk)).split("\n")
        yield from whole


def decoded(attention: dict[str, Any] | None) -> np.ndarray | None:
    """float32 whatever ``dtype`` says; the product of the shape has to be the count of values."""
    if not attention:
        return None
    values = np.frombuffer(base64.b64decode(attention["data"], validate=True), "<f4")
    shape = attention["shape"]
    if attention["format"] == "aggregated":
        shape = [1, 1, attention["context_length"]]
    return values.reshape(shape)


def hear(chunks: Iterable[bytes], on_token: Callable[[Heard], None] | None = None) -> Heard:
    """Read a stream of events as the page does."""
    heard = Heard()
    try:
        for line in lines(chunks):
            if not line.startswith("data: "):
                continue
            try:
                event = json.loads(line[6:])
                if event.get("type") == "token":
                    token = event["token"]
                    rows = decoded(event.get("attention"))
                    heard.tokens.append((token["token_id"], token["text"], rows))
                    if on_token:
                        on_token(heard)
                elif event.get("type") == "done":
                    heard.done = event
                    return heard
                elif event.get("finish_reason"):
                    heard.tokens.append((None, event["token"], None))
                    heard.done = event
                    return heard
            except (ValueError, KeyError, TypeError):
                heard.n_dropped += 1
    except httpx.HTTPError as error:
        heard.error = f"Generation failed: {error}"
        return heard
    heard.done = {"finish_reason": "complete"}
    return heard


def generate_stream(
    client: httpx.Client,
    input_ids: list[int],
    *,
    max_new_tokens: int = 50,
    return_attention: bool = True,
    request_id: str = "5c1c3f1e-8f0c-4c0e-9c39-2f6cf2a9e7a1",
    temperature: float = 0.7,
    on_token: Callable[[Heard], None] | None = None,
    **more: Any,
) -> Heard:
    """The page's generateStream: its body, field for field; *more* is what it never sends."""
    body = {
        "input_ids": input_ids,
        "max_length": max_new_tokens or 50,
        "temperature": temperature or 0.7,
        "top_p": 0.9,
        "top_k": 40,
        "rep_pen": 1.0,
        "output_attentions": return_attention,
        "request_id": request_id,
        "sampler_seed": -1,
        "stop_sequence": STOPS,
        **more,
    }
    with client.stream("POST", "/api/extra/generate/stream", json=body) as reply:
        if not reply.is_success:
            return Heard(error=f"Generation failed: {reply.reason_phrase}")
        return hear(reply.iter_raw(), on_token)


def tokenize(client: httpx.Client, text: str) -> list[dict[str, Any]]:
    """The page's tokenize: text/plain, so that the browser asks for no permission first."""
    reply = client.post(
        "/api/v1/tokenize",
        content=json.dumps({"text": text, "add_special_tokens": False}),
        headers={"content-type": "text/plain"},
        timeout=60,
    )
    reply.raise_for_status()
    return reply.json()["tokens"]


def threshold(rows: np.ndarray, n_tokens: int) -> float:
    """conversation.js, updateBrightness: at or below 0 the page scores nothing at all."""
    mean = rows.reshape(-1, rows.shape[-1]).mean(axis=0)
    return float((1 - mean.max()) / (n_tokens - 1))
