"""Child process of the core that runs llguidance, for cpp/sample/constraint_host.h.

Runs as a script, ``python -I -S -B constraint_child.py LIBRARY``, and speaks on descriptor 0. It
loads the library, builds the vocabulary's trie and forks a process for each constraint, which has
limits on its memory and CPU time. Needs nothing but the standard library.

Numbers have the machine's byte order. Descriptor 0 of a constraint gets the length of the kind and
of the text, both, and then steps: their kind, the number of tokens, and these. A step adds the
tokens (0), does so anew (1), or asks whether a token, followed by the number of tokens that are
left with it, leaves enough of them to end the output (2). Each answer is a kind (``m`` a mask,
``t`` the token or another one that does, ``e`` an error), microseconds of CPU time, KiB that the
process has grown, a length and so many bytes.

Beside llguidance, which ends nothing: JSON numbers end where they have the digits that JSON readers
hold (`Numbers`), and an output is ended while there are tokens for that (`_Ends`).
"""

import contextlib
import ctypes
import gc
import itertools
import os
import re
import signal
import socket
import struct
import sys
import time
from collections import Counter
from typing import Any

try:
    import resource
except ImportError:  # Windows, where only `Numbers` is used
    resource: Any = None

_HEAD = struct.Struct("=4Q2d")
_OPERATION = struct.Struct("=c3xI")
_TEXTS = struct.Struct("=2I")
_STEP = struct.Struct("=2I")
_ANSWER = struct.Struct("=c3x3I")
_STACK_BYTES = 64 << 20
_ANEW, _SETTLE = 1, 2  # kinds of steps
_ERROR_CHARACTERS = 3000
_SPECIAL = b"\xff"  # how the text of a special token begins
_AFTER_NUMBERS = frozenset((b"", b",", b"}", b"]", b" ", b"\n", b"\t", b"\r", _SPECIAL))
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
        ("llg_matcher_rollback", number, pointer, size),
        ("llg_matcher_is_accepting", ctypes.c_bool, pointer),
        ("llg_matcher_validate_tokens", number, pointer, pointer, size),
        ("llg_matcher_compute_ff_tokens", number, pointer, pointer, size),
    ):
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


