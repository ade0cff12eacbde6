"""Supervisor: the parent of ``kqview serve``, which restarts the worker if it crashes or hangs.

It owns the listening socket, so that no connection is refused while there is no worker; meanwhile
it answers 503 with Retry-After itself. It runs as a script of its own (``python supervisor.py
...``) and imports nothing but the standard library, so that it stays small and has little to fail
with.

One thread, one loop: signals, the worker's end and its signs of life wake it through descriptors.
`kqview.server.web.worker` is the other side.
"""

import contextlib
import json
import os
import selectors
import signal
import socket
import sys
import time
from types import FrameType

ENVIRONMENT = "KQVIEW_WORKER"
"""Variable that names a worker's descriptors: listening socket, control socket, notes."""

READY = b"r"
"""Sent by a worker once it accepts requests, and returned once the supervisor refuses no more."""
ALIVE = b"a"
"""Sent by a worker about once a second from its start on."""

NOTES_BYTES = 4096
"""Size of the notes: the worker's requests in flight as JSON, padded with spaces."""

FIRST_DELAY_S = 0.5
LONGEST_DELAY_S = 30.0
GOOD_RUN_S = 60.0
"""After a run of this length the next restart counts as the first."""

_REFUSAL_BODY = b'{"error":"the server is starting; try again later","error_code":"BUSY"}'
_REFUSAL_LIMIT_S = 2.0  # for a client to send its request and read the answer
_MOST_REFUSED = 64  # connections at a time; those beyond are closed at once
_KILL_AFTER_S = 2.0  # after SIGABRT, which lets the worker print its stacks
_GRACE_MARGIN_S = 3.0  # beyond its own grace, after which the worker is killed
_TICK_S = 1.0
STOPS = [signal.SIGTERM, signal.SIGINT, *([signal.SIGHUP] if hasattr(signal, "SIGHUP") else [])]
"""Signals that ask for the end; SIGHUP does so where there is no configuration to read again."""


def refusal(retry_after_s: int) -> bytes:
    """The answer while there is no worker."""
    head = (
        "HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\n"
        "x-content-type-options: nosniff\r\n"
        f"retry-after: {retry_after_s}\r\ncontent-length: {len(_REFUSAL_BODY)}\r\n"
        "connection: close\r\n\r\n"
    )
    return head.encode() + _REFUSAL_BODY


class Refusals:
    """Connections that are told to try again later; bounded in number and time."""

    def __init__(self, selector: selectors.BaseSelector, *, speaks_tls: bool) -> None:
        self._selector = selector
        self._speaks_tls = speaks_tls
        self._open: dict[socket.socket, tuple[float, bool]] = {}  # end, whether answered
        self.retry_after_s = 1

    def accept(self, listener: socket.socket) -> None:
        try:
            client, _ = listener.accept()
        except OSError:  # the client left, or the worker was faster
            return
        client.setblocking(False)
        # A plain answer would be noise to a client that waits for a TLS handshake.
        if self._speaks_tls or len(self._open) >= _MOST_REFUSED:
            client.close()
            return
        self._open[client] = time.monotonic() + _REFUSAL_LIMIT_S, False
        self._selector.register(client, selectors.EVENT_READ, self.read)

    def read(self, client: socket.socket) -> None:
        """Answer the first bytes; read the rest: closing on unread bytes cuts the answer."""
        try:
            data = client.recv(65536)
            end_s, is_answered = self._open[client]
            if data and not is_answered:
                client.send(refusal(self.retry_after_s))
                client.shutdown(socket.SHUT_WR)
                self._open[client] = end_s, True
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self.drop(client)

    def drop(self, client: socket.socket) -> None:
        del self._open[client]
        self._selector.unregister(client)
        client.close()

    def drop_late(self) -> None:
        now_s = time.monotonic()
        for client in [one for one, (end_s, _) in self._open.items() if end_s < now_s]:
            self.drop(client)

    def drop_all(self) -> None:
        for client in list(self._open):
            self.drop(client)


class Hangup:
    """Tells the two meanings of SIGHUP apart: an operator's wish, and a terminal that has gone."""

    def __init__(self) -> None:
        self._had_terminal = _has_terminal()

    def is_of_terminal(self) -> bool:
        """Whether the terminal that this process began with has gone."""
        return self._had_terminal and not _has_terminal()


def _has_terminal() -> bool:
    try:
        return os.isatty(0)
    except OSError:
        return False


