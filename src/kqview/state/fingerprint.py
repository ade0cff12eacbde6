"""Fingerprints of models: which files an engine was opened from, told by all of their bytes.

Two models of one shape differ in nothing but their weights, so every byte counts: of each part of
a split model, and of each adapter. Files are read in chunks by a few threads, without the GIL; the
digest of a file is kept in the process for as long as the file is the same one. It is not kept on
the disk: what is read here lies in the page cache of a machine that has just loaded it.
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

from kqview.errors import StateError
from kqview.machine import default_threads
from kqview.state.durable import FileIdentity

CHUNK_BYTES: Final = 1 << 23
_N_THREADS_MAX: Final = 4
# A file written to within this time before it was read may be written to again unseen.
_CLOCK_STEP_NS: Final = 2_000_000_000
_N_SAMPLES: Final = 64
_SAMPLE_BYTES: Final = 1 << 16
_PART: Final = re.compile(r"(?P<stem>.*)-(?P<i>\d{5})-of-(?P<n>\d{5})\.gguf", re.DOTALL)


def model_parts(path: str) -> list[str]:
    """The files of a model of which *path* is the first: ``x-00001-of-00003.gguf`` has three."""
    matched = _PART.fullmatch(path)
    if matched is None or int(matched["i"]) != 1:
        return [path]
    stem, n_parts = matched["stem"], int(matched["n"])
    others = (f"{stem}-{i:05d}-of-{n_parts:05d}.gguf" for i in range(2, n_parts + 1))
    return [path, *filter(os.path.exists, others)]


class ModelFiles:
    """The files of one engine: make it before they are loaded; the rest happens when asked for.

    Args:
        model: Path of the model, of its first part where it is split.
        adapters: (path, scale) of each LoRA adapter.
    """

    def __init__(self, model: str, adapters: Sequence[tuple[str, float]]) -> None:
        model = os.path.abspath(model)  # the process may go elsewhere before they are read
        adapters = [(os.path.abspath(path), scale) for path, scale in adapters]
        self._first = [(model, 1.0), *adapters]
        self._all = [*((part, 1.0) for part in model_parts(model)), *adapters]
        self._opened = {path: _identity_at(path) for path, _ in self._all}

    def fingerprint(self) -> str:
        """Of all bytes of all files, and the adapters' scales.

        Raises:
            StateError: A file is not the one that was there when this was made.
            OSError: A file cannot be read.
        """
        digest = hashlib.sha256()
        for path, scale in self._all:
            n_bytes, of_file = file_digest(path, self._opened[path])
            digest.update(struct.pack("<Qd", n_bytes, scale))
            digest.update(of_file)
        return digest.hexdigest()

    def sampled_fingerprint(self) -> str:
        """What trailers of version 1 hold: each file's size, scale and 64 samples of 64 KiB.

        It misses changes between the samples and in all parts but the first.

        Raises:
            OSError: A file cannot be read.
        """
        digest = hashlib.sha256()
        for path, scale in self._first:
            with open(path, "rb") as stream:
                n_bytes = os.fstat(stream.fileno()).st_size
                digest.update(struct.pack("<Qd", n_bytes, scale))
                last = max(n_bytes - _SAMPLE_BYTES, 0)
                for at in sorted({last * i // (_N_SAMPLES - 1) for i in range(_N_SAMPLES)}):
                    stream.seek(at)
                    digest.update(stream.read(_SAMPLE_BYTES))
        return digest.hexdigest()


_digests: dict[FileIdentity, bytes] = {}
_lock = threading.Lock()  # one file at a time: two readers of a disk are slower than one


def file_digest(path: str, opened: FileIdentity | None = None) -> tuple[int, bytes]:
    """(size, SHA-256 over the SHA-256 of each 8 MiB) of the file at *path*.

    Raises:
        StateError: It is not the file that *opened* is of, or changed meanwhile.
        OSError: It cannot be read.
    """
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        before = FileIdentity.of(os.fstat(handle))
        if opened is not None and not before.has_content_of(opened):
            raise StateError(
                f"state: {path!r} was replaced or changed after the engine had opened it, so a "
                "state file could not say whose it is; open the engine again"
            )
        with _lock:
            digest = _digests.get(before)
            if digest is None:
                digest = _read_digest(handle, path, before.n_bytes)
                after = FileIdentity.of(os.fstat(handle))
                if not after.has_content_of(before):
                    raise StateError(f"state: {path!r} changed while it was read; try again")
                if time.time_ns() - max(after.modified_ns, after.changed_ns) > _CLOCK_STEP_NS:
                    _digests[after] = digest
    finally:
        os.close(handle)
    return before.n_bytes, digest


def _read_digest(handle: int, path: str, n_bytes: int) -> bytes:
    def digest_at(at: int) -> bytes:
        chunk = os.pread(handle, CHUNK_BYTES, at)
        n_wanted = min(CHUNK_BYTES, n_bytes - at)
        while len(chunk) < n_wanted:
            more = os.pread(handle, n_wanted - len(chunk), at + len(chunk))
            if not more:
                raise StateError(f"state: {path!r} became shorter while it was read; try again")
            chunk += more
        return hashlib.sha256(chunk).digest()

    pool = ThreadPoolExecutor(min(_N_THREADS_MAX, default_threads()), "kqview-fingerprint")
    try:
        return hashlib.sha256(
            b"".join(pool.map(digest_at, range(0, n_bytes, CHUNK_BYTES)))
        ).digest()
    finally:
        pool.shutdown(cancel_futures=True)


def _identity_at(path: str) -> FileIdentity | None:
    try:
        return FileIdentity.of(os.stat(path))
    except OSError:
        return None  # loading says it better
