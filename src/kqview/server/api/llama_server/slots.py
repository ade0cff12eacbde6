"""Routes of slots: save, restore, look into, shorten and empty what they hold.

``POST /slots/{id}?action=`` is one operation; `ACTIONS` says what each action does.
"""

import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, Final, TypeVar

from kqview.errors import QueueFull, RequestError, StateError, UnsupportedModel
from kqview.server.api.llama_server import properties, states
from kqview.server.api.wire.llama_fields import Failure, error_body
from kqview.server.errors import NotSupported, Unauthorized
from kqview.server.models.service import Call
from kqview.server.models.sessions import SavedSlot
from kqview.server.web.budget import Body
from kqview.server.web.endpoint import LongReply, OneOf, Operation, Upload
from kqview.slot import Slot

Action = Callable[[Call, Upload, int], Awaitable[Any]]

_T = TypeVar("_T")
_TAG: Final = "llama-server"
_OFFLOAD: Final = 2**62  # a file is written in another thread, whatever its size
_BINARY: Final = "application/octet-stream"


async def save_state(call: Call, upload: Upload, slot_id: int) -> LongReply:
    """The slot as a SES1 blob, raw or in JSON."""
    started_s = time.monotonic()
    slots = call.model.slots
    blob = await use(call, slot_id, slots.save)
    call.hold.take(len(blob))
    if _BINARY in call.headers.get("accept", ""):
        return states.blob_reply(blob)
    return states.saved_reply(slot_id, blob, elapsed_ms(started_s))


async def restore_state(call: Call, upload: Upload, slot_id: int) -> states.Restored:
    """Put a SES1 blob, raw or in JSON, into the slot."""
    check_may_restore(call)
    service = call.service
    call.model.slots.get(slot_id)
    body = await upload.read(service.settings.max_state_bytes)
    started_s = time.monotonic()
    if upload.media_type == _BINARY:
        n_bytes = await _restore(call, slot_id, body)
    else:
        with body, await service.converted(len(body), call.hold, states.blob_in, body) as blob:
            body.close()
            call.hold.take(len(blob) - len(body))
            n_bytes = await _restore(call, slot_id, blob)
    return states.Restored(
        id_slot=slot_id, n_bytes_read=n_bytes, success=True, t_ms=elapsed_ms(started_s)
    )


async def _restore(call: Call, slot_id: int, body: Body) -> int:
    slots = call.model.slots

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
        n_prompt_tokens_processed=call.model.slots.n_processed(slot_id),
    )


async def context_shift(call: Call, upload: Upload, slot_id: int) -> states.Shifted:
    """Remove tokens from the slot; those after them move up."""
    call.model.slots.get(slot_id)
    body = await upload.read()
    wanted: states.ShiftBody = states.json_of(body, states.ShiftBody)
    work = partial(states.shifted, n_keep=wanted.n_keep, n_discard=wanted.n_discard)
    return states.Shifted(success=True, new_n_tokens=await use(call, slot_id, work))


async def save(call: Call, upload: Upload, slot_id: int) -> states.SlotSaved:
    """Save the slot to a file."""
    files = call.service.files
    name = await _filename(call, upload)
    started_s = time.monotonic()
    saved = await use(call, slot_id, SavedSlot.of)
    n_bytes = await call.service.offload(_OFFLOAD, files.write, call.caller, name, saved)
    return states.SlotSaved(
        id_slot=slot_id,
        filename=name,
        n_saved=states.n_tokens_in(saved.blob),
        n_written=n_bytes,
        timings={"save_ms": elapsed_ms(started_s)},
    )


async def restore(call: Call, upload: Upload, slot_id: int) -> states.SlotRestored:
    """Restore the slot from a file; a file that is refused changes nothing."""
    check_may_restore(call)
    service = call.service
    call.model.slots.get(slot_id)
    name = await _filename(call, upload)
    started_s = time.monotonic()

    def work(slot: Slot) -> tuple[int, int]:
        blob, marks = service.files.read(call.caller, name, slot.state_facts())
        return slot.restore_marked(blob, marks), states.n_tokens_in(blob)

    n_bytes, n_tokens = await use(call, slot_id, work, fills=True)
    return states.SlotRestored(
        id_slot=slot_id,
        filename=name,
        n_restored=n_tokens,
        n_read=n_bytes,
        timings={"restore_ms": elapsed_ms(started_s)},
    )


async def erase(call: Call, upload: Upload, slot_id: int) -> states.SlotErased:
    """Forget what the slot holds."""
    return states.SlotErased(slot_id, await use(call, slot_id, states.erased))


async def _filename(call: Call, upload: Upload) -> str:
    """The file that the body names; checked before anything is done."""
    body = await upload.read()
    wanted: states.FilenameBody = states.json_of(body, states.FilenameBody)
    call.service.files.check(wanted.filename)
    return wanted.filename


