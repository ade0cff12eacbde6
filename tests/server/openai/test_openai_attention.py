"""Attention through OpenAI's API: in the reply, or kept for whoever has its id and its key."""

from __future__ import annotations

import base64
import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from kqview.server import Settings
from tests.support import openai as api

if TYPE_CHECKING:
    import httpx

    from tests.server.conftest import Serve
    from tests.support.serving import Served

N_TOKENS = 4


def engine_rows(served: Served, **capture: Any) -> list[np.ndarray[Any, Any]]:
    """Rows of the completion that `tests.support.openai.TEXT` asks for, from the engine itself."""
    from kqview import Capture

    generation = served.engine.generate(
        api.TEXT["prompt"], max_tokens=N_TOKENS, temperature=0, capture=Capture(**capture)
    )
    return [np.asarray(token.attention) for token in generation]


def values_of(attention: dict[str, Any]) -> np.ndarray[Any, Any]:
    assert attention["encoding"] == "base64"
    data = np.frombuffer(base64.b64decode(attention["data"]), np.dtype(attention["dtype"]))
    return data.reshape(attention["shape"])


def is_row(values: np.ndarray[Any, Any], row: np.ndarray[Any, Any]) -> bool:
    """Equal but for what another division into batches may change."""
    assert (values.dtype, values.shape) == (row.dtype, row.shape)
    return np.allclose(values, row, rtol=1e-2, atol=1e-3)


def get(served: Served, path: str, **headers: str) -> httpx.Response:
    with served.client(headers=headers) as client:
        return client.get(path)


def attention_of(stream: list[dict[str, Any]]) -> list[dict[str, Any]]:
    choices = [choice for chunk in stream for choice in chunk["choices"]]
    return [choice["attention"] for choice in choices if "attention" in choice]


@pytest.mark.parametrize(
    ("wanted", "capture"),
    [
        (True, {"kind": "probs"}),
        ({"values": "logits", "layers": [3, 1], "heads": [2]},
         {"kind": "logits", "layers": [3, 1], "heads": [2]}),
        ({"values": "scores", "dtype": "float16"}, {"kind": "scores", "dtype": "float16"}),
        ({"reduce": "mean_heads"}, {"kind": "probs", "reduce": "mean_heads"}),
        ({"reduce": "max_heads"}, {"kind": "probs", "reduce": "max_heads"}),
        ({"reduce": "mean"}, {"kind": "probs", "reduce": "mean"}),
    ],
)  # fmt: skip
def test_rows_of_every_token_are_the_engines(demo: Served, wanted: Any, capture: dict[str, Any]):
    expected = engine_rows(demo, **capture)
    whole = api.text(demo, attention=wanted)["choices"][0]["attention"]
    streamed = attention_of(api.text_chunks(demo, attention=wanted))
    for sent in (whole, streamed):
        assert [one["n"] for one in sent] == list(range(N_TOKENS))
        for one, row in zip(sent, expected, strict=True):
            assert is_row(values_of(one), row)
    assert [one["token_id"] for one in whole] == [one["token_id"] for one in streamed]


def test_each_token_of_a_chat_comes_with_its_row_while_its_text_is_held_back(demo: Served):
    forced = {"grammar": 'root ::= "<think>Hm</think>Yes"', "max_tokens": 40}
    stream = api.chat_chunks(demo, **forced, attention=True)
    rows = attention_of(stream)
    assert [one["n"] for one in rows] == list(range(len(rows)))
    widths = [one["shape"][-1] for one in rows]
    assert widths == list(range(widths[0], widths[0] + len(rows)))
    assert api.joined(stream, "content") == "Yes"
    whole = api.chat(demo, **forced, attention=True)["choices"][0]
    assert [one["n"] for one in whole["attention"]] == [one["n"] for one in rows]


def test_small_formats_are_objects(demo: Served):
    sparse = api.text(demo, attention={"format": "sparse", "top_k": 3})["choices"][0]["attention"]
    assert [len(one["data"]) for one in sparse] == [3] * N_TOKENS
    viz = api.text(demo, attention={"format": "viz"})["choices"][0]["attention"]
    assert all(one["entropy"] > 0 for one in viz)


