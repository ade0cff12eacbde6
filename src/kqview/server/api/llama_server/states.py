"""Bodies of saved slots: requests, replies, SES1 in base64. Pure.

A blob may have gigabytes. It is whole in memory once; its base64, at both ends, never is.
"""

import binascii
import re
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Final

import msgspec
import pybase64
from msgspec import Struct

from kqview.errors import BusyError, RequestError, StateError
from kqview.server.web.budget import Body
from kqview.server.web.described import about
from kqview.server.web.endpoint import LongReply, decoded
from kqview.slot import Slot

_PIECE: Final = 3 * 2**18  # bytes of a blob that are encoded in one call
_TEXT: Final = 2**20  # bytes of base64 that are decoded in one call
_MOST_OTHER: Final = 64 * 1024  # bytes of a JSON body apart from its "state"
_STATE: Final = re.compile(rb'"state"\s*:\s*"')
_WHOLE_NUMBER: Final = re.compile(r"-?\d{1,18}")


# ---- requests


class RestoreBody(Struct, kw_only=True):
    """A saved slot in base64."""

    state: Annotated[str, about("The SES1 blob in base64.", "U0VTMQ==")]


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

    filename: Annotated[str, about("Name of the file.", "anna.bin")]


def slot_number(text: str) -> int:
    """The index in a path; whether there is such a slot shows later.

    Raises:
        RequestError: It is not a number.
    """
    if not _WHOLE_NUMBER.fullmatch(text):
        raise RequestError(
            f"Invalid slot ID {text[:40]!r}; use the index of a slot", parameter="id_slot"
        )
    return int(text)


def slot_parameter(text: str | None) -> int:
    """The index in the query of a session's URL; raises as `slot_number`."""
    if text is None or not _WHOLE_NUMBER.fullmatch(text):
        raise RequestError(
            "Missing or invalid 'slot' parameter; add &slot= with the index of a slot",
            parameter="slot",
        )
    return int(text)


def session_number(text: str) -> int:
    """The number of a session.

    Raises:
        RequestError: It is not a whole number from 0.
    """
    if not _WHOLE_NUMBER.fullmatch(text) or int(text) < 0:
        raise RequestError(
            f"Invalid session ID {text[:40]!r}; use a whole number from 0", parameter="id_session"
        )
    return int(text)


def json_of(body: Body, kind: type[Any]) -> Any:
    """A short JSON body; an empty one is ``{}``.

    Raises:
        RequestError: It cannot be read; the message names the field.
    """
    return decoded(msgspec.json.Decoder(kind), body.read())


def blob_in(body: Body) -> Body:
    """The blob in the JSON ``{"state": "<base64>"}``, piece by piece.

    Raises:
        RequestError: It is not such an object, or not base64.
    """
    with body.mapped() as text:
        found = _STATE.search(text[:_MOST_OTHER])
        start = found.end() if found else len(text)
        end = _find(text, start)
        if end is None or start + len(text) - end > _MOST_OTHER:
            # Without the text between, what is wrong is small enough to be told.
            json = text[:_MOST_OTHER] if found is None else text[:start] + b'"}'
            decoded(msgspec.json.Decoder(RestoreBody), json)
            raise RequestError('"state" must be a base64-encoded string', parameter="state")
        decoded(msgspec.json.Decoder(RestoreBody), text[:start] + text[end:])
        return _decoded_text(text, start, end)


def _find(text: Any, start: int) -> int | None:
    """Where the next quotation mark is; in steps, because a search holds the GIL."""
    for at in range(start, len(text), _TEXT):
        end = text.find(b'"', at, at + _TEXT)
        if end >= 0:
            return end
    return None


def _decoded_text(text: Any, start: int, end: int) -> Body:
    blob, rest = Body(), b""
    try:
        for at in range(start, end, _TEXT):
            part = rest + text[at : min(at + _TEXT, end)]
            is_last = at + _TEXT >= end
            half = b"\\" if part.endswith(b"\\") and not is_last else b""
            part = part[: len(part) - len(half)].replace(b"\\/", b"/")  # JSON may escape it
            n_whole = len(part) if is_last else len(part) // 4 * 4
            if not is_last and b"=" in part[:n_whole]:
                raise ValueError("padding before the end")
            blob.add(pybase64.b64decode(part[:n_whole], validate=True))
            rest = part[n_whole:] + half
    except (binascii.Error, ValueError) as error:
        blob.close()
        raise RequestError(
            f'"state" must be a base64-encoded string: {error}', parameter="state"
        ) from None
    except BaseException:
        blob.close()
        raise
    return blob