class Supervisor:
    """Runs *command* until it ends for good."""

    def __init__(
        self,
        listener: socket.socket,
        command: list[str],
        *,
        grace_s: float,
        stall_s: float,
        speaks_tls: bool = False,
        reloads: bool = False,
    ) -> None:
        """Supervise *command*.

        Args:
            listener: A bound socket; `run` makes it listen.
            command: The worker's; the first item is the path of the program.
            grace_s: Longest time that the worker takes to end at SIGTERM.
            stall_s: Longest silence of a worker before it is killed; 0 for no limit.
            speaks_tls: Whether clients expect TLS.
            reloads: Whether the worker reads its configuration again at SIGHUP; else that ends it.
        """
        self._listener = listener
        self._command = command
        self._grace_s = grace_s
        self._stall_s = stall_s
        self._hangup = Hangup() if reloads else None
        self._shall_reload = False  # once the worker is ready
        self._selector = selectors.DefaultSelector()
        self._refusals = Refusals(self._selector, speaks_tls=speaks_tls)
        self._notes = os.memfd_create("kqview-notes") if hasattr(os, "memfd_create") else _scratch()
        self._wakes, self._waker = socket.socketpair()
        self._control: socket.socket | None = None
        self._is_accepting = False
        self._pid = 0
        self._started_s = 0.0
        self._sign_s = 0.0  # the worker's last sign of life
        self._is_ready = False
        self._was_ready = False  # was any worker ever?
        self._kill_at_s: float | None = None
        self._delay_s = 0.0
        self._stop = 0  # the first signal that asked to end

    def run(self) -> int:
        """Supervise until the worker has ended for good; returns the exit status."""
        self._listener.listen(1024)
        self._listener.setblocking(False)
        self._wakes.setblocking(False)
        self._waker.setblocking(False)
        self._selector.register(self._wakes, selectors.EVENT_READ, _drain)
        signal.set_wakeup_fd(self._waker.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, _woken)
        for number in STOPS:
            if number == signal.SIGHUP and self._hangup is not None:
                signal.signal(number, self._hung_up)
            elif signal.getsignal(number) is not signal.SIG_IGN:  # as nohup leaves it
                signal.signal(number, self._asked)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPS)  # whoever started it held them back
        while True:
            self._start()
            pid, status = self._pid, self._watch()
            if not self._goes_on(pid, status):
                self._refusals.drop_all()
                # A worker that was starting ended as its signal says, however it was told.
                is_early = self._stop and status and not self._is_ready
                return -self._stop if is_early else os.waitstatus_to_exitcode(status)
            if not self._pause():
                self._refusals.drop_all()
                return 0

    # ---- the worker

    def _start(self) -> None:
        control, theirs = socket.socketpair()
        inherited = (self._listener.fileno(), theirs.fileno(), self._notes)
        os.pwrite(self._notes, b" " * NOTES_BYTES, 0)
        self._started_s = self._sign_s = time.monotonic()
        self._is_ready = False
        self._shall_reload = False  # it reads the configuration as it is now
        self._kill_at_s = None
        # A signal that comes now is held back until the worker's handlers are the default ones, and
        # until this process knows the worker: its handler forwards it and sets the time limit.
        signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)
        try:
            self._pid = os.fork()
            if self._pid == 0:
                self._become_worker(inherited)
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPS)
        if self._stop:  # the signal came between the last worker and this one
            self._signal(signal.SIGTERM)
            self._kill_at_s = time.monotonic() + self._grace_s + _GRACE_MARGIN_S
        theirs.close()
        control.setblocking(False)
        self._control = control
        self._selector.register(control, selectors.EVENT_READ, self._hear)
        self._accept(wanted=True)

    def _become_worker(self, inherited: tuple[int, int, int]) -> None:
        try:
            # Ctrl-C reaches the terminal's whole group; the worker shall hear of it once, from us.
            os.setsid()
            signal.set_wakeup_fd(-1)
            for number in (signal.SIGCHLD, *STOPS):
                if signal.getsignal(number) is not signal.SIG_IGN:
                    signal.signal(number, signal.SIG_DFL)
            # One that reads its configuration again hears SIGHUP once it has a handler.
            heard = STOPS if self._hangup is None else set(STOPS) - {signal.SIGHUP}
            signal.pthread_sigmask(signal.SIG_UNBLOCK, heard)
            for descriptor in inherited:
                os.set_inheritable(descriptor, True)
            environment = {**os.environ, ENVIRONMENT: ",".join(map(str, inherited))}
            os.execve(self._command[0], self._command, environment)
        except BaseException as error:
            _say(f"the worker cannot be started: {error}")
            os._exit(1)

    def _watch(self) -> int:
        """Wait for the end of the worker; returns its wait status."""
        while True:
            ended = _reaped(self._pid)
            if ended is not None:
                break
            self._turn(_TICK_S)
            now_s = time.monotonic()
            if self._kill_at_s is not None and now_s > self._kill_at_s:
                self._signal(signal.SIGKILL)
                self._kill_at_s = now_s + _TICK_S
            elif self._kill_at_s is None and 0 < self._stall_s < now_s - self._sign_s:
                _say(f"worker {self._pid} gave no sign of life for {now_s - self._sign_s:.1f} s")
                self._signal(signal.SIGABRT)
                self._kill_at_s = now_s + _KILL_AFTER_S
        self._pid = 0
        if self._control is not None:
            self._drop_control()
        return ended

    def _hear(self, control: socket.socket) -> None:
        try:
            heard = control.recv(4096)
        except BlockingIOError:
            return
        except OSError:
            heard = b""
        if not heard:  # the worker ends
            self._drop_control()
            self._accept(wanted=not self._stop)
            return
        self._sign_s = time.monotonic()
        if READY in heard:
            self._is_ready = self._was_ready = True
            self._accept(wanted=False)
            with contextlib.suppress(OSError):
                control.send(READY)
            if self._shall_reload:
                self._reload()

    def _drop_control(self) -> None:
        assert self._control is not None
        self._selector.unregister(self._control)
        self._control.close()
        self._control = None

    def _goes_on(self, pid: int, status: int) -> bool:
        """Whether a worker that ended like this is restarted; logs why it ended."""
        code = os.waitstatus_to_exitcode(status)
        after_s = time.monotonic() - self._started_s
        if self._stop:
            if code != 0 and self._is_ready:
                _say(f"worker {pid} ended {_how(code)} on its way out")
            return False
        if code == 0:
            return False
        if not self._was_ready:
            return False  # a wrong setting or a broken model, which it reported itself
        notes = self._read_notes()
        asked = ", ".join(notes) if notes else "none"
        self._delay_s = (
            FIRST_DELAY_S
            if self._delay_s == 0 or (self._is_ready and after_s > GOOD_RUN_S)
            else min(2 * self._delay_s, LONGEST_DELAY_S)
        )
        _say(
            f"worker {pid} ended {_how(code)} after {after_s:.1f} s; requests in flight: "
            f"{asked}; restarting in {self._delay_s:g} s"
        )
        return True

    def _read_notes(self) -> list[str]:
        try:
            return list(map(str, json.loads(os.pread(self._notes, NOTES_BYTES, 0))))
        except ValueError:  # none yet, or it died while writing them
            return []

    def _pause(self) -> bool:
        """Wait before the next start and refuse clients meanwhile; False if asked to end."""
        end_s = time.monotonic() + self._delay_s
        self._refusals.retry_after_s = max(1, round(self._delay_s) + 1)
        self._accept(wanted=True)
        while not self._stop and (left_s := end_s - time.monotonic()) > 0:
            _reaped(0)
            self._turn(min(left_s, _TICK_S))
        return not self._stop

    # ---- what wakes it

    def _turn(self, longest_s: float) -> None:
        for key, _ in self._selector.select(longest_s):
            key.data(key.fileobj)
        self._refusals.drop_late()

    def _accept(self, *, wanted: bool) -> None:
        if wanted == self._is_accepting:
            return
        self._is_accepting = wanted
        if wanted:
            self._selector.register(self._listener, selectors.EVENT_READ, self._refusals.accept)
        else:
            self._selector.unregister(self._listener)

    def _asked(self, number: int, _frame: FrameType | None) -> None:
        """Handler of the signals that end it: the first is forwarded, the second kills."""
        if self._stop:
            self._signal(signal.SIGKILL)
            return
        self._stop = number
        self._kill_at_s = time.monotonic() + self._grace_s + _GRACE_MARGIN_S
        # A terminal that closes is an end like any other; a worker that loads a model would hear
        # SIGINT only after that.
        is_interrupt = number == signal.SIGINT and self._is_ready
        self._signal(signal.SIGINT if is_interrupt else signal.SIGTERM)

    def _hung_up(self, number: int, frame: FrameType | None) -> None:
        """Handler of SIGHUP where the worker reads its configuration again."""
        assert self._hangup is not None
        if self._hangup.is_of_terminal():
            self._asked(number, frame)
        elif self._is_ready:
            self._reload()
        else:  # it has no handler yet, and may have read the configuration already
            self._shall_reload = True

    def _reload(self) -> None:
        self._shall_reload = False
        self._signal(signal.SIGHUP)

    def _signal(self, number: int) -> None:
        if self._pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, number)


