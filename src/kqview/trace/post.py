"""Poster: sends finished traces to a receiver, in the background.

`Poster.post` only appends to a bounded queue; two threads do the rest. The writer encodes a trace
and puts it into the spool: a folder in which each trace is a file until the receiver has it, or
memory if there is no folder. The sender posts what is in the spool, oldest first. A trace may be
sent more than once, such as after a crash; receivers replace an older one with the same
``request_id``. `Poster.when_stored` tells when a crash can no longer lose a trace: a server that
answers only then loses none of which a client has seen the end.

Several processes may share a folder: each sends what it finds there when it starts.

It speaks HTTP through the standard library: one request at a time on a thread of its own needs no
client with a pool, and works without any extra.
"""

import atexit
import contextlib
import hashlib
import http.client
import logging
import os
import random
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Final, NamedTuple, Self
from urllib.parse import urlsplit

from kqview import durable
from kqview.errors import RequestError
from kqview.trace.record import Trace

DEFAULT_PATH: Final = "/ingest"
"""Path of a URL that has none."""

_log: Final = logging.getLogger("kqview.trace")
_SUFFIX: Final = ".json"
_REFUSED: Final = "refused"  # folder in the spool of what the receiver will never take
_MOST_REFUSED_BYTES: Final = 64 * 2**20
_MOST_TRIES: Final = 8  # of a trace whose every answer is "500"
_ABORT_S: Final = 1.0  # for the sender to notice that its post was ended
_ERROR_BYTES: Final = 500  # of a receiver's answer that are logged
# Answers that say "not now". Others below 500 say "never".
_LATER: Final = frozenset({408, 425, 429})
_FAILED: Final = 500  # may be the receiver's trouble with this one trace


@dataclass(slots=True)
class PosterStats:
    """Counters of a Poster.

    Attributes:
        n_posted: Traces given to `Poster.post`.
        n_found: Traces that an earlier process left in the spool.
        n_sent: Traces that the receiver has.
        n_waiting: Traces that wait, in the queue or in the spool.
        n_waiting_bytes: Size of those in the spool.
        n_refused: Traces that the receiver rejected for good.
        n_dropped: Traces that were lost because the queue or the spool was full.
        n_failures: Attempts that failed and were retried.
        last_error: Why the last attempt failed; None after a success.
    """

    n_posted: int = 0
    n_found: int = 0
    n_sent: int = 0
    n_waiting: int = 0
    n_waiting_bytes: int = 0
    n_refused: int = 0
    n_dropped: int = 0
    n_failures: int = 0
    last_error: str | None = None


@dataclass(slots=True)
class _Item:
    """A trace in the spool."""

    name: str
    n_bytes: int
    data: bytes | None  # None: in the file of that name
    n_tries: int = 0


class _Reply(NamedTuple):
    status: int
    text: str
    retry_after_s: float


