"""Routes of OpenAI's API. Glue only: `schema` says what bodies are, `convert` and `events` what
becomes of them.
"""

import time
import uuid
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

import msgspec
import numpy as np

from kqview.engine import Engine
from kqview.errors import RequestError
from kqview.server.api.openai import convert, events, schema, stream_schema
from kqview.server.api.wire.attention_field import AttentionWriter
from kqview.server.api.wire.llama_fields import Failure, error_body, with_defaults
from kqview.server.api.wire.prompts import ids_of_each, prompts_of
from kqview.server.errors import NotFound, NotSupported, renamed
from kqview.server.models.row_cache import Row, Rows
from kqview.server.models.service import Call
from kqview.server.models.stream import Events
from kqview.server.web.endpoint import Handler, HttpReply, Operation, Sample

_TAG: Final = "openai"
# Templates may take seconds: their work is large enough for another thread.
_LARGE: Final = 2**20
_ID_BYTES: Final = 40  # of an id of a prompt, of which there are at most as many as bytes
_VALUE_BYTES: Final = 32  # of a number in a list, with its JSON


# ---- completions


async def chat_completions(call: Call, body: schema.ChatBody) -> HttpReply | Events:
    """The assistant's answer to a chat."""
    return await _completed(call, body, convert.chat_plan, "chatcmpl")


async def completions(call: Call, body: schema.CompletionBody) -> HttpReply | Events:
    """Text that continues a prompt, or each of several."""
    return await _completed(call, body, convert.completion_plan, "cmpl")


async def _completed(
    call: Call, body: schema.GenerateFields, plan_of: Callable[..., convert.Plan], prefix: str
) -> HttpReply | Events:
    service = call.service
    engine, settings = call.model.engine, service.settings
    name = f"{prefix}-{uuid.uuid4().hex}"
    body = with_defaults(body, settings)
    with call.hold.part() as ids:  # a prompt that fits is small
        ids.take(_ID_BYTES * call.n_body_bytes)
        plan = await service.converted(
            _LARGE, call.hold, plan_of, body, request_id=name, engine=engine, settings=settings,
            model=call.model.name,
        )  # fmt: skip
        echoed = await _echoed(call, plan, engine)
        run = await service.start(plan.request, call.caller, call.hold, model=call.model)
    attention = AttentionWriter(run, engine.model, service.kept if plan.keeps else None)
    parts = events.Parts(plan, engine.token_bytes, attention, echoed)
    created_s = int(time.time())
    if body.stream:
        chunks = events.Chunks(plan, parts, created_s)
        return Events(run, chunks, events.HEAD, _LARGE if echoed else call.n_body_bytes)
    whole = events.Whole(plan, parts, created_s, call.hold, settings.max_reply_bytes)
    async with run:
        if echoed:
            await service.offload(_LARGE, whole.echo, plan.request.n_generations)
        async for block in run.prompt_blocks():
            await service.offload(_LARGE, whole.prompt, run, block)
            del block  # the pool wants its memory back
        async for step in run.final_steps():
            await service.offload(step.n_bytes, whole.token, run, step)
            del step
    return HttpReply(await service.offload(whole.n_bytes, whole.body, run))


async def _echoed(call: Call, plan: convert.Plan, engine: Engine) -> list[events.EchoedLogprobs]:
    """Logprobs of each prompt that the reply shows, before they are continued."""
    if plan.echo_logprobs is None:
        return []
    scores = await call.service.scores(
        plan.request, call.caller, top_logprobs=plan.echo_logprobs, hold=call.hold,
        model=call.model,
    )  # fmt: skip

    def written() -> list[events.EchoedLogprobs]:
        return [
            events.echoed_logprobs(score, text, engine.token_bytes)
            for score, text in zip(scores, plan.echoes, strict=True)
        ]

    return await call.service.converted(_LARGE, call.hold, written)


# ---- attention that is kept


