"""The trailer of a state file: whose slot it was, and whether the bytes are still the same.

    SES1 blob | JSON | u32 bytes of the JSON | "KQVIEW01"

The blob in front stays what every reader of SES1 knows. A blob that happens to end like a trailer
is one in 2**64.
"""

import hashlib
import json
import os
import struct
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final, cast

from kqview.errors import StateFormatError, StateMismatch

MAGIC: Final = b"KQVIEW01"
FOOTER_BYTES: Final = 4 + len(MAGIC)
_JSON_BYTES_MAX: Final = 1 << 16
_N_SAMPLES: Final = 64
_SAMPLE_BYTES: Final = 1 << 16


@dataclass(frozen=True, slots=True)
class StateFacts:
    """What a slot's cache depends on besides its ids.

    Attributes:
        model: Fingerprint of the model's and the adapters' files (`fingerprint`).
        kv_type: Type of the KV cache, such as "f16".
    """

    model: str
    kv_type: str


def fingerprint(paths: Sequence[tuple[str, float]]) -> str:
    """SHA-256 over each file's size, scale and 64 samples of 64 KiB, spread evenly.

    The first samples hold the metadata and the vocabulary, the others weights of every part;
    reading all of a model would take longer than most prompts. Of a model in several files the
    first one counts.
    """
    digest = hashlib.sha256()
    for path, scale in paths:
        with open(path, "rb") as stream:
            n_bytes = os.fstat(stream.fileno()).st_size
            digest.update(struct.pack("<Qd", n_bytes, scale))
            last = max(n_bytes - _SAMPLE_BYTES, 0)
            for at in sorted({last * i // (_N_SAMPLES - 1) for i in range(_N_SAMPLES)}):
                stream.seek(at)
                digest.update(stream.read(_SAMPLE_BYTES))
    return digest.hexdigest()


def make_trailer(blob: bytes, facts: StateFacts) -> bytes:
    """The trailer to write behind *blob*."""
    content = {"version": 1, **asdict(facts), "sha256": hashlib.sha256(blob).hexdigest()}
    text = json.dumps(content, separators=(",", ":")).encode()
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


def check_trailer(blob: bytes, trailer: bytes, facts: StateFacts | None) -> None:
    """Check *blob* against its trailer, and the trailer against *facts* where given.

    Raises:
        StateFormatError: The bytes are not those that were written.
        StateMismatch: The slot was one of another model or kv_type.
    """
    content = _content(trailer[:-FOOTER_BYTES])
    if content.get("version") != 1:
        raise StateFormatError(
            f"state: the trailer has version {content.get('version')!r}, 1 is known; "
            "use a newer kqview"
        )
    if content.get("sha256") != hashlib.sha256(blob).hexdigest():
        raise StateFormatError("state: the checksum is another; the file was altered")
    if facts is not None:
        check_facts(StateFacts(str(content.get("model")), str(content.get("kv_type"))), facts)


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


def _content(text: bytes) -> Mapping[str, Any]:
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        content = None
    if not isinstance(content, dict):
        raise StateFormatError("state: the trailer is no JSON object; the file was altered")
    return cast("dict[str, Any]", content)
