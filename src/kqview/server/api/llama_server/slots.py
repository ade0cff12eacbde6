"""Saved slots: their blobs, files and sessions, which are saved slots that stay on the server.

``POST /slots/{id}?action=`` and ``POST /sessions/{id}?action=`` are one operation each; tables say
what each action does. What a body names is checked before anything is done.
"""

import re
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Annotated, Any, Final, TypeVar

from msgspec import Struct

from kqview.errors import BusyError, QueueFull, RequestError, StateError, UnsupportedModel
from kqview.server.api.llama_server import properties
from kqview.server.api.llama_server.blobs import (
    BINARY,
    RestoreBody,
    blob_in,
    blob_reply,
    n_tokens_in,
    saved_reply,
)
from kqview.server.errors import NotSupported
from kqview.server.models.service import Call
from kqview.server.web.budget import Body
from kqview.server.web.described import about
from kqview.server.web.endpoint import LongReply, OneOf, Upload
from kqview.slot import Slot
from kqview.state.store import SavedSlot

_T = TypeVar("_T")
_Action = Callable[[Call, Upload, int], Awaitable[Any]]
_OFFLOAD: Final = 2**62  # files and sessions: in another thread, whatever their size
_WHOLE_NUMBER: Final = re.compile(r"-?\d{1,18}")

# ---- bodies

SlotId = Annotated[int, about("Index of the slot.", 0)]
SessionId = Annotated[int, about("Number of the session.", 7)]
NTokens = Annotated[int, about("Tokens that it holds.", 12)]
NBytes = Annotated[int, about("Bytes of the saved slot.", 49152)]
FileName = Annotated[str, about("Name of the file.", "anna.bin")]
Milliseconds = Annotated[float, about("Milliseconds that it took.", 0.9)]
AlwaysTrue = Annotated[bool, about("Always true; a failure is an error.")]


class ShiftBody(Struct, kw_only=True):
    """Which tokens to remove from a slot."""

    n_keep: Annotated[int, about("Tokens before them, which stay.")] = 0
    n_discard: Annotated[int, about("How many to remove.")] = 0


class FileBody(Struct, kw_only=True):
    """The file that a session comes from or goes to."""

    file: Annotated[
        str | None, about("Name of the file; the session itself if not given.", "anna.bin")
    ] = None


class FilenameBody(Struct, kw_only=True):
    """The file to save a slot to, or to restore it from."""

    filename: FileName


class SavedState(Struct, kw_only=True):
    """A slot with its saved state."""

    id_slot: SlotId
    n_tokens: NTokens
    n_bytes: NBytes
    t_ms: Milliseconds
    state: Annotated[str, about("The SES1 blob in base64.", "U0VTMQ==")]


class RestoredState(Struct, kw_only=True):
    """A slot that was restored."""

    id_slot: SlotId
    n_bytes_read: NBytes
    success: AlwaysTrue = True
    t_ms: Milliseconds


class SlotTokens(Struct, kw_only=True):
    """Ids in a slot."""

    id_slot: SlotId
    n_tokens: NTokens
    tokens: Annotated[list[int], about("Their ids.", [1, 259, 354])]
    n_prompt_tokens_processed: Annotated[
        int, about("Tokens of the last prompt that were evaluated.", 3)
    ]


class ShiftedSlot(Struct, kw_only=True):
    """A slot from which tokens were removed."""

    success: AlwaysTrue = True
    new_n_tokens: Annotated[int, about("Tokens that the slot holds now.", 8)]


class SlotMessage(Struct, kw_only=True):
    """A message in a slot, by positions of tokens."""

    index: Annotated[int, about("Of the message, from 0.", 0)]
    start: Annotated[int, about("Its first token.", 0)]
    end: Annotated[int, about("Its last token.", 11)]


class SlotInfo(Struct, kw_only=True):
    """Messages in a slot."""

    n_tokens: NTokens
    boundary_eot: Annotated[int, about("Id that ends a message; -1 if the model has none.", 2)]
    n_messages: Annotated[int, about("How many there are.", 1)]
    messages: Annotated[list[SlotMessage], about("The messages, the oldest first.")]


class SlotSaved(Struct, kw_only=True):
    """A slot that was saved to a file."""

    id_slot: SlotId
    filename: FileName
    n_saved: NTokens
    n_written: NBytes
    timings: Annotated[dict[str, float], about("Milliseconds that it took.", {"save_ms": 0.9})]


class SlotRestored(Struct, kw_only=True):
    """A slot that was restored from a file."""

    id_slot: SlotId
    filename: FileName
    n_restored: NTokens
    n_read: NBytes
    timings: Annotated[dict[str, float], about("Milliseconds that it took.", {"restore_ms": 0.9})]


