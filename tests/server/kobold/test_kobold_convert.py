"""Requests of the KoboldAI API become neutral ones; replies are those of its documents."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from kqview.errors import InvalidSampling, InvalidToken, PromptTooLong, QueueFull, RequestError
from kqview.server import Settings
from kqview.server.api.koboldai import routes
from kqview.server.api.koboldai.failures import KoboldFailure, kobold_error_body
from kqview.server.api.koboldai.request import FIELDS, StreamBody
from kqview.server.api.wire.logprobs import logprobs_of
from kqview.server.errors import NoModel, Unauthorized, answer_of
from kqview.server.models.run import LastRun, TokenLogprobs
from kqview.types import EngineStats, Usage
from kqview.types.sampling import OPTIONS
from tests.support.dream import QWEN, entry_of, plan_from
from tests.support.kobold import golden


def as_json(value: object) -> Any:
    return msgspec.json.decode(msgspec.json.encode(value))


def convert_request(fields: dict[str, Any], *, asked: bool = False, **settings: Any) -> Any:
    options = {"asked": asked, "settings": Settings(**settings), "max_context": 512}
    return plan_from(fields, kind=StreamBody, **options).request


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
    request = replace(request, forcing=None)
    assert contains(as_json(request), case["expect"])


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
        ({"prompt": "x", "top_logprobs": 1001}, RequestError, "^top_logprobs is 1001, .* 1000"),
        ({"prompt": "x", "logprobs": 1001}, RequestError, "^logprobs is 1001, the limit is 1000"),
        ({"input_ids": [5] * 513}, PromptTooLong, "input_ids has 513 tokens, the limit is 512"),
        ({"prompt": "x", "logit_bias": {"word": 1}}, InvalidToken, "logit_bias"),
    ],
)
def test_request_that_cannot_work_is_refused(
    fields: dict[str, Any], error: type[Exception], says: str
):
    with pytest.raises(error, match=says):
        convert_request(fields)


def test_every_sampling_option_has_a_field():
    not_offered = {
        "min_keep", "min_tokens", "begin_suppress", "finish_on_length", "post_sampling_probs",
    }  # fmt: skip
    assert set(FIELDS.sampling) == set(OPTIONS) - not_offered
    fields = {field.name for field in msgspec.structs.fields(StreamBody)}
    assert {name for names in FIELDS.fields.values() for name in names} <= fields


# ---- replies


def call_of(**model: Any) -> Any:
    """A call of a model like the one of the documents, with these facts."""
    info = replace(QWEN, **model)
    return SimpleNamespace(model=entry_of(info, model.get("n_ctx_train")))


async def test_model_is_the_documents_reply_in_its_order():
    case = golden("model")
    layers = tuple(range(case["info"]["n_layer"]))
    call = call_of(**case["info"], attention_layers=layers)
    call.model.max_context = case["max_context"]
    assert list(as_json(await routes.model(call)).items()) == list(case["reply"].items())


async def test_model_says_minus_one_for_missing_tokens_and_names_its_layers():
    missing: dict[str, Any] = dict.fromkeys(("bos_token_id", "eos_token_id", "eot_token_id"))
    reply = as_json(await routes.model(call_of(n_layer=4, attention_layers=(1, 3), **missing)))
    assert (reply["bos_token_id"], reply["eos_token_id"], reply["eot_token_id"]) == (-1, -1, -1)
    assert (reply["num_layers"], reply["attention_layers"]) == (4, [1, 3])


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
    body = as_json(cast("KoboldFailure", kobold_error_body(answer)))
    assert answer.status == status
    assert body["error"] == body["detail"]["msg"] == answer.message
    assert body["detail"]["type"] == kind
    assert "secret" not in str(body)


def last_run(monkeypatch: pytest.MonkeyPatch, last: LastRun, **known: Any) -> Any:
    """A call of a server whose last run is *last*; it is second 100, and began at second 40."""
    monkeypatch.setattr(routes.time, "monotonic", lambda: 100.0)
    facts = {
        "last_of": lambda caller: last, "n_runs_of": lambda caller: 5, "runs": (),
        "started_s": 40.0, **known,
    }  # fmt: skip
    call = call_of()
    call.model.engine.stats = lambda: EngineStats(n_queued=2)
    call.service, call.caller = SimpleNamespace(**facts), None
    return call


async def test_perf_is_of_the_last_generation(monkeypatch: pytest.MonkeyPatch):
    last = LastRun(Usage(30, 10, 11, 0.5, 2.0), "stop_sequence", 7, ended_s=90.0)
    perf = await routes.perf(last_run(monkeypatch, last))
    assert (perf.last_process, perf.last_eval) == (25.0, 200.0)
    assert (perf.last_process_speed, perf.last_eval_speed) == (40.0, 5.0)
    assert (perf.last_input_count, perf.last_token_count) == (30, 11)
    assert (perf.stop_reason, perf.last_seed, perf.total_gens, perf.queue) == (2, 7, 5, 2)
    assert (perf.idle, perf.uptime, perf.idletime) == (1, 60.0, 10.0)


def test_logprobs_have_both_forms():
    texts = {1: b"Hi", 2: b" you", 3: b"\xf0\x9f", 4: b"\x98\x80", 5: b"!"}
    tokens = [
        TokenLogprobs(1, -0.5, ((1, -0.5), (3, -2.0))),
        TokenLogprobs(2, -1.0, ()),
    ]
    reply = as_json(logprobs_of(tokens, texts.__getitem__))
    assert reply["tokens"] == ["Hi", " you"]
    assert reply["token_logprobs"] == [-0.5, -1.0]
    assert reply["text_offset"] == [0, 2]
    split = [TokenLogprobs(id_, -1.0, ()) for id_ in (1, 3, 4, 5)]
    assert logprobs_of(split, texts.__getitem__).text_offset == [0, 2, 2, 3]  # "Hi😀!"
    assert reply["top_logprobs"] == [{"Hi": -0.5, "\ufffd": -2.0}, {}]
    assert reply["content"][0]["bytes"] == [72, 105]
    assert reply["content"][0]["top_logprobs"][1]["bytes"] == [0xF0, 0x9F]