async def list_attention(call: Call) -> schema.KeptAttention:
    """Which rows are kept of a reply."""
    name = call.path["id"]
    rows = _kept(call, name)
    n_rows = sum(map(len, rows.choices))
    return await call.service.converted(
        _VALUE_BYTES * n_rows, call.hold, convert.kept_attention, name, rows
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


def _kept(call: Call, name: str) -> Rows:
    rows = call.service.kept.find(call.caller.owner, name)
    if rows is None:
        raise NotFound(
            f"no attention of {name[:80]!r} is kept: it was never asked for with "
            'attention {"delivery": "id"}, or newer rows took its place'
        )
    return rows


def _row(rows: Rows, name: str, n: str, choice: str) -> Row:
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


async def list_models(call: Call) -> schema.Models:
    """The models that are served."""
    return _models(call)


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
    aliases = call.service.settings.aliases
    return convert.models_of(
        [
            convert.model_of(
                None if one.loaded is None else one.loaded.model,
                name=one.name,
                aliases=() if pool.has_several else aliases,
                n_ctx=0 if one.loaded is None else one.max_context_of(one.loaded),
                status=convert.status_of(one.state, one.progress),
                created=int(time.time()),
            )
            for one in pool
        ]
    )


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


# ---- the table


def _operation(method: Any, path: str, handler: Handler, summary: str, **more: Any) -> Operation:
    return Operation(
        method=method, path=path, handler=handler, tag=_TAG, summary=summary,
        error_body=error_body, failure=Failure, **more,
    )  # fmt: skip


_CHUNK: Final[dict[str, Any]] = {
    "id": "…", "created": 1767225600, "model": "demo", "system_fingerprint": "kqview-0.1.0",
}  # fmt: skip
_USAGE: Final[dict[str, Any]] = {
    "prompt_tokens": 12, "completion_tokens": 20, "total_tokens": 32,
    "prompt_tokens_details": {"cached_tokens": 0},
}  # fmt: skip
_ROW: Final[dict[str, Any]] = {
    "values": "probs", "format": "per_layer", "shape": [4, 8, 12], "context_length": 12,
    "encoding": "base64", "dtype": "float32", "data": "…",
}  # fmt: skip


def _chunks(
    type: Any, kind: str, begin: dict[str, Any], new: dict[str, Any], end: dict[str, Any]
) -> Sequence[Sample]:
    """Events of a stream whose choices begin, go on and end so."""

    def chunk(about: str, choice: dict[str, Any] | None, **more: Any) -> Sample:
        shown = {"index": 0, "logprobs": None, "finish_reason": None}
        choices = [] if choice is None else [{**shown, **choice}]
        body = {**_CHUNK, "object": kind, "choices": choices, **more}
        return Sample("server", about, body, type=type)

    rows = {**_ROW, "start": 0, "rows": 12, "shape": [4, 8, 12, 12]}
    failure = {
        "code": 503, "message": "the model was switched; send the request again",
        "type": "unavailable_error", "param": None,
    }  # fmt: skip
    return (
        chunk("Rows of the prompt, with attention.prompt", {**end, "prompt_attention": rows}),
        chunk("The beginning of each choice", begin),
        chunk("What is new", new),
        chunk(
            "The same with attention: a chunk for each token",
            {**new, "attention": {"n": 0, "token_id": 259, **_ROW}},
        ),
        chunk(
            "Tokens that a mod took back",
            {**end, "removed": {"tokens": 1, "characters": 4}},
        ),
        chunk("The end of each choice", {**end, "finish_reason": "stop"}),
        chunk("With stream_options.include_usage", None, usage=_USAGE),
        Sample("server", "The mark of the end", "[DONE]"),
        Sample("server", "A failure, in place of the end", {"error": failure}, type=Failure),
    )


_CHAT_CHUNKS: Final = _chunks(
    stream_schema.ChatChunk, "chat.completion.chunk",
    {"delta": {"role": "assistant", "content": None}}, {"delta": {"content": "Anna"}},
    {"delta": {}},
)  # fmt: skip
_TEXT_CHUNKS: Final = _chunks(
    stream_schema.TextChunk, "text_completion", {"text": "Anna is a"}, {"text": " t"}, {"text": ""}
)
_CHAT: Final = {
    "messages": [{"role": "user", "content": "Who is Anna?"}], "max_tokens": 4, "temperature": 0,
}  # fmt: skip

OPERATIONS: Final[Sequence[Operation]] = [
    _operation(
        "POST", "/v1/chat/completions", chat_completions,
        'The answer to a chat; Server-Sent Events with "stream": true.',
        body=schema.ChatBody, reply=schema.ChatCompletion, streams=True, model="named",
        example=_CHAT, samples=_CHAT_CHUNKS,
        also=("/chat/completions",),
    ),
    _operation(
        "POST", "/v1/completions", completions,
        'Text that continues a prompt; Server-Sent Events with "stream": true.',
        body=schema.CompletionBody, reply=schema.TextCompletion, streams=True, model="named",
        example={"prompt": "Anna is a", "max_tokens": 4, "temperature": 0}, samples=_TEXT_CHUNKS,
    ),
    _operation(
        "POST", "/v1/embeddings", embeddings, "Vectors of texts.",
        body=schema.EmbeddingsBody, reply=schema.Embeddings, model="named",
    ),
    _operation(
        "GET", "/v1/models", list_models, "The models that are served.", reply=schema.Models,
    ),
    _operation(
        "GET", "/v1/models/{id:path}", show_model, "A model, by its id.", reply=schema.Model,
        parameters={"id": 'Its id or an alias, such as "demo".'},
    ),
    _operation(
        "GET", "/v1/attention/{id}", list_attention,
        'Attention rows that are kept of a reply with attention {"delivery": "id"}.',
        reply=schema.KeptAttention,
        parameters={"id": 'Id of the reply, such as "chatcmpl-1".'},
    ),
    _operation(
        "GET", "/v1/attention/{id}/{n}", show_attention,
        "The attention row of one token as bytes; takes Range.",
        parameters={
            "id": 'Id of the reply, such as "chatcmpl-1".',
            "n": "Index of the token, such as 0.",
            "choice": "Index of the choice, such as 1; 0 if not given.",
        },
    ),
]  # fmt: skip
