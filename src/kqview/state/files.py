"""State files: a SES1 blob followed by a trailer that names its model.

    SES1 blob | checkpoints | JSON | u32 bytes of the JSON | "KQVIEW01"

The blob comes first, so any reader of SES1 can read the file. The chance that a blob itself ends
like a trailer is one in 2**64.

The JSON is one flat object: ``version``, ``model``, ``kv_type``, the known fields of `SlotMarks`,
and ``sha256`` over the blob, the checkpoints and all other fields. ``checkpoint_bytes`` is the size
of the checkpoints (``cpp/state/ses1.h``); without it there are none. A reader ignores fields that
it does not know, except for the checksum; a field that must not be ignored needs a new version.
"""

import contextlib
import hashlib
import json
import math
import os
import re
import stat
import struct
from collections.abc import Generator, Mapping
from dataclasses import dataclass, field
from typing import Any, BinaryIO, Final, cast

import numpy as np
from numpy.typing import NDArray

from kqview import json_input, system
from kqview.durable import FileIdentity, write_whole
from kqview.errors import StateFormatError, StateMismatch, shown
from kqview.state import ses1
from kqview.state.fingerprint import ModelFiles
from kqview.state.ses1 import SavedState, checkpoints_in, inspect

MAGIC: Final = b"KQVIEW01"
_VERSION: Final = 3
FOOTER_BYTES: Final = 4 + len(MAGIC)
_JSON_BYTES_MAX: Final = 1 << 16
_END_BYTES: Final = _JSON_BYTES_MAX + FOOTER_BYTES
_EDITS_BYTES_MAX: Final = 1 << 15
_RUN: Final = r"\d{1,10}:(?:[\w ]{1,64}@\d{1,10}(?:,[\w ]{1,64}@\d{1,10})*)?"
_EDITS: Final = re.compile(rf"{_RUN}(?:;{_RUN})*", re.ASCII)


@dataclass(frozen=True, slots=True)
class StateFacts:
    """What the cache of a slot depends on besides its ids.

    Attributes:
        model: Fingerprint of the model and adapter files (`ModelFiles.fingerprint`).
        kv_type: Type of the KV cache, such as "f16".
    """

    model: str
    kv_type: str


EditedRun = tuple[int, tuple[tuple[str, int], ...]]


@dataclass(frozen=True, slots=True)
class SlotMarks:
    """Facts about one saved slot that neither its blob nor its engine records.

    A field is written if it is known. A new field that readers may ignore needs no new version of
    the trailer.

    Attributes:
        n_exact: Number of leading tokens whose cache equals that of a fresh evaluation; the rest
            is approximate. None if unknown.
        lora: Scale of each LoRA adapter of the engine with which the cache was computed. None: as
            the engine was opened.
        edits: The edits that the cells were computed with, as runs: the first cell of each, and the
            (hash, first position) of the edits in force there. Empty: without edits.
        checkpoints: The slot's checkpoints, as the core writes them; empty if it has none.
    """

    n_exact: int | None = None
    lora: tuple[float, ...] | None = None
    edits: tuple[EditedRun, ...] = ()
    checkpoints: bytes = field(default=b"", repr=False)


NO_MARKS: Final = SlotMarks()


def make_trailer(blob: bytes, facts: StateFacts, marks: SlotMarks = NO_MARKS) -> bytes:
    """The trailer for *blob*, all but the checkpoints of *marks*, which come before it."""
    known: dict[str, object] = {} if marks.n_exact is None else {"n_exact": marks.n_exact}
    if marks.lora:
        known["lora"] = " ".join(map(repr, marks.lora))
    if marks.edits:
        known["edits"] = _text_of_edits(marks.edits)
    if marks.checkpoints:
        known["checkpoint_bytes"] = len(marks.checkpoints)
    content = {"version": _VERSION, "model": facts.model, "kv_type": facts.kv_type, **known}
    content["sha256"] = _checksum(blob, marks.checkpoints, content)
    text = _to_json(content)
    return text + struct.pack("<I", len(text)) + MAGIC


