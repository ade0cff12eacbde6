"""Child process of the core that runs llguidance, for cpp/sample/constraint_host.h.

Runs as a script, ``python -I -S -B constraint_child.py LIBRARY``, and speaks on descriptor 0. It
loads the library, builds the vocabulary's trie and forks a process for each constraint, which has
limits on its memory and CPU time. Needs nothing but the standard library.

Numbers have the machine's byte order. Descriptor 0 of a constraint gets the length of the kind and
of the text, both, and then steps: whether to begin anew, the number of tokens, and these. Each
answer is a kind (``m`` a mask, ``e`` an error), microseconds of CPU time, KiB that the process has
grown, a length and so many bytes.
"""

import ctypes
import gc
import os
import resource
import signal
import socket
import struct
import sys
import time
from typing import Any

_HEAD = struct.Struct("=4Q2d")
_OPERATION = struct.Struct("=c3xI")
_TEXTS = struct.Struct("=2I")
_STEP = struct.Struct("=2I")
_ANSWER = struct.Struct("=c3x3I")
_STACK_BYTES = 64 << 20
_ERROR_BYTES = 2000
_RSS_UNIT = 1 if sys.platform == "darwin" else 1024


class _TokenizerInit(ctypes.Structure):
    """llguidance's LlgTokenizerInitV2; the size lets later versions append fields."""

    _fields_ = (
        ("struct_size", ctypes.c_size_t),
        ("vocab_size", ctypes.c_uint32),
        ("tok_eos", ctypes.c_uint32),
        ("token_lens", ctypes.c_char_p),
        ("token_bytes", ctypes.c_char_p),
        ("tokenizer_json", ctypes.c_char_p),
        ("tokenize_assumes_string", ctypes.c_bool),
        ("tokenize_fn", ctypes.c_void_p),
        ("use_approximate_greedy_tokenize_fn", ctypes.c_bool),
        ("tokenize_user_data", ctypes.c_void_p),
        ("slices", ctypes.c_void_p),
        ("tok_eos_extra", ctypes.c_char_p),
        ("tok_eos_extra_count", ctypes.c_uint32),
    )


class _MatcherInit(ctypes.Structure):
    """The beginning of LlgConstraintInit; llguidance writes defaults for the rest, which grows."""

    _fields_ = (
        ("tokenizer", ctypes.c_void_p),
        ("log_buffer_level", ctypes.c_uint32),
        ("log_stderr_level", ctypes.c_uint32),
        ("rest", ctypes.c_char * 1024),
    )


def _read(n: int) -> bytes:
    """*n* bytes of descriptor 0; ends the process if the owner has gone."""
    parts: list[bytes] = []
    while n:
        if not (part := os.read(0, n)):
            os._exit(0)
        parts.append(part)
        n -= len(part)
    return b"".join(parts)


def _library(path: str) -> Any:
    """llguidance's C interface, with the types of the functions used."""
    library = ctypes.CDLL(path)
    pointer, number = ctypes.c_void_p, ctypes.c_int32
    text, size = ctypes.c_char_p, ctypes.c_size_t
    for name, result, *arguments in (
        ("llg_new_tokenizer_v2", pointer, pointer, text, size),
        ("llg_constraint_init_set_defaults", None, pointer, pointer),
        ("llg_new_matcher", pointer, pointer, text, text),
        ("llg_matcher_get_error", text, pointer),
        ("llg_matcher_compute_mask", number, pointer),
        ("llg_matcher_get_mask", pointer, pointer),
        ("llg_matcher_consume_token", number, pointer, ctypes.c_uint32),
        ("llg_matcher_reset", number, pointer),
    ):
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


