"""Routes of OpenAI's API. Glue only: `schema` says what bodies are, `convert` and `events` what
becomes of them.
"""

import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final

import msgspec
import numpy as np

from kqview.errors import RequestError
from kqview.server.api.openai import convert, events, schema
from kqview.server.api.wire.attention import AttentionWriter, ReplyLists, keeps
from kqview.server.api.wire.chat import ID_BYTES, LARGE, collected
from kqview.server.api.wire.event_parts import PROMPT_ROWS, TOKEN_ROW
from kqview.server.api.wire.failures import FailureBody, error_body
from kqview.server.api.wire.fields import with_defaults
from kqview.server.api.wire.prompts import ids_of_each, prompts_of
from kqview.server.errors import NotFound, NotSupported, renamed
from kqview.server.models.row_cache import CachedRow, CachedRows
from kqview.server.models.service import Call
from kqview.server.models.stream import Events
from kqview.server.web.endpoint import HttpReply, Operations, Sample

_VALUE_BYTES: Final = 32  # of a number in a list, with its JSON


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
    events.ChatChunk, {"delta": {"role": "assistant", "content": None}},
    {"delta": {"content": "Anna"}}, {"delta": {}},
)  # fmt: skip
_TEXT_CHUNKS: Final = _chunks(events.TextChunk, {"text": "Anna is a"}, {"text": " t"}, {"text": ""})
_CHAT: Final = {
    "messages": [{"role": "user", "content": "Who is Anna?"}], "max_tokens": 4, "temperature": 0,
}  # fmt: skip
_REPLY: Final = 'Id of the reply, such as "chatcmpl-1".'

OPERATIONS: Final = Operations(tag="openai", error_body=error_body, failure=FailureBody)
"""Rows of the route table."""


# ---- completions


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
    return await _completed(call, body, convert.chat_plan, "chatcmpl")


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
    return await _completed(call, body, convert.completion_plan, "cmpl")


async def _completed(
    call: Call,
    body: schema.GenerateFields,
    plan_of: Callable[..., convert.CompletionPlan],
    prefix: str,
) -> HttpReply | Events:
    service, engine, settings = call.service, call.model.engine, call.service.settings
    body = with_defaults(body, settings)
    lists = ReplyLists(call.hold, settings.max_reply_bytes)
    with call.hold.part() as ids:  # a prompt that fits is small
        ids.take(ID_BYTES * call.n_body_bytes)
        plan = await service.converted(
            LARGE, call.hold, plan_of, body, request_id=f"{prefix}-{uuid.uuid4().hex}",
            engine=engine, settings=settings, model=call.model.name,
        )  # fmt: skip
        echoed: Sequence[msgspec.Raw] = ()
        if plan.echo_logprobs is not None:
            echoed = await _echoed(call, plan, plan.echo_logprobs, lists)
        run = await service.start(plan.request, call.caller, call.hold, model=call.model)
    attention = AttentionWriter(run, engine.model, service.kept if keeps(body.attention) else None)
    writer = events.CompletionWriter(plan, engine.token_bytes, attention, int(time.time()), echoed)
    if body.stream:
        return Events(run, writer, events.HEAD, LARGE if echoed else call.n_body_bytes)
    return await collected(call, run, writer, lists)


