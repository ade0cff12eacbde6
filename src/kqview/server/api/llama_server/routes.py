"""Routes of llama.cpp's server. Glue only: `schema` says what bodies are, `convert` and `events`
what becomes of them.
"""

from collections.abc import Sequence
from functools import partial
from typing import Final

from kqview.errors import RequestError
from kqview.server.api.llama_server import convert, events, pooled, properties, schema, slots
from kqview.server.api.wire.attention import ReplyLists
from kqview.server.api.wire.chat import prompt_of, written
from kqview.server.api.wire.event_parts import sent
from kqview.server.api.wire.failures import FailureBody, error_body
from kqview.server.api.wire.fields import LoraScale, most_tokens_of, with_defaults
from kqview.server.api.wire.prompts import ids_of, ids_of_each, prompts_of
from kqview.server.errors import NotSupported
from kqview.server.models.service import OFFLOAD_BYTES, Call
from kqview.server.models.stream import Events
from kqview.server.web.endpoint import HttpReply, OneOf, Operations, Upload, empty, json_in_slices

_COMPLETIONS: Final = schema.Completion | list[schema.Completion]  # a list for several texts
_EVENTS: Final = (
    sent(schema.Partial, stop=False),
    sent(
        schema.Partial, about="Tokens that a mod took back",
        content="", tokens=[], stop=False, removed={"tokens": 1, "characters": 2},
    ),
    sent(
        schema.Completion, about="The end of each text",
        content="", has_new_line=False, truncated=False, stop=True,
    ),
    sent(FailureBody, about="A failure, in place of the end"),
)  # fmt: skip
_SLOT: Final = "Index of the slot, such as 0."

OPERATIONS: Final = Operations(
    tag="llama-server", error_body=error_body, failure=FailureBody, model="named"
)
"""Rows of the route table."""

# ---- text and ids


@OPERATIONS.post("/tokenize", reply=schema.Tokenized)
async def tokenize(call: Call, body: schema.TokenizeBody) -> HttpReply:
    """Ids of a text, with their texts if asked for."""
    engine = call.model.engine
    parts = [body.content] if isinstance(body.content, str) else body.content or []
    ids = await ids_of(
        call,
        parts,
        add_special=bool(body.add_special),
        parse_special=body.parse_special is not False,
    )

    def piece(id_: int) -> schema.TokenPiece:
        data = engine.token_bytes(id_)
        try:
            return schema.TokenPiece(id_, data.decode())
        except UnicodeDecodeError:
            return schema.TokenPiece(id_, list(data))

    def written() -> bytes:
        tokens: list[int | schema.TokenPiece] = [*ids]
        if body.with_pieces:
            tokens = [piece(id_) for id_ in ids]
        data = json_in_slices(schema.Tokenized(tokens))
        empty(ids)
        return data

    return HttpReply(await call.service.converted(call.n_body_bytes, call.hold, written))


@OPERATIONS.post("/detokenize")
async def detokenize(call: Call, body: schema.DetokenizeBody) -> schema.PlainText:
    """Text of ids."""
    ids = body.tokens or []
    text = await call.model.texts.detokenize(ids, name="tokens", client=call.hold.client)
    return schema.PlainText(text)


# ---- completions


@OPERATIONS.post(
    "/completion",
    also=("/completions",),
    reply=_COMPLETIONS,
    streams=True,
    samples=_EVENTS,
    summary='Text that continues a prompt; Server-Sent Events with "stream": true.',
    example={"prompt": "Anna is a", "n_predict": 2, "temperature": 0},
)
async def completion(call: Call, body: schema.CompletionBody) -> HttpReply | Events:
    """Text that continues a prompt, or each of several."""
    prompts = await ids_of_each(call, partial(prompts_of, "prompt", body.prompt))
    return await _complete(call, body, prompts)


@OPERATIONS.post(
    "/infill",
    reply=_COMPLETIONS,
    streams=True,
    samples=_EVENTS,
    summary="Code for the gap between a prefix and a suffix; Server-Sent Events with "
    '"stream": true.',
    example={"input_prefix": "def area(r):\n    return ", "input_suffix": "\n"},
)
async def infill(call: Call, body: schema.InfillBody) -> HttpReply | Events:
    """Code for the gap between a prefix and a suffix."""
    engine = call.model.engine
    fim = engine.model.fim_token_ids
    if not fim:
        raise NotSupported(
            f"{call.model.name} has no tokens for filling a gap; serve a model for code that has"
        )
    for name in ("input_prefix", "input_suffix"):
        if getattr(body, name) is None:
            raise RequestError(f"{name} is missing; send a text", parameter=name)

    async def plain(text: str | Sequence[int | str] | None) -> list[int]:
        parts = [text] if isinstance(text, str) else text or ()
        return await ids_of(call, parts, add_special=False, parse_special=False)

    n_predict = max(most_tokens_of(body, "max_tokens") or 0, 1)
    begun = await ids_of(call, [body.prompt or ""], add_special=False)
    ids = convert.infill_ids(
        fim,
        prefix=await plain(body.input_prefix),
        suffix=await plain(body.input_suffix),
        begun=begun,
        extra=await plain(convert.extra_texts(body, fim)),
        bos=list(engine.model.begin_ids),
        n_ctx=call.model.max_context,
        n_predict=min(n_predict, call.service.settings.max_tokens),
    )
    return await _complete(call, body, [ids])


