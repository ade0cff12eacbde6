"""OpenAI's completions, of chats and of texts: what bodies ask for, and how they are answered.

What is made of a body is pure. The handlers are glue; `wire.chat.answered` plans, starts, writes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final, Literal, cast

import msgspec

from kqview.chat.parts import object_of, objects_of
from kqview.engine import Engine
from kqview.errors import RequestError, shown
from kqview.server.api.openai import schema
from kqview.server.api.openai.events import ChatChunk, CompletionWriter, TextChunk, echoed_logprobs
from kqview.server.api.wire.attention import ATTENTION_NAMES, ReplyLists, attention_of
from kqview.server.api.wire.chat import (
    LARGE,
    WHOLE_CONTEXT,
    ChatRequest,
    InputTokens,
    allowed_template,
    answered,
    counted,
    options_of_effort,
    prepare,
    with_fields,
)
from kqview.server.api.wire.citations import with_documents
from kqview.server.api.wire.event_parts import PROMPT_ROWS, TOKEN_ROW
from kqview.server.api.wire.failures import FailureBody, error_body
from kqview.server.api.wire.fields import (
    MOST_LOGPROBS,
    first,
    most_tokens_of,
    names_of,
    options_of,
    sampling_of,
)
from kqview.server.api.wire.reasoning_cap import cap_of_texts
from kqview.server.errors import renamed
from kqview.server.models.run import GenerateRequest
from kqview.server.models.service import Call
from kqview.server.models.stream import Events
from kqview.server.settings import Settings
from kqview.server.web.endpoint import HttpReply, Operations, Sample

Prompt = str | list[int]
ToolChoice = Literal["auto", "none", "required"]


# ---- chat completions


def chat_writer(
    body: schema.ChatBody, *, request_id: str, engine: Engine, settings: Settings, model: str
) -> CompletionWriter:
    """Who writes a chat completion; any thread, because a template may take seconds.

    Arguments and errors as of `with_fields`; *model* is its name in the reply.
    """
    chat = with_fields(
        chat_of(body, settings), body, engine=engine, settings=settings, request_id=request_id
    )
    is_prefill = chat.max_tokens == 0
    work = prepare(engine, replace(chat, max_tokens=1) if is_prefill else chat)
    prompt = None
    if first(body.verbose, settings.verbose):
        prompt = engine.detokenize(cast("list[int]", work.request.prompt))
    return CompletionWriter(
        body, work.request, model, engine.token_bytes, is_prefill=is_prefill,
        reading=work.reading, sources=work.sources, shown_prompt=prompt,
    )  # fmt: skip


def chat_of(body: schema.ChatBody, settings: Settings) -> ChatRequest:
    """The neutral chat in *body*; errors as of `chat_writer`."""
    continues = body.continue_final_message
    if continues is not None:
        continues = continues not in (False, "", "none", "false")
    if continues and body.add_generation_prompt:
        raise RequestError(
            "add_generation_prompt and continue_final_message are both true, but an answer either "
            "begins or goes on; send one of them",
            parameter="continue_final_message",
        )
    if not body.logprobs and body.top_logprobs:
        raise RequestError(
            f"top_logprobs is {body.top_logprobs}, but logprobs is not true; send both",
            parameter="top_logprobs",
        )
    n_logprobs = None
    if body.logprobs:
        n_logprobs = _n_logprobs("top_logprobs", first(body.top_logprobs, 0))
    options = body.chat_template_kwargs or {}
    if body.reasoning_effort is not None:
        options = options_of_effort(options, body.reasoning_effort)
    tool_choice, tool_name, allowed = "auto", None, None
    if body.tool_choice is not None:
        tool_choice, tool_name, allowed = _tool_choice(body.tool_choice)
    messages, documents = body.messages, ()
    if body.documents:
        messages, documents = with_documents(body.messages, body.documents)
    return ChatRequest(
        messages=messages,
        documents=documents,
        tools=body.tools or (),
        tool_choice=tool_choice,
        tool_name=tool_name,
        allowed_tools=allowed,
        parallel_calls=body.parallel_tool_calls is not False and tool_name is None,
        schema=_response_schema(body.response_format) if body.response_format else None,
        reasoning=body.reasoning_format or settings.reasoning_format,
        template_options=options,
        adds_generation_prompt=body.add_generation_prompt is not False,
        continues=continues,
        n_samples=first(body.n_cmpl, body.n, 1),
        top_logprobs=n_logprobs,
        names={"prompt": "prompt", "json_schema": "response_format"},
    )


def _n_logprobs(name: str, n: int) -> int:
    if not 0 <= n <= MOST_LOGPROBS:
        raise RequestError(f"{name} is {n}, allowed are 0 to {MOST_LOGPROBS}", parameter=name)
    return n


def _tool_choice(
    choice: str | dict[str, Any],
) -> tuple[ToolChoice, str | None, list[str] | None]:
    """The choice, the function that it names, and the only ones that it allows."""
    if isinstance(choice, str) and choice in ("auto", "none", "required"):
        return choice, None, None
    given = object_of(choice)
    if given.get("type") == "allowed_tools":
        return _allowed_tools(object_of(given.get("allowed_tools")))
    name = object_of(given.get("function")).get("name")
    if not isinstance(name, str):
        raise RequestError(
            f"tool_choice is {shown(choice)}; send auto, none, required, or "
            '{"type": "function", "function": {"name": ...}}',
            parameter="tool_choice",
        )
    return "required", name, None


def _allowed_tools(given: dict[str, Any]) -> tuple[ToolChoice, None, list[str]]:
    mode = given.get("mode")
    names = [object_of(tool.get("function")).get("name") for tool in objects_of(given.get("tools"))]
    if mode not in ("auto", "required") or not names or not all(type(n) is str for n in names):
        raise RequestError(
            f"tool_choice.allowed_tools is {shown(given)}; send "
            '{"mode": "auto" or "required", "tools": [{"type": "function", "function": '
            '{"name": ...}}, ...]}',
            parameter="tool_choice",
        )
    return mode, None, cast("list[str]", names)


def _response_schema(response_format: dict[str, Any]) -> dict[str, Any] | None:
    """The JSON schema that the answer has to follow, None for text."""
    kind = response_format.get("type")
    if kind in (None, "text"):
        return None
    if kind not in ("json_object", "json_schema"):
        raise RequestError(
            f"response_format.type is {shown(kind)}; send text, json_object or json_schema",
            parameter="response_format",
        )
    holder = response_format if kind == "json_object" else response_format.get("json_schema")
    given = object_of(holder).get("schema", {})
    if not isinstance(given, dict):
        raise RequestError(
            f"the schema of response_format is {shown(given)}; send a JSON schema, an object",
            parameter="response_format",
        )
    schema = cast("dict[str, Any]", given)
    return schema or {"type": "object"} if kind == "json_object" else schema


# ---- completions


def text_writer(
    body: schema.CompletionBody, *, request_id: str, engine: Engine, settings: Settings, model: str
) -> CompletionWriter:
    """Who writes a completion; any thread. Arguments and errors as of `chat_writer`."""
    if body.suffix:
        raise RequestError(
            f"suffix is {shown(body.suffix)}, but text is only generated at the end; leave it out",
            parameter="suffix",
        )
    n_samples = first(body.n_cmpl, body.n, 1)
    if body.best_of is not None and body.best_of != n_samples:
        raise RequestError(
            f"best_of is {body.best_of} and n is {n_samples}; this server returns every text that "
            "it generates, so leave best_of out",
            parameter="best_of",
        )
    n_logprobs = None
    if body.logprobs is not None and body.logprobs is not False:
        n_logprobs = _n_logprobs("logprobs", int(body.logprobs))
    prompts = prompts_of("prompt", body.prompt)
    tokenize = partial(engine.tokenize, add_special=False, parse_special=False)
    sampling = sampling_of(body, tokenize=tokenize, top_logprobs=n_logprobs)
    n, budget = most_tokens_of(body, "max_tokens"), most_tokens_of(body, "reasoning_budget")
    max_tokens = WHOLE_CONTEXT if n is None else max(n, 1)
    names = {**names_of(body), **ATTENTION_NAMES, "prompt": "prompt"}
    texts: list[str] = []
    if body.echo or budget is not None:
        try:
            texts = [p if isinstance(p, str) else engine.detokenize(p) for p in prompts]
        except RequestError as error:
            raise renamed(error, {"ids": "prompt"}) from None
    forcing = None
    if budget is not None:
        forcing = cap_of_texts(budget, texts, sampling, max_tokens=max_tokens, names=names)
    request = GenerateRequest(
        prompt=prompts[0],
        more_prompts=prompts[1:],
        max_tokens=max_tokens,
        sampling=sampling,
        request_id=request_id,
        attention=attention_of(body.attention, settings),
        n_samples=n_samples,
        names=names,
        forcing=forcing,
        **options_of(body, settings),
    )
    return CompletionWriter(
        body, request, model, engine.token_bytes, is_prefill=n == 0,
        echoes=texts if body.echo else (), echo_logprobs=n_logprobs if body.echo else None,
    )  # fmt: skip


def prompts_of(name: str, value: object) -> list[Prompt]:
    """The texts or ids in *value*: one of them, or a list.

    Raises:
        RequestError: It is neither; the message calls it *name*.
    """
    if isinstance(value, str):
        return [value]
    items = cast("list[object]", value) if isinstance(value, list) else []
    if _are_ids(items):
        return [cast("list[int]", items)]
    prompts = [
        cast("Prompt", one)
        for one in items
        if isinstance(one, str) or (isinstance(one, list) and _are_ids(cast("list[object]", one)))
    ]
    if not prompts or len(prompts) < len(items):
        raise RequestError(
            f"{name} is neither a text nor a list of ids, nor a list of these; correct it",
            parameter=name,
        )
    return prompts


def _are_ids(items: Sequence[object]) -> bool:
    return bool(items) and all(type(one) is int for one in items)


# ---- how they are described


def _chunks(
    type: Any, begin: Mapping[str, Any], new: Mapping[str, Any], nothing: Mapping[str, Any]
) -> Sequence[Sample]:
    """Events of a stream whose choices begin, go on and have nothing new so."""

    def chunk(about: str, choice: Mapping[str, Any], **more: Any) -> Sample:
        shown = {"index": 0, "logprobs": None, "finish_reason": None, **choice, **more}
        return Sample("server", about, {"choices": [shown]}, type=type)

    usage = {
        "prompt_tokens": 12, "completion_tokens": 20, "total_tokens": 32,
        "prompt_tokens_details": {"cached_tokens": 0},
        "completion_tokens_details": {
            "accepted_prediction_tokens": 0, "rejected_prediction_tokens": 0,
        },
    }  # fmt: skip
    return (
        chunk(
            "Rows of the prompt, with attention.prompt", nothing, prompt_attention=PROMPT_ROWS
        ),
        chunk("The beginning of each choice", begin),
        chunk("What is new", new),
        chunk("The same with attention: a chunk for each token", new, attention=TOKEN_ROW),
        chunk("Tokens that a mod took back", nothing, removed={"tokens": 1, "characters": 4}),
        chunk("The end of each choice", nothing, finish_reason="stop"),
        Sample(
            "server", "With stream_options.include_usage", {"choices": [], "usage": usage},
            type=type,
        ),
        Sample("server", "The mark of the end", "[DONE]"),
        Sample("server", "A failure, in place of the end", type=FailureBody),
    )  # fmt: skip


_CHAT_CHUNKS: Final = _chunks(
    ChatChunk, {"delta": {"role": "assistant", "content": None}},
    {"delta": {"content": "Anna"}}, {"delta": {}},
)  # fmt: skip
_TEXT_CHUNKS: Final = _chunks(TextChunk, {"text": "Anna is a"}, {"text": " t"}, {"text": ""})
_CHAT: Final = {
    "messages": [{"role": "user", "content": "Who is Anna?"}], "max_tokens": 4, "temperature": 0,
}  # fmt: skip

OPERATIONS: Final = Operations(tag="openai", error_body=error_body, failure=FailureBody)
"""Rows of the route table, with which `routes` begins."""


# ---- their handlers


@OPERATIONS.post(
    "/v1/chat/completions",
    also=("/chat/completions",),
    reply=schema.ChatCompletion,
    summary='The answer to a chat; Server-Sent Events with "stream": true.',
    streams=True,
    model="named",
    example=_CHAT,
    samples=_CHAT_CHUNKS,
)
async def chat_completions(call: Call, body: schema.ChatBody) -> HttpReply | Events:
    """The assistant's answer to a chat."""
    return await answered(call, body, chat_writer, prefix="chatcmpl-")


