"""OpenAI's API over a socket: completions whole and streamed, tools, embeddings, models, errors."""

from __future__ import annotations

import base64
import json
import shutil
from typing import TYPE_CHECKING, Any

import httpx
import numpy as np
import pytest

from kqview import Engine
from kqview.demo import MODEL_PATH
from kqview.server import Settings
from tests.support import openai as api
from tests.support.serving import serving

if TYPE_CHECKING:
    from pathlib import Path

    from tests.server.conftest import Serve
    from tests.support.serving import Served

pytest.importorskip("jinja2")
pytest.importorskip("llguidance")

CHAT_PATH = "/v1/chat/completions"
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {
                "properties": {"z": {"enum": ["A", "B"]}},
                "required": ["z"],
                "additionalProperties": False,
            },
        },
    }
    for name in ("clock", "bell")
]
FORCED: dict[str, Any] = {"tools": TOOLS, "parallel_tool_calls": False, "max_tokens": 90}


def forced(text: str) -> dict[str, Any]:
    """Fields with which the model answers *text*."""
    return {"grammar": f"root ::= {json.dumps(text)}", "max_tokens": 60}


# ---- chat completions


def test_reply_has_the_fields_of_openai(demo: Served):
    reply = api.chat(demo, model="any name", unknown_field={"is": "ignored"})
    assert reply["id"].startswith("chatcmpl-")
    assert (reply["object"], reply["model"]) == ("chat.completion", "any name")
    [choice] = reply["choices"]
    assert choice["message"]["role"] == "assistant"
    assert choice["finish_reason"] == "length"
    usage = reply["usage"]
    assert usage["completion_tokens"] == reply["timings"]["predicted_n"] == 8
    assert usage["total_tokens"] == usage["prompt_tokens"] + 8
    again = api.chat(demo)
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == usage["prompt_tokens"] - 1
    assert again["choices"][0]["message"] == choice["message"]
    assert again["id"] != reply["id"]


def test_predicted_text_is_counted_and_changes_nothing(steady_demo: Served):
    fields: dict[str, Any] = {"max_tokens": 40, "ignore_eos": True}
    plain = api.chat(steady_demo, **fields)
    assert plain["usage"]["completion_tokens_details"] == {
        "accepted_prediction_tokens": 0, "rejected_prediction_tokens": 0,
    }  # fmt: skip
    assert "draft_n" not in plain["timings"]
    text = plain["choices"][0]["message"]["content"]
    for content in (text, [{"type": "text", "text": text[:9]}, {"type": "text", "text": text[9:]}]):
        reply = api.chat(steady_demo, prediction={"type": "content", "content": content}, **fields)
        assert reply["choices"][0]["message"] == plain["choices"][0]["message"]
        details, timings = reply["usage"]["completion_tokens_details"], reply["timings"]
        n_guessed = timings["draft_n"]
        assert details["accepted_prediction_tokens"] == timings["draft_n_accepted"] > 20
        assert details["rejected_prediction_tokens"] == n_guessed - timings["draft_n_accepted"]
        assert reply["usage"]["completion_tokens"] == 40
    stream = api.chat_chunks(
        steady_demo, prediction={"type": "content", "content": text}, attention=True,
        stream_options={"include_usage": True}, **fields,
    )  # fmt: skip
    assert api.joined(stream, "content") == text
    assert stream[-1]["usage"]["completion_tokens_details"]["accepted_prediction_tokens"] > 20
    other = api.chat(
        steady_demo, prediction={"type": "content", "content": "Other words."}, **fields
    )
    assert other["choices"][0]["message"] == plain["choices"][0]["message"]


def test_stream_joins_to_the_reply(demo: Served):
    whole = api.chat(demo)
    stream = api.chat_chunks(demo, stream_options={"include_usage": True})
    assert stream[0]["choices"][0]["delta"] == {"role": "assistant", "content": None}
    assert api.joined(stream, "content") == whole["choices"][0]["message"]["content"]
    reasons = [choice["finish_reason"] for one in stream for choice in one["choices"]]
    assert reasons == [None] * (len(reasons) - 1) + ["length"]
    assert stream[-1]["choices"] == []
    counts = ("prompt_tokens", "completion_tokens", "total_tokens")
    assert [stream[-1]["usage"][name] for name in counts] == [
        whole["usage"][name] for name in counts
    ]
    assert stream[-1]["timings"]["predicted_n"] == 8
    assert len({one["id"] for one in stream}) == 1
    without = api.chat_chunks(demo)
    assert without[-1]["choices"][0]["finish_reason"] == "length"
    assert not any("usage" in one for one in without)


