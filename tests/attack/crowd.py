"""Everybody at once: hostile clients of every kind beside one who only wants his tokens.

The one client streams a text again and again and asks /health; how long he waits between two tokens
is measured alone first and then under each kind of client, and under all of them. Nobody gets a
status of 500, the process lives, and its memory stays within its budget.
"""

from __future__ import annotations

import contextlib
import json
import random
import statistics
import threading
import time
from typing import TYPE_CHECKING, Any

from tests.attack.summary import Summary, main
from tests.attack.target import target

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable

    from tests.attack.target import Target

N_SLOTS = 4
WORST_GAP_S = 10.0  # a stall; figures say what is usual
WORST_RATIO = 400  # of the worst gap when it is alone, on a machine that does other work too
PEAK_BYTES = 1500 * 2**20
STREAM = {
    "prompt": "Tom found a red ball.", "max_length": 120, "temperature": 0.8,
    "output_attentions": True, "bypass_eos": True,
}  # fmt: skip
# Every rule is two ways to say the same, so that a parser's states grow with each blank.
BOMB = 'root ::= s\ns ::= " " s "x" | " " s "y" | " "'
BOMBS = (
    BOMB,
    'root ::= a+\na ::= ("x" | "xx" | "xxx" | " ")*  "y"',
    "root ::= " + "(" * 150 + '"a"' + ")" * 150,
    "root ::= " + " ".join('"a"{0,30}' for _ in range(60)),
    "root ::= [a-z]" * 2000,
)


class Client:
    """Who only wants his tokens: the gaps between them, and the times of /health."""

    def __init__(self, running: Target) -> None:
        self._running = running
        self.gaps_s: list[float] = []
        self.health_s: list[float] = []
        self.wrong: list[str] = []
        self.n_tokens = 0
        self.n_refused = 0
        self._is_done = threading.Event()
        self._threads = [
            threading.Thread(target=work, daemon=True) for work in (self._stream, self._ask)
        ]

    def __enter__(self) -> Client:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_done.set()
        for thread in self._threads:
            thread.join(60)

    def wait_for_anything(self) -> None:
        """Wait for a token or a refusal: how many are ahead in the queue depends on the load."""
        ends_s = time.monotonic() + WORST_GAP_S * 3
        while not (self.n_tokens or self.n_refused) and time.monotonic() < ends_s:
            time.sleep(0.05)

    def _stream(self) -> None:
        while not self._is_done.is_set():
            try:
                self._one_stream()
            except OSError as error:
                self.wrong.append(f"the stream of an ordinary client broke: {error!r}")
                time.sleep(0.1)

    def _one_stream(self) -> None:
        with self._running.connect(timeout_s=WORST_GAP_S * 3) as sock:
            sock.sendall(post("/api/extra/generate/stream", STREAM, "connection: close"))
            head = sock.recv(1 << 16)
            status = head[9:12]
            if status in (b"503", b"429"):
                self.n_refused += 1
                time.sleep(0.05)
                return
            if status != b"200":
                self.wrong.append(f"an ordinary client got {head[:200]!r}")
                time.sleep(0.1)
                return
            then_s, left = time.monotonic(), head
            while not self._is_done.is_set():
                n = left.count(b'"type":"token"')
                now_s = time.monotonic()
                if n:
                    # Tokens that come together came without a gap between them.
                    self.gaps_s += [now_s - then_s] + [0.0] * (n - 1)
                    self.n_tokens += n
                    then_s = now_s
                left = left[-16:] if b'"type":"token"' not in left[-16:] else b""
                part = sock.recv(1 << 18)
                if not part:
                    return
                left += part

    def _ask(self) -> None:
        while not self._is_done.wait(0.05):
            started_s = time.monotonic()
            try:
                status, body = self._running.request("GET", "/health", timeout_s=WORST_GAP_S * 3)
            except OSError as error:
                self.wrong.append(f"/health: {error!r}")
                continue
            self.health_s.append(time.monotonic() - started_s)
            if status not in (200, 503, 429):
                self.wrong.append(f"/health says {status}: {body[:200]!r}")


def percentile(values: list[float], share: float) -> float:
    """The value below which *share* of them lie; 0 of none."""
    return statistics.quantiles(values, n=100)[round(share * 100) - 1] if len(values) > 1 else 0.0


def post(path: str, value: Any, *headers: str) -> bytes:
    """A POST of JSON, or of bytes as they are."""
    body = value if isinstance(value, bytes) else json.dumps(value).encode()
    lines = [f"POST {path} HTTP/1.1", "host: 127.0.0.1", f"content-length: {len(body)}", *headers]
    return "\r\n".join([*lines, "", ""]).encode() + body


