"""State files: a SES1 blob, and behind it a trailer that says which model it is of.

    SES1 blob | JSON | u32 bytes of the JSON | "KQVIEW01"

The blob comes first, so that every reader of SES1 still finds it. The chance that a blob ends like
a trailer by itself is one in 2**64.

The JSON is one flat object. Version 2, which is written: ``model``, ``kv_type``, the `SlotMarks`
that are known, and ``sha256`` over the blob and all other fields. Fields that a reader does not
know count for the checksum and are ignored otherwise; a field that must not be ignored needs a new
version. Version 1 is still read: its ``model`` is the sampled fingerprint, and its ``sha256``
covers the blob alone.
"""

import contextlib
import hashlib
import json
import os
import stat
import struct
from collections.abc import Generator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, BinaryIO, Final, cast

from kqview.errors import StateFormatError, StateMismatch
from kqview.state import ses1
from kqview.state.durable import FileIdentity, write_whole
from kqview.state.fingerprint import ModelFiles
from kqview.state.ses1 import SavedState, inspect

MAGIC: Final = b"KQVIEW01"
FOOTER_BYTES: Final = 4 + len(MAGIC)
_JSON_BYTES_MAX: Final = 1 << 16


@dataclass(frozen=True, slots=True)
class StateFacts:
    """What a slot's cache depends on besides its ids.

    Attributes:
        model: Fingerprint of the model's and the adapters' files (`ModelFiles.fingerprint`).
        kv_type: Type of the KV cache, such as "f16".
        sampled_model: The fingerprint that trailers of version 1 hold; not written.
    """

    model: str
    kv_type: str
    sampled_model: str = ""


@dataclass(frozen=True, slots=True)
class SlotMarks:
    """What is true of one saved slot and stands neither in its blob nor in its engine.

    Each field is written where it is known. A new one needs no new version of the trailer as long
    as a reader may ignore it.

    Attributes:
        n_exact: Tokens whose cache is what a fresh evaluation computes; from there on it is
            approximate. None: not known.
    """

    n_exact: int | None = None


NO_MARKS: Final = SlotMarks()


def make_trailer(blob: bytes, facts: StateFacts, marks: SlotMarks = NO_MARKS) -> bytes:
    """The trailer to write behind *blob*."""
    known = {name: value for name, value in asdict(marks).items() if value is not None}
    content = {"version": 2, "model": facts.model, "kv_type": facts.kv_type, **known}
    content["sha256"] = _checksum(blob, content)
    text = _to_json(content)
    return text + struct.pack("<I", len(text)) + MAGIC


def trailer_bytes(end: bytes, n_bytes: int) -> int:
    """Size of the trailer of a file of *n_bytes* that ends with *end*; 0 without one.

    Raises:
        StateFormatError: It cannot be as long as it says.
    """
    footer = end[-FOOTER_BYTES:]
    if len(footer) < FOOTER_BYTES or not footer.endswith(MAGIC):
        return 0
    n_text = struct.unpack_from("<I", footer)[0]
    if n_text > min(_JSON_BYTES_MAX, n_bytes - FOOTER_BYTES):
        raise StateFormatError(
            f"state: the trailer at the end says {n_text} bytes, of {n_bytes} in all; "
            "the file was altered"
        )
    return n_text + FOOTER_BYTES


@dataclass(frozen=True, slots=True)
class Trailer:
    """What a trailer says, whose checksum is right.

    Attributes:
        version: 1 or 2.
        model: Fingerprint of the model; in version 1 the sampled one.
        kv_type: Type of the KV cache.
        marks: What it says of the slot.
    """

    version: int
    model: str
    kv_type: str
    marks: SlotMarks

    def check(self, own: StateFacts) -> None:
        """Raise StateMismatch unless the slot was one of an engine with *own* facts."""
        if self.version == 1:
            own = replace(own, model=own.sampled_model)
        check_facts(StateFacts(self.model, self.kv_type), own)