class _Host:
    """The vocabulary, and the processes made of this one."""

    def __init__(self, path: str) -> None:
        self._library = _library(path)
        n_vocab, n_ends, n_bytes, self._memory_bytes, self._compile_s, self._step_s = _HEAD.unpack(
            _read(_HEAD.size)
        )
        ends = _read(4 * n_ends)
        lengths, words = _read(4 * n_vocab), _read(n_bytes)
        init = _TokenizerInit(
            struct_size=ctypes.sizeof(_TokenizerInit),
            vocab_size=n_vocab,
            tok_eos=struct.unpack_from("=I", ends)[0],
            token_lens=lengths,
            token_bytes=words,
            # It would only force tokens; here the model chooses each one.
            use_approximate_greedy_tokenize_fn=True,
            tok_eos_extra=ends[4:],
            tok_eos_extra_count=n_ends - 1,
        )
        reason = ctypes.create_string_buffer(300)
        self._tokenizer = self._library.llg_new_tokenizer_v2(ctypes.byref(init), reason, 300)
        if not self._tokenizer:
            raise RuntimeError(reason.value.decode("utf-8", "replace"))
        self._n_mask = (n_vocab + 31) // 32 * 4
        self._children: dict[int, int] = {}  # process ids by number

    def run(self) -> None:
        """Fork and kill as the owner asks."""
        with socket.socket(fileno=0) as owner:
            owner.sendall(b"r")
            while True:
                data, fds, _, _ = socket.recv_fds(owner, _OPERATION.size, 1)
                if not data:
                    break
                kind, number = _OPERATION.unpack(data)
                answer = self._fork(number, fds[0]) if kind == b"f" else self._end(number)
                if kind != b"d":
                    owner.sendall(bytes([answer]))
            for one in list(self._children):
                self._end(one)

    def _fork(self, number: int, fd: int) -> bool:
        try:
            pid = os.fork()
        except OSError:
            os.close(fd)
            return False
        if not pid:
            try:
                os.dup2(fd, 0)
                os.close(fd)
                self._limit()
                self._serve()
            except MemoryError:
                os.abort()  # as llguidance does
            finally:
                os._exit(1)
        os.close(fd)
        self._children[number] = pid
        return True

    def _end(self, number: int) -> int:
        """Kill a child; the signal that had ended it before."""
        if not (pid := self._children.pop(number, 0)):
            return 0
        os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        return os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0

    def _limit(self) -> None:
        limits = {"RLIMIT_CORE": 0, "RLIMIT_FSIZE": 0, "RLIMIT_NOFILE": 8}
        if sys.platform == "linux":  # macOS enforces none
            with open("/proc/self/statm", encoding="ascii") as pages:
                mapped = int(pages.read().split()[0]) * resource.getpagesize()
            limits["RLIMIT_AS"] = mapped + _STACK_BYTES + self._memory_bytes
        for name, limit in limits.items():
            _, hard = resource.getrlimit(kind := getattr(resource, name))
            limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
            resource.setrlimit(kind, (limit, limit))

    def _serve(self) -> None:
        """Answer the steps of one constraint."""
        library = self._library
        n_kind, n_text = _TEXTS.unpack(_read(_TEXTS.size))
        kind, text = _read(n_kind), _read(n_text)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

        def send(kind: bytes, body: bytes) -> None:
            grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak
            used_us = int((time.process_time() - started_s) * 1e6)
            data = _ANSWER.pack(kind, used_us, grown * _RSS_UNIT >> 10, len(body)) + body
            while data:
                data = data[os.write(0, data) :]

        # Ends the process, also within one call of C. Waiting for a step takes no CPU time.
        signal.setitimer(signal.ITIMER_PROF, self._compile_s)
        started_s = time.process_time()
        init = _MatcherInit()
        library.llg_constraint_init_set_defaults(ctypes.byref(init), self._tokenizer)
        init.log_buffer_level = init.log_stderr_level = 0
        matcher = library.llg_new_matcher(ctypes.byref(init), kind, text)
        is_well = library.llg_matcher_get_error(matcher) is None
        while is_well and library.llg_matcher_compute_mask(matcher) == 0:
            send(b"m", ctypes.string_at(library.llg_matcher_get_mask(matcher), self._n_mask))
            is_anew, n_tokens = _STEP.unpack(_read(_STEP.size))
            tokens = struct.unpack(f"={n_tokens}I", _read(4 * n_tokens))
            signal.setitimer(signal.ITIMER_PROF, self._step_s)
            started_s = time.process_time()
            is_well = not is_anew or library.llg_matcher_reset(matcher) == 0
            is_well = is_well and all(
                library.llg_matcher_consume_token(matcher, token) == 0 for token in tokens
            )
        send(b"e", (library.llg_matcher_get_error(matcher) or b"")[:_ERROR_BYTES])


def _main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # meant for the owner
        signal.signal(number, signal.SIG_IGN)
    os.closerange(3, 1 << 16)
    os.chdir("/")
    _, hard = resource.getrlimit(resource.RLIMIT_STACK)
    limit = _STACK_BYTES if hard == resource.RLIM_INFINITY else min(hard, _STACK_BYTES)
    resource.setrlimit(resource.RLIMIT_STACK, (limit, hard))
    try:
        host = _Host(sys.argv[1])
    except Exception as error:
        os.write(0, b"x" + " ".join(str(error).split()).encode()[:250])
        return
    gc.collect()
    gc.freeze()  # shared pages stay shared
    host.run()


if __name__ == "__main__":
    _main()