def test_several_answers_are_choices_of_their_own(demo: Served):
    fields: dict[str, Any] = {"n": 3, "temperature": 2.5, "seed": 5}
    reply = api.chat(demo, **fields)
    texts = [choice["message"]["content"] for choice in reply["choices"]]
    assert [choice["index"] for choice in reply["choices"]] == [0, 1, 2]
    assert len(set(texts)) > 1
    assert reply["usage"]["completion_tokens"] == 24
    stream = api.chat_chunks(demo, **fields)
    assert [api.joined(stream, "content", i) for i in range(3)] == texts


def test_stop_sequence_is_not_shown(demo: Served):
    text = "One two STOP three"
    for stop in ("STOP", ["never", "TOP t", " STOP"]):
        expected = text.partition(" STOP" if isinstance(stop, list) else "STOP")[0]
        whole = api.chat(demo, **forced(text), stop=stop)["choices"][0]
        assert (whole["message"]["content"], whole["finish_reason"]) == (expected, "stop")
        assert api.joined(api.chat_chunks(demo, **forced(text), stop=stop), "content") == expected


def test_logprobs_are_those_of_each_token(demo: Served):
    fields: dict[str, Any] = {"logprobs": True, "top_logprobs": 2}
    choice = api.chat(demo, **fields)["choices"][0]
    content = choice["logprobs"]["content"]
    assert len(content) == 8
    assert (
        bytes(b for one in content for b in one["bytes"]).decode() == choice["message"]["content"]
    )
    for one in content:
        assert [top["logprob"] for top in one["top_logprobs"]] == sorted(
            (top["logprob"] for top in one["top_logprobs"]), reverse=True
        )
        assert one["top_logprobs"][0]["logprob"] == one["logprob"] < 0  # greedy
    streamed = [
        one
        for chunk in api.chat_chunks(demo, **fields)
        for choice in chunk["choices"]
        for one in (choice["logprobs"] or {"content": []})["content"]
    ]
    assert [one["token"] for one in streamed] == [one["token"] for one in content]


def test_bias_bans_a_token(demo: Served):
    first = api.text(demo, max_tokens=1, logprobs=0)["choices"][0]["logprobs"]["tokens"][0]
    [id_] = demo.engine.tokenize(first, add_special=False)
    other = api.text(demo, max_tokens=1, logit_bias={str(id_): -100})["choices"][0]["text"]
    assert other != first


@pytest.mark.parametrize(
    ("fields", "reasoning", "content"),
    [
        ({}, "I see.", "Yes."),
        ({"reasoning_format": "none"}, "", "<think>I see.</think>\n\nYes."),
    ],
)
def test_reasoning_comes_apart_from_content(
    demo: Served, fields: dict[str, Any], reasoning: str, content: str
):
    fields = {**forced("<think>I see.</think>\n\nYes."), **fields}
    message = api.chat(demo, **fields)["choices"][0]["message"]
    assert (message.get("reasoning_content", ""), message["content"]) == (reasoning, content)
    stream = api.chat_chunks(demo, **fields)
    assert api.joined(stream, "reasoning_content") == reasoning
    assert api.joined(stream, "content") == content


def test_answer_follows_a_schema(demo: Served):
    schema = {"type": "object", "properties": {"zone": {"enum": ["UTC", "CET"]}},
              "required": ["zone"], "additionalProperties": False}  # fmt: skip
    wanted = {"type": "json_schema", "json_schema": {"name": "z", "strict": True, "schema": schema}}
    choice = api.chat(demo, response_format=wanted, max_tokens=80)["choices"][0]
    assert json.loads(choice["message"]["content"])["zone"] in ("UTC", "CET")
    assert choice["finish_reason"] == "stop"


@pytest.mark.parametrize("strict", [True, False])
def test_schema_that_names_its_properties_has_no_others(demo: Served, strict: bool):
    """As in llama.cpp's server; strict or not, and in objects inside of it."""
    inner = {"type": "object", "properties": {"on": {"type": "boolean"}}, "required": ["on"]}
    schema = {"type": "object", "properties": {"lamp": {"$ref": "#/$defs/lamp"}},
              "required": ["lamp"], "$defs": {"lamp": inner}}  # fmt: skip
    given = {"name": "z", "strict": strict, "schema": schema}
    for seed in range(3):
        choice = api.chat(
            demo, response_format={"type": "json_schema", "json_schema": given},
            max_tokens=80, temperature=1.5, seed=seed,
        )["choices"][0]  # fmt: skip
        assert choice["message"]["content"] in ('{"lamp":{"on":true}}', '{"lamp":{"on":false}}')


