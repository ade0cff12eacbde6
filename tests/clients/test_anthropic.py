"""The official ``anthropic`` package."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.clients.conftest import CLOCK, KEY, QUESTION, ZONES

if TYPE_CHECKING:
    from tests.support.serving import Served

anthropic = pytest.importorskip("anthropic")

CHAT: dict[str, Any] = {
    "model": "demo",
    "max_tokens": 12,
    "extra_body": {"temperature": 0},  # no field of its own in the package's version 2
    "messages": [{"role": "user", "content": QUESTION}],
}
CALL: dict[str, Any] = {
    **CHAT,
    "max_tokens": 120,
    "tools": [{"name": "clock", "description": "The time.", "input_schema": CLOCK}],
    "tool_choice": {"type": "tool", "name": "clock", "disable_parallel_tool_use": True},
}


@pytest.fixture
def client(served: Served) -> Any:
    with anthropic.Anthropic(base_url=served.url, api_key=KEY, max_retries=0) as one:
        yield one


def test_message_counts_and_stops_as_the_engine_does(client: Any, served: Served) -> None:
    message = client.messages.create(**CHAT, system="Tell stories.")
    text = served.engine.chat(
        [{"role": "system", "content": "Tell stories."}, *CHAT["messages"]],
        max_tokens=12, temperature=0,
    ).read()  # fmt: skip
    assert [block.text for block in message.content] == [text]
    assert message.stop_reason == "max_tokens"
    assert message.usage.output_tokens == 12
    counted = client.messages.count_tokens(
        model="demo", system="Tell stories.", messages=CHAT["messages"]
    )
    usage = message.usage
    assert counted.input_tokens == usage.input_tokens + usage.cache_read_input_tokens


def test_stream_gives_the_message_of_the_plain_call(client: Any) -> None:
    whole = client.messages.create(**CHAT)
    with client.messages.stream(**CHAT) as stream:
        text = "".join(stream.text_stream)
        streamed = stream.get_final_message()
    assert text == whole.content[0].text
    assert [block.text for block in streamed.content] == [text]
    assert streamed.stop_reason == whole.stop_reason
    assert streamed.usage.output_tokens == whole.usage.output_tokens


async def test_async_client_streams_too(served: Served) -> None:
    async with anthropic.AsyncAnthropic(base_url=served.url, api_key=KEY) as client:
        whole = await client.messages.create(**CHAT)
        async with client.messages.stream(**CHAT) as stream:
            text = "".join([piece async for piece in stream.text_stream])
    assert text == whole.content[0].text


def test_tool_is_called_and_its_result_is_read(client: Any) -> None:
    message = client.messages.create(**CALL)
    assert message.stop_reason == "tool_use"
    (call,) = message.content
    assert (call.type, call.name, call.input["zone"] in ZONES) == ("tool_use", "clock", True)
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "12:00"}
    turns = [
        {"role": "assistant", "content": message.content},
        {"role": "user", "content": [result]},
    ]
    after = client.messages.create(**{**CHAT, "messages": [*CHAT["messages"], *turns]})
    assert after.content[0].type == "text"


def test_streamed_call_is_the_plain_one(client: Any) -> None:
    whole = client.messages.create(**CALL)
    with client.messages.stream(**CALL) as stream:
        streamed = stream.get_final_message()
    assert [block.input for block in streamed.content] == [block.input for block in whole.content]
    assert streamed.stop_reason == "tool_use"


def test_schema_holds_the_text(client: Any) -> None:
    output = {"format": {"type": "json_schema", "schema": CLOCK}}
    message = client.messages.create(**{**CHAT, "max_tokens": 60, "output_config": output})
    assert message.content[0].text.startswith("{")


def test_stop_sequence_is_named(client: Any) -> None:
    text = client.messages.create(**CHAT).content[0].text
    stop = text[5:8]
    message = client.messages.create(**CHAT, stop_sequences=[stop])
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", stop)
    assert message.content[0].text == text[: text.index(stop)]


def test_failures_are_the_packages_own_errors(client: Any, served: Served) -> None:
    with pytest.raises(anthropic.BadRequestError, match="tokens, the limit is"):
        client.messages.create(**{**CHAT, "messages": [{"role": "user", "content": "x " * 9999}]})
    with (
        anthropic.Anthropic(base_url=served.url, api_key="wrong", max_retries=0) as stranger,
        pytest.raises(anthropic.AuthenticationError),
    ):
        stranger.messages.create(**CHAT)


TEXTS = ["Anna has a red ball. Her dog is old.", "Tom found a silver key."]
CITED: dict[str, Any] = {
    **CHAT,
    "max_tokens": 40,
    "messages": [
        {
            "role": "user",
            "content": [
                *(
                    {
                        "type": "document",
                        "source": {"type": "text", "media_type": "text/plain", "data": text},
                        "title": f"Text {i}",
                        "citations": {"enabled": True},
                    }
                    for i, text in enumerate(TEXTS)
                ),
                {"type": "text", "text": QUESTION},
            ],
        }
    ],
}


def test_citations_are_the_packages_own_types(client: Any) -> None:
    blocks = client.messages.create(**CITED).content
    for block in blocks:
        (one,) = block.citations
        assert isinstance(one, anthropic.types.CitationCharLocation)
        text = TEXTS[one.document_index]
        assert one.cited_text == text[one.start_char_index : one.end_char_index]
        assert one.document_title == f"Text {one.document_index}"
    with client.messages.stream(**CITED) as stream:
        seen = [event.citation for event in stream if event.type == "citation"]
        whole = stream.get_final_message().content
    assert [one.cited_text for one in seen] == [one.citations[0].cited_text for one in blocks]
    assert [one.text for one in whole] == [one.text for one in blocks]
    turn = {"role": "assistant", "content": whole}  # an answer with citations goes back as it is
    again = {"role": "user", "content": "And then?"}
    after = client.messages.create(**{**CHAT, "messages": [*CITED["messages"], turn, again]})
    assert after.content[0].type == "text"
