"""Bodies of OpenAI's API become neutral requests, or are refused by the name of their field."""

from __future__ import annotations

import base64
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pytest

from kqview.errors import RequestError
from kqview.server import Settings
from kqview.server.api.openai import completions, convert, schema
from kqview.server.api.wire.chat import with_fields

if TYPE_CHECKING:
    from kqview import Engine
    from kqview.server.api.openai.events import CompletionWriter

HELLO = [{"role": "user", "content": "Who?"}]
TOOLS = [{"type": "function", "function": {"name": "f"}}]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


def chat(**fields: Any) -> Any:
    body = msgspec.convert({"messages": HELLO, **fields}, schema.ChatBody)
    engine: Any = SimpleNamespace(tokenize=lambda text, **options: [1])
    chat = completions.chat_of(body, Settings())
    return with_fields(chat, body, engine=engine, settings=Settings())


def completion(engine: Engine, settings: Settings | None = None, **fields: Any) -> CompletionWriter:
    body = msgspec.convert({"prompt": "Anna", **fields}, schema.CompletionBody)
    return completions.text_writer(
        body, request_id="r", engine=engine, settings=settings or Settings(), model="demo"
    )


@pytest.mark.parametrize(
    ("given", "choice", "name"),
    [
        (None, "auto", None),
        ("none", "none", None),
        ("required", "required", None),
        ({"type": "function", "function": {"name": "f"}}, "required", "f"),
    ],
)
def test_tool_choice_is_read(given: Any, choice: str, name: str | None):
    found = chat(tools=TOOLS, tool_choice=given)
    assert (found.tool_choice, found.tool_name) == (choice, name)
    assert found.allowed_tools is None
    assert found.parallel_calls is (name is None)


def test_allowed_tools_are_read():
    tools = [{"type": "function", "function": {"name": "f"}}]
    given = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": tools}}
    found = chat(tools=TOOLS, tool_choice=given)
    assert (found.tool_choice, found.tool_name, found.allowed_tools) == ("auto", None, ["f"])


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, None),
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, {"type": "object"}),
        ({"response_format": {"type": "json_object", "schema": SCHEMA}}, SCHEMA),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "strict": True, "schema": SCHEMA},
                }
            },
            SCHEMA,
        ),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, {"type": "object"}),
        ({"json_schema": SCHEMA}, SCHEMA),
        ({"json_schema": {}}, {"type": "object"}),
    ],
)
def test_schema_of_the_answer_is_read(fields: dict[str, Any], expected: Any):
    found = chat(**fields)
    assert found.schema == expected
    assert found.sampling.json_schema is None  # how it is held is decided with the template


def test_chat_logprobs_count_the_alternatives():
    assert chat().sampling.top_logprobs is None
    assert chat(logprobs=True).sampling.top_logprobs == 0
    assert chat(logprobs=True, top_logprobs=3).sampling.top_logprobs == 3


def test_seed_may_have_the_64_bits_of_openais():
    assert chat(seed=2**32 + 6).sampling.seed == 7
    assert 0 <= chat(seed=2**63 - 1).sampling.seed < 2**32 - 1


def test_options_of_the_template_are_read():
    assert chat(reasoning_effort="high").template_options == {"reasoning_effort": "high"}
    assert chat(reasoning_effort="none").template_options == {"enable_thinking": False}
    given = {"reasoning_effort": "low", "chat_template_kwargs": {"enable_thinking": True}}
    expected = {"enable_thinking": True, "reasoning_effort": "low"}
    assert chat(**given).template_options == expected


@pytest.mark.parametrize(
    ("fields", "parameter"),
    [
        ({"tool_choice": "sometimes"}, "tool_choice"),
        ({"tool_choice": {"type": "function"}}, "tool_choice"),
        ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice"),
        ({"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto"}}},
         "tool_choice"),
        ({"tool_choice": {"type": "allowed_tools", "allowed_tools": {
            "mode": "auto", "tools": [{"type": "function", "function": {"name": 1}}]}}},
         "tool_choice"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"response_format": {"type": "json_object", "schema": 123}}, "response_format"),
        ({"add_generation_prompt": True, "continue_final_message": True}, "continue_final_message"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": 1}}},
         "response_format"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 10**6}, "top_logprobs"),
        ({"max_tokens": -5}, "max_tokens"),
        ({"presence_penalty": float("nan")}, "presence_penalty"),
        ({"seed": -7}, "seed"),
        ({"attention": {"format": "viz", "reduce": "mean"}}, "attention"),
        ({"attention": {"format": "sparse", "top_k": 0}}, "attention.top_k"),
        ({"attention": {"delivery": "id", "prompt": True}}, "attention"),
    ],
)  # fmt: skip
def test_impossible_value_is_refused_by_the_name_of_its_field(
    fields: dict[str, Any], parameter: str
):
    with pytest.raises(RequestError) as caught:
        chat(**fields)
    assert caught.value.parameter == parameter