@pytest.mark.parametrize(
    ("tool_choice", "names"),
    [
        ("required", {"clock", "bell"}),
        ({"type": "function", "function": {"name": "bell"}}, {"bell"}),
        (
            {
                "type": "allowed_tools",
                "allowed_tools": {
                    "mode": "required",
                    "tools": [{"type": "function", "function": {"name": "clock"}}],
                },
            },
            {"clock"},
        ),
    ],
)
def test_call_is_forced_and_follows_its_schema(demo: Served, tool_choice: Any, names: set[str]):
    choice = api.chat(demo, **FORCED, tool_choice=tool_choice)["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] is None
    [call] = choice["message"]["tool_calls"]
    assert (call["type"], call["function"]["name"] in names) == ("function", True)
    assert json.loads(call["function"]["arguments"])["z"] in ("A", "B")
    stream = api.chat_chunks(demo, **FORCED, tool_choice=tool_choice)
    pieces = [
        piece
        for chunk in stream
        for choice in chunk["choices"]
        for piece in choice["delta"].get("tool_calls", ())
    ]
    assert {piece["index"] for piece in pieces} == {0}
    assert [piece["function"]["name"] for piece in pieces if "id" in piece] == [
        call["function"]["name"]
    ]
    arguments = "".join(piece["function"]["arguments"] for piece in pieces)
    assert arguments == call["function"]["arguments"]
    assert stream[-1]["choices"][0]["finish_reason"] == "tool_calls"


def test_parallel_calls_have_an_index_each(demo: Served):
    # Biased against the end of the text, which may follow each call.
    ends = {demo.engine.token_text(id_): -100 for id_ in (demo.engine.model.eos_token_id or 0,)}
    message = api.chat(demo, tools=TOOLS, tool_choice="required", max_tokens=120, logit_bias=ends)[
        "choices"
    ][0]["message"]
    assert len(message["tool_calls"]) > 1
    assert len({call["id"] for call in message["tool_calls"]}) == len(message["tool_calls"])


def test_call_and_its_result_are_part_of_the_next_prompt(demo: Served):
    messages = [
        *api.CHAT["messages"],
        {"role": "assistant", "content": None, "tool_calls": [
            {"id": "1", "type": "function",
             "function": {"name": "clock", "arguments": '{"zone": "UTC"}'}}]},
        {"role": "tool", "tool_call_id": "1", "content": "noon"},
    ]  # fmt: skip
    alone = api.chat(demo)["usage"]["prompt_tokens"]
    assert api.chat(demo, messages=messages)["usage"]["prompt_tokens"] > alone + 20


def test_request_for_no_tokens_evaluates_the_prompt(demo: Served):
    reply = api.chat(demo, max_tokens=0)
    assert reply["choices"][0]["message"]["content"] == ""
    assert reply["usage"]["completion_tokens"] == 0
    stream = api.chat_chunks(demo, max_tokens=0, stream_options={"include_usage": True})
    assert api.joined(stream, "content") == ""
    assert stream[-1]["usage"]["completion_tokens"] == 0


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": TOOLS, "tool_choice": "none"},
        {"documents": [{"text": "Anna is a teacher."}]},
        {
            "messages": [*api.CHAT["messages"], {"role": "assistant", "content": "Anna"}],
            "continue_final_message": False,
        },
    ],
)
def test_tokens_that_are_counted_are_those_of_the_chat(demo: Served, fields: dict[str, Any]):
    body = {**api.CHAT, **fields}
    counted = api.asked(demo, f"{CHAT_PATH}/input_tokens", **body)["input_tokens"]
    assert counted == api.chat(demo, **body)["usage"]["prompt_tokens"]


def test_each_chunk_has_timings_if_asked_for(demo: Served):
    stream = api.chat_chunks(demo, timings_per_token=True)
    counts = [one["timings"]["predicted_n"] for one in stream if "timings" in one]
    assert counts == sorted(counts)
    assert counts[-1] == 8
    assert len(counts) >= 8
    assert "timings" not in stream[0]


