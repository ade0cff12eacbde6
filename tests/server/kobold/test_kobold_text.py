"""Text and ids of the kobold dialect's streams: characters of several ids, ends, stop sequences."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from kqview import Engine
from kqview.server import Settings
from tests.support.kobold import ids, stream, texts, typed
from tests.support.serving import serving

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import httpx

    from tests.support.serving import Served


@pytest.fixture(scope="module")
def bytes_served(byte_model: Path) -> Iterator[Served]:
    """A model whose ids below 256 are the bytes of its text; grammars make it write anything."""
    with Engine(byte_model, n_threads=1, n_ctx=256) as engine, serving(Settings(), engine) as one:
        yield one


@pytest.fixture(scope="module")
def writer(bytes_served: Served) -> Iterator[httpx.Client]:
    with bytes_served.client() as client:
        yield client


def writes(text: str) -> dict[str, Any]:
    """A request after which the model writes *text* and ends."""
    return {"input_ids": [65], "max_length": 100, "grammar": f'root ::= "{text}"'}


def test_every_id_of_a_character_is_an_event(writer: httpx.Client):
    text = "a\u00e9\U0001f600b"
    tokens, done = typed(writer, **writes(text))
    assert bytes(ids(tokens)) == text.encode()
    assert [one["token"]["text"] for one in tokens] == ["a", "", "é", "", "", "", "😀", "b"]
    assert done["finish_reason"] == "stop"


def test_end_of_text_is_no_token(bytes_served: Served, writer: httpx.Client):
    tokens, done = typed(writer, **writes("abc"))
    assert (texts(tokens), done["total_tokens"], done["finish_reason"]) == ("abc", 3, "stop")
    assert bytes_served.engine.model.eos_token_id not in ids(tokens)


def test_unfinished_character_is_flushed_with_the_last_id(writer: httpx.Client):
    request = writes("\U0001f600") | {"max_length": 2}
    tokens, done = typed(writer, **request)
    assert [one["token"]["text"] for one in tokens] == ["", "\ufffd"]
    assert done["finish_reason"] == "length"
    events = stream(writer, **request)
    assert [event["token"] for event in events] == ["\ufffd", ""]


def test_character_that_the_model_leaves_unfinished_is_told_at_the_end(writer: httpx.Client):
    # The first byte of two, then, as that one is penalized, the stop token.
    request = {"input_ids": [65], "max_length": 9, "logit_bias": {"195": 1000, "66": 900}}
    request |= {"presence_penalty": 500, "stop_tokens": [66]}
    tokens, done = typed(writer, **request)
    assert ids(tokens) == [0xC3]
    # With the token where the end was known when it was taken, else behind it.
    assert texts(tokens) + done.get("text", "") == "\ufffd"
    events = stream(writer, **request)
    assert [event["token"] for event in events] == ["\ufffd", ""]


def test_stop_sequence_over_several_tokens_arrives_untrimmed(writer: httpx.Client):
    tokens, done = typed(writer, **writes("go </b></tool> on"), stop_sequence=["</tool>"])
    assert texts(tokens) == "go </b></tool>"
    assert done["finish_reason"] == "stop"
    assert done["total_tokens"] == len("go </b></tool>")


@pytest.mark.parametrize(
    ("trim", "shown"),
    [({}, "go </b>"), ({"trim_stop": True}, "go </b>"), ({"trim_stop": False}, "go </b></tool>")],
)
def test_plain_stream_trims_the_stop_sequence(
    writer: httpx.Client, trim: dict[str, Any], shown: str
):
    events = stream(writer, **writes("go </b></tool> on"), stop_sequence=["</tool>"], **trim)
    assert "".join(event["token"] for event in events) == shown
    assert events[-1] == {"token": "", "finish_reason": "stop"}


def test_stop_token_is_told_as_stop(writer: httpx.Client):
    tokens, done = typed(writer, **writes("abc"), stop_tokens=[ord("c")])
    assert (texts(tokens), done["finish_reason"]) == ("ab", "stop")


def test_banned_and_biased_ids_are_heeded(writer: httpx.Client):
    request = {"input_ids": [65], "max_length": 5, "logit_bias": {"66": 1000}}
    tokens, _ = typed(writer, **request)
    assert texts(tokens) == "BBBBB"
    tokens, _ = typed(writer, **request, banned_tokens=[66])
    assert "B" not in texts(tokens)