def upgrade(path: str) -> bytes:
    """A WebSocket's handshake."""
    return (
        f"GET {path} HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: upgrade\r\nupgrade: websocket\r\n"
        "sec-websocket-version: 13\r\nsec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
    ).encode()


def frame(data: bytes, opcode: int) -> bytes:
    """A client's frame; its mask is zero."""
    n = len(data)
    if n < 126:
        return bytes([0x80 | opcode, 0x80 | n]) + bytes(4) + data
    if n < 1 << 16:
        return bytes([0x80 | opcode, 0xFE]) + n.to_bytes(2, "big") + bytes(4) + data
    return bytes([0x80 | opcode, 0xFF]) + n.to_bytes(8, "big") + bytes(4) + data


def exchange(running: Target, data: bytes, *, waits_s: float = 1.0, most: int = 1 << 20) -> bytes:
    """Send *data*, read up to *most* bytes for at most *waits_s*, leave."""
    got = bytearray()
    with running.connect(timeout_s=waits_s) as sock:
        sock.sendall(data)
        ends_s = time.monotonic() + waits_s
        with contextlib.suppress(TimeoutError):
            while len(got) < most and time.monotonic() < ends_s and (part := sock.recv(1 << 16)):
                got += part
    return bytes(got)


# ---- hostile clients: each does one thing once


def leaver(running: Target, rng: random.Random) -> bytes:
    """Asks for much and leaves."""
    asked = {**STREAM, "max_length": 2000, "prompt": "Tom " * rng.choice([1, 100])}
    return exchange(running, post("/api/extra/generate/stream", asked), waits_s=rng.random() * 0.1)


def slow_reader(running: Target, rng: random.Random) -> bytes:
    """Asks for rows and reads none of them."""
    with running.connect(receive_bytes=4096) as sock:
        sock.sendall(post("/api/extra/generate/stream", {**STREAM, "max_length": 400}))
        time.sleep(rng.random())
    return b""


def half_body(running: Target, rng: random.Random) -> bytes:
    """Says a large body and sends a part of it."""
    with running.connect() as sock:
        head = post("/api/v1/generate", b"").replace(b"length: 0", b"length: 30000000")
        sock.sendall(head)
        for _ in range(rng.randrange(40)):
            sock.sendall(b" " * 200_000)
        time.sleep(rng.random() * 0.5)
    return b""


def trailers(running: Target, rng: random.Random) -> bytes:
    """Sends trailers for as long as they are taken, up to some megabytes."""
    head = post("/api/v1/tokenize", b"").replace(
        b"content-length: 0", b"transfer-encoding: chunked"
    )
    return exchange(running, head + b"0\r\n" + b"x: yyyyyyyyyyyyyyyyyyyyyyyyy\r\n" * 100_000)


def idle(running: Target, rng: random.Random) -> bytes:
    """Opens connections and says nothing."""
    socks: list[socket.socket] = []
    try:
        for _ in range(40):
            socks.append(running.connect())
        time.sleep(rng.random() * 0.5)
    finally:
        for sock in socks:
            sock.close()
    return b""


def large_text(running: Target, rng: random.Random) -> bytes:
    """Has megabytes tokenized and leaves."""
    text = rng.choice(["a", "ab ", " ", "\u00e9", "Tom found a ball. "]) * 300_000
    return exchange(running, post("/api/v1/tokenize", {"text": text}), waits_s=rng.random())


def many_ids(running: Target, rng: random.Random) -> bytes:
    """Sends a million ids."""
    return exchange(running, post("/api/v1/detokenize", {"token_ids": [5] * 1_000_000}))


def large_bias(running: Target, rng: random.Random) -> bytes:
    """Sends a bias for far more ids than there are."""
    bias = {str(i): 1.0 for i in range(200_000)}
    return exchange(
        running, post("/api/v1/generate", {"prompt": "a", "max_length": 2, "logit_bias": bias})
    )


def many_bans(running: Target, rng: random.Random) -> bytes:
    """Bans a hundred thousand strings."""
    bans = [f"w{i}" for i in range(100_000)]
    return exchange(
        running, post("/api/v1/generate", {"prompt": "a", "max_length": 2, "banned_tokens": bans})
    )


def grammar(running: Target, rng: random.Random) -> bytes:
    """A grammar that explodes."""
    asked = {"prompt": "a", "max_length": 40, "grammar": rng.choice(BOMBS)}
    return exchange(running, post("/api/v1/generate", asked), waits_s=3.0)


def samples(running: Target, rng: random.Random) -> bytes:
    """Many samples with many logprobs."""
    asked = {
        "input_ids": [1, 2, 3], "max_new_tokens": 60, "num_samples": 16, "top_logprobs": 700,
        "return_attention": False,
    }  # fmt: skip
    return exchange(running, post("/api/v1/generate", asked), waits_s=2.0)


