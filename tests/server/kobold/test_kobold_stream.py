"""The SSE streams of the kobold dialect: events, rows, and texts of characters in parts."""

from __future__ import annotations

import itertools
import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from kqview import Engine
from kqview.server import Settings
from tests.support.kobold import (
    ATTENTION,
    LONG,
    PATH,
    TEXT,
    golden,
    ids,
    rows,
    stream,
    texts,
    typed,
)
from tests.support.serving import serving

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import httpx

    from tests.support.serving import Serve, Served


@pytest.fixture(scope="module")
def client(demo: Served) -> Iterator[httpx.Client]:
    with demo.client() as client:
        yield client


# ---- which events


def test_stream_without_attention_or_name_is_the_plain_one(client: httpx.Client):
    events = stream(client, prompt=TEXT, max_length=3, temperature=0.7, sampler_seed=12345)
    assert all(list(event) == ["token", "finish_reason"] for event in events)
    assert [event["finish_reason"] for event in events[:-1]] == [None] * (len(events) - 1)
    assert events[-1] == {"token": "", "finish_reason": "length"}


def test_text_and_its_ids_give_the_same_stream(client: httpx.Client):
    sampling = {"max_length": 12, "temperature": 0.7, "sampler_seed": 12345}
    wanted = {"text": TEXT, "add_special_tokens": True}
    input_ids = client.post("/api/v1/tokenize", json=wanted).json()["token_ids"]
    by_text = stream(client, prompt=TEXT, **sampling)
    by_ids = stream(client, input_ids=input_ids, **sampling)
    assert by_text == by_ids
    *tokens, done = stream(client, prompt="x", input_ids=input_ids, **sampling)
    assert done.pop("ignored") == ["prompt"]
    assert [*tokens, done] == by_ids


def test_greedy_stream_is_the_engines(demo: Served, client: httpx.Client):
    tokens, done = typed(client, prompt=TEXT, max_length=16)
    generation = demo.engine.generate(TEXT, max_tokens=16, temperature=0)
    assert texts(tokens) == generation.read()
    assert ids(tokens) == generation.tokens
    assert done["finish_reason"] == "length"


@pytest.mark.parametrize("given", [{"request_id": "mine"}, {"output_attentions": False}])
def test_name_or_attention_field_makes_events_typed(client: httpx.Client, given: dict[str, Any]):
    *tokens, done = stream(client, prompt=TEXT, max_length=2, **given)
    assert {event["type"] for event in tokens} == {"token"}
    assert all(list(event) == ["type", "token", "request_id", "attention"] for event in tokens)
    assert all(event["attention"] is None for event in tokens)
    assert list(done)[:4] == ["type", "finish_reason", "total_tokens", "request_id"]
    assert list(done)[4:] == list(golden("additions")["done"])
    name = given.get("request_id", done["request_id"])
    assert {event["request_id"] for event in [*tokens, done]} == {name}


# ---- what cannot work


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        ({}, 400, "INVALID_REQUEST"),
        ({"prompt": 1}, 400, "INVALID_REQUEST"),
        ({"input_ids": [1, "a"]}, 400, "INVALID_REQUEST"),
        ({"input_ids": [10**6]}, 400, "INVALID_TOKEN"),
        ({"input_ids": [-1]}, 400, "INVALID_TOKEN"),
        ({"input_ids": []}, 400, "INVALID_REQUEST"),
        ({"input_ids": [5] * 513}, 400, "CONTEXT_TOO_LONG"),
        ({"input_ids": [5] * 9, "max_context_length": 8}, 400, "CONTEXT_TOO_LONG"),
        ({"prompt": "x", "max_length": 0}, 400, "INVALID_REQUEST"),
        ({"prompt": "x", "temperature": -1}, 400, "INVALID_REQUEST"),
        ({"prompt": "x", "attention_format": "all"}, 400, "INVALID_REQUEST"),
        ({"prompt": "x", "request_id": "r", "num_samples": 2}, 400, "INVALID_REQUEST"),
        ({"input_ids": [1], **ATTENTION, "attention_layers": [9]}, 400, "INVALID_REQUEST"),
        ({"prompt": "x", "grammar": "root ::= ("}, 400, "INVALID_REQUEST"),
    ],
)  # fmt: skip
def test_request_that_cannot_work_is_refused_before_the_first_byte(
    client: httpx.Client, body: dict[str, Any], status: int, code: str
):
    reply = client.post(PATH, json=body, headers={"origin": "http://localhost:8080"})
    assert reply.status_code == status
    assert reply.json()["error_code"] == code
    assert reply.json()["detail"]["msg"] == reply.json()["error"]
    assert reply.headers["access-control-allow-origin"] == "http://localhost:8080"