def refused(error: StateError) -> RequestError:
    """A blob that is not restored is the request's fault, whatever is wrong with it."""
    return RequestError(str(error).replace("Slot.save", "save-state"))


# ---- what is read of a slot


def tokens_of(slot: Slot) -> list[int]:
    """Ids in *slot*; raises BusyError if a generation uses it."""
    ids = slot.tokens
    if slot.is_busy:
        raise BusyError(f"slot {slot.id} is in use")
    return ids


def messages_of(slot: Slot) -> tuple[int, Sequence[tuple[int, int]]]:
    """Number of ids in *slot*, and its messages; raises BusyError."""
    tokens, messages = tokens_of(slot), slot.messages()
    return len(tokens), messages


def shifted(slot: Slot, *, n_keep: int, n_discard: int) -> int:
    """Shift *slot*, and return how many ids are left.

    Raises:
        RequestError: The range is not one of its tokens.
        BusyError: A generation uses it.
    """
    n_tokens = len(tokens_of(slot))
    if n_keep < 0 or n_discard <= 0 or n_keep + n_discard > n_tokens:
        raise RequestError(
            f"Invalid context shift parameters: n_keep={n_keep} n_discard={n_discard} "
            f"n_tokens={n_tokens}; n_keep must be 0 or more, n_discard above 0, and their sum at "
            "most n_tokens"
        )
    return slot.shift(n_keep, n_discard)


def erased(slot: Slot) -> int:
    """Empty *slot*, and return how many ids it had; raises BusyError."""
    n_tokens = slot.n_tokens
    slot.clear()
    return n_tokens


# ---- replies


class Saved(Struct, kw_only=True):
    """A slot with its saved state."""

    id_slot: Annotated[int, about("Index of the slot.", 0)]
    n_tokens: Annotated[int, about("Tokens that it holds.", 12)]
    n_bytes: Annotated[int, about("Bytes of the blob.", 49152)]
    t_ms: Annotated[float, about("Milliseconds that it took.", 0.9)]
    state: Annotated[str, about("The SES1 blob in base64.", "U0VTMQ==")]


class Restored(Struct, kw_only=True):
    """A slot that was restored."""

    id_slot: Annotated[int, about("Index of the slot.", 0)]
    n_bytes_read: Annotated[int, about("Bytes of the blob.", 49152)]
    success: Annotated[bool, about("Always true; a failure is an error.")]
    t_ms: Annotated[float, about("Milliseconds that it took.", 0.9)]


class Tokens(Struct, kw_only=True):
    """Ids in a slot."""

    id_slot: Annotated[int, about("Index of the slot.", 0)]
    n_tokens: Annotated[int, about("How many it holds.", 3)]
    tokens: Annotated[list[int], about("Their ids.", [1, 259, 354])]
    n_prompt_tokens_processed: Annotated[
        int, about("Tokens of the last prompt that were evaluated.", 3)
    ]


class Shifted(Struct, kw_only=True):
    """A slot from which tokens were removed."""

    success: Annotated[bool, about("Always true; a failure is an error.")]
    new_n_tokens: Annotated[int, about("Tokens that the slot holds now.", 8)]


class Message(Struct, kw_only=True):
    """A message in a slot, by positions of tokens."""

    index: Annotated[int, about("Of the message, from 0.", 0)]
    start: Annotated[int, about("Its first token.", 0)]
    end: Annotated[int, about("Its last token.", 11)]


class Info(Struct, kw_only=True):
    """Messages in a slot."""

    n_tokens: Annotated[int, about("Tokens that it holds.", 12)]
    boundary_eot: Annotated[int, about("Id that ends a message; -1 if the model has none.", 2)]
    n_messages: Annotated[int, about("How many there are.", 1)]
    messages: Annotated[list[Message], about("The messages, the oldest first.")]


