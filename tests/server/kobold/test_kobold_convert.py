"""Requests of the kobold dialect become neutral ones; replies are those of its documents."""

from __future__ import annotations

import base64
import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pytest

from kqview import Engine
from kqview.errors import InvalidSampling, InvalidToken, PromptTooLong, QueueFull, RequestError
from kqview.server import Settings
from kqview.server.api.kobold import convert, schema
from kqview.server.api.wire.attention_protocol import SAMPLING_FIELDS, logprobs_of, sampling_for
from kqview.server.errors import NoModel, Unauthorized, answer_of
from kqview.server.models.run import LastRun, TokenLogprobs
from kqview.server.web.lenient import LenientDecoder
from kqview.types import EngineStats, ModelInfo, Usage
from kqview.types.sampling import OPTIONS
from tests.support.kobold import golden
from tests.support.serving import serving

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import httpx


SEED = 4711  # of requests that give none

INFO = ModelInfo(
    name="", architecture="qwen2", n_vocab=0, n_layer=0, n_head=0, n_head_kv=0, n_embd=0,
    n_ctx_train=0, attention_layers=(), attention_scale=0.1, bos_token_id=None, eos_token_id=None,
    eot_token_id=None, pad_token_id=None, special_tokens={}, rope_freq_base=1e4, rope_freq_scale=1,
    chat_template=None, n_params=0, size_bytes=0, file_type="F16", classifier_labels=(),
    metadata={},
)  # fmt: skip


def info(**facts: Any) -> ModelInfo:
    n_layer = facts.get("n_layer", 0)
    return ModelInfo(**{**asdict(INFO), "attention_layers": tuple(range(n_layer)), **facts})


def body_of(fields: dict[str, Any]) -> schema.StreamBody:
    return LenientDecoder(schema.StreamBody).decode(msgspec.json.encode(fields))


def as_json(value: object) -> Any:
    return msgspec.json.decode(msgspec.json.encode(value))


def convert_request(fields: dict[str, Any], *, asked: bool = False, **settings: Any) -> Any:
    return convert.request_of(
        body_of(fields), Settings(**settings), request_id="ours", max_context=512,
        control_token=lambda text: None, seed=SEED, asked=asked,
    )  # fmt: skip


def contains(actual: Any, expected: Any) -> bool:
    """Whether *actual* has all that *expected* names, however deep."""
    if isinstance(expected, dict) and isinstance(actual, dict):
        return all(name in actual and contains(actual[name], expected[name]) for name in expected)
    return bool(actual == expected)


# ---- requests


@pytest.mark.parametrize("case", golden("requests"), ids=lambda case: case["name"])
def test_request_becomes_what_its_fields_say(case: dict[str, Any]):
    request = convert_request(
        case["body"], asked=case.get("asked", False), **case.get("settings", {})
    )
    assert contains(as_json(request), case["expect"])
    assert convert.is_typed(body_of(case["body"])) is case["is_typed"]


def test_request_without_a_name_gets_ours():
    assert convert_request({"prompt": "x"}).request_id == "ours"
    assert convert_request({"prompt": "x", "request_id": ""}).request_id == "ours"


def test_samplers_of_koboldcpp_go_to_the_engine():
    fields = {"nsigma": 1.5, "dynatemp_range": 0.4, "dynatemp_exponent": 2.0, "typical": 0.9}
    sampling = convert_request({"prompt": "x", **fields}).sampling
    assert (sampling.top_n_sigma, sampling.typical_p) == (1.5, 0.9)
    assert (sampling.dynatemp_range, sampling.dynatemp_exponent) == (0.4, 2.0)


@pytest.mark.parametrize("negative", [-1, -2])
def test_negative_seed_is_a_random_one(negative: int):
    assert convert_request({"prompt": "x", "sampler_seed": negative}).sampling.seed == SEED


