"""Request bodies: fields of every type and size, JSON that is none, lists that are too long.

The server answers each with a status below 500 (503 where it is full), within seconds, and when all
is over its memory budget is free again.
"""

from __future__ import annotations

import json
import math
import random
import re
import time
from typing import TYPE_CHECKING, Any

from tests.attack.summary import Summary, main
from tests.attack.target import target
from tests.support.hostile_grammars import random_constraint

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.attack.target import Target

ANSWERS_WITHIN_S = 30.0
FREE_WITHIN_S = 20.0
FLAGS = (
    "--memory-budget-bytes", str(256 * 2**20), "--slots", "4", "--request-timeout-s", "20",
    "--edits", "all",
)  # fmt: skip
PATHS = (
    "/api/v1/generate", "/api/v1/generate", "/api/extra/generate/stream", "/api/v1/tokenize",
    "/api/v1/detokenize", "/api/extra/tokencount", "/api/extra/detokenize", "/api/extra/abort",
    "/api/extra/generate/check", "/completion", "/api/extra/last_logprobs", "/api/v1/model/load",
)  # fmt: skip
FIELDS = (
    "prompt", "memory", "input_ids", "request_id", "genkey", "max_length", "max_new_tokens",
    "max_context_length", "temperature", "top_p", "top_k", "min_p", "typical", "rep_pen",
    "rep_pen_range", "presence_penalty", "frequency_penalty", "mirostat", "mirostat_tau",
    "dry_multiplier", "dry_base", "dry_sequence_breakers", "xtc_probability", "sampler_seed",
    "grammar", "logit_bias", "stop_sequence", "stop_tokens", "banned_tokens", "ban_eos_token",
    "trim_stop", "num_samples", "logprobs", "top_logprobs", "output_attentions",
    "prompt_attention", "attention_values", "attention_format", "aggregation_mode",
    "layer_weights", "sparse_top_k", "attention_layers", "attention_heads", "dtype", "sentences",
    "prune_below", "encoding", "compression", "text", "content", "token_ids", "ids", "tokens",
    "special", "model", "n_ctx", "edits",
)  # fmt: skip
SCALARS = (
    None, True, False, 0, 1, -1, 2, 17, 255, 2**31, -(2**31), 2**63, 2**64, 10**40, 0.0, -0.0, 0.5,
    1e-320, 1e308, "", "a", "\0", "é", "\U0001f600", "word " * 50, "probs", "logits", "per_layer",
    "float16", "mean", "sparse", "viz", "aggregated", "base64", "binary", 'root ::= "a"',
    'root ::= root "a" | "b"', 'root ::= ("a"*)*', "[", {}, [], [[]], {"1": 1}, {"a": -1e30},
)  # fmt: skip


def value(rng: random.Random) -> Any:
    """Something for a field."""
    kind = rng.randrange(10)
    if kind < 6:
        return rng.choice(SCALARS)
    n = rng.choice([1, 3, 30, 300, 5000])
    if kind == 6:
        return [rng.choice(SCALARS) for _ in range(min(n, 300))]
    if kind == 7:
        return [rng.randrange(-1, 1000) for _ in range(n)]
    if kind == 8:
        return {str(rng.randrange(-1, 1000)): rng.uniform(-9, 9) for _ in range(n)}
    return "".join(chr(rng.choice([32, 97, 10, 233, 0x4E2D, 0x1F600])) for _ in range(n))


def edit(rng: random.Random) -> dict[str, Any]:
    """Nearly an edit."""
    kind = rng.choice(["add", "set", "scale_heads", "attention_bias", "block", "hook", "x"])
    given: dict[str, Any] = {
        "vector": [rng.uniform(-9, 9)] * rng.choice([1, 128]), "layers": [rng.randrange(5)],
        "vectors": [[0.5] * 128], "layer": 1, "positions": [0, rng.randrange(9)],
        "factors": [[1, rng.randrange(10), rng.choice([0, 1e9])]], "spans": [[0, 3]],
        "log_factor": rng.choice([1, 1e9]), "queries": [2, None], "keys": [0, 1], "name": "../x",
    }  # fmt: skip
    names = {
        "add": ("vector", "layers"), "set": ("vectors", "layer", "positions"),
        "scale_heads": ("factors",), "attention_bias": ("spans", "log_factor"),
        "block": ("queries", "keys"),
    }.get(kind, ("name",))  # fmt: skip
    found = {"type": kind, **{name: given[name] for name in names}}
    if rng.random() < 0.3:
        found[rng.choice([*given])] = value(rng)
    return found


def likely(rng: random.Random) -> dict[str, Any]:
    """A request that works, before its fields are changed; short, so that many are sent."""
    body: dict[str, Any] = {"max_length": rng.randrange(1, 12)}
    if rng.random() < 0.7:
        body["prompt"] = rng.choice(["Tom has", "", "Anna is a painter. " * 9])
    if rng.random() < 0.3:
        body["input_ids"] = [rng.randrange(768) for _ in range(rng.randrange(1, 40))]
    return body