def pings(running: Target, rng: random.Random) -> bytes:
    """A WebSocket that only pings."""
    with running.connect() as sock:
        sock.sendall(upgrade("/api/v1/generate/stream"))
        sock.recv(4096)
        for _ in range(50):
            sock.sendall(frame(b"x" * 100, 9) * 100)
        sock.settimeout(0.2)
        with contextlib.suppress(OSError):
            while sock.recv(1 << 16):
                pass
    return b""


def large_messages(running: Target, rng: random.Random) -> bytes:
    """A WebSocket whose messages are large, and nonsense."""
    with running.connect() as sock:
        sock.sendall(upgrade("/api/v1/generate/stream") + frame(b" " * 5_000_000, 1))
        sock.settimeout(1.0)
        with contextlib.suppress(OSError):
            return sock.recv(1 << 16)
    return b""


HOSTILE: tuple[Callable[[Target, random.Random], bytes], ...] = (
    leaver, slow_reader, half_body, trailers, idle, large_text, many_ids, large_bias, many_bans,
    grammar, samples, pings, large_messages,
)  # fmt: skip


def attack(
    running: Target,
    kinds: tuple[Callable[[Target, random.Random], bytes], ...],
    seconds: float,
    seed: int,
    summary: Summary,
) -> None:
    """Clients of *kinds*, two of each and at most six at a time, for *seconds*."""
    ends_s = time.monotonic() + seconds
    lock = threading.Lock()

    def work(name: str) -> None:
        rng = random.Random(f"{seed} {name}")
        while time.monotonic() < ends_s:
            one = rng.choice(kinds)
            try:
                got = one(running, rng)
            except OSError as error:
                got = b""
                outcome = f"{one.__name__}: {type(error).__name__}"
            else:
                status = got[9:12].decode("latin-1") if got.startswith(b"HTTP/") else "left"
                outcome = f"{one.__name__}: {status}"
            with lock:
                summary.count(outcome)
                if got[9:12] in (b"500", b"502", b"504"):
                    summary.fail(f"{one.__name__} got {got[:300]!r}")

    n = min(6, 2 * len(kinds))
    threads = [threading.Thread(target=work, args=(f"{i}",), daemon=True) for i in range(n)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(seconds + 60)
        if thread.is_alive():
            summary.fail("a client of the attack hangs")


def observe(
    running: Target,
    name: str,
    kinds: tuple[Callable[[Target, random.Random], bytes], ...],
    seconds: float,
    summary: Summary,
) -> None:
    """The ordinary client's figures under an attack by *kinds*; none is nobody else."""
    with Client(running) as client:
        if kinds:
            attack(running, kinds, seconds, summary.seed, summary)
        else:
            time.sleep(seconds)
        client.wait_for_anything()
    for what in client.wrong:
        summary.fail(f"{name}: {what}")
    summary.count("tokens of the ordinary client", client.n_tokens)
    summary.count("ordinary client refused", client.n_refused)
    worst_s = max(client.gaps_s, default=0.0)
    summary.figures[f"{name}: token gap p99 ms"] = percentile(client.gaps_s, 0.99) * 1000
    summary.figures[f"{name}: token gap worst ms"] = worst_s * 1000
    summary.figures[f"{name}: health p99 ms"] = percentile(client.health_s, 0.99) * 1000
    alone_s = summary.figures["alone: token gap worst ms"] / 1000
    if worst_s > max(WORST_GAP_S, WORST_RATIO * alone_s):
        summary.fail(f"{name}: the ordinary client waited {worst_s:.1f} s for a token")
    if not client.n_tokens and not client.n_refused:
        summary.fail(f"{name}: the ordinary client got nothing")


def run(seconds: float, seed: int) -> Summary:
    """Alone, under each kind, and under all together; half of the time for the latter."""
    summary = Summary("crowd", seed)
    flags = ("--slots", str(N_SLOTS), "--ctx", "512", "--idle-timeout-s", "5")
    with target(summary, *flags) as running:
        share_s = seconds / 2 / (len(HOSTILE) + 1)
        observe(running, "alone", (), share_s, summary)
        for one in HOSTILE:
            observe(running, one.__name__, (one,), share_s, summary)
        observe(running, "all", HOSTILE, seconds / 2, summary)
        running.is_well(summary)
    if running.peak_bytes > PEAK_BYTES:
        summary.fail(f"it took {running.peak_bytes / 2**20:.0f} MiB of memory")
    return summary


if __name__ == "__main__":
    raise SystemExit(main(run))
