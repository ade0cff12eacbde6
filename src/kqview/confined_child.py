"""Child process of `kqview.confined`: answers requests of its owner, one after the other.

Runs as a script (``python -I -S confined_child.py``) that speaks on the socket of
`kqview.system.start`. It needs only the standard library and what the program imports; kqview's
native core is never loaded.

A message of the owner is a length and JSON. An answer has a kind before these: ``r`` ready, ``a``
the answer, ``e`` an error of kqview, ``x`` another one, ``m`` out of memory, ``l`` too long an
answer. Upper case says that this process leaves, because it keeps much memory.
"""

import importlib.util
import json
import os
import signal
import struct
import sys
import types
from functools import partial
from typing import Any

_receive, _put = partial(os.read, 0), partial(os.write, 0)


def _read(n: int) -> bytes:
    """*n* bytes; ends the process if the owner has gone."""
    data = bytearray()
    while len(data) < n:
        if not (more := _receive(n - len(data))):
            os._exit(0)
        data += more
    return bytes(data)


def _request() -> Any:
    (length,) = struct.unpack("!I", _read(4))
    return json.loads(_read(length).decode("utf-8", "surrogatepass"))


def _send(kind: str, body: bytes = b"") -> None:
    data = memoryview(struct.pack("!cI", kind.encode(), len(body)) + body)
    while data:
        data = data[_put(data) :]


def _loaded(about: dict[str, Any]) -> Any:
    """The program, and of kqview only the modules that it imports: no package's own code."""
    sys.path[:] = about["path"]
    for name in ("kqview", "kqview.chat"):
        package = types.ModuleType(name)
        package.__path__ = [os.path.join(about["packages"], *name.split(".")[1:])]
        sys.modules[name] = package
    spec = importlib.util.spec_from_file_location("program", about["program"])
    assert spec is not None
    assert spec.loader is not None
    program = importlib.util.module_from_spec(spec)
    sys.modules["program"] = program
    spec.loader.exec_module(program)
    return program


def _mapped_bytes() -> int:
    """The memory that this process has mapped; 0 on macOS and Windows, which do not say."""
    try:
        with open("/proc/self/statm", encoding="ascii") as pages:
            return int(pages.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def _limit(memory_bytes: int) -> None:
    try:
        import resource
    except ImportError:  # Windows has no such limits
        return
    limits = {"RLIMIT_CORE": 0, "RLIMIT_FSIZE": 0, "RLIMIT_NOFILE": 16}
    if mapped := _mapped_bytes():
        limits["RLIMIT_AS"] = mapped + memory_bytes
    for name, limit in limits.items():
        _, hard = resource.getrlimit(number := getattr(resource, name))
        limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        resource.setrlimit(number, (limit, limit))


def _answered(program: Any, length_max: int) -> tuple[str, bytes]:
    try:
        kind, value = "a", program.answer(_request())
    except MemoryError:
        raise
    except Exception as error:
        name = type(error).__name__
        if type(error).__module__ == "kqview.errors":
            kind, value = "e", {"error": name, "message": str(error), "about": vars(error)}
        else:
            kind, value = "x", f"{name}: {error}"
    body = json.dumps(value, ensure_ascii=False).encode("utf-8", "surrogatepass")
    return (kind, body) if len(body) <= length_max else ("l", b"")


def _main() -> None:
    global _receive, _put
    if os.name == "nt":
        socket = importlib.import_module("socket")
        line = socket.fromshare(sys.stdin.buffer.read())
        _receive, _put = line.recv, line.send
    for name in ("SIGINT", "SIGTERM", "SIGHUP"):  # meant for the owner
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)
    if hasattr(signal, "SIGPROF"):
        # The limit on CPU time, which an owner may ignore or block, and with it its children.
        signal.signal(signal.SIGPROF, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
    about = _request()
    try:
        program = _loaded(about)
        _limit(about["memory_bytes"])
    except Exception as error:
        _send("x", f"{type(error).__name__}: {error}".encode())
        return
    _send("r")
    enough = _mapped_bytes() + about["memory_bytes"] // 4
    while True:
        # Ends the process, also within one call of C. Waiting for a request takes no CPU time.
        if hasattr(signal, "setitimer"):
            signal.setitimer(signal.ITIMER_PROF, about["cpu_s"])
        try:
            kind, body = _answered(program, about["length_max"])
        except MemoryError:
            _send("m")
            return
        leaves = _mapped_bytes() > enough
        _send(kind.upper() if leaves else kind, body)
        if leaves:
            return


if __name__ == "__main__":
    _main()