@pytest.mark.parametrize(
    ("fields", "parameter"),
    [
        ({"suffix": "end"}, "suffix"),
        ({"best_of": 3}, "best_of"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ["a", 1]}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"logprobs": -1}, "logprobs"),
        ({"logprobs": 1001, "echo": True}, "logprobs"),
    ],
)
def test_impossible_completion_is_refused_by_the_name_of_its_field(
    engine: Engine, fields: dict[str, Any], parameter: str
):
    with pytest.raises(RequestError) as caught:
        completion(engine, **fields)
    assert caught.value.parameter == parameter


def test_prompts_have_every_form(engine: Engine):
    ids = engine.tokenize("Anna is", add_special=False)
    for given, first, more in [
        ("Anna", "Anna", []),
        (ids, ids, []),
        (["Anna", "Ben"], "Anna", ["Ben"]),
        ([ids, "Ben"], ids, ["Ben"]),
    ]:
        request = completion(engine, prompt=given).request
        assert (request.prompt, list(request.more_prompts)) == (first, more)
    plan = completion(engine, prompt=[ids, "Ben"], n=2, echo=True, best_of=2)
    assert [plan.echo(i) for i in range(4)] == ["Anna is", "Anna is", "Ben", "Ben"]


def test_none_and_zero_tokens_are_told_apart(engine: Engine):
    assert completion(engine, max_tokens=-1).request.max_tokens > 10**6
    plan = completion(engine, max_tokens=0)
    assert (plan.request.max_tokens, plan.is_prefill) == (1, True)
    assert completion(engine, logprobs=0).request.sampling.top_logprobs == 0


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (True, {"kind": "probs", "format": "per_layer"}),
        ({"values": "scores", "layers": [1], "heads": [0, 2]},
         {"kind": "scores", "layers": (1,), "heads": (0, 2)}),
        ({"reduce": "mean_heads"}, {"format": "per_layer", "reduce_heads": "mean_heads"}),
        ({"reduce": "max"}, {"format": "aggregated", "aggregation": "max", "reduce_heads": None}),
        ({"format": "sparse", "top_k": 3, "dtype": "float16"},
         {"format": "sparse", "top_k": 3, "dtype": "float16"}),
    ],
)  # fmt: skip
def test_attention_is_read(given: Any, expected: dict[str, Any]):
    found = chat(attention=given).attention
    assert {name: getattr(found, name) for name in expected} == expected
    assert chat(attention=False).attention is None


def test_settings_give_the_attention_that_a_request_does_not_name(engine: Engine):
    settings = Settings(attention_values="logits", attention_format="aggregated")
    found = completion(engine, settings, attention=True).request.attention
    assert found is not None
    assert (found.kind, found.format) == ("logits", "aggregated")
    with pytest.raises(RequestError, match="kept_attention_bytes is 0"):
        completion(engine, Settings(kept_attention_bytes=0), attention={"delivery": "id"})


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        ("", None),
        ("bytes=0-3", (0, 4)),
        ("bytes=4-", (4, 10)),
        ("bytes=-3", (7, 10)),
        ("bytes=-99", (0, 10)),
        ("bytes=8-99", (8, 10)),
        ("bytes=3-2", None),
        ("bytes=-", None),
        ("bytes=0-1,3-4", None),
        ("rows=0-1", None),
        ("bytes=٣-", None),
    ],
)
def test_range_is_that_of_the_header(header: str, expected: tuple[int, int] | None):
    assert convert.byte_range(header, 10) == expected


@pytest.mark.parametrize("header", ["bytes=10-", "bytes=99-100", "bytes=-0"])
def test_range_beyond_the_end_is_none(header: str):
    with pytest.raises(IndexError):
        convert.byte_range(header, 10)


def test_embeddings_are_numbers_or_bytes_of_the_dimensions_asked_for():
    vectors = np.array([[3, 4, 0], [0, 0, 1]], np.float32) / np.array([[5], [1]], np.float32)

    def reply(**fields: Any) -> schema.Embeddings:
        body = schema.EmbeddingsBody(input="x", **fields)
        return convert.embeddings_of(vectors, n_tokens=9, model="m", body=body)

    plain = reply()
    assert np.allclose([one.embedding for one in plain.data], vectors)  # pyright: ignore[reportArgumentType]
    assert (plain.usage.prompt_tokens, plain.usage.total_tokens) == (9, 9)
    coded = reply(encoding_format="base64").data[0].embedding
    assert isinstance(coded, str)
    assert np.array_equal(np.frombuffer(base64.b64decode(coded), "<f4"), vectors[0])
    short = [one.embedding for one in reply(dimensions=1).data]
    assert short == [[1.0], [0.0]]
    with pytest.raises(RequestError, match="dimensions is 4"):
        reply(dimensions=4)
