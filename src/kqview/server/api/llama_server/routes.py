"""Routes of llama.cpp's server. Glue only: `schema` says what bodies are, `convert` and `events`
what becomes of them.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, Final

from kqview.server.api.llama_fields import LlamaFields, error_body
from kqview.server.api.llama_server import convert, events, schema
from kqview.server.api.llama_server.classify import Classified, ClassifyBody, classify
from kqview.server.endpoint import (
    Call,
    Events,
    Handler,
    HttpReply,
    Operation,
    json_in_slices,
)
from kqview.server.service import Run

_TAG: Final = "llama-server"


# ---- text and ids


async def tokenize(call: Call, body: schema.TokenizeBody) -> HttpReply:
    """Ids of a text, with their texts if asked for."""
    engine = call.service.engine
    parts = [body.content] if isinstance(body.content, str) else body.content or []
    ids = await _ids(
        call,
        parts,
        add_special=bool(body.add_special),
        parse_special=body.parse_special is not False,
    )

    def written() -> bytes:
        return json_in_slices(
            convert.tokenized(ids, engine.token_bytes, with_pieces=bool(body.with_pieces))
        )

    return HttpReply(await call.service.converted(call.n_body_bytes, call.hold, written))


async def detokenize(call: Call, body: schema.DetokenizeBody) -> schema.Content:
    """Text of ids."""
    ids = body.tokens or []
    return schema.Content(await call.service.detokenize(ids, client=call.hold.client))


async def _ids(
    call: Call, parts: Sequence[int | str], *, add_special: bool, parse_special: bool = True
) -> list[int]:
    """Ids of parts that follow one another; special ones are added to a text that is the first."""
    ids: list[int] = []
    for i, part in enumerate(parts):
        if isinstance(part, int):
            ids.append(part)
            continue
        ids += await call.service.ids(
            part, add_special=add_special and i == 0, parse_special=parse_special, hold=call.hold
        )
    return ids


# ---- completions


async def completion(call: Call, body: schema.CompletionBody) -> HttpReply | Events:
    """Text that continues a prompt, or each of several."""
    prompts = [
        await _ids(call, parts, add_special=True) for parts in convert.prompts_of(body.prompt)
    ]
    return await _complete(call, body, prompts)


async def _complete(
    call: Call, body: LlamaFields, prompts: Sequence[list[int]]
) -> HttpReply | Events:
    service = call.service
    engine, settings = service.engine, service.settings
    shown = [(ids, await service.detokenize(ids, client=call.hold.client)) for ids in prompts]
    plan = await service.converted(
        call.n_body_bytes, call.hold, convert.plan_of, body, shown,
        request_id=call.request_id, model=service.model_name, n_ctx=engine.n_ctx,
        most_tokens=settings.max_tokens, shifts=False,
        tokenize=partial(engine.tokenize, add_special=False, parse_special=False),
    )  # fmt: skip
    run = await service.start(plan.request, call.caller, call.hold)
    writer = events.CompletionEvents(plan, len(run.generations), engine.token_bytes)
    if body.stream:
        return Events(run, writer, events.HEAD)
    return await _whole(run, writer)


async def _whole(run: Run, writer: events.CompletionEvents) -> HttpReply:
    async with run:
        async for step in run:
            run.hold.take(writer.add(run, step))
        return HttpReply(writer.whole(run))


# ---- the table


def _post(
    path: str, handler: Handler, summary: str, body: Any, reply: Any = None, **more: Any
) -> Operation:
    return Operation(
        method="POST", path=path, handler=handler, tag=_TAG, summary=summary,
        error_body=error_body, body=body, reply=reply, **more,
    )  # fmt: skip


OPERATIONS: Final[list[Operation]] = [
    _post(
        "/completion", completion,
        "Text that continues a prompt; Server-Sent Events with \"stream\": true.",
        schema.CompletionBody, schema.Completion, also=("/completions",),
    ),
    _post("/tokenize", tokenize, "Ids of a text.", schema.TokenizeBody, schema.Tokenized),
    _post("/detokenize", detokenize, "Text of ids.", schema.DetokenizeBody, schema.Content),
    _post(
        "/classify", classify, "Scores of a classifier's labels for each text.",
        ClassifyBody, Classified, also=("/v1/classify",),
    ),
]  # fmt: skip