def test_rows_of_the_prompt_precede_the_tokens(demo: Served):
    wanted = {"prompt": True, "reduce": "mean"}
    n_prompt = len(demo.engine.tokenize(api.TEXT["prompt"]))
    stream = api.text_chunks(demo, attention=wanted)
    choices = [choice for chunk in stream for choice in chunk["choices"]]
    n_blocks = sum("prompt_attention" in choice for choice in choices)
    assert n_blocks >= 1
    assert all("prompt_attention" in choice for choice in choices[:n_blocks])
    blocks = api.text(demo, attention=wanted)["choices"][0]["prompt_attention"]
    rows = np.concatenate([values_of(block) for block in blocks])
    assert rows.shape == (n_prompt, n_prompt)
    assert np.allclose(rows.sum(axis=-1), 1, atol=1e-3)


def test_spans_are_sums_of_the_rows(demo: Served):
    spans = [[0, 3], [3, None]]
    for delivery in ("reply", "stream"):
        asked = [{"heads": [2]}, {"heads": [2], "spans": spans}]
        if delivery == "reply":
            replies = [api.text(demo, attention=one) for one in asked]
            whole, sums = (reply["choices"][0]["attention"] for reply in replies)
        else:
            whole, sums = (attention_of(api.text_chunks(demo, attention=one)) for one in asked)
        assert len(whole) == len(sums) == N_TOKENS
        for row, part in zip(whole, sums, strict=True):
            assert part["spans"] == spans
            assert "context_length" not in part
            expected = [values_of(row)[..., slice(*span)].sum(-1) for span in spans]
            np.testing.assert_allclose(values_of(part), np.stack(expected, -1), rtol=1e-5)


def test_each_choice_has_rows_of_its_own(demo: Served):
    reply = api.text(demo, prompt=["Anna is a", "Tom"], n=2, attention={"reduce": "mean"})
    widths = [choice["attention"][0]["shape"][-1] for choice in reply["choices"]]
    counts = [len(demo.engine.tokenize(one)) for one in ("Anna is a", "Tom")]
    assert widths == [counts[0], counts[0], counts[1], counts[1]]
    assert all(len(choice["attention"]) == N_TOKENS for choice in reply["choices"])


def test_reply_that_would_be_too_large_is_refused(serve: Serve):
    served = serve(Settings(max_reply_bytes=2000))
    with served.client() as client:
        reply = client.post("/v1/completions", json={**api.TEXT, "attention": True})
        assert reply.status_code == 413
        assert "max_reply_bytes" in reply.json()["error"]["message"]
    assert len(attention_of(api.text_chunks(served, attention=True))) == N_TOKENS
    served.wait_idle()


# ---- kept


def test_kept_rows_are_fetched_by_the_id_of_the_reply(demo: Served):
    expected = engine_rows(demo, kind="probs")
    plain = api.text(demo)
    reply = api.text(demo, attention={"delivery": "id"})
    assert set(reply) == set(plain)  # nothing new
    assert set(reply["choices"][0]) == set(plain["choices"][0])
    listed = get(demo, f"/v1/attention/{reply['id']}").json()
    assert (listed["values"], listed["format"], listed["layers"]) == (
        "probs", "per_layer", [0, 1, 2, 3],
    )  # fmt: skip
    [choice] = listed["choices"]
    assert "".join(row["text"] for row in choice["rows"]) == reply["choices"][0]["text"]
    for row, values in zip(choice["rows"], expected, strict=True):
        sent = get(demo, f"/v1/attention/{reply['id']}/{row['n']}")
        assert sent.headers["content-type"] == "application/octet-stream"
        assert sent.headers["x-attention-shape"] == ",".join(map(str, values.shape))
        assert is_row(np.frombuffer(sent.content, np.float32).reshape(values.shape), values)
        assert row["shape"] == list(values.shape)