def test_larger_context_than_there_is_is_no_error(client: httpx.Client):
    tokens, _ = typed(client, prompt=TEXT, max_length=2, max_context_length=8192)
    assert len(tokens) == 2


def test_requests_may_share_a_name_and_are_ended_by_it(demo: Served, client: httpx.Client):
    named = LONG | {"request_id": "one"}
    with demo.client() as other, client.stream("POST", PATH, json=named) as reply:
        chunks = reply.iter_raw()  # dropping it would close the connection
        next(chunks)
        with other.stream("POST", PATH, json=named) as second:
            others = second.iter_raw()
            next(others)
            assert {run.label for run in demo.runs} == {"one"}
            assert len({run.request_id for run in demo.runs}) == 2
            with demo.client() as third:
                ended = third.post("/api/extra/abort", json={"request_id": "one"}).json()
            assert ended == {"success": "true", "done": "true"}
            for body in (b"".join(chunks), b"".join(others)):
                last = json.loads(body[body.rindex(b"data: ") + 6 :])
                assert (last["type"], last["request_id"]) == ("done", "one")
                assert last["reason"] == "cancelled"
    demo.wait_idle()


# ---- the end


# ---- rows, in every format


def fresh(demo: Served, **options: Any) -> list[Any]:
    """The engine's own tokens, its slots empty as for the stream that is compared."""
    for slot in demo.engine.slots:
        slot.clear()
    tokens = list(demo.engine.generate(TEXT, max_tokens=4, temperature=0, **options))
    for slot in demo.engine.slots:
        slot.clear()
    return tokens


@pytest.mark.parametrize("values", [None, "logits", "scores", "probs"])
def test_rows_are_the_engines_bit_for_bit(demo: Served, client: httpx.Client, values: str | None):
    own = fresh(demo, capture=values or "logits")
    tokens, _ = typed(
        client, prompt=TEXT, max_length=4, output_attentions=True, attention_values=values
    )
    n_prompt = len(demo.engine.tokenize(TEXT))
    for i, (event, token) in enumerate(zip(tokens, own, strict=True)):
        attention = event["attention"]
        assert attention["format"] == "per_layer"
        assert attention["shape"] == [4, 8, n_prompt + i]
        assert attention["context_length"] == n_prompt + i
        assert attention["dtype"] == "float32"
        assert rows(event).tobytes() == token.attention.tobytes()


def test_rows_of_the_prompt_come_first(demo: Served, client: httpx.Client):
    for slot in demo.engine.slots:
        slot.clear()
    own = demo.engine.attend(TEXT, "probs").array()
    for slot in demo.engine.slots:
        slot.clear()
    events = stream(
        client, prompt=TEXT, max_length=2, output_attentions=True, attention_values="probs",
        prompt_attention=True,
    )  # fmt: skip
    kinds = [event["type"] for event in events]
    blocks = list(itertools.takewhile(lambda event: event["type"] == "prompt_attention", events))
    assert kinds == ["prompt_attention"] * len(blocks) + ["token", "token", "done"]
    assert blocks[0]["start"] == 0
    joined = np.concatenate([rows(block) for block in blocks], axis=2)
    np.testing.assert_array_equal(joined, own)


def test_values_and_format_of_the_settings_are_the_default(serve: Serve):
    served = serve(Settings(attention_values="probs", attention_format="aggregated"))
    with served.client() as client:
        tokens, _ = typed(client, prompt=TEXT, max_length=2, output_attentions=True)
        assert tokens[0]["attention"]["format"] == "aggregated"
        np.testing.assert_allclose(rows(tokens[0]).sum(), 1, atol=1e-4)
        query = f"{PATH}?attention_format=per_layer"
        body = {"prompt": TEXT, "max_length": 1, "output_attentions": True}
        assert '"per_layer"' in client.post(query, json=body).text


# ---- text: characters of several ids, ends, stop sequences


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


def test_plain_stream_ends_where_its_stop_sequence_does(demo: Served, client: httpx.Client):
    token = next(one for one in demo.engine.generate(TEXT, temperature=0) if len(one.text) > 3)
    given = {"prompt": TEXT, "max_length": 16, "stop_sequence": [token.text[1:3]]}
    shown = "".join(one["token"] for one in stream(client, **given, trim_stop=False))
    assert shown.endswith(token.text[1:3])
    reply = client.post("/api/v1/generate", json={**given, "temperature": 0, "trim_stop": False})
    assert reply.json()["results"][0]["text"] == shown


def test_banned_and_biased_ids_are_heeded(writer: httpx.Client):
    request = {"input_ids": [65], "max_length": 5, "logit_bias": {"66": 1000}}
    tokens, _ = typed(writer, **request)
    assert texts(tokens) == "BBBBB"
    tokens, _ = typed(writer, **request, banned_tokens=[66])
    assert "B" not in texts(tokens)
