"""Bodies of the dream dialect as neutral requests, and the model as its info; without a server."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from kqview.errors import (
    InvalidCapture,
    InvalidToken,
    OutOfMemory,
    PoolExhausted,
    PromptTooLong,
    QueueFull,
)
from kqview.server.api.koboldai import failures, routes
from kqview.server.api.koboldai.request import KoboldGenerateBody
from kqview.server.errors import NoModel, answer_of
from kqview.server.models.run import AttentionWanted
from kqview.server.settings import Settings
from kqview.types import EngineStats, PoolStats
from tests.support.dream import QWEN, SEED, entry_of, golden, plan_from, shown_of

IDS = {"input_ids": [1, 2, 3, 4]}


@pytest.mark.parametrize("name", ["generate_request", "generate_message"])
def test_seed_request_becomes_what_it_says(name: str):
    plan = plan_from(golden(name))
    request = plan.request
    assert request.prompt == [151644, 1587, 198, 2610]
    assert request.max_tokens == 50
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.7, 0.9, 40)
    assert sampling.repeat_penalty == 1.0
    assert sampling.stop_tokens == (151645,)
    assert sampling.banned_tokens == (151644,)
    assert request.attention == shown_of(plan) == AttentionWanted("probs")
    assert request.n_samples == 1
    expected = "uuid-1234-5678" if name == "generate_message" else "made-up"
    assert request.request_id == expected


def test_absent_and_null_fields_take_the_example_values_of_the_seed():
    nulls = dict.fromkeys(KoboldGenerateBody.__struct_fields__)
    plan = plan_from({**nulls, **IDS})
    assert plan == plan_from(IDS)
    sampling = plan.request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.7, 0.9, 40)
    assert (sampling.repeat_penalty, sampling.min_p, sampling.seed) == (1.0, 0.0, SEED)
    assert plan.request.max_tokens == 50
    assert shown_of(plan) is None
    assert plan.request.attention is None


def test_values_are_probabilities_unless_somebody_says_otherwise():
    asked = {**IDS, "return_attention": True}

    def kind(fields: dict[str, Any], settings: Settings) -> str:
        shown = shown_of(plan_from(fields, settings=settings))
        assert shown is not None
        return shown.kind

    assert kind(asked, Settings()) == "probs"
    assert kind(asked, Settings(attention_values="scores")) == "scores"
    assert kind({**asked, "attention_values": "logits"}, Settings()) == "logits"


@pytest.mark.parametrize("name", ["sparse_top_k", "attention_top_k"])
def test_sparse_without_positions_is_refused(name: str):
    plan = plan_from({**IDS, "return_attention": True, "attention_format": "sparse", name: 0})
    shown = shown_of(plan)
    assert shown is not None
    with pytest.raises(InvalidCapture, match="top_k is 0"):
        shown.capture(QWEN)


def test_stream_asks_for_the_logprob_of_every_token_and_for_more_only_if_told():
    assert plan_from(IDS).request.sampling.top_logprobs is None
    streamed = {**IDS, "type": "generate"}
    assert plan_from(streamed).request.sampling.top_logprobs == 0
    told = plan_from({**streamed, "top_logprobs": 3})
    assert told.request.sampling.top_logprobs == 3


def test_text_and_key_are_taken_over():
    plan = plan_from({"prompt": "b", "memory": "a", "genkey": "K", "num_samples": 3})
    assert plan.request.prompt == "ab"
    assert plan.request.key == "K"
    assert plan.request.n_samples == 3


@pytest.mark.parametrize("field", ["input_ids", "stop_tokens", "banned_tokens"])
@pytest.mark.parametrize("id_", [-1, 151936, 999999, 2**70])
def test_id_outside_the_vocabulary_is_refused_by_field_and_index(field: str, id_: int):
    with pytest.raises(InvalidToken) as caught:
        plan_from({**IDS, field: [7, id_]})
    assert f"{field}[1]" in str(caught.value)
    assert f"token ID {id_} not in vocabulary (vocab_size=151936)" in str(caught.value)


def test_banned_text_of_a_control_token_is_its_id_and_others_are_phrases():
    banned = {"banned_tokens": ["<|im_start|>", 5, "two words", ""], "banned_strings": ["more"]}
    request = plan_from({**IDS, **banned}).request
    assert request.sampling.banned_tokens == (151644, 5)
    assert request.banned_phrases == ("two words", "more")


# ---- the model


async def info(**changes: Any) -> Any:
    reply = await routes.show_model_info(SimpleNamespace(model=entry_of(replace(QWEN, **changes))))
    return msgspec.json.decode(msgspec.json.encode(reply))


async def test_model_info_is_the_seeds():
    assert await info() == golden("model_info")


async def test_model_info_invents_nothing():
    bare = await info(
        metadata={}, special_tokens={}, bos_token_id=None, eos_token_id=None, chat_template=None,
        architecture="",
    )  # fmt: skip
    assert bare["rope_theta"] is None  # llama.cpp's default is no fact of the file
    assert bare["architecture"] is None
    assert bare["chat_template"] is None
    assert bare["bos_token_id"] is bare["eos_token_id"] is None
    assert bare["special_tokens"]["bos_token"] is None


# ---- errors


def figures(error: Exception, n_prompt: int | None = 5, *, has_gpu: bool = True) -> dict[str, int]:
    devices = [{"type": "CPU", "memory_total_bytes": 99 * 2**30, "memory_free_bytes": 2**30}]
    if has_gpu:
        memory = {"memory_total_bytes": 24576 * 2**20, "memory_free_bytes": 1120 * 2**20}
        devices.append({"type": "GPU", **memory})
    engine = SimpleNamespace(
        model=QWEN,
        stats=lambda: EngineStats(pool=PoolStats(budget_bytes=2**30, leased_bytes=2**29)),
        system_info=lambda: {"devices": devices},
    )
    model: Any = SimpleNamespace(
        loaded=engine, is_closing=False, max_context_of=lambda engine: 8192
    )
    return dict(failures.answer_for(model, error, n_prompt=n_prompt).figures)


def test_errors_have_the_figures_that_belong_to_them():
    assert figures(PromptTooLong("x")) == {"context_length": 8192, "prompt_tokens": 5}
    assert figures(PromptTooLong("x"), None) == {"context_length": 8192}
    assert figures(InvalidToken("x")) == {"vocab_size": 151936}
    for error in (PoolExhausted("x"), OutOfMemory("x")):
        assert figures(error) == {
            "context_length": 8192, "prompt_tokens": 5, "attention_used_mb": 512,
            "attention_budget_mb": 1024, "vram_used_mb": 23456, "vram_total_mb": 24576,
        }  # fmt: skip
    too_large = failures.ReplyTooLarge("x", reply_bytes=9)
    assert figures(too_large) == {"reply_bytes": 9}
    assert figures(QueueFull("x")) == {}


def test_memory_of_gpus_is_left_out_where_there_are_none():
    assert "vram_used_mb" not in figures(OutOfMemory("x"), has_gpu=False)


@pytest.mark.parametrize(
    ("error", "code", "i"),
    [
        (OutOfMemory("x"), "OOM", 0),
        (InvalidToken("x"), "INVALID_TOKEN", 1),
        (NoModel("x"), "NO_MODEL", 2),
    ],
)
def test_error_bodies_have_the_seeds_fields(error: Exception, code: str, i: int):
    expected = golden("error_events")[i]
    made = msgspec.to_builtins(failures.error_body(answer_of(error, **figures(error))))
    assert made["type"] == "error"
    assert made["error_code"] == code == expected["error_code"]
    assert expected.keys() - {"request_id"} <= made.keys()
    for name in ("context_length", "vram_used_mb", "vram_total_mb"):
        assert made.get(name) == expected.get(name)
