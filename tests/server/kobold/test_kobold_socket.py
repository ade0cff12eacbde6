"""The WebSocket of the kobold dialect over real sockets: pairs of frames, their rows, its ends."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection, connect

from kqview import Capture
from tests.support.kobold import golden

if TYPE_CHECKING:
    from tests.support.serving import Served

PATH = "/api/extra/generate/stream/ws"
TEXT = "Mirelda found a silver key near the old bridge. Then Mirel"


def opened(served: Served, query: str = "", **options: Any) -> ClientConnection:
    return connect(served.ws_url + PATH + query, max_size=None, **options)


def frames(served: Served, query: str = "", **body: Any) -> list[Any]:
    """Every frame until the server closes; texts are read as JSON."""
    with opened(served, query) as socket:
        socket.send(json.dumps({"temperature": 0, **body}))
        got = [json.loads(one) if isinstance(one, str) else one for one in socket]
        assert socket.close_code == 1000
    return got


def pairs(got: list[Any]) -> tuple[list[tuple[dict[str, Any], bytes]], dict[str, Any]]:
    """The token frames, each with its binary frame, and the last one."""
    *tokens, done = got
    assert all(isinstance(one, dict) for one in tokens[0::2])
    assert all(isinstance(one, bytes) for one in tokens[1::2])
    return list(zip(tokens[0::2], tokens[1::2], strict=True)), done


def own(served: Served, **options: Any) -> list[Any]:
    """The engine's own tokens, its slots empty as for the stream that is compared."""
    for slot in served.engine.slots:
        slot.clear()
    tokens = list(served.engine.generate(TEXT, max_tokens=4, temperature=0, **options))
    for slot in served.engine.slots:
        slot.clear()
    return tokens


def test_frames_are_those_of_the_document(demo: Served):
    tokens, done = pairs(frames(demo, prompt=TEXT, max_length=4, request_id="my-request-001"))
    expected = {"type": "done", "finish_reason": "length", "total_tokens": 4}
    assert list(done.items())[:3] == list(expected.items())
    assert done.keys() == expected.keys() | golden("additions")["done"].keys()
    assert len(tokens) == 4
    assert all(list(text) == ["type", "token_id", "text"] for text, _ in tokens)


@pytest.mark.parametrize("values", [None, "probs"])
def test_binary_frames_are_the_engines_rows_bit_for_bit(demo: Served, values: str | None):
    expected = own(demo, capture=values or "logits")
    tokens, _ = pairs(frames(demo, prompt=TEXT, max_length=4, attention_values=values))
    for (text, binary), token in zip(tokens, expected, strict=True):
        assert text["token_id"] == token.id
        assert binary == token.attention.tobytes()
    n_prompt = len(demo.engine.tokenize(TEXT))
    assert [len(binary) // (4 * 4 * 8) - n_prompt for _, binary in tokens] == [0, 1, 2, 3]


@pytest.mark.parametrize("query", ["", "?attention_format=aggregated"])
def test_aggregated_frames_by_field_or_query(demo: Served, query: str):
    expected = own(demo, capture=Capture("probs", reduce="mean"))
    fields = {} if query else {"attention_format": "aggregated"}
    tokens, _ = pairs(
        frames(demo, query, prompt=TEXT, max_length=4, attention_values="probs", **fields)
    )
    for (text, binary), token in zip(tokens, expected, strict=True):
        assert text["attention"]["format"] == "aggregated"
        assert text["attention"]["shape"] == [token.attention.size]
        assert binary == token.attention.tobytes()


def test_rows_of_the_prompt_come_first(demo: Served):
    own(demo)
    expected = demo.engine.attend(TEXT, "probs").array()
    own(demo)
    got, _ = pairs(
        frames(demo, prompt=TEXT, max_length=1, attention_values="probs", prompt_attention=True)
    )
    text, binary = got[0]
    assert text["type"] == "prompt_attention"
    assert text["attention"]["shape"] == list(expected.shape)
    np.testing.assert_array_equal(
        np.frombuffer(binary, np.float32).reshape(expected.shape), expected
    )
    assert [one["type"] for one, _ in got] == ["prompt_attention", "token"]


@pytest.mark.parametrize(
    ("message", "code"),
    [
        ("not json", "INVALID_REQUEST"),
        ("{}", "INVALID_REQUEST"),
        ('{"input_ids": [1000000]}', "INVALID_TOKEN"),
        ('{"input_ids": [' + ",".join(["5"] * 600) + "]}", "CONTEXT_TOO_LONG"),
        (b'\xff\x00', "INVALID_REQUEST"),
    ],
)  # fmt: skip
def test_request_that_cannot_work_is_told_and_closed_with_1008(
    demo: Served, message: str | bytes, code: str
):
    with opened(demo) as socket:
        socket.send(message)
        error = json.loads(socket.recv())
        assert (error["type"], error["error_code"]) == ("error", code)
        with pytest.raises(ConnectionClosed):
            socket.recv()
        assert socket.close_code == 1008


def test_unknown_format_in_the_query_is_told(demo: Served):
    with opened(demo, "?attention_format=all") as socket:
        socket.send('{"prompt": "x"}')
        assert "attention_format" in json.loads(socket.recv())["error"]


def test_abort_ends_a_socket_with_done(demo: Served):
    body = {"prompt": TEXT, "max_length": 450, "ban_eos_token": True, "genkey": "W"}
    with opened(demo) as socket, demo.client() as client:
        socket.send(json.dumps(body))
        socket.recv()
        reply = client.post("/api/extra/abort", json={"genkey": "W"})
        assert reply.json() == {"success": "true", "done": "true"}
        *_, done = [one for one in socket if isinstance(one, str)]
        assert json.loads(done)["finish_reason"] == "stop"
    demo.wait_idle()