@pytest.mark.parametrize(
    ("fields", "error", "says"),
    [
        ({}, RequestError, "prompt"),
        ({"prompt": "x", "num_samples": 2}, RequestError, "num_samples"),
        ({"prompt": "x", "temperature": -1}, InvalidSampling, "^temperature must be"),
        ({"prompt": "x", "rep_pen": -1}, InvalidSampling, "^rep_pen must be"),
        ({"prompt": "x", "repetition_penalty": -1}, InvalidSampling, "^repetition_penalty must be"),
        ({"prompt": "x", "typical": 2}, InvalidSampling, "^typical must be"),
        ({"prompt": "x", "nsigma": -2}, InvalidSampling, "^nsigma must be"),
        ({"prompt": "x", "banned_tokens": ["x" * 1001]}, RequestError, "1001 characters"),
        ({"prompt": "x", "banned_strings": ["x"] * 257}, RequestError, "banned_strings has 257"),
        ({"input_ids": [5] * 513}, PromptTooLong, "input_ids has 513 tokens, the limit is 512"),
        ({"prompt": "x", "logit_bias": {"word": 1}}, InvalidToken, "logit_bias"),
    ],
)
def test_request_that_cannot_work_is_refused(
    fields: dict[str, Any], error: type[Exception], says: str
):
    with pytest.raises(error, match=says):
        convert_request(fields)


def test_bias_of_what_is_no_id_names_its_field():
    with pytest.raises(InvalidToken) as caught:
        convert_request({"prompt": "x", "logit_bias": {"word": 1}})
    assert caught.value.parameter == "logit_bias"


def test_query_gives_attention_fields_where_the_body_does_not():
    body = body_of({"prompt": "x", "dtype": "float32"})
    query = {"attention_format": "aggregated", "dtype": "float16", "other": "ignored"}
    seen = convert.with_query(body, query)
    assert (seen.attention_format, seen.dtype, seen.prompt) == ("aggregated", "float32", "x")
    assert convert.with_query(body, {}) is body


def test_query_with_an_unknown_value_is_refused():
    with pytest.raises(RequestError, match="attention_format"):
        convert.with_query(body_of({"prompt": "x"}), {"attention_format": "all"})


# ---- replies


def test_tokenized_text_is_the_documents_reply():
    case = golden("tokenize")
    pieces = [(id_, text) for id_, text in case["pieces"]]
    assert as_json(convert.tokenized(pieces, with_pieces=True)) == case["reply"]
    without = convert.tokenized(pieces, with_pieces=False)
    assert as_json(without) == case["reply_without_pieces"]


@pytest.mark.parametrize(
    ("fields", "text"), [({"text": "a", "content": "b"}, "a"), ({"content": "b"}, "b")]
)
def test_text_to_tokenize_has_two_names(fields: dict[str, Any], text: str):
    assert convert.text_of(schema.TokenizeBody(**fields)) == text


def test_requests_without_text_or_ids_are_refused():
    with pytest.raises(RequestError, match="send text"):
        convert.text_of(schema.TokenizeBody())
    with pytest.raises(RequestError, match="send token_ids"):
        convert.ids_of(schema.DetokenizeBody())
    assert convert.ids_of(schema.DetokenizeBody(tokens=[3])) == [3]


def test_model_is_the_documents_reply_in_its_order():
    case = golden("model")
    name = case["info"]["name"]
    reply = convert.model_of(info(**case["info"]), name=name, max_context=case["max_context"])
    assert list(as_json(reply).items()) == list(case["reply"].items())


def test_model_without_special_tokens_says_minus_one():
    reply = convert.model_of(info(n_layer=2), name="m", max_context=8)
    assert (reply.bos_token_id, reply.eos_token_id, reply.eot_token_id) == (-1, -1, -1)


def test_model_names_its_attention_layers_where_they_are_not_all():
    reply = as_json(
        convert.model_of(info(n_layer=4, attention_layers=(1, 3)), name="m", max_context=8)
    )
    assert reply["num_layers"] == 4
    assert reply["attention_layers"] == [1, 3]