def _trailer_bytes(end: bytes, n_bytes: int) -> tuple[int, int]:
    """Bytes of the checkpoints and of what follows them, in a file of *n_bytes*; 0 if it has none.

    Args:
        end: The last bytes of the file, `_END_BYTES` if it has as many.
        n_bytes: Its size.

    Raises:
        StateFormatError: The trailer gives an impossible size.
    """
    footer = end[-FOOTER_BYTES:]
    if len(footer) < FOOTER_BYTES or not footer.endswith(MAGIC):
        return 0, 0
    n_text = struct.unpack_from("<I", footer)[0]
    n_checkpoints = 0
    if n_text <= _JSON_BYTES_MAX:
        with contextlib.suppress(StateFormatError):  # damaged, which its checksum will show
            content = _content(end[-FOOTER_BYTES - n_text : -FOOTER_BYTES])
            given = content.get("checkpoint_bytes")
            n_checkpoints = given if type(given) is int and given > 0 else 0
    if n_text > _JSON_BYTES_MAX or n_checkpoints + n_text + FOOTER_BYTES > n_bytes:
        raise StateFormatError(
            f"the trailer claims {n_checkpoints + n_text} bytes in a file of {n_bytes} bytes; the "
            "file was altered"
        )
    return n_checkpoints, n_text + FOOTER_BYTES


@dataclass(frozen=True, slots=True)
class Trailer:
    """A trailer whose checksum is correct: what the cache depends on, and marks of the slot."""

    facts: StateFacts
    marks: SlotMarks


def read_trailer(blob: bytes, trailer: bytes) -> Trailer:
    """Parse *trailer* and check *blob* against its checksum.

    Raises:
        StateFormatError: The file was altered, or the version is unknown.
    """
    n_text = struct.unpack_from("<I", trailer[-FOOTER_BYTES:])[0]
    text_at = len(trailer) - FOOTER_BYTES - n_text
    checkpoints, content = trailer[:text_at], _content(trailer[text_at:-FOOTER_BYTES])
    version = content.get("version")
    if version != _VERSION:
        raise StateFormatError(
            f"the trailer has version {version!r}, this kqview reads {_VERSION}; use the kqview "
            "that wrote it"
        )
    signed = {k: v for k, v in content.items() if k != "sha256"}
    if content.get("sha256") != _checksum(blob, checkpoints, signed):
        raise StateFormatError(
            "the checksum of the state file does not match; the file was altered"
        )
    facts = StateFacts(str(content.get("model")), str(content.get("kv_type")))
    n_exact = content.get("n_exact")
    if n_exact is not None and (type(n_exact) is not int or n_exact < 0):
        raise StateFormatError(
            f"n_exact in the trailer is {n_exact!r}, but must be a whole number from 0"
        )
    lora, edits = _scales(content.get("lora")), _edits(content.get("edits"))
    return Trailer(facts, SlotMarks(n_exact, lora, edits, checkpoints))


def check_trailer(blob: bytes, trailer: bytes, facts: StateFacts | None) -> SlotMarks:
    """Check *blob* against its trailer and, if given, the trailer against *facts*.

    Raises:
        StateFormatError: The file was altered, or the version is unknown.
        StateMismatch: The slot was saved with another model or kv_type.
    """
    read = read_trailer(blob, trailer)
    if facts is not None:
        check_facts(read.facts, facts)
    return read.marks


def check_facts(saved: StateFacts, own: StateFacts) -> None:
    """Raise StateMismatch if the facts of a *saved* slot differ from an engine's *own*."""
    if saved.model != own.model:
        raise StateMismatch(
            "the slot was saved with another model or other LoRA adapters; "
            "restore it with those it was saved with"
        )
    if saved.kv_type != own.kv_type:
        raise StateMismatch(
            f"the slot was saved with kv_type {saved.kv_type!r}, this engine has {own.kv_type!r}; "
            f"open the engine with kv_type={saved.kv_type!r}"
        )


def split(data: bytes) -> tuple[bytes, bytes]:
    """*data* as (blob, trailer); the trailer is b"" if there is none."""
    n = sum(_trailer_bytes(data[-_END_BYTES:], len(data)))
    return (data[:-n], data[-n:]) if n else (data, b"")


def _text_of_edits(runs: tuple[EditedRun, ...]) -> str:
    """Runs of cells as ``start:hash@first,hash@first;...``."""
    text = ";".join(
        f"{start}:{','.join(f'{hash_}@{first}' for hash_, first in keys)}" for start, keys in runs
    )
    if len(text) <= _EDITS_BYTES_MAX:
        return text
    # One hash for all of them, which no request's edits have: no edited cell is reused.
    first = next(start for start, keys in runs if keys)
    return ("0:;" if first else "") + f"{first}:{hashlib.sha256(text.encode()).hexdigest()}@0"