ACTIONS: Final[dict[str, Action]] = {
    "save-state": save_state,
    "restore-state": restore_state,
    "tokens": show_tokens,
    "context-shift": context_shift,
}
FILE_ACTIONS: Final[dict[str, Action]] = {"save": save, "restore": restore, "erase": erase}
"""Those that need ``slot_save_path``, and no more: also without ``slot_endpoints``."""


async def slot_action(call: Call, upload: Upload) -> Any:
    """``POST /slots/{id_slot}?action=``."""
    slot_id = states.slot_number(call.path["id_slot"])
    name = call.query.get("action", "")
    if name not in FILE_ACTIONS:
        check_enabled(call)
    elif call.service.settings.slot_save_path is None:
        raise NotSupported(
            "This server does not support slots action. Start it with `--slot-save-path`"
        )
    action = (ACTIONS | FILE_ACTIONS).get(name)
    if action is None:
        known = ", ".join([*FILE_ACTIONS, *ACTIONS])
        raise RequestError(f"Invalid action {name[:40]!r}. Supported: {known}", parameter="action")
    return await action(call, upload, slot_id)


async def list_slots(call: Call) -> list[properties.SlotState]:
    """``GET /slots``: every slot; what is in it only to those whose it is."""
    check_enabled(call)
    engine = call.model.engine
    slots = engine.stats().slots
    if call.query.get("fail_on_no_slot") and all(slot.is_busy for slot in slots):
        raise QueueFull("no slot available; try again later")
    return [
        properties.slot_state(slot, engine.n_ctx, _generation_on(call, slot.id)) for slot in slots
    ]


def _generation_on(call: Call, slot_id: int) -> properties.OnSlot | None:
    """What runs on a slot, if it is the caller's."""
    for run in call.model.work.runs.values():
        for generation in run.generations:
            if generation.slot == slot_id and call.caller.may_see(run.owner):
                return properties.OnSlot(run.request, generation.usage, generation.text)
    return None


async def info(call: Call) -> states.Info:
    """``GET /v1/slots/{id_slot}/info``."""
    check_enabled(call)
    slot_id = states.slot_number(call.path["id_slot"])
    eot = call.model.engine.model.eot_token_id
    return states.info_of(*await use(call, slot_id, states.messages_of), eot)


# ---- what all of them do


async def use(call: Call, slot_id: int, work: Callable[[Slot], _T], *, fills: bool = False) -> _T:
    """`Slots.use`, with the statuses of this API: 400 for a blob, 501 for a model.

    Raises:
        RequestError: A blob was refused.
        NotSupported: The model cannot do it.
    """
    try:
        return await call.model.slots.use(call.caller, slot_id, work, fills=fills)
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

    A blob can put anything into the cache, so it is not taken from a stranger.
    """
    settings = call.service.settings
    if (settings.api_keys or settings.admin_keys) and not call.caller.owner:
        raise Unauthorized("an API key is needed to restore; send Authorization: Bearer KEY")


def elapsed_ms(started_s: float) -> float:
    """Milliseconds since *started_s* of ``time.monotonic``."""
    return round((time.monotonic() - started_s) * 1000, 3)


OPERATIONS: Final[list[Operation]] = [
    Operation(
        method="POST", path="/slots/{id_slot}", handler=slot_action, model="named", tag=_TAG,
        error_body=error_body, failure=Failure, body=Upload,
        upload=OneOf((states.FilenameBody, states.RestoreBody, states.ShiftBody)),
        reply=OneOf((
            states.Saved, states.Restored, states.Tokens, states.Shifted, states.SlotSaved,
            states.SlotRestored, states.SlotErased,
        )),
        parameters={
            "id_slot": "Index of the slot, such as 0.",
            "action": 'What to do, such as "tokens", which lists its ids. "save-state" and '
            '"restore-state" send and take its state, "context-shift" removes tokens; "save", '
            '"restore" and "erase" work with files of the server.',
        },
        summary="Save, restore, list or shorten what a slot holds, by ?action=.",
    ),
    Operation(
        method="GET", path="/slots", handler=list_slots, model="named", tag=_TAG,
        error_body=error_body, failure=Failure,
        reply=list[properties.SlotState], parameters={
            "fail_on_no_slot": 'Anything, such as "1", to fail with 503 if every slot is busy.',
        },
        summary="What each slot does.",
    ),
    Operation(
        method="GET", path="/v1/slots/{id_slot}/info", handler=info, model="named", tag=_TAG,
        error_body=error_body, failure=Failure, reply=states.Info, summary="Messages in a slot.",
        parameters={"id_slot": "Index of the slot, such as 0."},
    ),
]  # fmt: skip