def _reaped(wanted: int) -> int | None:
    """Reap every child that ended, as process 1 of a container must; returns *wanted*'s status."""
    found = None
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return found
        if pid == 0:
            return found
        if pid == wanted:
            found = status


def _how(code: int) -> str:
    if code >= 0:
        return f"with status {code}"
    try:
        return f"by {signal.Signals(-code).name}"
    except ValueError:
        return f"by signal {-code}"


def _say(text: str) -> None:
    with contextlib.suppress(OSError):
        os.write(2, f"kqview supervisor: {text}\n".encode(errors="backslashreplace"))


def _woken(_number: int, _frame: FrameType | None) -> None:
    """Does nothing; with a handler the signal is written to the wakeup descriptor."""


def _drain(wakes: socket.socket) -> None:
    with contextlib.suppress(BlockingIOError):
        while wakes.recv(4096):
            pass


def _scratch() -> int:
    import tempfile

    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def main(arguments: list[str]) -> int:
    """Run with ``LISTENER_FD GRACE_S STALL_S SPEAKS_TLS RELOADS COMMAND...``.

    Returns:
        The exit status.
    """
    listener_fd, grace_s, stall_s, speaks_tls, reloads, *command = arguments
    listener = socket.socket(fileno=int(listener_fd))
    supervisor = Supervisor(
        listener,
        command,
        grace_s=float(grace_s),
        stall_s=float(stall_s),
        speaks_tls=speaks_tls == "1",
        reloads=reloads == "1",
    )
    status = supervisor.run()
    return status if status >= 0 else 128 - status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
