"""``POST /api/v1/generate`` of the dream dialect: what it answers, and what it refuses."""

from __future__ import annotations

import base64
import json
from typing import TYPE_CHECKING, Any, get_type_hints

import msgspec
import numpy as np
import pytest

from kqview import Capture
from kqview.server import Settings
from kqview.server.api.koboldai import schema
from kqview.server.api.koboldai.request import KoboldGenerateBody
from tests.support.dream import (
    PROMPT,
    DreamSocket,
    clear,
    decoded,
    golden,
    reference,
    wrong_value,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    import httpx

    from tests.support.serving import Serve, Served


N_TOKENS = 6
ATTENTION = {"return_attention": True, "temperature": 0, "ban_eos_token": True,
             "max_new_tokens": N_TOKENS}  # fmt: skip
MSGPACK = {"accept": "application/msgpack"}


@pytest.fixture
def client(demo: Served) -> Iterator[httpx.Client]:
    clear(demo.engine)
    with demo.client() as client:
        yield client


@pytest.fixture
def ids(demo: Served) -> list[int]:
    return demo.engine.tokenize(PROMPT)


def post(client: httpx.Client, **body: Any) -> dict[str, Any]:
    reply = client.post("/api/v1/generate", json=body)
    assert reply.status_code == 200, reply.text
    return reply.json()


# ---- attention


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("packs", [False, True])
def test_rows_are_the_engines_to_the_last_bit(
    demo: Served, client: httpx.Client, ids: list[int], dtype: Any, packs: bool
):
    expected = reference(demo.engine, ids, N_TOKENS, Capture("probs", dtype=dtype))
    reply = client.post(
        "/api/v1/generate",
        json={**ATTENTION, "input_ids": ids, "dtype": dtype},
        headers=MSGPACK if packs else {},
    )
    assert reply.headers["content-type"] == (MSGPACK["accept"] if packs else "application/json")
    body = msgspec.msgpack.decode(reply.content) if packs else reply.json()
    entries = body["attention_data"]
    assert [entry["token_id"] for entry in entries] == [token.id for token in expected]
    for entry, token in zip(entries, expected, strict=True):
        data = entry["attention"]["data"]
        assert isinstance(data, bytes) == packs
        raw = data if packs else base64.b64decode(data, validate=True)
        assert isinstance(token.attention, np.ndarray)
        assert raw == token.attention.tobytes()
        assert entry["attention"]["dtype"] == dtype
        assert entry["attention"]["shape"] == list(token.attention.shape)


def test_short_formats_are_numpys_of_the_whole_rows(
    demo: Served, client: httpx.Client, ids: list[int]
):
    whole = [
        np.asarray(token.attention)
        for token in reference(demo.engine, ids, N_TOKENS, Capture("probs"))
    ]
    weights = np.arange(1, 5) / 10

    def attentions(**fields: Any) -> list[dict[str, Any]]:
        clear(demo.engine)
        reply = post(client, **ATTENTION, input_ids=ids, **fields)
        return [entry["attention"] for entry in reply["attention_data"]]

    expected = {
        "mean": [rows.mean(axis=(0, 1)) for rows in whole],
        "max": [rows.max(axis=(0, 1)) for rows in whole],
        "last_layer": [rows[-1].mean(axis=0) for rows in whole],
        "weighted_layers": [np.tensordot(weights, rows.mean(axis=1), 1) for rows in whole],
    }
    for mode, rows in expected.items():
        got = attentions(attention_format="aggregated", aggregation_mode=mode)
        for one, row in zip(got, rows, strict=True):
            assert isinstance(one["data"], list)
            assert one["shape"] == [len(row)]
            np.testing.assert_allclose(decoded(one), row, rtol=1e-5, atol=1e-7)
    for one, rows in zip(attentions(attention_format="viz"), whole, strict=True):
        row = rows.mean(axis=(0, 1), dtype=np.float64)
        np.testing.assert_allclose(one["mean_by_layer"], rows.mean(axis=(1, 2)), rtol=1e-5)
        np.testing.assert_allclose(one["max_by_layer"], rows.max(axis=(1, 2)), rtol=1e-5)
        assert one["entropy"] == pytest.approx(-(row * np.log(row)).sum(), rel=1e-4)
    for one, rows in zip(attentions(attention_format="sparse", sparse_top_k=5), whole, strict=True):
        mean = rows.mean(axis=(0, 1))
        positions = [entry["position"] for entry in one["data"]]
        assert one["top_k"] == len(positions) == 5
        np.testing.assert_allclose(mean[positions], np.sort(mean)[::-1][:5], rtol=1e-5)
        for entry in one["data"]:
            by_layer = rows.mean(axis=1)[:, entry["position"]]
            np.testing.assert_allclose(entry["layers"], by_layer, rtol=1e-4, atol=1e-7)


def test_rows_of_the_prompt_are_the_engines(demo: Served, client: httpx.Client, ids: list[int]):
    clear(demo.engine)
    generation = demo.engine.generate(
        ids, max_tokens=1, temperature=0, capture=Capture("probs", prompt=True)
    )
    expected = generation.prompt_attention.array()
    generation.read()
    clear(demo.engine)
    reply = post(client, **ATTENTION, input_ids=ids, prompt_attention=True)
    blocks = reply["prompt_attention"]
    assert [block["start"] for block in blocks] == list(
        np.cumsum([0, *(block["rows"] for block in blocks[:-1])])
    )
    got = np.concatenate([decoded(block["attention"]) for block in blocks], axis=2)
    np.testing.assert_array_equal(got, expected)
    assert got.shape == (4, 8, len(ids), len(ids))
    # The last row of the prompt is what the first token came of.
    first = decoded(reply["attention_data"][0]["attention"])
    np.testing.assert_array_equal(got[:, :, -1], first)


def test_layers_and_heads_can_be_chosen(demo: Served, client: httpx.Client, ids: list[int]):
    whole = np.asarray(reference(demo.engine, ids, 1, Capture("probs"))[0].attention)
    body = {**ATTENTION, "max_new_tokens": 1, "input_ids": ids}
    reply = post(client, **body, attention_layers=[3, 1], attention_heads=[7])
    attention = reply["attention_data"][0]["attention"]
    np.testing.assert_array_equal(decoded(attention), whole[[3, 1]][:, [7]])
    assert attention["layers"] == [3, 1]


# ---- text


def test_plain_reply_is_what_koboldai_clients_expect(client: httpx.Client, demo: Served):
    expected = reference(demo.engine, demo.engine.tokenize(PROMPT), 8, None)
    for path in ("/api/v1/generate", "/api/latest/generate"):
        reply = client.post(
            path,
            json={"prompt": PROMPT, "max_length": 8, "temperature": 0, "ban_eos_token": True},
        ).json()
        assert reply.pop("details").keys() == {"reason", *golden("additions")["details"]}
        assert reply == {
            "results": [
                {
                    "text": "".join(token.text for token in expected),
                    "finish_reason": "length",
                    "prompt_tokens": 20,
                    "completion_tokens": 8,
                }
            ]
        }


def test_stop_sequence_is_cut_from_plain_text_alone(
    demo: Served, client: httpx.Client, ids: list[int]
):
    tokens = reference(demo.engine, ids, 12, None)
    text = "".join(token.text for token in tokens)
    stop = text[5:9]
    asked = {"input_ids": ids, "max_new_tokens": 12, "temperature": 0, "ban_eos_token": True,
             "stop_sequence": [stop]}  # fmt: skip
    before = text[: text.index(stop)]
    for fields, expected in (
        ({}, before),
        ({"trim_stop": False}, before + stop),
        ({"return_attention": True}, before + stop),
        ({"return_attention": True, "trim_stop": True}, before),
    ):
        reply = post(client, **asked, **fields)
        assert reply["results"][0]["text"] == expected
        assert reply["results"][0]["finish_reason"] == "stop"
        if fields.get("return_attention"):
            assert reply["generated_text"] == expected
            assert reply["finish_reason"] == "stop_sequence"
            joined = "".join(token["text"] for token in reply["generated_tokens"])
            assert joined.startswith(before + stop)


def test_logprobs_are_the_engines(demo: Served, client: httpx.Client, ids: list[int]):
    tokens = reference(demo.engine, ids, 4, None, top_logprobs=3)
    reply = post(client, input_ids=ids, max_length=4, temperature=0, top_logprobs=3,
                 return_attention=False, ban_eos_token=True)  # fmt: skip
    logprobs = reply["results"][0]["logprobs"]
    assert logprobs["token_logprobs"] == [token.logprob for token in tokens]
    assert logprobs["tokens"] == [token.text for token in tokens]
    for token, one in zip(tokens, reply["generated_tokens"], strict=True):
        assert one["logprob"] == token.logprob
        assert [(top["token_id"], top["logprob"]) for top in one["top_logprobs"]] == (
            token.top_logprobs
        )
        assert one["top_logprobs"][0]["text"] == demo.engine.token_text(
            one["top_logprobs"][0]["token_id"]
        )


def test_samples_differ_and_each_has_its_rows(client: httpx.Client, ids: list[int]):
    reply = post(client, input_ids=ids, max_new_tokens=12, temperature=1.5, top_p=1.0, top_k=0,
                 num_samples=3, seed=5, return_attention=True, ban_eos_token=True)  # fmt: skip
    texts = [result["text"] for result in reply["results"]]
    assert len(set(texts)) == 3
    for i, text in enumerate(texts):
        of_sample = [one for one in reply["attention_data"] if one["sample"] == i]
        assert [e["attention"]["shape"][2] for e in of_sample] == [len(ids) + k for k in range(12)]
        tokens = [one["text"] for one in reply["generated_tokens"] if one["sample"] == i]
        assert "".join(tokens) == text


# ---- transport


def test_reply_is_compressed_where_asked_for_and_possible(client: httpx.Client, ids: list[int]):
    body = {**ATTENTION, "input_ids": ids}
    gzip, identity = {"accept-encoding": "gzip"}, {"accept-encoding": "identity"}
    plain = client.post("/api/v1/generate", json=body, headers=gzip)
    assert "content-encoding" not in plain.headers
    asked = client.post("/api/v1/generate", json={**body, "compression": "gzip"}, headers=gzip)
    assert asked.headers["content-encoding"] == "gzip"
    assert int(asked.headers["content-length"]) < len(asked.content)
    assert asked.json().keys() == plain.json().keys()
    query = client.post("/api/v1/generate?compression=gzip", json=body, headers=gzip)
    assert query.headers["content-encoding"] == "gzip"
    unable = client.post("/api/v1/generate", json={**body, "compression": "gzip"}, headers=identity)
    assert "content-encoding" not in unable.headers


def test_engine_has_its_memory_back_when_the_reply_is_there(
    demo: Served, client: httpx.Client, ids: list[int]
):
    post(client, **ATTENTION, input_ids=ids)
    demo.wait_until(lambda: demo.engine.stats().pool.leased_bytes == 0)


def test_reply_above_the_limit_is_refused_with_figures(serve: Serve):
    served = serve(Settings(max_reply_bytes=100_000))
    asked = {"prompt": PROMPT, "return_attention": True, "temperature": 0}
    with served.client() as client:
        refused = client.post("/api/v1/generate", json={**asked, "max_new_tokens": 40})
        assert refused.status_code == 413
        body = refused.json()
        assert body["detail"]["type"] == "bad_input"
        assert body["limit_bytes"] == 100_000 < body["reply_bytes"]
        assert body["prompt_tokens"] == 20
        assert (body["type"], body["error_code"]) == ("error", "INVALID_REQUEST")
        served.wait_idle()
        fits = {**asked, "max_new_tokens": 40, "attention_format": "viz"}
        assert client.post("/api/v1/generate", json=fits).status_code == 200


# ---- the model


def test_model_info_says_what_the_engine_is(demo: Served, client: httpx.Client):
    info = client.get("/api/v1/model/info").json()
    model = demo.engine.model
    assert info == msgspec.to_builtins(msgspec.convert(info, schema.ModelInfoReply))
    assert info["num_layers"] == model.n_layer == 4
    assert info["num_attention_heads"] == model.n_head == 8
    assert info["vocab_size"] == model.n_vocab
    assert info["context_length"] == demo.engine.n_ctx
    assert info["chat_template"] == model.chat_template
    assert info["torch_dtype"] is None
    special = info["special_tokens"]
    for key in ("im_start_id", "im_end_id"):
        if key in special:
            assert demo.engine.token_text(special[key]) == f"<|{key[:-3]}|>"
    assert special["eos_token"] == demo.engine.token_text(info["eos_token_id"])
    assert json.dumps(info)


# ---- requests that cannot work


@pytest.fixture
def client_refused(demo: Served) -> Iterator[httpx.Client]:
    with demo.client() as client_refused:
        yield client_refused


# ---- over HTTP


@pytest.mark.parametrize(
    ("fields", "code", "figures"),
    [
        ({"input_ids": [5, 999999]}, "INVALID_TOKEN", {"vocab_size"}),
        ({"input_ids": [5], "stop_tokens": [-1]}, "INVALID_TOKEN", {"vocab_size"}),
        ({"input_ids": [5] * 100_000}, "CONTEXT_TOO_LONG", {"context_length", "prompt_tokens"}),
        ({"input_ids": []}, "INVALID_REQUEST", set()),
        ({}, "INVALID_REQUEST", set()),
        ({"input_ids": [5], "temperature": -1}, "INVALID_REQUEST", set()),
        ({"input_ids": [5], "max_new_tokens": 0}, "INVALID_REQUEST", set()),
        ({"input_ids": [5], "num_samples": 17}, "INVALID_REQUEST", set()),
        ({"input_ids": [5], "num_samples": 0}, "INVALID_REQUEST", set()),
        (
            {"input_ids": [5], "return_attention": True, "attention_layers": [2**70]},
            "INVALID_REQUEST",
            set(),
        ),
        (
            {"input_ids": [5], "return_attention": True, "attention_heads": [8]},
            "INVALID_REQUEST",
            set(),
        ),
        (
            {"input_ids": [5], "return_attention": True, "attention_spans": [[4, 4]]},
            "INVALID_REQUEST",
            set(),
        ),
        (
            {
                "input_ids": [5], "return_attention": True, "attention_format": "aggregated",
                "aggregation_mode": "weighted_layers", "layer_weights": [1.0],
            },
            "INVALID_REQUEST",
            set(),
        ),
        (
            {
                "input_ids": [5], "return_attention": True, "attention_format": "viz",
                "prompt_attention": True,
            },
            "INVALID_REQUEST",
            set(),
        ),
    ],
    ids=lambda value: str(sorted(value) if isinstance(value, set) else value)[:60],
)  # fmt: skip
def test_request_that_cannot_work_is_refused_before_it_begins(
    demo: Served,
    client_refused: httpx.Client,
    fields: dict[str, Any],
    code: str,
    figures: set[str],
):
    reply = client_refused.post("/api/v1/generate", json=fields)
    assert reply.status_code == 400
    body = reply.json()
    assert (body["type"], body["error_code"]) == ("error", code)
    assert body.keys() == {"type", "error", "error_code", "detail"} | figures
    assert body["detail"]["msg"] == body["error"]  # where KoboldAI's clients look
    demo.wait_idle()


FIELDS = get_type_hints(KoboldGenerateBody)


@pytest.mark.parametrize("field", FIELDS)
def test_field_of_another_type_is_refused_by_name(client_refused: httpx.Client, field: str):
    body = {"input_ids": [5], field: wrong_value(FIELDS[field])}
    reply = client_refused.post("/api/v1/generate", json=body)
    assert reply.status_code == 400
    assert f"`$.{field}" in reply.json()["error"]


# ---- over the WebSocket


MISTAKES = [
    ({"input_ids": [999999]}, "INVALID_TOKEN", {"vocab_size"}),
    ({"input_ids": [1], "banned_tokens": [-5]}, "INVALID_TOKEN", {"vocab_size"}),
    ({"input_ids": [1] * 100_000}, "CONTEXT_TOO_LONG", {"context_length", "prompt_tokens"}),
    (
        {"input_ids": [1, 2, 3], "max_context_length": 2},
        "CONTEXT_TOO_LONG",
        {"context_length", "prompt_tokens"},
    ),
    ({"input_ids": []}, "INVALID_REQUEST", set[str]()),
    ({"input_ids": [1], "top_p": 2}, "INVALID_REQUEST", set[str]()),
    ({"input_ids": [1], "num_samples": 1000}, "INVALID_REQUEST", set[str]()),
    ({}, "INVALID_REQUEST", set[str]()),
]


@pytest.mark.parametrize("packs", [False, True])
def test_mistakes_are_events_and_the_socket_stays_usable(demo: Served, ids: list[int], packs: bool):
    with DreamSocket(demo.ws_url, packs=packs) as socket:
        for fields, code, figures in MISTAKES:
            socket.send(**{"request_id": "x", "temperature": 0, **fields})
            event = socket.event()
            assert (event["type"], event["error_code"]) == ("error", code), event
            assert event.keys() == {"type", "request_id", "error", "error_code"} | figures
        tokens, _ = socket.generate(input_ids=ids, max_new_tokens=2)
        assert len(tokens) == 2


def test_messagepack_socket_reads_json_text_too(demo: Served, ids: list[int]):
    with DreamSocket(demo.ws_url, packs=True) as socket:
        socket.socket.send(json.dumps({"type": "generate", "input_ids": ids, "max_new_tokens": 1}))
        assert [one["type"] for one in socket.until("done")] == ["token", "done"]
        socket.socket.send(msgspec.msgpack.encode({"type": "sing"}))
        assert socket.event()["error_code"] == "INVALID_REQUEST"