async def _echoed(
    call: Call, plan: convert.CompletionPlan, n_logprobs: int, lists: ReplyLists
) -> Sequence[msgspec.Raw]:
    """Logprobs of the prompts that a stream shows, before they are continued; others in *lists*."""
    scores = await call.service.scores(
        plan.request, call.caller, top_logprobs=n_logprobs, hold=call.hold, model=call.model
    )
    bytes_of = call.model.engine.token_bytes

    def written() -> list[msgspec.Raw]:
        found = [
            events.echoed_logprobs(score, text, bytes_of)
            for score, text in zip(scores, plan.echoes, strict=True)
        ]
        if plan.body.stream:
            return [msgspec.Raw(msgspec.json.encode(one)) for one in found]
        for i in range(plan.request.n_generations):
            for name, elements in found[i // plan.request.n_samples].items():
                for element in elements:
                    lists.add(i, f"logprobs.{name}", element)
        return []

    return await call.service.converted(LARGE, call.hold, written)


# ---- attention that is kept


@OPERATIONS.get("/v1/attention/{id}", parameters={"id": _REPLY})
async def list_attention(call: Call) -> schema.KeptAttention:
    """Attention rows that are kept of a reply with attention {"delivery": "id"}."""
    name = call.path["id"]
    rows = _kept(call, name)
    n_rows = sum(map(len, rows.choices))
    return await call.service.converted(
        _VALUE_BYTES * n_rows, call.hold, convert.kept_attention, name, rows
    )


@OPERATIONS.get(
    "/v1/attention/{id}/{n}",
    summary="The attention row of one token as bytes; takes Range.",
    parameters={
        "id": _REPLY,
        "n": "Index of the token, such as 0.",
        "choice": "Index of the choice, such as 1; 0 if not given.",
    },
)
async def show_attention(call: Call) -> HttpReply:
    """The row of one token: little-endian values in C order, or JSON for "sparse" and "viz"."""
    name = call.path["id"]
    row = _row(_kept(call, name), name, call.path["n"], call.query.get("choice", "0"))
    headers = {
        "accept-ranges": "bytes",
        "cache-control": "private, no-store",
        "x-attention-shape": ",".join(map(str, row.shape)),
    }
    data = row.data
    try:
        asked = convert.byte_range(call.headers.get("range", ""), len(data))
    except IndexError:
        headers["content-range"] = f"bytes */{len(data)}"
        return HttpReply(b"", row.media_type, 416, headers=headers)
    if asked is None:
        return HttpReply(data, row.media_type, headers=headers)
    start, end = asked
    headers["content-range"] = f"bytes {start}-{end - 1}/{len(data)}"
    return HttpReply(data[start:end], row.media_type, 206, headers=headers)


def _kept(call: Call, name: str) -> CachedRows:
    rows = call.service.kept.find(call.caller.owner, name)
    if rows is None:
        raise NotFound(
            f"no attention of {name[:80]!r} is kept: it was never asked for with "
            'attention {"delivery": "id"}, or newer rows took its place'
        )
    return rows


def _row(rows: CachedRows, name: str, n: str, choice: str) -> CachedRow:
    index = _number(choice)
    if index is None or index >= len(rows.choices):
        raise NotFound(f"choice is {choice[:20]!r}, {name} has {len(rows.choices)}, from 0")
    row = rows.choices[index].get(-1 if (at := _number(n)) is None else at)
    if row is None:
        raise NotFound(
            f"row {n[:20]!r} of {name} is not kept; GET /v1/attention/{name} lists those that are"
        )
    return row


def _number(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 10 else None


# ---- models and embeddings


@OPERATIONS.get("/v1/models")
async def list_models(call: Call) -> schema.Models:
    """The models that are served."""
    return _models(call)


@OPERATIONS.get("/v1/models/{id:path}", parameters={"id": 'Its id or an alias, such as "demo".'})
async def show_model(call: Call) -> schema.Model:
    """A model, by its id or an alias."""
    models = _models(call).data
    for model in models:
        if call.path["id"] in (model.id, *model.aliases):
            return model
    known = ", ".join(repr(one.id) for one in models)
    raise NotFound(f"there is no model {call.path['id'][:80]!r}; this server has {known}")


def _models(call: Call) -> schema.Models:
    pool = call.service.pool
    if not pool.has_several:
        _ = pool.default.engine  # says why there is none
    aliases = () if pool.has_several else call.service.settings.aliases
    models = [
        convert.model_of(
            None if one.loaded is None else one.loaded.model,
            name=one.name,
            aliases=aliases,
            n_ctx=0 if one.loaded is None else one.max_context_of(one.loaded),
            state=one.state,
            progress=one.progress,
            created=int(time.time()),
        )
        for one in pool
    ]
    return convert.models_of(models)


@OPERATIONS.post("/v1/embeddings", reply=schema.Embeddings, model="named")
async def embeddings(call: Call, body: schema.EmbeddingsBody) -> HttpReply:
    """Vectors of texts, each of length 1."""
    service = call.service
    pooling, n_embd = call.model.engine.pooling, call.model.engine.model.n_embd
    if pooling is None or pooling == "rank":
        raise NotSupported(
            f"{call.model.name} gives no embeddings as it is served; serve an embedding model, "
            "or start the server with --pooling mean"
        )
    if pooling == "none":
        raise RequestError(
            "the server gives a vector for each token (--pooling none); use /embeddings, or start "
            "it with another pooling"
        )
    ids = await ids_of_each(call, partial(prompts_of, "input", body.input))
    n_bytes = len(ids) * n_embd * _VALUE_BYTES
    call.hold.take(n_bytes)
    async with service.working(call.model, call.caller) as engine:
        try:
            vectors = await engine.aembed(ids)
        except RequestError as error:
            raise renamed(error, {"texts": "input"}) from None

    def written() -> bytes:
        rows = np.stack(list(vectors))
        n_tokens = sum(map(len, ids))
        model = body.model or name
        return msgspec.json.encode(
            convert.embeddings_of(rows, n_tokens=n_tokens, model=model, body=body)
        )

    name = call.model.name
    return HttpReply(await service.converted(n_bytes, call.hold, written))
