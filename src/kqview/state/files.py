"""The trailer of a state file: whose slot it was, and whether the bytes are still the same.

    SES1 blob | JSON | u32 bytes of the JSON | "KQVIEW01"

The blob in front stays what every reader of SES1 knows. A blob that happens to end like a trailer
is one in 2**64.

The JSON is one flat object. Version 2, which is written: ``model``, ``kv_type``, those of
`SlotMarks` that are known, and ``sha256`` over the blob and all other fields. Fields that a reader
does not know count for the checksum and are ignored otherwise; what must not be ignored needs
another version. Version 1 is still read: its ``model`` is the sampled fingerprint, and its
``sha256`` covers the blob alone.
"""

import hashlib
import json
import struct
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Final, cast

from kqview.errors import StateFormatError, StateMismatch

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
