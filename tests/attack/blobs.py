"""Hostile saved slots: blobs and checkpoints changed at random, restored into a slot that works.

A blob is refused with StateFormatError or StateMismatch and leaves the slot as it was, or the slot
takes it and generates. The native fuzzer (``python tests/native/run.py --fuzz``) reads more of them
a second; here llama.cpp itself gets what the reader lets through.
"""

from __future__ import annotations

import random
import struct
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kqview import Engine, errors
from tests.attack.summary import Summary, main
from tests.support import tiny_gguf

if TYPE_CHECKING:
    from collections.abc import Callable

    from kqview.state.files import SlotMarks

GENERATE_EVERY = 50
LENGTHS = (1, 7, 30, 60)
WITH_CHECKPOINTS: tuple[tuple[Callable[[Path], Path], dict[str, Any]], ...] = (
    (tiny_gguf.write_jamba, {"n_ctx": 64}),
    (tiny_gguf.write_gemma4, {"n_ctx": 512, "n_ubatch": 16, "swa_full": False}),
)
KV_TYPES = (("f32", False), ("f16", "auto"), ("q8_0", True))
EDGES = (0, 1, 2, 3, 0x7F, 0x80, 0xFF, 0x7FFF, 0xFFFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF)


def changed(blob: bytes, rng: random.Random, others: list[bytes]) -> bytes:
    """*blob* with a few changes of one kind."""
    data = bytearray(blob)
    # Of nothing, nothing can be changed, only more of it made.
    kind = rng.randrange(9) if data else 3
    # Most of what matters is at the front: ids, positions, counts, types.
    front = min(len(data), rng.choice([16, 64, 400, len(data)]))
    if kind == 0:
        for _ in range(rng.randrange(1, 9)):
            data[rng.randrange(front)] = rng.randrange(256)
    elif kind == 1:
        at = rng.randrange(0, max(1, front - 4))
        struct.pack_into("<I", data, min(at, len(data) - 4), rng.choice(EDGES))
    elif kind == 2:
        del data[rng.randrange(len(data)) :]
    elif kind == 3:
        data += rng.randbytes(rng.randrange(1, 4096))
    elif kind == 4:
        at = rng.randrange(front)
        del data[at : at + rng.randrange(1, 65)]
    elif kind == 5:
        at = rng.randrange(front)
        data[at:at] = rng.randbytes(rng.randrange(1, 65))
    elif kind == 6:
        other = rng.choice(others)
        at = rng.randrange(len(data))
        data[at:] = other[at:]
    elif kind == 7:
        at = rng.randrange(0, max(1, len(data) - 4)) & ~3
        struct.pack_into("<I", data, min(at, len(data) - 4), rng.choice(EDGES))
    else:
        bit = rng.randrange(8 * front)
        data[bit // 8] ^= 1 << (bit % 8)
    return bytes(data)


def attack_engine(engine: Engine, rng: random.Random, ends_s: float, summary: Summary) -> None:
    """Restore changed blobs of *engine* into its first slot until *ends_s*."""
    slot, other = engine.slots
    sound: list[bytes] = []
    for n in LENGTHS:
        ids = [rng.randrange(3, 700) for _ in range(n)]
        engine.generate(ids, max_tokens=1, temperature=0, slot=1).read()
        sound.append(other.save())
    slot.restore(sound[-1])
    n_tried = 0
    while time.monotonic() < ends_s or n_tried < GENERATE_EVERY:
        n_tried += 1
        before = slot.tokens
        blob = changed(rng.choice(sound), rng, sound)
        try:
            n_read = slot.restore(blob)
        except (errors.StateFormatError, errors.StateMismatch) as error:
            summary.count(type(error).__name__)
            if slot.tokens != before:
                summary.fail(f"a refused blob changed the slot: {error}")
        except Exception as error:
            summary.fail(f"{type(error).__name__}: {error}; blob {blob[:64].hex()}")
        else:
            summary.count("restored")
            if not 0 < n_read <= len(blob):
                summary.fail(f"{n_read} bytes were read of {len(blob)}")
        if n_tried % GENERATE_EVERY == 0:
            go_on(engine, summary)


def attack_checkpoints(engine: Engine, rng: random.Random, ends_s: float, summary: Summary) -> None:
    """Restore a sound blob of *engine* with changed checkpoints until *ends_s*, and go back."""
    slot = engine.slots[0]
    sound: list[tuple[bytes, SlotMarks]] = []
    for n in LENGTHS:
        slot.clear()
        ids = [rng.randrange(97, 123) for _ in range(n)]
        engine.generate(ids, max_tokens=2, temperature=0, slot=0, ignore_eos=True).read()
        sound.append(slot.save_marked())
    n_tried = 0
    while time.monotonic() < ends_s or n_tried < GENERATE_EVERY:
        n_tried += 1
        before = slot.tokens, slot.checkpoints
        blob, marks = rng.choice(sound)
        data = changed(marks.checkpoints, rng, [other.checkpoints for _, other in sound])
        try:
            slot.restore_marked(blob, replace(marks, checkpoints=data))
        except (errors.StateFormatError, errors.StateMismatch) as error:
            summary.count(f"checkpoints: {type(error).__name__}")
            if (slot.tokens, slot.checkpoints) != before:
                summary.fail(f"refused checkpoints changed the slot: {error}")
        except Exception as error:
            summary.fail(f"{type(error).__name__}: {error}; checkpoints {data[:64].hex()}")
        else:
            summary.count("checkpoints: restored")
            if any(n > slot.n_tokens for n in slot.checkpoints):
                summary.fail(f"{slot.checkpoints} of {slot.n_tokens} tokens")
        if n_tried % GENERATE_EVERY == 0:
            slot.truncate(rng.randint(0, slot.n_tokens))
            go_on(engine, summary)


def go_on(engine: Engine, summary: Summary) -> None:
    """The slot works on whatever is in it."""
    slot = engine.slots[0]
    try:
        ids = slot.tokens[: engine.n_ctx - 4] or [1]
        engine.generate(ids, max_tokens=2, slot=0, capture="probs", ignore_eos=True).read()
        summary.count("generated after it")
    except errors.DecodeError:  # values that a blob may hold and that overflow on the way
        summary.count("generated: not finite")
        slot.clear()
    except errors.KqviewError as error:
        summary.fail(f"an ordinary request failed: {type(error).__name__}: {error}")


def run(seconds: float, seed: int) -> Summary:
    """Restore changed blobs for *seconds*, with each type of cache in turn."""
    summary = Summary("blobs", seed)
    rng = random.Random(seed)
    started_s = time.monotonic()
    n_kinds = len(KV_TYPES) + len(WITH_CHECKPOINTS)
    for i, (kv_type, flash) in enumerate(KV_TYPES, 1):
        ends_s = started_s + seconds * i / n_kinds
        with Engine.demo(
            n_ctx=64, n_slots=2, n_threads=1, kv_type=kv_type, flash_attn=flash
        ) as engine:
            attack_engine(engine, rng, ends_s, summary)
    for i, (write, options) in enumerate(WITH_CHECKPOINTS, 1 + len(KV_TYPES)):
        with tempfile.TemporaryDirectory() as folder:
            model = write(Path(folder) / "model.gguf")
            with Engine(model, n_threads=1, n_slots=2, checkpoint_every=8, **options) as engine:
                attack_checkpoints(engine, rng, started_s + seconds * i / n_kinds, summary)
    return summary


if __name__ == "__main__":
    raise SystemExit(main(run))