def _edits(text: object) -> tuple[EditedRun, ...]:
    if text is None:
        return ()
    if not _EDITS.fullmatch(str(text)):
        raise StateFormatError(
            f"edits in the trailer is {shown(text)}, but must be runs of cells and hashes"
        )
    runs: list[EditedRun] = []
    for run in str(text).split(";"):
        start, _, keys = run.partition(":")
        pairs = (key.split("@") for key in keys.split(",") if key)
        runs.append((int(start), tuple((hash_, int(first)) for hash_, first in pairs)))
    starts = [start for start, _ in runs]
    if starts[0] != 0 or starts != sorted(set(starts)):
        raise StateFormatError(
            f"edits in the trailer has runs from {starts}; they must ascend from 0"
        )
    return tuple(runs)


def _scales(text: object) -> tuple[float, ...] | None:
    if text is None:
        return None
    try:
        scales = tuple(map(float, str(text).split()))
    except ValueError:
        scales = ()
    if not scales or not all(map(math.isfinite, scales)):
        raise StateFormatError(f"lora in the trailer is {text!r}, but must be scales")
    return scales


def _checksum(blob: bytes, checkpoints: bytes, signed: Mapping[str, Any]) -> str:
    digest = hashlib.sha256(blob)
    digest.update(checkpoints)
    digest.update(_to_json(signed))
    return digest.hexdigest()


def _to_json(content: Mapping[str, Any]) -> bytes:
    return json.dumps(content, sort_keys=True, separators=(",", ":")).encode()


def _content(text: bytes) -> Mapping[str, Any]:
    try:
        content = json_input.loads(text)
    except ValueError:
        content = None
    fields = cast("dict[str, Any]", content) if isinstance(content, dict) else None
    if fields is None or any(isinstance(value, dict | list) for value in fields.values()):
        raise StateFormatError("the trailer is not a flat JSON object; the file was altered")
    return fields


# ---- files


def write_state(
    path: str | os.PathLike[str],
    blob: bytes,
    facts: StateFacts | None = None,
    marks: SlotMarks = NO_MARKS,
) -> int:
    """Write *blob* to *path* and return the size of the file.

    With *facts*, a trailer with them, *marks* and a checksum follows the blob.

    The file is written atomically and synced. Only its owner can read it, because it holds the
    prompt.

    Raises:
        StateFormatError: *blob* is not a SES1 blob.
        OSError: The file cannot be written; an old file stays.
    """
    return write_marked(path, blob, facts, marks).n_bytes


def write_marked(
    path: str | os.PathLike[str],
    blob: bytes,
    facts: StateFacts | None,
    marks: SlotMarks,
    *,
    follows: bool = True,
) -> FileIdentity:
    """Like `write_state`, but return the identity of the file; *follows* is `WholeFile`'s."""
    if blob[: len(ses1.MAGIC)] != ses1.MAGIC:
        raise StateFormatError("blob does not start with 'SES1'; pass what Slot.save() returned")
    trailer = (marks.checkpoints, make_trailer(blob, facts, marks)) if facts else ()
    return write_whole(path, blob, *trailer, is_private=True, follows=follows)


def read_state(path: str | os.PathLike[str], facts: StateFacts | None = None) -> bytes:
    """Read the blob of a state file and check its trailer, if it has one.

    Raises:
        StateFormatError: It is not a regular file, or it was altered.
        StateMismatch: *facts* differ from those of the trailer.
        OSError: The file cannot be read.
    """
    return read_marked(path, facts)[0]


def read_marked(
    path: str | os.PathLike[str], facts: StateFacts | None = None, *, follows: bool = True
) -> tuple[bytes, SlotMarks]:
    """Like `read_state`, but return (blob, marks); without *follows* a link is an OSError."""
    blob, trailer = read_parts(path, follows=follows)
    return blob, check_trailer(blob, trailer, facts) if trailer else NO_MARKS