class SlotErased(Struct):
    """A slot that was emptied."""

    id_slot: SlotId
    n_erased: Annotated[int, about("Tokens that it held.", 12)]


class SessionSaved(Struct, kw_only=True):
    """A session that was saved."""

    id_session: SessionId
    id_slot: SlotId
    n_tokens: NTokens
    n_bytes: NBytes
    t_ms: Milliseconds


class SessionRestored(Struct, kw_only=True):
    """A slot that was restored from a session."""

    id_session: SessionId
    id_slot: SlotId
    n_bytes_read: NBytes
    success: AlwaysTrue = True
    t_ms: Milliseconds


class SessionRemoved(Struct, kw_only=True, omit_defaults=True):
    """A session that was removed."""

    id_session: SessionId
    removed: AlwaysTrue
    file: Annotated[
        str | None,
        about("Name of the file that it went to; absent if it went nowhere.", "anna.bin"),
    ] = None
    n_bytes: Annotated[int | None, about("Bytes of the file; absent without one.", 49152)] = None


class SessionFacts(Struct, kw_only=True):
    """A session in memory."""

    id: SessionId
    size: NBytes
    created_at: Annotated[int, about("When it was first saved, in seconds since 1970.", 1767225600)]
    updated_at: Annotated[int, about("When it was last saved, the same.", 1767225600)]


SLOT_BODIES: Final = OneOf((FilenameBody, RestoreBody, ShiftBody))
SLOT_REPLIES: Final = OneOf(
    (SavedState, RestoredState, SlotTokens, ShiftedSlot, SlotSaved, SlotRestored, SlotErased)
)
SESSION_REPLIES: Final = OneOf((SessionSaved, SessionRestored, SessionRemoved))


# ---- what all of them do


def _number(text: str, parameter: str, refusal: str, *, least: int | None = None) -> int:
    """The whole number in *text*; whether there is such a slot or session shows later."""
    if not _WHOLE_NUMBER.fullmatch(text) or (least is not None and int(text) < least):
        raise RequestError(refusal, parameter=parameter)
    return int(text)


def _slot_in_path(call: Call) -> int:
    text = call.path["id_slot"]
    return _number(text, "id_slot", f"Invalid slot ID {text[:40]!r}; use the index of a slot")


def _slot_in_query(call: Call) -> int:
    refusal = "Missing or invalid 'slot' parameter; add &slot= with the index of a slot"
    return _number(call.query.get("slot", ""), "slot", refusal)


async def _use(call: Call, slot_id: int, work: Callable[[Slot], _T], *, fills: bool = False) -> _T:
    """`Slots.use`, with the statuses of this API.

    Raises:
        RequestError: A blob was refused, which is the request's fault whatever is wrong with it.
        NotSupported: The model cannot do it.
    """
    try:
        return await call.model.slots.use(call.caller, slot_id, work, fills=fills)
    except StateError as error:
        raise RequestError(str(error).replace("Slot.save", "save-state")) from None
    except UnsupportedModel as error:
        raise NotSupported(str(error)) from None


def _check_enabled(call: Call) -> None:
    if not call.service.settings.slot_endpoints:
        raise NotSupported(
            "This server does not support slots endpoint. Start it without `--no-slots`"
        )


def _check_may_restore(call: Call, slot_id: int) -> None:
    """Raise Unauthorized for anybody without a key on a server that has keys; UnknownSlot.

    A blob can put anything into the cache, so it is not taken from a stranger.
    """
    call.caller.check_key(call.service.settings, "restore")
    call.model.slots.get(slot_id)


async def _filename(call: Call, upload: Upload) -> str:
    wanted = await upload.json(FilenameBody)
    call.service.files.check(wanted.filename)
    return wanted.filename


async def _file(call: Call, upload: Upload) -> str | None:
    wanted = await upload.json(FileBody)
    if wanted.file is not None:
        call.service.files.check(wanted.file)
    return wanted.file


async def _restore_file(call: Call, slot_id: int, name: str) -> tuple[int, int]:
    """Fill the slot with what a file holds; returns its bytes and tokens."""

    def work(slot: Slot) -> tuple[int, int]:
        blob, marks = call.service.files.read(call.caller, name, slot.state_facts())
        return slot.restore_marked(blob, marks), n_tokens_in(blob)

    return await _use(call, slot_id, work, fills=True)


def _tokens_of(slot: Slot) -> list[int]:
    ids = slot.tokens
    if slot.is_busy:
        raise BusyError(f"slot {slot.id} is in use")
    return ids