class Poster:
    """Sends traces to *url*, without ever waiting; any thread. Also a context manager.

    Args:
        url: Where to post, ``http`` or ``https``; the path is ``/ingest`` if it has none.
        spool: Folder for waiting traces, created if necessary. Without one they are kept in memory
            and lost with the process.
        headers: Further headers, such as ``Authorization``.
        timeout_s: Time limit of a post, in seconds.
        max_queued: Maximum number of traces between `post` and the spool; beyond it the oldest is
            dropped.
        max_spool_bytes: Maximum size of the spool; beyond it the oldest trace is dropped.
        first_retry_s: Wait after the first failure, in seconds; it doubles with each further
            failure and is shortened at random by up to half.
        max_retry_s: Longest wait, in seconds.

    Raises:
        RequestError: *url* is not an ``http`` or ``https`` URL of a host.
        OSError: The folder cannot be created or read.
    """

    def __init__(
        self,
        url: str,
        *,
        spool: str | os.PathLike[str] | None = None,
        headers: Mapping[str, str] = MappingProxyType({}),
        timeout_s: float = 20.0,
        max_queued: int = 256,
        max_spool_bytes: int = 256 * 2**20,
        first_retry_s: float = 0.5,
        max_retry_s: float = 60.0,
    ) -> None:
        self._receiver = _Receiver(url, headers, timeout_s)
        self._spool = None if spool is None else os.fspath(spool)
        self._max_queued = max_queued
        self._max_bytes = max_spool_bytes
        self._first_retry_s = first_retry_s
        self._max_retry_s = max_retry_s
        self._changed = threading.Condition()
        self._queue: deque[Trace] = deque()
        self._waiting: deque[_Item] = deque()
        self._n_stored = 0  # or dropped: posted ones that the queue has let go of
        self._unstored: deque[tuple[int, Callable[[], object]]] = deque()
        self._n_in_hand = 0  # taken from one of them and on its way
        self._n_made = 0
        self._n_failed_in_row = 0
        self._not_before_s = 0.0
        self._is_closing = False
        self._is_closed = False
        self._stats = PosterStats()  # with n_waiting, which `stats` counts, left at 0
        self._find()
        self._stats.n_found = len(self._waiting)
        self._threads = [
            threading.Thread(target=loop, name=f"kqview-trace-{name}", daemon=True)
            for name, loop in (("writer", self._write), ("sender", self._send))
        ]
        for thread in self._threads:
            thread.start()
        atexit.register(self.close)

    # ---- for callers

    def post(self, trace: Trace) -> None:
        """Queue *trace*, which must not change any more, for sending; returns at once.

        A full queue drops its oldest trace, and a closed poster drops this one; both are counted.
        """
        with self._changed:
            self._stats.n_posted += 1
            if self._is_closing:
                self._stats.n_dropped += 1
                self._n_stored += 1
                return
            if len(self._queue) >= self._max_queued:
                self._queue.popleft()
                self._stats.n_dropped += 1
                self._n_stored += 1
            self._queue.append(trace)
            self._changed.notify_all()

    def when_stored(self, call: Callable[[], object]) -> None:
        """Call *call* once all traces that were posted until now are in the spool.

        That is now and on this thread, or later and on another one. What is dropped, or kept in
        memory because its file cannot be written, counts as well; both are logged or counted.
        """
        with self._changed:
            if self._n_stored < self._stats.n_posted:
                self._unstored.append((self._stats.n_posted, call))
                return
        call()

    def stats(self) -> PosterStats:
        """Return the current counters."""
        with self._changed:
            n_waiting = len(self._queue) + len(self._waiting) + self._n_in_hand
            return replace(self._stats, n_waiting=n_waiting)

    def flush(self, timeout_s: float) -> bool:
        """Wait until all traces are sent, at most *timeout_s* seconds; return whether they are."""
        with self._changed:
            return self._changed.wait_for(
                lambda: not self._queue and not self._waiting and not self._n_in_hand, timeout_s
            )

    def close(self, timeout_s: float = 5.0) -> None:
        """Send waiting traces for at most *timeout_s* seconds, then end; idempotent.

        The next Poster of a spool folder sends what remains there. A failed attempt is not
        retried.
        """
        with self._changed:
            is_first = not self._is_closing
            self._is_closing = True
            self._changed.notify_all()
        deadline_s = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, deadline_s - time.monotonic()))
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._receiver.abort()
        self._threads[-1].join(_ABORT_S)
        if not is_first:
            return
        atexit.unregister(self.close)
        with self._changed:
            n_kept = sum(item.data is None for item in self._waiting)
            n_lost = len(self._queue) + len(self._waiting) - n_kept
            self._stats.n_dropped += n_lost
        if n_lost:
            _log.warning("%d traces were not sent to %s and are lost", n_lost, self._receiver.name)
        if n_kept:
            _log.info("%d traces wait in %s to be sent later", n_kept, self._spool)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- the spool

    def _find(self) -> None:
        """Take over what earlier processes left in the folder."""
        if self._spool is None:
            return
        os.makedirs(os.path.join(self._spool, _REFUSED), exist_ok=True)
        durable.remove_leftovers(self._spool)
        for name in sorted(os.listdir(self._spool)):
            if name.endswith(_SUFFIX):
                with contextlib.suppress(FileNotFoundError):  # another process has sent it
                    n_bytes = os.path.getsize(os.path.join(self._spool, name))
                    self._add(_Item(name, n_bytes, None))

    def _write(self) -> None:
        """Body of the writer."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._is_closing)
                if not self._queue:
                    return
                trace = self._queue.popleft()
                self._n_in_hand += 1
            item = None
            try:
                item = self._stored(trace)
            except Exception:  # a trace that cannot be written must not end those to come
                _log.exception("the trace of %s is lost", trace.request.request_id)
            with self._changed:
                self._n_in_hand -= 1
                self._n_stored += 1
                if item is None:
                    self._stats.n_dropped += 1
                else:
                    self._add(item)
                self._changed.notify_all()
                calls: list[Callable[[], object]] = []
                while self._unstored and self._unstored[0][0] <= self._n_stored:
                    calls.append(self._unstored.popleft()[1])
            for call in calls:
                call()

    def _stored(self, trace: Trace) -> _Item:
        data = b"".join(part.encode("ascii") for part in trace.json_parts())
        digest = hashlib.sha256(trace.request.request_id.encode("utf-8", "replace")).hexdigest()
        self._n_made += 1
        name = f"{time.time_ns():020}-{os.getpid()}-{self._n_made}-{digest[:16]}{_SUFFIX}"
        if self._spool is not None:
            try:
                durable.write_whole(os.path.join(self._spool, name), data, is_private=True)
                return _Item(name, len(data), None)
            except OSError as error:
                _log.warning("the trace waits in memory, its file cannot be written: %s", error)
        return _Item(name, len(data), data)

    def _add(self, item: _Item) -> None:
        """Append to what waits, and drop the oldest of what is too much; with the lock."""
        self._waiting.append(item)
        self._stats.n_waiting_bytes += item.n_bytes
        while self._stats.n_waiting_bytes > self._max_bytes and self._waiting:
            self._stats.n_dropped += 1
            self._forget(self._waiting.popleft())

    def _forget(self, item: _Item) -> None:
        """Remove *item* for good; with the lock."""
        self._stats.n_waiting_bytes -= item.n_bytes
        if self._spool is not None and item.data is None:
            try:
                durable.remove(os.path.join(self._spool, item.name))
            except OSError as error:
                _log.warning("a trace that was sent stays in the spool: %s", error)

    def _reply_to(self, item: _Item) -> _Reply | str | None:
        """Post *item*; the reply, or why there is none; None if another process has sent it."""
        data = item.data
        if data is None:
            assert self._spool is not None
            try:
                with open(os.path.join(self._spool, item.name), "rb") as file:
                    data = file.read()
            except FileNotFoundError:
                return None
            except OSError as error:
                return f"its file cannot be read: {error}"
        return self._receiver.post(data)

    # ---- the sender

    def _send(self) -> None:
        """Body of the sender."""
        while (item := self._next()) is not None:
            reply = self._reply_to(item)
            with self._changed:
                self._n_in_hand -= 1
                self._settle(item, reply)
                self._changed.notify_all()

    def _next(self) -> _Item | None:
        """The item to send now; waits for one. None at the end."""
        with self._changed:
            while not self._is_closed:
                # Whoever closes has waited long enough: it sends what can be sent at once.
                wait_s = self._not_before_s - time.monotonic()
                has_more = self._queue or self._n_in_hand
                if self._is_closing and (wait_s > 0 or not (self._waiting or has_more)):
                    return None
                if self._waiting and wait_s <= 0:
                    self._n_in_hand += 1
                    return self._waiting.popleft()
                self._changed.wait(wait_s if self._waiting else None)
        return None

    def _settle(self, item: _Item, reply: _Reply | str | None) -> None:
        """Act on what `_reply_to` says of *item*; with the lock."""
        item.n_tries += 1
        if reply is None:
            self._stats.n_waiting_bytes -= item.n_bytes
        elif isinstance(reply, str):
            self._retry(item, reply, 0.0)
        elif 200 <= reply.status < 300:
            if self._n_failed_in_row:
                _log.info("%s takes traces again", self._receiver.name)
            self._n_failed_in_row, self._stats.last_error = 0, None
            self._stats.n_sent += 1
            self._forget(item)
        elif reply.status in _LATER or (
            reply.status >= 500 and (reply.status != _FAILED or item.n_tries < _MOST_TRIES)
        ):
            self._retry(item, f"it answered {reply.status} {reply.text}", reply.retry_after_s)
        else:
            self._stats.n_refused += 1
            self._stats.last_error = f"it answered {reply.status} {reply.text}"
            self._put_aside(item)

    def _retry(self, item: _Item, why: str, at_least_s: float) -> None:
        if not self._n_failed_in_row:
            _log.warning("a trace cannot be sent to %s: %s", self._receiver.name, why)
        self._stats.n_failures += 1
        self._stats.last_error = why
        wait_s = min(self._max_retry_s, self._first_retry_s * 2.0 ** min(self._n_failed_in_row, 30))
        wait_s = max(wait_s * random.uniform(0.5, 1.0), min(at_least_s, self._max_retry_s))
        self._n_failed_in_row += 1
        self._not_before_s = time.monotonic() + wait_s
        # Last in line, so that a trace that the receiver chokes on does not hold up the others.
        self._waiting.append(item)

    def _put_aside(self, item: _Item) -> None:
        """Keep *item* where it is not sent again."""
        if self._spool is None or item.data is not None:
            _log.warning("%s refuses a trace: %s", self._receiver.name, self._stats.last_error)
            self._forget(item)
            return
        self._stats.n_waiting_bytes -= item.n_bytes
        path = os.path.join(self._spool, _REFUSED, item.name)
        try:
            durable.move(os.path.join(self._spool, item.name), path)
            _trim(os.path.join(self._spool, _REFUSED))
        except OSError as error:
            _log.warning("a refused trace cannot be moved: %s", error)
        _log.warning(
            "%s refuses a trace, kept as %s: %s", self._receiver.name, path, self._stats.last_error
        )


def _trim(folder: str) -> None:
    """Remove the oldest files of *folder* beyond `_MOST_REFUSED_BYTES`."""
    names = sorted(os.listdir(folder))
    sizes = [os.path.getsize(os.path.join(folder, name)) for name in names]
    n_over = sum(sizes) - _MOST_REFUSED_BYTES
    for name, n_bytes in zip(names, sizes, strict=True):
        if n_over <= 0:
            return
        durable.remove(os.path.join(folder, name))
        n_over -= n_bytes


class _Receiver:
    """The receiver: one POST at a time, which another thread can end."""

    def __init__(self, url: str, headers: Mapping[str, str], timeout_s: float) -> None:
        try:
            parts = urlsplit(url)
            host, port = parts.hostname, parts.port
        except ValueError:
            host = port = None
            parts = urlsplit("")
        if parts.scheme not in ("http", "https") or not host or parts.username is not None:
            raise RequestError(
                f"url is {url!r}; it must be http:// or https:// and a host, such as "
                "http://127.0.0.1:6767/ingest; put a password into headers",
                parameter="url",
            )
        self._is_tls = parts.scheme == "https"
        self._host, self._port = host, port
        self._path = parts.path if len(parts.path) > 1 else DEFAULT_PATH
        self.name = f"{parts.scheme}://{parts.netloc}{self._path}"
        if parts.query:
            self._path += f"?{parts.query}"
        self._headers = {"content-type": "application/json", "connection": "close", **headers}
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._connection: http.client.HTTPConnection | None = None
        self._is_aborted = False

    def post(self, data: bytes) -> _Reply | str:
        """The reply to a POST of *data*, or why there is none."""
        kind = http.client.HTTPSConnection if self._is_tls else http.client.HTTPConnection
        connection = kind(self._host, self._port, timeout=self._timeout_s)
        with self._lock:
            if self._is_aborted:
                return "closed"
            self._connection = connection
        # The timeout of a socket is one for each read; a slow answer may have many.
        timer = threading.Timer(self._timeout_s, _shut, [connection])
        timer.daemon = True
        timer.start()
        try:
            connection.request("POST", self._path, data, self._headers)
            response = connection.getresponse()
            text = response.read(_ERROR_BYTES).decode("utf-8", "replace").strip()
            after = response.headers.get("retry-after") or ""
            after_s = float(after) if after.isascii() and after.isdigit() else 0.0
            return _Reply(response.status, text, after_s)
        except (OSError, http.client.HTTPException, ValueError) as error:
            return f"{type(error).__name__}: {error}"
        finally:
            timer.cancel()
            with self._lock:
                self._connection = None
            connection.close()

    def abort(self) -> None:
        """End the post that runs, and allow no more."""
        with self._lock:
            self._is_aborted = True
            if self._connection is not None:
                _shut(self._connection)


def _shut(connection: http.client.HTTPConnection) -> None:
    sock = connection.sock
    if sock is not None:
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)
