"""Fingerprints of models, computed from all bytes of the files an engine was opened from.

Two models of one shape differ only in their weights, so every byte of each part of a split model
and of each adapter counts. A few threads read the files in chunks, without the GIL. The process
keeps the digest of a file for as long as the file is unchanged. The digest is not stored on disk:
a machine that has just loaded the model has its files in the page cache.
"""

import hashlib
import os
import re
import struct
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from kqview import system
from kqview.durable import FileIdentity
from kqview.errors import StateError
from kqview.machine import default_threads

CHUNK_BYTES: Final = 1 << 23
_N_THREADS_MAX: Final = 4
# A file modified this shortly before it was read could change again within one clock tick.
_CLOCK_STEP_NS: Final = 2_000_000_000
_PART: Final = re.compile(r"(?P<stem>.*)-(?P<i>\d{5})-of-(?P<n>\d{5})\.gguf", re.DOTALL)


def model_parts(path: str) -> list[str]:
    """All files of the model whose first is *path*: ``x-00001-of-00003.gguf`` has three."""
    matched = _PART.fullmatch(path)
    if matched is None or int(matched["i"]) != 1:
        return [path]
    stem, n_parts = matched["stem"], int(matched["n"])
    others = (f"{stem}-{i:05d}-of-{n_parts:05d}.gguf" for i in range(2, n_parts + 1))
    return [path, *filter(os.path.exists, others)]


class ModelFiles:
    """The files of one engine. Create it before they are loaded; they are read on demand.

    Args:
        model: Path of the model, or of its first part if it is split.
        adapters: (path, scale) of each LoRA adapter.
    """

    def __init__(self, model: str, adapters: Sequence[tuple[str, float]]) -> None:
        model = os.path.abspath(model)  # the working directory may change before they are read
        adapters = [(os.path.abspath(path), scale) for path, scale in adapters]
        self._all = [*((part, 1.0) for part in model_parts(model)), *adapters]
        # None for what is not a file: loading it reports that better.
        self._opened = {path: FileIdentity.at(path) for path, _ in self._all}

    def fingerprint(self) -> str:
        """Fingerprint of all bytes of all files and of the scales of the adapters.

        Raises:
            StateError: A file changed since this object was created.
            OSError: A file cannot be read.
        """
        digest = hashlib.sha256()
        for path, scale in self._all:
            n_bytes, of_file = file_digest(path, self._opened[path])
            digest.update(struct.pack("<Qd", n_bytes, scale))
            digest.update(of_file)
        return digest.hexdigest()


_digests: dict[FileIdentity, bytes] = {}
_lock = threading.Lock()  # one file at a time: two readers slow each other down


def file_digest(path: str, opened: FileIdentity | None = None) -> tuple[int, bytes]:
    """(size, SHA-256 over the SHA-256 of each 8 MiB) of the file at *path*.

    Raises:
        StateError: The file is not the one that was *opened*, or changes while it is read.
        OSError: The file cannot be read.
    """
    handle = os.open(path, os.O_RDONLY | system.OPEN)
    try:
        before = FileIdentity.of(os.fstat(handle))
        if opened is not None and not before.has_content_of(opened):
            raise StateError(
                f"{path!r} changed after the engine was opened, so state files cannot name their "
                "model; open the engine again"
            )
        with _lock:
            digest = _digests.get(before)
            if digest is None:
                digest = _read_digest(handle, path, before.n_bytes)
                after = FileIdentity.of(os.fstat(handle))
                if not after.has_content_of(before):
                    raise StateError(f"{path!r} changed while it was read; try again")
                if time.time_ns() - max(after.modified_ns, after.changed_ns) > _CLOCK_STEP_NS:
                    _digests[after] = digest
    finally:
        os.close(handle)
    return before.n_bytes, digest


def _read_digest(handle: int, path: str, n_bytes: int) -> bytes:
    def digest_at(at: int) -> bytes:
        chunk = system.read_at(handle, CHUNK_BYTES, at)
        n_wanted = min(CHUNK_BYTES, n_bytes - at)
        while len(chunk) < n_wanted:
            more = system.read_at(handle, n_wanted - len(chunk), at + len(chunk))
            if not more:
                raise StateError(f"{path!r} became shorter while it was read; try again")
            chunk += more
        return hashlib.sha256(chunk).digest()

    pool = ThreadPoolExecutor(min(_N_THREADS_MAX, default_threads()), "kqview-fingerprint")
    try:
        return hashlib.sha256(
            b"".join(pool.map(digest_at, range(0, n_bytes, CHUNK_BYTES)))
        ).digest()
    finally:
        pool.shutdown(cancel_futures=True)