@pytest.mark.parametrize("ask", [api.chat_chunks, api.text_chunks])
def test_stream_begins_with_the_progress_of_the_prompt(demo: Served, ask: Any):
    progress = [
        one["prompt_progress"]
        for one in ask(demo, return_progress=True)[:3]
        if "prompt_progress" in one
    ]
    begun, evaluated = progress
    assert begun["processed"] == begun["cache"]
    assert evaluated["processed"] == evaluated["total"] > begun["processed"]


def test_reply_shows_the_prompt_if_asked(demo: Served):
    assert "__verbose" not in api.chat(demo)
    prompt = api.chat(demo, verbose=True)["__verbose"]["prompt"]
    assert prompt.endswith("<|im_start|>assistant\n")


# ---- completions


def test_completions_of_several_prompts_are_in_their_order(demo: Served):
    prompts = ["Anna is a", demo.engine.tokenize("Tom has a", add_special=False)]
    single = [api.text(demo, prompt=one)["choices"][0]["text"] for one in prompts]
    reply = api.text(demo, prompt=prompts, n=2)
    assert [choice["text"] for choice in reply["choices"]] == [
        single[0], single[0], single[1], single[1]
    ]  # fmt: skip
    assert reply["usage"]["completion_tokens"] == 16
    stream = api.text_chunks(demo, prompt=prompts, n=2)
    texts = [""] * 4
    for chunk in stream:
        for choice in chunk["choices"]:
            texts[choice["index"]] += choice["text"]
    assert texts == [choice["text"] for choice in reply["choices"]]


def test_echo_precedes_the_text(demo: Served):
    plain = api.text(demo)["choices"][0]["text"]
    assert api.text(demo, echo=True)["choices"][0]["text"] == api.TEXT["prompt"] + plain
    stream = api.text_chunks(demo, echo=True)
    joined = "".join(choice["text"] for chunk in stream for choice in chunk["choices"])
    assert joined == api.TEXT["prompt"] + plain


def test_logprobs_of_a_completion_have_both_forms(demo: Served):
    choice = api.text(demo, logprobs=2)["choices"][0]
    logprobs = choice["logprobs"]
    assert "".join(logprobs["tokens"]) == choice["text"]
    starts = [len("".join(logprobs["tokens"][:i])) for i in range(4)]
    assert logprobs["text_offset"] == starts
    assert [len(top) for top in logprobs["top_logprobs"]] == [2] * 4
    assert [one["logprob"] for one in logprobs["content"]] == logprobs["token_logprobs"]
    streamed = [
        choice["logprobs"]["text_offset"][0]
        for chunk in api.text_chunks(demo, logprobs=2)
        for choice in chunk["choices"]
        if choice["logprobs"]
    ]
    assert streamed == starts


@pytest.mark.parametrize("as_ids", [False, True])
@pytest.mark.parametrize("max_tokens", [0, 4])
def test_echo_has_the_logprobs_of_the_prompt(demo: Served, max_tokens: int, as_ids: bool):
    text = "Anna is a. \N{SNOWMAN} Tom"
    ids = demo.engine.tokenize(text)
    score = demo.engine.score(ids, top_logprobs=2)
    given = ids if as_ids else text
    fields: dict[str, Any] = {"prompt": given, "echo": True, "logprobs": 2}
    choice = api.text(demo, **fields, max_tokens=max_tokens)["choices"][0]
    logprobs, n = choice["logprobs"], len(ids)
    assert len(logprobs["tokens"]) == n + max_tokens
    assert logprobs["token_logprobs"][0] is None
    assert logprobs["top_logprobs"][0] is None
    assert logprobs["token_logprobs"][1:n] == pytest.approx(score.logprobs[1:].tolist(), abs=0.02)
    assert [len(top) for top in logprobs["top_logprobs"][1:]] == [2] * (n + max_tokens - 1)
    # The first token is the one that starts every text.
    shown = demo.engine.detokenize(ids) if as_ids else text
    assert choice["text"].startswith(shown)
    offsets = logprobs["text_offset"]
    for i in range(2, n + max_tokens):
        piece = choice["text"][offsets[i - 1] : offsets[i]]
        assert piece == logprobs["tokens"][i - 1] or "\ufffd" in logprobs["tokens"][i - 1]
    assert offsets[n - 1] < len(shown)
    if max_tokens:
        assert offsets[n] == len(shown)
    else:
        assert choice["text"] == shown
        assert choice["finish_reason"] == "length"
    joined: dict[str, list[Any]] = {}
    streamed = ""
    for chunk in api.text_chunks(demo, **fields, max_tokens=max_tokens):
        for one in chunk["choices"]:
            streamed += one["text"]
            for name, values in (one["logprobs"] or {}).items():
                joined.setdefault(name, []).extend(values)
    assert streamed == choice["text"]
    assert joined["tokens"] == logprobs["tokens"]
    assert joined["text_offset"] == offsets
    assert joined["token_logprobs"][1:] == pytest.approx(logprobs["token_logprobs"][1:], abs=0.02)