def _mask(ids: list[int]) -> int:
    """One bit per token."""
    bits = bytearray(max(ids, default=0) // 8 + 1)
    for i in ids:
        bits[i // 8] |= 1 << i % 8
    return int.from_bytes(bits, "little")


class Numbers:
    """Ends JSON numbers, for which a grammar of llguidance has no limit.

    Most schemas bound their integers (kqview/types/closed_schema.py), others have the digits of an
    int64. A number goes on where it may not end, such as below its minimum.
    """

    SIGNIFICANT_MAX = 17
    INTEGER_MAX = 19
    DIGITS_MAX = 24
    EXPONENT_MAX = 290
    EXPONENT_DIGITS_MAX = 3
    _NUMBER = re.compile(rb"(\d+)(\.\d*)?([eE][+-]?(\d*))?$")
    TAIL_BYTES = 64

    def __init__(self, pieces: list[bytes]) -> None:
        nines = bytes.maketrans(b"12345678", b"99999999")
        longer: dict[bytes, list[int]] = {}  # what tokens add to a number
        ends: list[int] = []
        beginning = re.compile(rb"[0-9.eE+-]+")
        for i, piece in enumerate(pieces):
            if piece[:1] in _AFTER_NUMBERS:
                ends.append(i)
            elif (found := beginning.match(piece)) and re.search(rb"[0-9.]", found[0]):
                longer.setdefault(found[0].translate(nines), []).append(i)
        self._longer = {shape: _mask(ids) for shape, ids in longer.items()}
        self._ends = _mask(ends)
        self._quote, self._point = (
            _mask([pieces.index(text)]) if text in pieces else 0 for text in (b'"', b".")
        )

    def held(self, mask: bytes, text: bytes) -> bytes:
        """*mask*, of what may follow *text*, or its last `TAIL_BYTES`, without what is too long."""
        if not (found := self._NUMBER.search(text)):
            return mask
        allowed = int.from_bytes(mask, "little")
        is_integer = found[2] is None and found[3] is None and not allowed & self._point
        if allowed & self._quote:  # in a string
            return mask
        n_max = self.INTEGER_MAX if is_integer else self.SIGNIFICANT_MAX
        for shape, tokens in self._longer.items():
            if self._is_too_long(text + shape, n_max):
                allowed &= ~tokens
        return allowed.to_bytes(len(mask), "little") if allowed & self._ends else mask

    def _is_too_long(self, text: bytes, n_max: int) -> bool:
        if not (found := self._NUMBER.search(text)):
            return False
        digits, exponent = found[1] + (found[2] or b"")[1:], found[4] or b""
        return (
            len(digits.lstrip(b"0")) + (found[2] == b".") > n_max
            or len(digits) > self.DIGITS_MAX
            or len(exponent) > self.EXPONENT_DIGITS_MAX
            or int(exponent or b"0") > self.EXPONENT_MAX  # a float64
        )


class _Ends:
    """Finds a short end of an output: what closes is tried before what goes on.

    Not the shortest one: a state of llguidance cannot be compared with another.
    """

    _CHOICES_MAX = 120
    _PAUSES = 16
    _CLOSING = b'}]",:'
    _LATER = b"@./0123456789ntfabcdeghijklmopqrsuvwxyz"

    def __init__(self, library: Any, pieces: list[bytes], end: int) -> None:
        self._library = library
        self._end = end
        single = {piece: i for i, piece in enumerate(pieces) if len(piece) == 1}
        later = bytes(dict.fromkeys(self._LATER + bytes(range(32, 256)) + b"\t\n\r[{"))
        special = [i for i, piece in enumerate(pieces) if piece[:1] == _SPECIAL and i != end]
        self._special = special[: self._CHOICES_MAX]

        def tokens(of: bytes) -> list[int]:
            return [single[one] for one in (bytes([byte]) for byte in of) if one in single]

        self._closing = tokens(self._CLOSING)
        letters = {len(piece): i for i, piece in enumerate(pieces) if piece.isalpha()}
        self._fillers = [letters[n] for n in (8, 4, 2) if n in letters]
        self._later = [*self._fillers, *tokens(later)]
        self._quote, self._letter = tokens(b'"'), tokens(b"z")  # which no JSON has but in strings
        self._n_pauses = 0
        self._forced = (ctypes.c_uint32 * 256)()

    def settle(
        self, matcher: int, token: int, n_left: int, end: list[int] | None
    ) -> tuple[int, list[int] | None]:
        """The token to take where *token* was chosen, and an end after it, if one is known.

        *end*: that of the output before it. *n_left*: tokens that are left, with this one.
        """
        if self._n_pauses:  # the last search found nothing, and may have taken long
            self._n_pauses -= 1
            return token, None
        if end and end[0] == token:
            return token, end[1:]
        if end and len(end) < n_left and self._follows(matcher, [token, *end]):
            return token, end
        after = None
        if self._library.llg_matcher_consume_token(matcher, token) == 0:
            after = self._find(matcher, n_left - 1)
            self._library.llg_matcher_rollback(matcher, 1)
        if after is not None:
            return token, after
        if end is None or len(end) > n_left:
            end = self._find(matcher, n_left)
        if end is None:
            self._n_pauses = min(self._PAUSES, n_left // 16)
            return token, None
        return end[0], end[1:]

    def _follows(self, matcher: int, tokens: list[int]) -> bool:
        """Whether *tokens* may follow."""
        array = (ctypes.c_uint32 * len(tokens))(*tokens)
        n_valid = self._library.llg_matcher_validate_tokens(matcher, array, len(tokens))
        return bool(n_valid == len(tokens))

    def _find(self, matcher: int, n_max: int) -> list[int] | None:
        """Tokens that end the output, at most *n_max* with the one that ends the text."""
        library, found, n_choices = self._library, list[int](), 0
        used: Counter[int] = Counter()
        is_ended = False
        while len(found) < n_max and n_choices < self._CHOICES_MAX:
            if is_ended := library.llg_matcher_is_accepting(matcher):
                break
            n_forced = library.llg_matcher_compute_ff_tokens(matcher, self._forced, 256)
            added = list(self._forced[: max(n_forced, 0)])
            if not added:
                n_choices += 1
                added = self._choice(matcher, used)
            if not added or any(library.llg_matcher_consume_token(matcher, i) for i in added):
                break
            found += added
        library.llg_matcher_rollback(matcher, len(found))
        return [*found, self._end] if is_ended and len(found) < n_max else None

    def _choice(self, matcher: int, used: Counter[int]) -> list[int]:
        closing = self._quote if self._follows(matcher, self._letter) else self._closing
        later = sorted(self._later, key=lambda one: used[one])  # none again and again
        for one in (*self._special, *closing, *later):
            if self._follows(matcher, [one]):
                used[one] += 1 if one in self._fillers else 2
                return [one]
        return []


class _ConstraintHost:
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
        sizes = struct.unpack(f"={n_vocab}I", lengths)
        places = [0, *itertools.accumulate(sizes)]
        pieces = [words[start:end] for start, end in itertools.pairwise(places)]
        self._pieces: list[bytes] = pieces
        self._numbers = Numbers(pieces)
        self._ends = _Ends(self._library, pieces, init.tok_eos)
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
        numbers, ends = self._numbers, self._ends
        is_json = kind == b"json_schema" or b"%json" in text
        tail = b""  # of the output
        end: list[int] | None = None  # of the output as it is
        settled: tuple[int, list[int] | None] = -1, None  # and with this token
        while is_well and library.llg_matcher_compute_mask(matcher) == 0:
            mask = ctypes.string_at(library.llg_matcher_get_mask(matcher), self._n_mask)
            send(b"m", numbers.held(mask, tail) if is_json else mask)
            while True:
                step, n_tokens = _STEP.unpack(_read(_STEP.size))
                tokens: tuple[int, ...] = struct.unpack(f"={n_tokens}I", _read(4 * n_tokens))
                signal.setitimer(signal.ITIMER_PROF, self._step_s)
                started_s = time.process_time()
                if step != _SETTLE:
                    break
                settled = ends.settle(matcher, tokens[0], tokens[1], end)
                send(b"t", struct.pack("=I", settled[0]))
            end = settled[1] if tokens == settled[:1] else None
            settled = -1, None
            if step == _ANEW:
                is_well = library.llg_matcher_reset(matcher) == 0
                tail, end = b"", None
            is_well = is_well and all(
                library.llg_matcher_consume_token(matcher, token) == 0 for token in tokens
            )
            tail += b"".join(self._pieces[token] for token in tokens)
            tail = tail[-Numbers.TAIL_BYTES :]
        error = library.llg_matcher_get_error(matcher) or b""
        send(b"e", shortened(error.partition(b"<state>")[0].decode("utf-8", "replace")).encode())


def shortened(message: str) -> str:
    """Its lines, as they point at each other; of a long one the beginning and the end."""
    lines = message.rstrip()
    half = _ERROR_CHARACTERS // 2
    return lines if len(lines) <= 2 * half else f"{lines[:half]} ... {lines[-half:]}"


def _main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # meant for the owner
        signal.signal(number, signal.SIG_IGN)
    os.closerange(3, 1 << 16)
    os.chdir("/")
    _, hard = resource.getrlimit(resource.RLIMIT_STACK)
    limit = _STACK_BYTES if hard == resource.RLIM_INFINITY else min(hard, _STACK_BYTES)
    with contextlib.suppress(ValueError):  # macOS: the stack of a Python keeps its size
        resource.setrlimit(resource.RLIMIT_STACK, (limit, hard))
    try:
        host = _ConstraintHost(sys.argv[1])
    except Exception as error:
        os.write(0, b"x" + " ".join(str(error).split()).encode()[:250])
        return
    gc.collect()
    gc.freeze()  # shared pages stay shared
    host.run()


if __name__ == "__main__":
    _main()