@pytest.mark.parametrize(
    ("reason", "told"),
    [
        ("stop", "stop"), ("stop_token", "stop"), ("stop_sequence", "stop"), ("cancelled", "stop"),
        ("length", "length"),
    ],
)  # fmt: skip
def test_finish_reason_is_stop_or_length(reason: str, told: str):
    assert convert.finish_reason(reason) == told


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (RequestError("x: y; z"), 400, "bad_input"),
        (PromptTooLong("x: y; z"), 400, "bad_input"),
        (Unauthorized("x: y; z"), 401, "unauthorized"),
        (QueueFull("x: y; z"), 503, "service_unavailable"),
        (NoModel("x: y; z"), 503, "service_unavailable"),
        (ZeroDivisionError("secret"), 500, "server_error"),
    ],
)
def test_error_body_has_both_forms(error: Exception, status: int, kind: str):
    answer = answer_of(error)
    body = convert.error_body(answer)
    assert answer.status == status
    assert body["error"] == body["detail"]["msg"] == answer.message
    assert body["detail"]["type"] == kind
    assert "secret" not in str(body)


def test_failed_count_says_minus_one():
    assert convert.token_count_error(answer_of(RequestError("x: y; z")))["value"] == -1


@pytest.mark.parametrize(
    ("n_ended", "is_known", "success", "done"),
    [(1, True, "true", "true"), (0, True, "false", "true"), (0, False, "false", "false")],
)
def test_abort_is_told_in_texts(n_ended: int, is_known: bool, success: str, done: str):
    reply = as_json(convert.aborted(n_ended=n_ended, is_known=is_known))
    assert reply == {"success": success, "done": done}


def test_perf_is_of_the_last_generation():
    usage = Usage(30, 10, 11, 0.5, 2.0)
    last = LastRun(usage, "stop_sequence", 7, ended_s=90.0)
    perf = convert.perf_of(
        last, EngineStats(n_queued=2), n_runs=5, n_running=0, started_s=40.0, now_s=100.0
    )
    assert (perf.last_process, perf.last_eval) == (25.0, 200.0)
    assert (perf.last_process_speed, perf.last_eval_speed) == (40.0, 5.0)
    assert (perf.last_input_count, perf.last_token_count) == (30, 11)
    assert (perf.stop_reason, perf.last_seed, perf.total_gens, perf.queue) == (2, 7, 5, 2)
    assert (perf.idle, perf.uptime, perf.idletime) == (1, 60.0, 10.0)


def test_perf_before_the_first_generation_has_no_figures():
    perf = convert.perf_of(
        LastRun(), EngineStats(), n_runs=0, n_running=1, started_s=40.0, now_s=41.0
    )
    assert (perf.last_process, perf.last_eval, perf.stop_reason, perf.last_seed) == (0, 0, -1, -1)
    assert (perf.idle, perf.idletime) == (0, 0.0)


def test_logprobs_have_both_forms():
    texts = {1: b"Hi", 2: b" you", 3: b"\xf0\x9f"}
    tokens = [
        TokenLogprobs(1, -0.5, ((1, -0.5), (3, -2.0))),
        TokenLogprobs(2, -1.0, ()),
    ]
    reply = as_json(logprobs_of(tokens, texts.__getitem__))
    assert reply["tokens"] == ["Hi", " you"]
    assert reply["token_logprobs"] == [-0.5, -1.0]
    assert reply["text_offset"] == [0, 2]
    assert reply["top_logprobs"] == [{"Hi": -0.5, "\ufffd": -2.0}, {}]
    assert reply["content"][0]["bytes"] == [72, 105]
    assert reply["content"][0]["top_logprobs"][1]["bytes"] == [0xF0, 0x9F]
    assert logprobs_of([], texts.__getitem__) is None