@OPERATIONS.post(
    "/v1/chat/completions/input_tokens", also=("/chat/completions/input_tokens",), model="named"
)
async def input_tokens(call: Call, body: schema.ChatCountBody) -> InputTokens:
    """How many tokens the prompt of a chat has."""
    settings = call.service.settings

    def chat() -> ChatRequest:
        template = allowed_template(body.chat_template, settings)
        return replace(chat_of(body, settings), chat_template=template)

    return InputTokens(input_tokens=await counted(call, chat))


@OPERATIONS.post(
    "/v1/completions",
    reply=schema.TextCompletion,
    streams=True,
    model="named",
    summary='Text that continues a prompt; Server-Sent Events with "stream": true.',
    example={"prompt": "Anna is a", "max_tokens": 4, "temperature": 0},
    samples=_TEXT_CHUNKS,
)
async def completions(call: Call, body: schema.CompletionBody) -> HttpReply | Events:
    """Text that continues a prompt, or each of several."""
    return await answered(call, body, text_writer, prefix="cmpl-", before=_score_echoes)


async def _score_echoes(call: Call, writer: CompletionWriter, lists: ReplyLists) -> None:
    """Logprobs of the prompts that a reply shows, before they are continued."""
    if writer.echo_logprobs is None:
        return
    scores = await call.service.scores(
        writer.request, call.caller, top_logprobs=writer.echo_logprobs, hold=call.hold,
        model=call.model,
    )  # fmt: skip
    bytes_of = call.model.engine.token_bytes

    def write() -> None:
        found = [
            echoed_logprobs(score, text, bytes_of)
            for score, text in zip(scores, writer.echoes, strict=True)
        ]
        if writer.body.stream:
            writer.echoed = [msgspec.Raw(msgspec.json.encode(one)) for one in found]
            writer.n_bytes = LARGE
            return
        for i in range(writer.request.n_generations):
            for name, elements in found[i // writer.request.n_samples].items():
                for element in elements:
                    lists.add(i, name, element, within="logprobs")

    await call.service.converted(LARGE, call.hold, write)