def large(rng: random.Random) -> bytes:
    """A body whose size is the attack."""
    n = rng.choice([10**4, 10**5, 10**6, 3 * 10**6])
    name = rng.choice(FIELDS).encode()
    parts = (
        b"[" + b"1," * n + b"1]",
        b"[" + b'"a",' * (n // 2) + b'"a"]',
        b'"' + b"word " * (n // 2) + b'"',
        b"{" + b",".join(b'"%d":1' % i for i in range(n // 8)) + b"}",
        b"[" * (n // 10) + b"]" * (n // 10),
        b" " * n + b"1",
    )
    return b'{"prompt":"a","max_length":1,"' + name + b'":' + rng.choice(parts) + b"}"


def body(rng: random.Random) -> bytes:
    """One body."""
    if rng.random() < 0.03:
        return large(rng)
    fields = likely(rng)
    if rng.random() < 0.02:
        fields |= {"n_predict": 3, **random_constraint(rng)}
    if rng.random() < 0.1:
        fields["edits"] = [edit(rng) for _ in range(rng.choice([1, 2, 256, 300]))]
    for _ in range(rng.choice([0, 1, 1, 2, 3, 8])):
        fields[rng.choice(FIELDS)] = value(rng)
    data = json.dumps(fields, ensure_ascii=rng.random() < 0.5).encode("utf-8", "surrogatepass")
    if rng.random() < 0.15:
        noise = bytearray(data)
        for _ in range(rng.randrange(1, 4)):
            noise[rng.randrange(len(noise))] = rng.randrange(256)
        data = bytes(noise)
    return data[: rng.randrange(len(data))] if rng.random() < 0.05 else data


def send(running: Target, rng: random.Random, summary: Summary) -> None:
    """One request; some clients leave before the answer, or never send all of it."""
    path, data = rng.choice(PATHS), body(rng)
    way = rng.random()
    declared = len(data) + (rng.choice([1, 10**6, 10**9]) if way < 0.05 else 0)
    head = (
        f"POST {path} HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\n"
        f"content-type: application/json\r\ncontent-length: {declared}\r\n\r\n"
    ).encode()
    started_s = time.monotonic()
    got = b""
    try:
        with running.connect(timeout_s=ANSWERS_WITHIN_S) as sock:
            sock.sendall(head + data)
            if way < 0.15:
                summary.count("left")
                return
            while len(got) < 2**25 and (part := sock.recv(1 << 16)):
                got += part
    except TimeoutError:
        summary.fail(f"no answer of {path} within {ANSWERS_WITHIN_S:.0f} s to {data[:300]!r}")
        return
    except OSError:
        summary.count("reset")
    answer_ms = (time.monotonic() - started_s) * 1000
    summary.figures["slowest_answer_ms"] = max(
        answer_ms, summary.figures.get("slowest_answer_ms", 0)
    )
    found = re.match(rb"HTTP/1\.1 (\d{3})", got)
    status = int(found[1]) if found else 0
    summary.count(f"status {status}" if status else "no answer")
    if (status >= 500 and status not in (503, 504)) or b"INTERNAL" in got[:2000]:
        summary.fail(f"status {status} of {path} to {data[:300]!r}: {got[:300]!r}")


def held_bytes(running: Target) -> float:
    """What the server says that requests hold of its memory budget."""
    _, text = running.request("GET", "/metrics")
    found = re.search(rb"^kqview_memory_used_bytes (\S+)", text, re.MULTILINE)
    return float(found[1]) if found else math.nan


def check_free(running: Target, summary: Summary) -> None:
    """The budget is free again soon after the last client left."""
    ends_s = time.monotonic() + FREE_WITHIN_S
    while held_bytes(running):
        if time.monotonic() > ends_s:
            summary.fail(f"{held_bytes(running):.0f} bytes of the memory budget stay held")
            return
        time.sleep(0.1)


def attack(
    summary: Summary, seconds: float, once: Callable[[Target, random.Random, Summary], None]
) -> Summary:
    """Do *once* again and again for *seconds*; the server is well afterwards and holds nothing."""
    rng = random.Random(summary.seed)
    with target(summary, *FLAGS) as running:
        ends_s = time.monotonic() + seconds
        while time.monotonic() < ends_s and running.process.poll() is None:
            once(running, rng, summary)
        if running.is_well(summary):
            check_free(running, summary)
    return summary


def run(seconds: float, seed: int) -> Summary:
    """Send for *seconds*."""
    return attack(Summary("bodies", seed), seconds, send)


if __name__ == "__main__":
    raise SystemExit(main(run))