def test_every_sampling_option_has_a_field():
    not_offered = {
        "min_keep", "min_tokens", "begin_suppress", "finish_on_length", "post_sampling_probs",
    }  # fmt: skip
    assert set(SAMPLING_FIELDS) == set(OPTIONS) - not_offered
    fields = {field.name for field in msgspec.structs.fields(schema.StreamBody)}
    assert {name for names in SAMPLING_FIELDS.values() for name in names} <= fields


@pytest.mark.parametrize("name", ["top_logprobs", "logprobs"])
def test_more_logprobs_than_the_limit_are_refused(name: str):
    body = body_of({"prompt": "a", name: 1001})
    with pytest.raises(RequestError, match=f"^{name} is 1001, the limit is 1000"):
        sampling_for(body, control_token=lambda text: None, seed=SEED)


# ---- the document's own examples


PATH = "/api/extra/generate/stream"
FRANCE = [785, 6722, 315, 9625, 374]


@pytest.fixture(scope="module")
def client(qwen_model: Path) -> Iterator[httpx.Client]:
    with (
        Engine(qwen_model, n_threads=1, n_ctx=512) as engine,
        serving(Settings(), engine) as served,
        served.client() as client,
    ):
        yield client


def test_tokenize_example_replies_as_documented(client: httpx.Client):
    body = {"text": "Hello, how are you?", "add_special_tokens": False}
    assert client.post("/api/v1/tokenize", json=body).json() == golden("tokenize")["reply"]


def test_detokenize_example_replies_as_documented(client: httpx.Client):
    body = {"token_ids": [9707, 11, 1246, 525, 498, 30]}
    assert client.post("/api/v1/detokenize", json=body).json() == {"text": "Hello, how are you?"}


def test_model_has_the_documented_fields_and_vocabulary(client: httpx.Client):
    reply = client.get("/api/v1/model").json()
    documented = golden("model")["reply"]
    assert list(reply) == list(documented)
    assert [type(value) for value in reply.values()] == [type(v) for v in documented.values()]
    same = ("vocab_size", "bos_token_id", "rope_freq_scale")
    assert [reply[name] for name in same] == [documented[name] for name in same]


def test_prompt_and_input_ids_examples_give_identical_output(client: httpx.Client):
    wanted = {"text": "The capital of France is", "add_special_tokens": False}
    assert client.post("/api/v1/tokenize", json=wanted).json()["token_ids"] == FRANCE
    sampling = {"max_length": 3, "temperature": 0.7, "sampler_seed": 12345}
    headers = {"accept": "text/event-stream"}
    a = client.post(PATH, json={"prompt": wanted["text"], **sampling}, headers=headers)
    b = client.post(PATH, json={"input_ids": FRANCE, **sampling}, headers=headers)
    assert a.text == b.text
    assert a.text.endswith('event: message\ndata: {"token":"","finish_reason":"length"}\n\n')


def test_complete_working_example_decodes_its_attention(client: httpx.Client):
    body = {
        "prompt": "The capital of France is", "max_length": 20, "temperature": 0.7,
        "output_attentions": True, "request_id": "test-123",
    }  # fmt: skip
    shapes: list[Any] = []
    with client.stream("POST", PATH, json=body) as response:
        for line in response.iter_lines():
            if not line.startswith("data: "):
                continue
            data = json.loads(line[6:])
            if data["type"] == "token":
                attn = np.frombuffer(base64.b64decode(data["attention"]["data"]), dtype=np.float32)
                shapes.append(attn.reshape(data["attention"]["shape"]).shape)
            elif data["type"] == "done":
                break
    assert shapes == [(3, 2, 5 + i) for i in range(data["total_tokens"])]
    assert data["request_id"] == "test-123"


def test_workflow_generates_from_pruned_ids(client: httpx.Client):
    pruned = FRANCE[:2] + FRANCE[3:]
    body = {"input_ids": pruned, "max_length": 10, "output_attentions": True}
    with client.stream("POST", PATH, json=body) as response:
        first = next(line for line in response.iter_lines() if line.startswith("data: "))
    assert json.loads(first[6:])["attention"]["context_length"] == len(pruned)
