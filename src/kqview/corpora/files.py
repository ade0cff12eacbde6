"""Files: where a corpus lies, a folder or a URL of fsspec.

A folder has one writer, whose files appear whole and survive a power cut, and its shards are
mapped. An object store, too, shows whole objects only, but it has neither locks nor mappings: of
two writers the first stops when it sees the second, and arrays are read.
"""

import mmap
import os
import secrets
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, Protocol

from kqview import durable, system
from kqview.errors import CorpusError, KqviewError, RequestError
from kqview.extras import needed

INSTALL: Final = 'run pip install "kqview[corpora]"'
FOLDERS: Final = ("shards", "index")
_LOCK: Final = ".lock"
_SCHEME: Final = "://"
N_READERS: Final = 16  # requests under way at once
_N_READ: Final = 64  # files in memory at once


class Files(Protocol):
    """The files of a corpus, by names such as ``index/00000.parquet``. All may raise OSError."""

    is_mapped: bool
    """Whether `content` reads nothing before it is used."""

    def begin_writing(self) -> None:
        """Be the only writer from here on.

        Raises:
            CorpusError: Another process writes, or nobody can.
        """
        ...

    def end_writing(self) -> None:
        """Let others write; idempotent."""
        ...

    def names(self, folder: str) -> list[str]:
        """Names of the files of a folder, sorted, without the folder's; none if it is missing."""
        ...

    def read(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        """What a file has from byte *start* to *stop*.

        Raises:
            FileNotFoundError: There is none.
        """
        ...

    def read_all(self, names: Sequence[str]) -> Iterator[bytes]:
        """What each of *names* has; raises as `read`."""
        ...

    def content(self, name: str) -> "mmap.mmap | bytes":
        """What a file has, mapped where that can be."""
        ...

    def write(self, name: str, data: bytes) -> None:
        """Write a file whole or not at all.

        Raises:
            CorpusError: Another process has begun to write.
        """
        ...

    def remove(self, name: str) -> None:
        """Remove a file."""
        ...


def open_files(place: str) -> Files:
    """The files at *place*, a folder or a URL such as ``s3://bucket/corpus``.

    Raises:
        RequestError: There is no such kind of URL.
        KqviewError: fsspec, or the package that it needs for the URL, is not installed.
    """
    name = os.fspath(place)
    return _Objects(name) if _SCHEME in name else _Folder(Path(name))


class _Folder:
    is_mapped = True

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock: int | None = None

    def begin_writing(self) -> None:
        for name in FOLDERS:
            (self._path / name).mkdir(parents=True, exist_ok=True)
        lock = os.open(self._path / _LOCK, os.O_RDWR | os.O_CREAT | system.OPEN, 0o666)
        try:
            system.lock(lock)
        except BlockingIOError:
            os.close(lock)
            raise CorpusError(
                f"another process writes to {self._path}; wait until it has ended, or write to "
                "another folder"
            ) from None
        except OSError:
            os.close(lock)
            raise
        self._lock = lock
        for name in FOLDERS:  # of writers that died
            durable.remove_leftovers(self._path / name)

    def end_writing(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def names(self, folder: str) -> list[str]:
        path = self._path / folder
        return sorted(one.name for one in path.iterdir()) if path.exists() else []

    def read(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        with (self._path / name).open("rb") as file:
            file.seek(start)
            return file.read() if stop is None else file.read(stop - start)

    def read_all(self, names: Sequence[str]) -> Iterator[bytes]:
        return map(self.read, names)

    def content(self, name: str) -> "mmap.mmap | bytes":
        with (self._path / name).open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

    def write(self, name: str, data: bytes) -> None:
        durable.write_whole(self._path / name, data)

    def remove(self, name: str) -> None:
        durable.remove(self._path / name)


class _Objects:
    is_mapped = False

    def __init__(self, url: str) -> None:
        self._url = url
        self._token: bytes | None = None  # of the one writer
        self._open()

    def _open(self) -> None:
        core = needed("fsspec.core", "a URL needs", INSTALL)
        self._pid = os.getpid()
        try:
            self._store, self._root = core.url_to_fs(self._url)
        except ImportError as error:  # of the package for this kind of URL
            raise KqviewError(f"{self._url} cannot be opened: {error}") from error
        except ValueError as error:
            raise RequestError(f"{self._url} is no URL that fsspec knows: {error}") from None

    @property
    def _files(self) -> Any:
        """The file system; a forked process, such as a torch worker, needs one of its own."""
        if self._pid != os.getpid():
            self._open()
        return self._store

    def begin_writing(self) -> None:
        token = secrets.token_hex(16).encode()
        try:
            with self._reached():
                for name in FOLDERS:
                    self._files.makedirs(f"{self._root}/{name}", exist_ok=True)
                self._files.pipe_file(f"{self._root}/{_LOCK}", token)
        except NotImplementedError:
            raise CorpusError(
                f"{self._url} cannot be written to: its file system only reads"
            ) from None
        self._token = token

    def end_writing(self) -> None:
        self._token = None

    def names(self, folder: str) -> list[str]:
        with self._reached():
            self._files.invalidate_cache()  # others write too
            try:
                found = self._files.ls(f"{self._root}/{folder}", detail=False)
            except FileNotFoundError:  # there are no folders, but names of what is there
                return []
        return sorted(one.rstrip("/").rsplit("/", 1)[1] for one in found)

    def read(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        with self._reached():
            return self._files.cat_file(f"{self._root}/{name}", start=start or None, end=stop)

    def read_all(self, names: Sequence[str]) -> Iterator[bytes]:
        # A request takes much longer than its bytes, and an index has thousands of parts.
        with ThreadPoolExecutor(N_READERS) as pool:
            for i in range(0, len(names), _N_READ):
                yield from pool.map(self.read, names[i : i + _N_READ])

    def content(self, name: str) -> "mmap.mmap | bytes":
        return self.read(name)

    def write(self, name: str, data: bytes) -> None:
        if self._token is not None and self.read(_LOCK) != self._token:
            raise CorpusError(
                f"another process has begun to write to {self._url}, which has no locks; this one "
                "stops. What is written stays: start one of them again"
            )
        with self._reached():
            self._files.pipe_file(f"{self._root}/{name}", data)

    def remove(self, name: str) -> None:
        with self._reached():
            self._files.rm_file(f"{self._root}/{name}")

    @contextmanager
    def _reached(self) -> Generator[None]:
        """Errors of the store as OSError; each kind of store has its own."""
        try:
            yield
        except (OSError, NotImplementedError):
            raise
        except Exception as error:
            raise OSError(f"{self._url} cannot be reached: {error}") from error


def parquet_tables(
    files: Files,
    names: Sequence[str],
    columns: list[str] | None = None,
    dictionaries: Sequence[str] = (),
) -> Iterator[Any]:
    """The tables in Parquet files: chosen *columns*, of which *dictionaries* are decoded as such.

    Decoded on this thread alone: a thread of pyarrow that still drops its last part of the buffer
    when the interpreter ends would abort the process.

    Raises:
        CorpusError: One is damaged.
        OSError: One cannot be read.
    """
    parquet = needed("pyarrow.parquet", "a corpus needs", INSTALL)
    arrow = needed("pyarrow", "a corpus needs", INSTALL)
    for name, content in zip(names, files.read_all(names), strict=True):
        data = arrow.BufferReader(content)
        try:
            known = parquet.read_schema(data).names
            chosen = [one for one in dictionaries if one in known]
            file = parquet.ParquetFile(data, read_dictionary=chosen, pre_buffer=False)
            table = file.read(columns, use_threads=False)
        except (OSError, ValueError) as error:
            raise CorpusError(f"{name} is damaged: {error}; extract it again") from None
        yield table