class SlotSaved(Struct, kw_only=True):
    """A slot that was saved to a file."""

    id_slot: Annotated[int, about("Index of the slot.", 0)]
    filename: Annotated[str, about("Name of the file.", "anna.bin")]
    n_saved: Annotated[int, about("Tokens in it.", 12)]
    n_written: Annotated[int, about("Bytes of the file.", 49152)]
    timings: Annotated[dict[str, float], about("Milliseconds that it took.", {"save_ms": 0.9})]


class SlotRestored(Struct, kw_only=True):
    """A slot that was restored from a file."""

    id_slot: Annotated[int, about("Index of the slot.", 0)]
    filename: Annotated[str, about("Name of the file.", "anna.bin")]
    n_restored: Annotated[int, about("Tokens in it.", 12)]
    n_read: Annotated[int, about("Bytes of the file.", 49152)]
    timings: Annotated[dict[str, float], about("Milliseconds that it took.", {"restore_ms": 0.9})]


class SlotErased(Struct):
    """A slot that was emptied."""

    id_slot: Annotated[int, about("Index of the slot.", 0)]
    n_erased: Annotated[int, about("Tokens that it held.", 12)]


class SessionSaved(Struct, kw_only=True):
    """A session that was saved."""

    id_session: Annotated[int, about("Number of the session.", 7)]
    id_slot: Annotated[int, about("Index of the slot.", 0)]
    n_tokens: Annotated[int, about("Tokens in it.", 12)]
    n_bytes: Annotated[int, about("Bytes of it.", 49152)]
    t_ms: Annotated[float, about("Milliseconds that it took.", 0.9)]


class SessionRestored(Struct, kw_only=True):
    """A session that was restored."""

    id_session: Annotated[int, about("Number of the session.", 7)]
    id_slot: Annotated[int, about("Index of the slot.", 0)]
    n_bytes_read: Annotated[int, about("Bytes of the session.", 49152)]
    success: Annotated[bool, about("Always true; a failure is an error.")]
    t_ms: Annotated[float, about("Milliseconds that it took.", 0.9)]


class SessionRemoved(Struct, kw_only=True, omit_defaults=True):
    """A session that was removed."""

    id_session: Annotated[int, about("Number of the session.", 7)]
    removed: Annotated[bool, about("Always true; a failure is an error.")]
    file: Annotated[
        str | None,
        about("Name of the file that it went to; absent if it went nowhere.", "anna.bin"),
    ] = None
    n_bytes: Annotated[int | None, about("Bytes of the file; absent without one.", 49152)] = None


class Session(Struct, kw_only=True):
    """A session in memory."""

    id: Annotated[int, about("Its number.", 7)]
    size: Annotated[int, about("Its bytes.", 49152)]
    created_at: Annotated[int, about("When it was first saved, in seconds since 1970.", 1767225600)]
    updated_at: Annotated[int, about("When it was last saved, the same.", 1767225600)]


def n_tokens_in(blob: bytes) -> int:
    """Number of ids in a blob."""
    return int.from_bytes(blob[4:8], "little")


def saved_reply(slot_id: int, blob: bytes, t_ms: float) -> LongReply:
    """The JSON of `Saved`, whose base64 is written while it is sent."""
    head = {"id_slot": slot_id, "n_tokens": n_tokens_in(blob), "n_bytes": len(blob), "t_ms": t_ms}
    first = msgspec.json.encode(head)[:-1] + b',"state":"'
    last = b'"}'

    def pieces() -> Iterator[bytes]:
        yield first
        for at in range(0, len(blob), _PIECE):
            yield pybase64.b64encode(memoryview(blob)[at : at + _PIECE])
        yield last

    n_bytes = len(first) + -(-len(blob) // 3) * 4 + len(last)
    return LongReply(n_bytes, pieces())


def blob_reply(blob: bytes) -> LongReply:
    """The blob itself."""
    pieces = (blob[at : at + _TEXT] for at in range(0, len(blob), _TEXT))
    return LongReply(len(blob), pieces, "application/octet-stream")


def info_of(n_tokens: int, messages: Sequence[tuple[int, int]], eot: int | None) -> Info:
    """The reply about a slot's messages."""
    found = [Message(index=i, start=a, end=b) for i, (a, b) in enumerate(messages)]
    return Info(
        n_tokens=n_tokens,
        boundary_eot=-1 if eot is None else eot,
        n_messages=len(found),
        messages=found,
    )
