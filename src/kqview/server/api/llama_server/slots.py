"""Routes of one slot: save, restore, look into and shorten what it holds (seed 003).

``POST /slots/{id}?action=`` is one operation; `ACTIONS` says what each action does.
"""

import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, Final, TypeVar

from kqview.errors import RequestError, StateError, UnsupportedModel
from kqview.server.api.llama_fields import error_body
from kqview.server.api.llama_server import states
from kqview.server.budget import Body
from kqview.server.endpoint import Call, LongReply, Operation, Upload
from kqview.server.errors import NotSupported, Unauthorized
from kqview.slot import Slot

Action = Callable[[Call, Upload, int], Awaitable[Any]]

_T = TypeVar("_T")
_TAG: Final = "llama-server"
_BINARY: Final = "application/octet-stream"


async def save_state(call: Call, upload: Upload, slot_id: int) -> LongReply:
    """The slot as a SES1 blob, raw or in JSON."""
    started_s = time.monotonic()
    slots = call.service.slots
    blob = await use(call, slot_id, slots.save)
    call.hold.take(len(blob))
    if _BINARY in call.headers.get("accept", ""):
        return states.blob_reply(blob)
    return states.saved_reply(slot_id, blob, elapsed_ms(started_s))


async def restore_state(call: Call, upload: Upload, slot_id: int) -> states.Restored:
    """Put a SES1 blob, raw or in JSON, into the slot."""
    check_may_restore(call)
    service = call.service
    service.slots.get(slot_id)
    body = await upload.read(service.settings.max_state_bytes)
    started_s = time.monotonic()
    if upload.media_type == _BINARY:
        n_bytes = await _restore(call, slot_id, body)
    else:
        with body, await service.converted(len(body), call.hold, states.blob_in, body) as blob:
            body.close()
            call.hold.put(len(body) - len(blob))
            n_bytes = await _restore(call, slot_id, blob)
    return states.Restored(
        id_slot=slot_id, n_bytes_read=n_bytes, success=True, t_ms=elapsed_ms(started_s)
    )


async def _restore(call: Call, slot_id: int, body: Body) -> int:
    slots = call.service.slots

    def work(slot: Slot) -> int:
        return slots.restore(slot, body.read())

    return await use(call, slot_id, work, fills=True)


async def show_tokens(call: Call, upload: Upload, slot_id: int) -> states.Tokens:
    """Ids in the slot."""
    ids = await use(call, slot_id, states.tokens_of)
    return states.Tokens(
        id_slot=slot_id,
        n_tokens=len(ids),
        tokens=ids,
        n_prompt_tokens_processed=call.service.slots.n_processed(slot_id),
    )


async def context_shift(call: Call, upload: Upload, slot_id: int) -> states.Shifted:
    """Remove tokens from the slot; those after them move up."""
    call.service.slots.get(slot_id)
    body = await upload.read(call.service.settings.max_body_bytes)
    wanted: states.ShiftBody = states.json_of(body, states.ShiftBody)
    work = partial(states.shifted, n_keep=wanted.n_keep, n_discard=wanted.n_discard)
    return states.Shifted(success=True, new_n_tokens=await use(call, slot_id, work))


ACTIONS: Final[dict[str, Action]] = {
    "save-state": save_state,
    "restore-state": restore_state,
    "tokens": show_tokens,
    "context-shift": context_shift,
}
FILE_ACTIONS: Final[dict[str, Action]] = {}
"""Those that need ``slot_save_path``."""


async def slot_action(call: Call, upload: Upload) -> Any:
    """``POST /slots/{id_slot}?action=``."""
    slot_id = states.slot_number(call.path["id_slot"])
    name = call.query.get("action", "")
    if name in FILE_ACTIONS and call.service.settings.slot_save_path is None:
        raise NotSupported(
            "This server does not support slots action. Start it with `--slot-save-path`"
        )
    check_enabled(call)
    action = (ACTIONS | FILE_ACTIONS).get(name)
    if action is None:
        known = ", ".join([*FILE_ACTIONS, *ACTIONS])
        raise RequestError(f"Invalid action {name[:40]!r}. Supported: {known}", parameter="action")
    return await action(call, upload, slot_id)


async def info(call: Call) -> states.Info:
    """``GET /v1/slots/{id_slot}/info``."""
    check_enabled(call)
    slot_id = states.slot_number(call.path["id_slot"])
    eot = call.service.engine.model.eot_token_id
    return states.info_of(*await use(call, slot_id, states.messages_of), eot)


# ---- what all of them do


async def use(call: Call, slot_id: int, work: Callable[[Slot], _T], *, fills: bool = False) -> _T:
    """`Slots.use`, with the statuses of this API: 400 for a blob, 501 for a model.

    Raises:
        RequestError: A blob was refused.
        NotSupported: The model cannot do it.
    """
    try:
        return await call.service.slots.use(call.caller, slot_id, work, fills=fills)
    except StateError as error:
        raise states.refused(error) from None
    except UnsupportedModel as error:
        raise NotSupported(str(error)) from None


def check_enabled(call: Call) -> None:
    """Raise NotSupported if the server was started without these endpoints."""
    if not call.service.settings.slot_endpoints:
        raise NotSupported(
            "This server does not support slots endpoint. Start it without `--no-slots`"
        )


def check_may_restore(call: Call) -> None:
    """Raise Unauthorized for anybody without a key on a server that has keys.

    A blob is attention of any content, so it is not taken from a stranger.
    """
    settings = call.service.settings
    if (settings.api_keys or settings.admin_keys) and not call.caller.owner:
        raise Unauthorized("an API key is needed to restore; send Authorization: Bearer KEY")


def elapsed_ms(started_s: float) -> float:
    """Milliseconds since *started_s* of ``time.monotonic``."""
    return round((time.monotonic() - started_s) * 1000, 3)


OPERATIONS: Final[list[Operation]] = [
    Operation(
        method="POST", path="/slots/{id_slot}", handler=slot_action, tag=_TAG,
        error_body=error_body, body=Upload, query=("action",),
        summary="Save, restore, list or shorten what a slot holds, by ?action=.",
    ),
    Operation(
        method="GET", path="/v1/slots/{id_slot}/info", handler=info, tag=_TAG,
        error_body=error_body, reply=states.Info, summary="Messages in a slot.",
    ),
]  # fmt: skip
