"""Routes of llama.cpp's server. Glue only: `schema` says what bodies are, `convert` what becomes
of them.
"""

from typing import Any, Final

from kqview.server.api.llama_fields import error_body
from kqview.server.api.llama_server import convert, schema
from kqview.server.endpoint import Call, Handler, HttpReply, Operation, json_in_slices

_TAG: Final = "llama-server"


# ---- text and ids


async def tokenize(call: Call, body: schema.TokenizeBody) -> HttpReply:
    """Ids of a text, with their texts if asked for."""
    engine = call.service.engine
    ids: list[int] = []
    parts = [body.content] if isinstance(body.content, str) else body.content or []
    add_special = bool(body.add_special)
    for i, part in enumerate(parts):
        if isinstance(part, int):
            ids.append(part)
        else:
            ids += await call.service.ids(
                part,
                add_special=add_special and i == 0,
                parse_special=body.parse_special is not False,
                hold=call.hold,
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


# ---- the table


def _post(
    path: str, handler: Handler, summary: str, body: Any, reply: Any = None, **more: Any
) -> Operation:
    return Operation(
        method="POST", path=path, handler=handler, tag=_TAG, summary=summary,
        error_body=error_body, body=body, reply=reply, **more,
    )  # fmt: skip


OPERATIONS: Final[list[Operation]] = [
    _post("/tokenize", tokenize, "Ids of a text.", schema.TokenizeBody, schema.Tokenized),
    _post("/detokenize", detokenize, "Text of ids.", schema.DetokenizeBody, schema.Content),
]