async def _complete(
    call: Call, body: schema.CompletionFields, prompts: Sequence[list[int]]
) -> HttpReply | Events:
    service = call.service
    engine, settings = call.model.engine, service.settings
    body = with_defaults(body, settings)
    shown = await service.converted(
        call.n_body_bytes, call.hold, lambda: [(ids, engine.detokenize(ids)) for ids in prompts]
    )
    writer = await service.converted(
        call.n_body_bytes, call.hold, events.CompletionEvents, body, shown, engine, settings,
        request_id=call.request_id, model=call.model.name,
    )  # fmt: skip
    run = await service.start(writer.request, call.caller, call.hold, model=call.model)
    # The end of each text repeats its prompt and how it is generated.
    writer.n_bytes = len(run.generations) * call.n_body_bytes
    writer.n_bytes += writer.request.n_samples * sum(len(text) for _, text in shown)
    lists = ReplyLists(call.hold, settings.max_reply_bytes)
    return await written(call, run, writer, lists, streams=bool(body.stream))


# ---- chats without an answer


@OPERATIONS.post("/apply-template")
async def apply_template(call: Call, body: schema.TemplateBody) -> schema.TemplatePrompt:
    """The prompt that a chat becomes."""
    service, engine = call.service, call.model.engine
    chat = convert.chat_of(body, service.settings)
    # A template may take seconds, however short the body.
    ids, *_ = await service.converted(OFFLOAD_BYTES, call.hold, prompt_of, engine, chat)
    model = engine.model
    if model.begin_ids and ids[:1] == [*model.begin_ids]:
        del ids[0]  # /completion begins the text with it
    return schema.TemplatePrompt(await call.model.texts.detokenize(ids, client=call.hold.client))


# ---- in files of their own

OPERATIONS.post("/embedding", also=("/embeddings",), reply=list[pooled.Embedded])(pooled.embed)
OPERATIONS.post(
    "/rerank", also=("/reranking", "/v1/rerank", "/v1/reranking"),
    reply=pooled.Reranked | list[pooled.TeiResult],
    example={"query": "a red ball", "documents": ["Tom found a ball.", "It rains."]},
)(pooled.rerank)  # fmt: skip
OPERATIONS.post("/classify", also=("/v1/classify",), reply=pooled.Classified)(pooled.classify)
OPERATIONS.get("/props")(properties.props)
OPERATIONS.post("/props", model="none")(properties.set_props)
OPERATIONS.get("/lora-adapters")(properties.list_adapters)
OPERATIONS.post("/lora-adapters", body=Upload, upload=OneOf((list[LoraScale],)))(
    properties.set_scales
)
OPERATIONS.post(
    "/slots/{id_slot}", body=Upload, reply=slots.SLOT_REPLIES, upload=slots.SLOT_BODIES,
    parameters={
        "id_slot": _SLOT,
        "action": 'What to do, such as "tokens", which lists its ids. "save-state" and '
        '"restore-state" send and take its state, "context-shift" removes tokens; "save", '
        '"restore" and "erase" work with files of the server.',
    },
)(slots.slot_action)  # fmt: skip
OPERATIONS.get(
    "/slots",
    parameters={
        "fail_on_no_slot": 'Anything, such as "1", to fail with 503 if every slot is busy.'
    },
)(slots.list_slots)
OPERATIONS.get("/v1/slots/{id_slot}/info", parameters={"id_slot": _SLOT})(slots.info)
OPERATIONS.post(
    "/sessions/{id_session}", body=Upload, reply=slots.SESSION_REPLIES,
    upload=OneOf((slots.FileBody,)),
    parameters={
        "id_session": "Number of the session, such as 7.",
        "action": 'What to do: save, restore or remove, such as "save".',
        "slot": "Index of the slot to save or restore, such as 0.",
    },
)(slots.session_action)  # fmt: skip
OPERATIONS.get("/sessions", model="none")(slots.list_sessions)