def _ms_since(started_s: float) -> float:
    return round((time.monotonic() - started_s) * 1000, 3)


# ---- slots


async def _save_state(call: Call, upload: Upload, slot_id: int) -> LongReply:
    started_s = time.monotonic()
    blob = await _use(call, slot_id, call.model.slots.save)
    call.hold.take(len(blob))
    if BINARY in call.headers.get("accept", ""):
        return blob_reply(blob)
    return saved_reply(slot_id, blob, _ms_since(started_s))


async def _restore_state(call: Call, upload: Upload, slot_id: int) -> RestoredState:
    service, slots = call.service, call.model.slots
    _check_may_restore(call, slot_id)
    body = await upload.read(service.settings.max_state_bytes)
    started_s = time.monotonic()

    async def restored(blob: Body) -> int:
        return await _use(call, slot_id, lambda slot: slots.restore(slot, blob.read()), fills=True)

    if upload.media_type == BINARY:
        n_bytes = await restored(body)
    else:
        with body, await service.converted(len(body), call.hold, blob_in, body) as blob:
            body.close()
            call.hold.take(len(blob) - len(body))
            n_bytes = await restored(blob)
    return RestoredState(id_slot=slot_id, n_bytes_read=n_bytes, t_ms=_ms_since(started_s))


async def _show_tokens(call: Call, upload: Upload, slot_id: int) -> SlotTokens:
    ids = await _use(call, slot_id, _tokens_of)
    n_processed = call.model.work.n_processed.get(slot_id, 0)
    return SlotTokens(
        id_slot=slot_id, n_tokens=len(ids), tokens=ids, n_prompt_tokens_processed=n_processed
    )


async def _context_shift(call: Call, upload: Upload, slot_id: int) -> ShiftedSlot:
    """Remove tokens from the slot; those after them move up."""
    call.model.slots.get(slot_id)
    wanted = await upload.json(ShiftBody)
    n_keep, n_discard = wanted.n_keep, wanted.n_discard

    def work(slot: Slot) -> int:
        n_tokens = len(_tokens_of(slot))
        if n_keep < 0 or n_discard <= 0 or n_keep + n_discard > n_tokens:
            raise RequestError(
                f"Invalid context shift parameters: n_keep={n_keep} n_discard={n_discard} "
                f"n_tokens={n_tokens}; n_keep must be 0 or more, n_discard above 0, and their "
                "sum at most n_tokens"
            )
        return slot.shift(n_keep, n_discard)

    return ShiftedSlot(new_n_tokens=await _use(call, slot_id, work))


async def _save(call: Call, upload: Upload, slot_id: int) -> SlotSaved:
    files = call.service.files
    name = await _filename(call, upload)
    started_s = time.monotonic()
    saved = await _use(call, slot_id, SavedSlot.of)
    n_bytes = await call.service.offload(_OFFLOAD, files.write, call.caller, name, saved)
    return SlotSaved(
        id_slot=slot_id,
        filename=name,
        n_saved=n_tokens_in(saved.blob),
        n_written=n_bytes,
        timings={"save_ms": _ms_since(started_s)},
    )


async def _restore(call: Call, upload: Upload, slot_id: int) -> SlotRestored:
    """Restore the slot from a file; a file that is refused changes nothing."""
    _check_may_restore(call, slot_id)
    name = await _filename(call, upload)
    started_s = time.monotonic()
    n_bytes, n_tokens = await _restore_file(call, slot_id, name)
    return SlotRestored(
        id_slot=slot_id,
        filename=name,
        n_restored=n_tokens,
        n_read=n_bytes,
        timings={"restore_ms": _ms_since(started_s)},
    )


async def _erase(call: Call, upload: Upload, slot_id: int) -> SlotErased:
    def work(slot: Slot) -> int:
        n_tokens = slot.n_tokens
        slot.clear()
        return n_tokens

    return SlotErased(slot_id, await _use(call, slot_id, work))


_ACTIONS: Final[dict[str, _Action]] = {
    "save-state": _save_state,
    "restore-state": _restore_state,
    "tokens": _show_tokens,
    "context-shift": _context_shift,
}
# Those that need ``slot_save_path``, and no more: also without ``slot_endpoints``.
_FILE_ACTIONS: Final[dict[str, _Action]] = {"save": _save, "restore": _restore, "erase": _erase}


