"""Blobs of saved slots over HTTP: as they are, or in JSON, as base64.

A blob may have gigabytes. It is whole in memory once; its base64, at both ends, never is.
"""

import binascii
import re
from collections.abc import Iterator
from typing import Annotated, Any, Final

import msgspec
import pybase64
from msgspec import Struct

from kqview.errors import RequestError
from kqview.server.web.budget import Body
from kqview.server.web.described import about
from kqview.server.web.endpoint import LongReply, decoded

BINARY: Final = "application/octet-stream"
"""Media type of a blob as it is."""

_PIECE: Final = 3 * 2**18  # bytes of a blob that are encoded in one call
_TEXT: Final = 2**20  # bytes of base64 that are decoded in one call
_MOST_OTHER: Final = 64 * 1024  # bytes of a JSON body apart from its "state"
_STATE: Final = re.compile(rb'"state"\s*:\s*"')


class RestoreBody(Struct, kw_only=True):
    """A saved slot in base64."""

    state: Annotated[str, about("The SES1 blob in base64.", "U0VTMQ==")]


def n_tokens_in(blob: bytes) -> int:
    """Number of ids in a blob."""
    return int.from_bytes(blob[4:8], "little")


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


def saved_reply(slot_id: int, blob: bytes, t_ms: float) -> LongReply:
    """The JSON of `slots.SlotState`, whose base64 is written while it is sent."""
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
    return LongReply(len(blob), pieces, BINARY)