def test_echo_of_several_prompts_has_the_logprobs_of_each(demo: Served):
    prompts = ["Anna is a", "Tom"]
    fields: dict[str, Any] = {"echo": True, "logprobs": 0, "max_tokens": 2, "n": 2}
    choices = api.text(demo, prompt=prompts, **fields)["choices"]
    for i, choice in enumerate(choices):
        ids = demo.engine.tokenize(prompts[i // 2])
        assert len(choice["logprobs"]["token_logprobs"]) == len(ids) + 2
        assert choice["logprobs"]["top_logprobs"][1] == {}


def test_echo_beyond_the_context_is_refused_by_the_name_of_the_field(demo: Served):
    fields: dict[str, Any] = {"echo": True, "logprobs": 1}
    status, _ = api.refused(demo, "/v1/completions", prompt=[[1, 2], [5] * 100_000], **fields)
    assert status == 400
    status, error = api.refused(demo, "/v1/completions", prompt=[[1, 10**6]], **fields)
    assert (status, error["message"][:6]) == (400, "prompt")


# ---- errors


@pytest.mark.parametrize(
    ("path", "body", "status", "kind", "param"),
    [
        (CHAT_PATH, {}, 400, "invalid_request_error", "messages"),
        (CHAT_PATH, {"messages": []}, 400, "invalid_request_error", "messages"),
        (CHAT_PATH, {**api.CHAT, "temperature": "hot"}, 400, "invalid_request_error",
         "temperature"),
        (CHAT_PATH, {**api.CHAT, "n": 0}, 400, "invalid_request_error", "n"),
        (CHAT_PATH, {**api.CHAT, "n": 1000}, 400, "invalid_request_error", "n"),
        (CHAT_PATH, {**api.CHAT, "logit_bias": {"99999": 1}}, 400, "invalid_request_error",
         "logit_bias"),
        (CHAT_PATH, {**api.CHAT, "tools": TOOLS, "tool_choice": "perhaps"}, 400,
         "invalid_request_error", "tool_choice"),
        (CHAT_PATH, {**api.CHAT, "tools": TOOLS, "tool_choice": "required",
                     "response_format": {"type": "json_object"}},
         400, "invalid_request_error", "response_format"),
        (CHAT_PATH, {**api.CHAT, "tools": TOOLS, "tool_choice": "required", "json_schema": {}},
         400, "invalid_request_error", "json_schema"),
        (CHAT_PATH, {**api.CHAT, "grammar": "root"}, 400, "invalid_request_error", "grammar"),
        (CHAT_PATH, {**api.CHAT, "response_format": {
            "type": "json_schema", "json_schema": {"schema": {"type": "foo"}}}},
         400, "invalid_request_error", "response_format"),
        (CHAT_PATH, {**api.CHAT, "tool_choice": "required", "tools": [
            {"type": "function", "function": {"name": "f", "parameters": {"enum": []}}}]},
         400, "invalid_request_error", "tools"),
        (CHAT_PATH, {**api.CHAT, "id_slot": 99}, 404, "not_found_error", "id_slot"),
        (CHAT_PATH, {"messages": [{"role": "user", "content": [
            {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}]}]},
         400, "invalid_request_error", "messages"),
        ("/v1/completions", {"prompt": "a", "suffix": "b"}, 400, "invalid_request_error",
         "suffix"),
        ("/v1/completions", {"prompt": [99999]}, 400, "invalid_request_error", "prompt"),
        ("/v1/completions", {**api.TEXT, "attention": {"layers": [77]}}, 400,
         "invalid_request_error", "attention"),
        ("/v1/completions", {**api.TEXT, "attention": {"layers": [10**15]}}, 400,
         "invalid_request_error", "attention"),
        ("/v1/completions", {**api.TEXT, "attention": {"spans": [[2, 2]]}}, 400,
         "invalid_request_error", "attention.spans"),
        ("/v1/completions", {**api.TEXT, "attention": {"spans": [[0, 2]], "values": "logits"}}, 400,
         "invalid_request_error", "attention.spans"),
        ("/v1/embeddings", {"input": "a"}, 501, "not_supported_error", None),
    ],
)  # fmt: skip
def test_impossible_request_is_refused_in_openais_form(
    demo: Served, path: str, body: dict[str, Any], status: int, kind: str, param: str | None
):
    got, error = api.refused(demo, path, **body)
    assert (got, error["code"], error["type"], error["param"]) == (status, status, kind, param)
    assert error["message"]


def test_prompt_that_is_too_long_says_how_long_it_is(demo: Served):
    status, error = api.refused(demo, "/v1/completions", prompt="Anna " * 600)
    assert (status, error["type"]) == (400, "exceed_context_size_error")
    assert error["n_ctx"] == 512
    assert error["n_prompt_tokens"] == len(demo.engine.tokenize("Anna " * 600))


def test_stream_that_fails_ends_with_an_error_and_without_the_mark_of_the_end(
    serve: Serve, tmp_path: Path
):
    shutil.copy(MODEL_PATH, tmp_path / "other.gguf")
    served = serve(
        Settings(demo=True, models_dir=str(tmp_path), admin_keys=("admin",), api_keys=("a",),
                 context_shift=True)
    )  # fmt: skip
    body = {**api.TEXT, "stream": True, "ignore_eos": True, "max_tokens": 8192}
    admin = {"authorization": "Bearer admin"}
    lines: list[str] = []
    with served.client(headers=admin) as client, served.client(headers=admin) as other:
        with client.stream("POST", "/v1/completions", json=body) as reply:
            received = reply.iter_lines()
            lines.append(next(received))
            switched = other.post("/api/v1/model/load", json={"model": "other.gguf"})
            assert switched.status_code == 200, switched.text
            with pytest.raises(httpx.RemoteProtocolError):
                lines.extend(received)
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line]
    error = events[-1]["error"]
    assert (error["code"], error["type"]) == (503, "unavailable_error")
    assert "the model was switched" in error["message"]


# ---- models


def test_model_is_listed_by_its_alias(serve: Serve):
    served = serve(Settings(aliases=("gpt-4", "gpt-3.5")))
    with served.client() as client:
        listed = client.get("/v1/models").json()
        assert client.get("/models").json()["data"][0]["id"] == "gpt-4"
        [model] = listed["data"]
        assert (model["id"], model["aliases"]) == ("gpt-4", ["gpt-4", "gpt-3.5"])
        assert model["meta"]["n_vocab"] == served.engine.model.n_vocab
        assert listed["models"][0]["name"] == "gpt-4"
        assert client.get("/v1/models/gpt-3.5").json()["id"] == "gpt-4"
        gone = client.get("/v1/models/other")
        assert (gone.status_code, gone.json()["error"]["type"]) == (404, "not_found_error")
    assert api.chat(served)["model"] == "gpt-4"


# ---- embeddings


def test_embeddings_are_the_engines_in_every_form():
    texts = ["Anna is a painter.", "Ben"]
    with (
        Engine.demo(n_threads=1, pooling="mean") as engine,
        serving(Settings(), engine) as served,
    ):
        expected = np.asarray(engine.embed(texts))
        reply = api.asked(served, "/v1/embeddings", input=texts, model="e")
        vectors = [one["embedding"] for one in reply["data"]]
        assert np.allclose(vectors, expected, atol=1e-6)
        assert [one["index"] for one in reply["data"]] == [0, 1]
        n_tokens = sum(len(engine.tokenize(one)) for one in texts)
        assert reply["usage"] == {"prompt_tokens": n_tokens, "total_tokens": n_tokens}
        coded = api.asked(served, "/v1/embeddings", input=texts, encoding_format="base64")
        raw = base64.b64decode(coded["data"][1]["embedding"])
        assert np.allclose(np.frombuffer(raw, "<f4"), expected[1], atol=1e-6)
        ids = engine.tokenize("Ben")
        for given in (ids, [ids], "Ben"):
            [one] = api.asked(served, "/v1/embeddings", input=given)["data"]
            assert np.allclose(one["embedding"], expected[1], atol=1e-6)
        for given in ([], ["a", []], [99999], "x " * 3000):
            status, error = api.refused(served, "/v1/embeddings", input=given)
            assert (status, error["param"]) == (400, "input"), given
        served.wait_idle()


def test_vectors_of_tokens_are_refused_by_name():
    with (
        Engine.demo(n_threads=1, pooling="none") as engine,
        serving(Settings(), engine) as served,
    ):
        status, error = api.refused(served, "/v1/embeddings", input="a")
    assert (status, "pooling none" in error["message"]) == (400, True)