def read_parts(path: str | os.PathLike[str], *, follows: bool = True) -> tuple[bytes, bytes]:
    """(blob, trailer) of a state file, unchecked; the trailer is b"" if there is none.

    The checkpoints are the first part of the trailer.

    Raises:
        StateFormatError: It is not a regular file, or the trailer gives an impossible size.
        OSError: The file cannot be read.
    """
    with _opened(path, follows=follows) as (stream, status):
        n_trailer = sum(_sizes_in(stream, status.st_size))
        stream.seek(0)
        blob = stream.read(status.st_size - n_trailer)
        return blob, stream.read(n_trailer)


def read_ids(path: str | os.PathLike[str], *, follows: bool = True) -> NDArray[np.int32]:
    """Ids in a state file, shape (n_tokens,); nothing but them is read, and no checksum checked.

    Raises:
        StateFormatError: It is not a regular file, or has no SES1 blob.
        OSError: The file cannot be read.
    """
    with _opened(path, follows=follows) as (stream, status):
        head = stream.read(ses1.HEADER_BYTES)
        n_bytes = 4 * int.from_bytes(head[len(ses1.MAGIC) :], "little")
        return ses1.ids_in(head + stream.read(min(n_bytes, status.st_size)))


def slot_bytes(path: str | os.PathLike[str]) -> int:
    """Size of blob and checkpoints in a state file, or of the file if its trailer is damaged.

    Reads only the end of the file.

    Raises:
        OSError: The file cannot be read.
    """
    with _opened(path) as (stream, status):
        try:
            return status.st_size - _sizes_in(stream, status.st_size)[1]
        except StateFormatError:
            return status.st_size


@contextlib.contextmanager
def _opened(
    path: str | os.PathLike[str], *, follows: bool = True
) -> Generator[tuple[BinaryIO, os.stat_result]]:
    flags = os.O_RDONLY | system.NO_WAIT | system.OPEN | (0 if follows else system.NO_LINK)
    handle = os.open(path, flags)
    status = os.fstat(handle)
    if not stat.S_ISREG(status.st_mode):
        os.close(handle)
        raise StateFormatError(f"{os.fspath(path)!r} is not a regular file")
    with os.fdopen(handle, "rb") as stream:
        yield stream, status


def _sizes_in(stream: BinaryIO, n_bytes: int) -> tuple[int, int]:
    stream.seek(max(n_bytes - _END_BYTES, 0))
    return _trailer_bytes(stream.read(_END_BYTES), n_bytes)


# ---- checking without an engine


@dataclass(frozen=True, slots=True)
class StateReport:
    """What `check_file` found.

    Attributes:
        path: The file.
        problems: Why it should not be restored; empty if nothing was found.
        n_bytes: Size of the file; None if it cannot be read.
        state: Contents of the blob; None if it is malformed.
        trailer: The trailer; None if there is none or its checksum is wrong.
        has_trailer: Whether there is a trailer. A raw blob has no checksum and names no model.
        is_of_model: Whether the slot belongs to the model asked about; None if none was given
            or the trailer cannot tell.
    """

    path: str
    problems: tuple[str, ...]
    n_bytes: int | None = None
    state: SavedState | None = None
    trailer: Trailer | None = None
    has_trailer: bool = False
    is_of_model: bool | None = None


def check_file(path: str | os.PathLike[str], model: ModelFiles | None = None) -> StateReport:
    """Check the structure and checksum of one file and, if *model* is given, that it belongs to it.

    Raises:
        OSError: A file of *model* cannot be read. Errors of *path* are in the report.
    """
    name = os.fspath(path)
    try:
        blob, trailer_text = read_parts(path)
    except OSError as error:
        return StateReport(name, (error.strerror or str(error),))
    except StateFormatError as error:
        return StateReport(name, (str(error),))
    problems: list[str] = []
    state = trailer = is_of_model = None
    try:
        state = inspect(blob)
    except StateFormatError as error:
        problems.append(str(error))
    if trailer_text:
        try:
            read = read_trailer(blob, trailer_text)
            checkpoints_in(read.marks.checkpoints)
            trailer = read
        except StateFormatError as error:
            problems.append(str(error))
    if model is not None:
        is_of_model = trailer and trailer.facts.model == model.fingerprint()
        if is_of_model is False:
            problems.append("it was saved with another model or other LoRA adapters")
        elif not trailer_text:
            problems.append("it has no trailer that names its model")
    n_bytes = len(blob) + len(trailer_text)
    return StateReport(
        name, tuple(problems), n_bytes, state, trailer, bool(trailer_text), is_of_model
    )
