"""Routes of OpenAI's API. Glue only: `schema` says what bodies are, `convert` and `events` what
becomes of them.
"""

import time
from collections.abc import Sequence
from functools import partial
from typing import Final

import msgspec
import numpy as np
from msgspec import UNSET

from kqview.errors import RequestError
from kqview.server.api.openai import completions, convert, schema
from kqview.server.api.wire.attention import index_of
from kqview.server.api.wire.failures import FailureBody, error_body
from kqview.server.api.wire.prompts import ids_of_each, pooling_of, prompts_of
from kqview.server.errors import NotFound, renamed
from kqview.server.models.model_entry import ModelEntry
from kqview.server.models.row_cache import CachedRow, CachedRows
from kqview.server.models.service import Call
from kqview.server.web.endpoint import HttpReply, Operations

_VALUE_BYTES: Final = 32  # of a number in a list, with its JSON
_REPLY: Final = 'Id of the reply, such as "chatcmpl-1".'

OPERATIONS: Final = Operations(tag="openai", error_body=error_body, failure=FailureBody)
"""Rows of the route table."""
OPERATIONS.extend(completions.OPERATIONS)


# ---- attention that is kept


@OPERATIONS.get("/v1/attention/{id}", parameters={"id": _REPLY})
async def list_attention(call: Call) -> schema.KeptAttention:
    """Attention rows that are kept of a reply with attention {"delivery": "id"}."""
    name = call.path["id"]
    rows = _kept(call, name)

    def choice(i: int) -> schema.KeptChoice:
        kept = [
            schema.KeptRow(n=n, token_id=row.token_id, text=row.text, shape=row.shape)
            for n, row in rows.shown(i)
        ]
        return schema.KeptChoice(index=i, n_left_out=rows.n_left_out[i], rows=kept)

    def written() -> schema.KeptAttention:
        wanted, choices = rows.wanted, [choice(i) for i in range(len(rows.choices))]
        return schema.KeptAttention(
            id=name, values=wanted.kind, format=wanted.format, dtype=wanted.dtype,
            layers=rows.layers, choices=choices,
        )  # fmt: skip

    n_rows = sum(map(len, rows.choices))
    return await call.service.converted(_VALUE_BYTES * n_rows, call.hold, written)


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
    index = index_of(choice)
    if not 0 <= index < len(rows.choices):
        raise NotFound(f"choice is {choice[:20]!r}, {name} has {len(rows.choices)}, from 0")
    row = rows.row(index, index_of(n))
    if row is None:
        raise NotFound(
            f"row {n[:20]!r} of {name} is not kept; GET /v1/attention/{name} lists those that are"
        )
    return row


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
    models = [_model(one, aliases) for one in pool]
    return schema.Models(data=models, models=[convert.in_ollamas_form(one) for one in models])


def _model(entry: ModelEntry, aliases: Sequence[str]) -> schema.Model:
    engine, meta = entry.loaded, None
    if engine is not None:
        info = engine.model
        meta = schema.ModelMeta(
            n_vocab=info.n_vocab, n_ctx=entry.max_context_of(engine), n_ctx_train=info.n_ctx_train,
            n_embd=info.n_embd, n_params=info.n_params, size=info.size_bytes, ftype=info.file_type,
            architecture=info.architecture,
        )  # fmt: skip
    status = schema.ModelStatus(
        value="unloaded" if entry.state == "failed" else entry.state,
        failed=True if entry.state == "failed" else UNSET,
        progress=entry.progress if entry.state == "loading" else UNSET,
    )
    return schema.Model(
        id=entry.name, created=int(time.time()), aliases=[*aliases], tags=[], meta=meta,
        status=status,
    )  # fmt: skip


@OPERATIONS.post("/v1/embeddings", reply=schema.Embeddings, model="named")
async def embeddings(call: Call, body: schema.EmbeddingsBody) -> HttpReply:
    """Vectors of texts, each of length 1."""
    service, n_embd = call.service, call.model.engine.model.n_embd
    if pooling_of(call) == "none":
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