def test_stream_with_kept_rows_shows_nothing_new(demo: Served):
    stream = api.chat_chunks(demo, attention={"delivery": "id", "reduce": "mean_heads"})
    assert not attention_of(stream)
    plain = api.chat_chunks(demo)
    assert [one["choices"] for one in stream] == [one["choices"] for one in plain]
    listed = get(demo, f"/v1/attention/{stream[0]['id']}").json()
    assert len(listed["choices"][0]["rows"]) == api.CHAT["max_tokens"]


def test_ranges_join_to_the_row(demo: Served):
    path = f"/v1/attention/{api.text(demo, attention={'delivery': 'id'})['id']}/0"
    whole = get(demo, path)
    n = len(whole.content)
    assert whole.headers["accept-ranges"] == "bytes"
    first, rest = get(demo, path, range="bytes=0-99"), get(demo, path, range="bytes=100-")
    assert (first.status_code, rest.status_code) == (206, 206)
    assert first.headers["content-range"] == f"bytes 0-99/{n}"
    assert rest.headers["content-range"] == f"bytes 100-{n - 1}/{n}"
    assert first.content + rest.content == whole.content
    beyond = get(demo, path, range=f"bytes={n}-")
    assert (beyond.status_code, beyond.headers["content-range"]) == (416, f"bytes */{n}")


def test_rows_of_each_choice_are_kept(demo: Served):
    reply = api.text(demo, prompt=["Anna is a", "Tom"], attention={"delivery": "id"})
    rows = [get(demo, f"/v1/attention/{reply['id']}/0?choice={i}") for i in range(2)]
    widths = [int(row.headers["x-attention-shape"].rpartition(",")[2]) for row in rows]
    prompts = ("Anna is a", "Tom")
    assert widths == [len(demo.engine.tokenize(one)) for one in prompts]


def test_small_format_is_kept_as_json(demo: Served):
    reply = api.text(demo, attention={"delivery": "id", "format": "viz"})
    row = get(demo, f"/v1/attention/{reply['id']}/1")
    assert row.headers["content-type"] == "application/json"
    assert json.loads(row.content)["entropy"] > 0


@pytest.mark.parametrize("path", ["99", "-1", "x", "0?choice=1", "0?choice=x", "1e3", "٣"])
def test_row_that_is_not_there_is_not_found(demo: Served, path: str):
    name = api.text(demo, attention={"delivery": "id"})["id"]
    found = get(demo, f"/v1/attention/{name}/{path}")
    assert (found.status_code, found.json()["error"]["type"]) == (404, "not_found_error")


def test_reply_without_kept_rows_is_not_found(demo: Served):
    for name in ("cmpl-unknown", api.text(demo)["id"], api.text(demo, attention=True)["id"]):
        assert get(demo, f"/v1/attention/{name}").status_code == 404


def test_kept_rows_belong_to_the_key_that_asked(serve: Serve):
    served = serve(Settings(api_keys=("one", "two")))
    body = {**api.TEXT, "attention": {"delivery": "id"}}
    name = api.asked(served, "/v1/completions", key="one", **body)["id"]
    for path in (f"/v1/attention/{name}", f"/v1/attention/{name}/0"):
        assert get(served, path, authorization="Bearer one").status_code == 200
        other = get(served, path, authorization="Bearer two")
        never = get(served, path.replace(name, "cmpl-never"), authorization="Bearer two")
        assert other.status_code == never.status_code == 404
        assert other.json()["error"]["message"].replace(name, "") == never.json()["error"][
            "message"
        ].replace("cmpl-never", "")
        assert get(served, path).status_code == 401


def test_kept_rows_stay_within_their_memory(serve: Serve):
    served = serve(Settings(kept_attention_bytes=20_000))
    names = [api.text(served, attention={"delivery": "id"})["id"] for _ in range(8)]
    kept = [name for name in names if get(served, f"/v1/attention/{name}").status_code == 200]
    assert 1 <= len(kept) < 8
    assert kept == names[-len(kept) :]  # the newest
    assert served.service.budget.used_bytes == served.service.kept.n_bytes <= 20_000