def read_trailer(blob: bytes, trailer: bytes) -> Trailer:
    """Read what `trailer_bytes` found at the end of a file, and check *blob* against it.

    Raises:
        StateFormatError: The bytes are not those that were written.
    """
    content = _content(trailer[:-FOOTER_BYTES])
    version = content.get("version")
    if version not in (1, 2):
        raise StateFormatError(
            f"state: the trailer has version {version!r}, 1 and 2 are known; use a newer kqview"
        )
    signed = {} if version == 1 else {k: v for k, v in content.items() if k != "sha256"}
    if content.get("sha256") != _checksum(blob, signed):
        raise StateFormatError("state: the checksum differs; the file was altered")
    marks = NO_MARKS if version == 1 else _marks(content)
    return Trailer(version, str(content.get("model")), str(content.get("kv_type")), marks)


def check_trailer(blob: bytes, trailer: bytes, facts: StateFacts | None) -> SlotMarks:
    """Check *blob* against its trailer, and the trailer against *facts* where given.

    Raises:
        StateFormatError: The bytes are not those that were written.
        StateMismatch: The slot was one of another model or kv_type.
    """
    read = read_trailer(blob, trailer)
    if facts is not None:
        read.check(facts)
    return read.marks


def check_facts(saved: StateFacts, own: StateFacts) -> None:
    """Raise StateMismatch where a slot was saved with other facts than an engine's *own*."""
    if saved.model != own.model:
        raise StateMismatch(
            "state: the slot is one of another model or of other LoRA adapters; "
            "restore it with those it was saved with"
        )
    if saved.kv_type != own.kv_type:
        raise StateMismatch(
            f"state: saved with kv_type {saved.kv_type!r}, this engine has {own.kv_type!r}; "
            f"open it with kv_type={saved.kv_type!r}"
        )


def split(data: bytes) -> tuple[bytes, bytes]:
    """*data* as (blob, trailer); the trailer is b"" where there is none."""
    n = trailer_bytes(data[-FOOTER_BYTES:], len(data))
    return (data[:-n], data[-n:]) if n else (data, b"")


def _marks(content: Mapping[str, Any]) -> SlotMarks:
    n_exact = content.get("n_exact")
    if n_exact is not None and (type(n_exact) is not int or n_exact < 0):
        raise StateFormatError(
            f"state: n_exact in the trailer is {n_exact!r}, 0 and above are known"
        )
    return SlotMarks(n_exact=n_exact)


def _checksum(blob: bytes, signed: Mapping[str, Any]) -> str:
    digest = hashlib.sha256(blob)
    if signed:
        digest.update(_to_json(signed))
    return digest.hexdigest()


def _to_json(content: Mapping[str, Any]) -> bytes:
    return json.dumps(content, sort_keys=True, separators=(",", ":")).encode()


def _content(text: bytes) -> Mapping[str, Any]:
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        content = None
    fields = cast("dict[str, Any]", content) if isinstance(content, dict) else None
    if fields is None or any(isinstance(value, dict | list) for value in fields.values()):
        raise StateFormatError("state: the trailer is no flat JSON object; the file was altered")
    return fields


# ---- files


def write_state(
    path: str | os.PathLike[str],
    blob: bytes,
    facts: StateFacts | None = None,
    marks: SlotMarks = NO_MARKS,
) -> int:
    """Write *blob* to *path*; returns the file's size.

    With *facts* a trailer follows the blob, which holds them, *marks* and a checksum.

    The file appears whole, on the disk and readable by its owner alone, because it holds the
    prompt.

    Raises:
        StateFormatError: *blob* is no SES1 blob.
        OSError: The file cannot be written; what was there before still is.
    """
    return write_marked(path, blob, facts, marks).n_bytes


def write_marked(
    path: str | os.PathLike[str], blob: bytes, facts: StateFacts | None, marks: SlotMarks
) -> FileIdentity:
    """As `write_state`; returns what the file can be recognised by."""
    if blob[: len(ses1.MAGIC)] != ses1.MAGIC:
        raise StateFormatError("state.write: the magic at byte 0 is not 'SES1'; pass Slot.save()")
    trailer = make_trailer(blob, facts, marks) if facts else b""
    return write_whole(path, blob, trailer, is_private=True)