async def slot_action(call: Call, upload: Upload) -> Any:
    """Save, restore, list or shorten what a slot holds, by ?action=."""
    slot_id = _slot_in_path(call)
    name = call.query.get("action", "")
    if name not in _FILE_ACTIONS:
        _check_enabled(call)
    elif call.service.settings.slot_save_path is None:
        raise NotSupported(
            "This server does not support slots action. Start it with `--slot-save-path`"
        )
    return await _action(_FILE_ACTIONS | _ACTIONS, name)(call, upload, slot_id)


def _action(actions: dict[str, _Action], name: str) -> _Action:
    if name not in actions:
        known = ", ".join(actions)
        raise RequestError(f"Invalid action {name[:40]!r}. Supported: {known}", parameter="action")
    return actions[name]


async def list_slots(call: Call) -> list[properties.SlotState]:
    """What each slot does; what is in it only to those whose it is."""
    _check_enabled(call)
    engine = call.model.engine
    slots = engine.stats().slots
    if call.query.get("fail_on_no_slot") and all(slot.is_busy for slot in slots):
        raise QueueFull("no slot available; try again later")
    running = {
        generation.slot: (run, generation)
        for run in call.model.work.runs.values()
        for generation in run.generations
        if call.caller.may_see(run.owner)
    }
    return [properties.slot_state(slot, engine, running.get(slot.id)) for slot in slots]


async def info(call: Call) -> SlotInfo:
    """Messages in a slot."""
    _check_enabled(call)
    slot_id = _slot_in_path(call)
    eot = call.model.engine.model.eot_token_id
    n_tokens, messages = await _use(
        call, slot_id, lambda slot: (len(_tokens_of(slot)), slot.messages())
    )
    return SlotInfo(
        n_tokens=n_tokens,
        boundary_eot=-1 if eot is None else eot,
        n_messages=len(messages),
        messages=[SlotMessage(index=i, start=a, end=b) for i, (a, b) in enumerate(messages)],
    )


# ---- sessions


async def session_action(call: Call, upload: Upload) -> Any:
    """Save a slot as a session, restore it, or remove it, by ?action=."""
    text = call.path["id_session"]
    refusal = f"Invalid session ID {text[:40]!r}; use a whole number from 0"
    session_id = _number(text, "id_session", refusal, least=0)
    _check_enabled(call)
    action = _action(_SESSION_ACTIONS, call.query.get("action", ""))
    return await action(call, upload, session_id)


async def _save_session(call: Call, upload: Upload, session_id: int) -> SessionSaved:
    slot_id = _slot_in_query(call)
    started_s = time.monotonic()
    service = call.service
    saved = await _use(call, slot_id, SavedSlot.of)
    info = await service.offload(_OFFLOAD, service.sessions.save, call.caller, session_id, saved)
    return SessionSaved(
        id_session=session_id,
        id_slot=slot_id,
        n_tokens=n_tokens_in(saved.blob),
        n_bytes=info.n_bytes,
        t_ms=_ms_since(started_s),
    )


async def _restore_session(call: Call, upload: Upload, session_id: int) -> SessionRestored:
    slot_id = _slot_in_query(call)
    _check_may_restore(call, slot_id)
    name = await _file(call, upload)
    started_s = time.monotonic()
    if name is None:
        work = partial(call.service.sessions.restore, call.caller, session_id)
        n_bytes = await _use(call, slot_id, work, fills=True)
    else:
        n_bytes, _ = await _restore_file(call, slot_id, name)
    return SessionRestored(
        id_session=session_id,
        id_slot=slot_id,
        n_bytes_read=n_bytes,
        t_ms=_ms_since(started_s),
    )


async def _remove_session(call: Call, upload: Upload, session_id: int) -> SessionRemoved:
    name = await _file(call, upload)
    sessions, files, offload = call.service.sessions, call.service.files, call.service.offload
    if name is None:
        await offload(_OFFLOAD, sessions.remove, call.caller, session_id)
        return SessionRemoved(id_session=session_id, removed=True)
    n_bytes = await offload(_OFFLOAD, sessions.move_to_file, call.caller, session_id, files, name)
    return SessionRemoved(id_session=session_id, removed=True, file=name, n_bytes=n_bytes)


_SESSION_ACTIONS: Final[dict[str, _Action]] = {
    "save": _save_session,
    "restore": _restore_session,
    "remove": _remove_session,
}


async def list_sessions(call: Call) -> list[SessionFacts]:
    """Sessions in memory."""
    _check_enabled(call)
    found = await call.service.offload(_OFFLOAD, call.service.sessions.list, call.caller)
    return [
        SessionFacts(
            id=number,
            size=info.n_bytes,
            created_at=int(info.created_s),
            updated_at=int(info.updated_s),
        )
        for number, info in found
    ]
