"""Routes of sessions: saved slots that stay on the server."""

import time
from functools import partial
from typing import Any, Final

from kqview.errors import RequestError
from kqview.server.api.llama_server import states
from kqview.server.api.llama_server.slots import (
    check_enabled,
    check_may_restore,
    elapsed_ms,
    use,
)
from kqview.server.api.wire.llama_fields import Failure, error_body
from kqview.server.models.service import Call
from kqview.server.models.sessions import SavedSlot
from kqview.server.web.endpoint import OneOf, Operation, Upload
from kqview.slot import Slot

_TAG: Final = "llama-server"
_OFFLOAD: Final = 2**62  # a session is removed and listed in a thread: others may write under it


async def session_action(call: Call, upload: Upload) -> Any:
    """``POST /sessions/{id_session}?action=``."""
    session_id = states.session_number(call.path["id_session"])
    check_enabled(call)
    name = call.query.get("action", "")
    action = {"save": _save, "restore": _restore, "remove": _remove}.get(name)
    if action is None:
        raise RequestError(
            f"Invalid action {name[:40]!r}. Supported: save, restore, remove", parameter="action"
        )
    return await action(call, upload, session_id)


async def _save(call: Call, upload: Upload, session_id: int) -> states.SessionSaved:
    slot_id = states.slot_parameter(call.query.get("slot"))
    started_s = time.monotonic()
    service = call.service
    saved = await use(call, slot_id, SavedSlot.of)
    info = await service.offload(_OFFLOAD, service.sessions.save, call.caller, session_id, saved)
    return states.SessionSaved(
        id_session=session_id,
        id_slot=slot_id,
        n_tokens=states.n_tokens_in(saved.blob),
        n_bytes=info.n_bytes,
        t_ms=elapsed_ms(started_s),
    )


async def _restore(call: Call, upload: Upload, session_id: int) -> states.SessionRestored:
    slot_id = states.slot_parameter(call.query.get("slot"))
    check_may_restore(call)
    service = call.service
    call.model.slots.get(slot_id)
    name = await _file_in(call, upload)
    started_s = time.monotonic()

    def from_file(slot: Slot) -> int:
        assert name is not None
        blob, marks = service.files.read(call.caller, name, slot.state_facts())
        return slot.restore_marked(blob, marks)

    from_memory = partial(service.sessions.restore, call.caller, session_id)
    work = from_memory if name is None else from_file
    n_bytes = await use(call, slot_id, work, fills=True)
    return states.SessionRestored(
        id_session=session_id,
        id_slot=slot_id,
        n_bytes_read=n_bytes,
        success=True,
        t_ms=elapsed_ms(started_s),
    )


async def _remove(call: Call, upload: Upload, session_id: int) -> states.SessionRemoved:
    name = await _file_in(call, upload)
    sessions, files = call.service.sessions, call.service.files
    if name is None:
        await call.service.offload(_OFFLOAD, sessions.remove, call.caller, session_id)
        return states.SessionRemoved(id_session=session_id, removed=True)
    n_bytes = await call.service.offload(
        _OFFLOAD, sessions.move_to_file, call.caller, session_id, files, name
    )
    return states.SessionRemoved(id_session=session_id, removed=True, file=name, n_bytes=n_bytes)


async def _file_in(call: Call, upload: Upload) -> str | None:
    """The file that the body names; checked before anything is done."""
    body = await upload.read()
    wanted: states.FileBody = states.json_of(body, states.FileBody)
    if wanted.file is not None:
        call.service.files.check(wanted.file)
    return wanted.file


async def list_sessions(call: Call) -> list[states.Session]:
    """``GET /sessions``."""
    check_enabled(call)
    found = await call.service.offload(_OFFLOAD, call.service.sessions.list, call.caller)
    return [
        states.Session(
            id=number,
            size=info.n_bytes,
            created_at=int(info.created_s),
            updated_at=int(info.updated_s),
        )
        for number, info in found
    ]


OPERATIONS: Final[list[Operation]] = [
    Operation(
        method="POST", path="/sessions/{id_session}", handler=session_action, tag=_TAG,
        model="named",
        error_body=error_body, failure=Failure, body=Upload,
        upload=OneOf((states.FileBody,)),
        reply=OneOf((states.SessionSaved, states.SessionRestored, states.SessionRemoved)),
        parameters={
            "id_session": "Number of the session, such as 7.",
            "action": 'What to do: save, restore or remove, such as "save".',
            "slot": "Index of the slot to save or restore, such as 0.",
        },
        summary="Save a slot as a session, restore it, or remove it, by ?action=.",
    ),
    Operation(
        method="GET", path="/sessions", handler=list_sessions, tag=_TAG,
        error_body=error_body, failure=Failure,
        reply=list[states.Session], summary="Sessions in memory.",
    ),
]  # fmt: skip