def read_state(path: str | os.PathLike[str], facts: StateFacts | None = None) -> bytes:
    """The blob in a state file; its trailer, where it has one, is checked.

    Raises:
        StateFormatError: It is no regular file, or its bytes are not those that were written.
        StateMismatch: *facts* are given and those of the trailer are others.
        OSError: The file cannot be read.
    """
    return read_marked(path, facts)[0]


def read_marked(
    path: str | os.PathLike[str], facts: StateFacts | None = None
) -> tuple[bytes, SlotMarks]:
    """As `read_state`, and what the trailer says of the slot."""
    blob, trailer = read_parts(path)
    return blob, check_trailer(blob, trailer, facts) if trailer else NO_MARKS


def read_parts(path: str | os.PathLike[str]) -> tuple[bytes, bytes]:
    """(blob, trailer) of a state file, unchecked; the trailer is b"" where there is none.

    Raises:
        StateFormatError: It is no regular file, or its trailer cannot be as long as it says.
        OSError: The file cannot be read.
    """
    with _opened(path) as (stream, status):
        n_trailer = _trailer_bytes(stream, status.st_size)
        stream.seek(0)
        blob = stream.read(status.st_size - n_trailer)
        return blob, stream.read(n_trailer)


def blob_bytes(path: str | os.PathLike[str]) -> int:
    """Size of the blob in a state file, of the whole file where that cannot be told; reads its end.

    Raises:
        OSError: The file cannot be read.
    """
    with _opened(path) as (stream, status):
        try:
            return status.st_size - _trailer_bytes(stream, status.st_size)
        except StateFormatError:
            return status.st_size


@contextlib.contextmanager
def _opened(path: str | os.PathLike[str]) -> Generator[tuple[BinaryIO, os.stat_result]]:
    # Not blocking: a named pipe would keep the caller until somebody writes to it.
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(handle, "rb") as stream:
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode):
            raise StateFormatError(f"state.read: {os.fspath(path)!r} is no regular file")
        yield stream, status


def _trailer_bytes(stream: BinaryIO, n_bytes: int) -> int:
    stream.seek(max(n_bytes - FOOTER_BYTES, 0))
    return trailer_bytes(stream.read(FOOTER_BYTES), n_bytes)


# ---- checking without an engine


@dataclass(frozen=True, slots=True)
class StateReport:
    """What `check_file` found.

    Attributes:
        path: The file.
        problems: Why it should not be restored; empty where nothing was found.
        n_bytes: Size of the file; None where it cannot be read.
        state: What the blob says about itself; None where it is no sound one.
        trailer: What the trailer says; None without one, or where its checksum is wrong.
        has_trailer: Whether there is one. A raw blob has no checksum: values that were altered
            cannot be told, nor of which model they are.
        is_of_model: Whether the slot was one of the model asked about; None where none was, or
            where the trailer does not say.
    """

    path: str
    problems: tuple[str, ...]
    n_bytes: int | None = None
    state: SavedState | None = None
    trailer: Trailer | None = None
    has_trailer: bool = False
    is_of_model: bool | None = None


def check_file(path: str | os.PathLike[str], model: ModelFiles | None = None) -> StateReport:
    """Check one file: its structure, its checksum, and whether it is of *model* where given.

    Raises:
        OSError: A file of *model* cannot be read. What is wrong with *path* is in the report.
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
            trailer = read_trailer(blob, trailer_text)
        except StateFormatError as error:
            problems.append(str(error))
    if model is not None:
        is_of_model = trailer and trailer.model == _fingerprint(model, trailer)
        if is_of_model is False:
            problems.append("the model or its LoRA adapters are not those it was saved with")
        elif not trailer_text:
            problems.append("it has no trailer, so nothing says of which model it is")
    n_bytes = len(blob) + len(trailer_text)
    return StateReport(
        name, tuple(problems), n_bytes, state, trailer, bool(trailer_text), is_of_model
    )


def _fingerprint(model: ModelFiles, trailer: Trailer) -> str:
    return model.sampled_fingerprint() if trailer.version == 1 else model.fingerprint()
