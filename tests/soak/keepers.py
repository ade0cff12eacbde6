"""Those who look after slots: save, restore, shift; the control request that must not change."""

from __future__ import annotations

import contextlib
import time
from random import Random
from typing import TYPE_CHECKING, Any

import numpy as np

from kqview import Capture, Engine, errors

from .choices import N_CTX, random_prompt

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kqview import Slot
    from kqview.state.files import SlotMarks

    from .world import World

N_CONTROL_TOKENS = 24
N_CONTROLS = 3
# Ways to compute a token differ by rounding: ids are compared where that cannot matter.
GAP_MIN = 1e-2


class SlotKeeper:
    """Does work on idle slots at random. A slot in use is BusyError, and that is all it may be."""

    def __init__(self, world: World, name: str) -> None:
        self.world = world
        self.name = name
        self.rng = Random(f"{world.seed} {name}")
        self.saved: list[tuple[bytes, SlotMarks]] = []

    def run(self) -> None:
        works = [self.save, self.save, self.restore, self.restore, self.shift, self.shift]
        works += [self.truncate, self.clear, self.restore_garbage, self.look]
        while not self.world.is_over:
            self.world.beat(self.name)
            slots = self.world.engine.slots
            # One in use too, now and then; and any may be taken in the meantime.
            idle = [slot for slot in slots if not slot.is_busy or self.rng.random() < 0.05]
            slot = self.rng.choice(idle or slots)
            try:
                with self.documented():
                    self.rng.choice(works)(slot)
            except Exception as error:
                self.world.fail(f"{self.name}: {type(error).__name__}: {error}")
            time.sleep(self.rng.random() * 0.004)
        self.world.retire(self.name)

    @contextlib.contextmanager
    def documented(self) -> Iterator[None]:
        try:
            yield
        except errors.BusyError:
            self.world.count("slot busy")
        except errors.DecodeError:  # a save that has to learn the layout decodes a token
            self.world.count("slot decode failed")

    def save(self, slot: Slot) -> None:
        saved = slot.save_marked()
        self.world.count("saves")
        self.saved = [*self.saved[-3:], saved]

    def restore(self, slot: Slot) -> None:
        if self.saved:
            blob, marks = self.rng.choice(self.saved)
            if slot.restore_marked(blob, marks) != len(blob):
                self.world.fail("restore read another number of bytes")
            self.world.count("restores")

    def shift(self, slot: Slot) -> None:
        n_tokens = slot.n_tokens
        if n_tokens < 3:
            return
        n_keep = self.rng.randrange(1, n_tokens - 1)
        n_discard = self.rng.randrange(1, n_tokens - n_keep + 1)
        # Another request may have had the slot since: then the range may not fit any more.
        with contextlib.suppress(errors.RequestError):
            slot.shift(n_keep, n_discard)
            self.world.count("shifts")

    def truncate(self, slot: Slot) -> None:
        with contextlib.suppress(errors.RequestError):
            slot.truncate(self.rng.randrange(slot.n_tokens + 1))
            self.world.count("truncates")

    def clear(self, slot: Slot) -> None:
        slot.clear()
        self.world.count("clears")

    def restore_garbage(self, slot: Slot) -> None:
        blob = bytearray(self.rng.choice(self.saved)[0] if self.saved else b"SES1")
        blob[self.rng.randrange(min(24, len(blob)))] ^= 1 << self.rng.randrange(8)
        if self.rng.random() < 0.5:
            blob = blob[: self.rng.randrange(len(blob))]
        try:
            slot.restore(bytes(blob))
        except errors.StateError:
            self.world.count("restores refused")

    def look(self, slot: Slot) -> None:
        if len(slot.tokens) > N_CTX or len(slot.messages()) > N_CTX:
            self.world.fail(f"{slot!r} holds more than fits")
        stats = self.world.engine.stats()
        if stats.pool.allocated_bytes > stats.pool.budget_bytes:
            self.world.fail(f"the pool holds {stats.pool}")


class Crowd:
    """Now and then more requests than the queue takes, all dropped again."""

    def __init__(self, world: World, name: str) -> None:
        self.world = world
        self.name = name
        self.rng = Random(f"{world.seed} {name}")

    def run(self) -> None:
        pause_s = max(8.0, (self.world.ends_s - self.world.started_s) / 20)
        while not self.world.is_over:
            self.fill_queue()
            next_s = time.monotonic() + pause_s
            while time.monotonic() < next_s and not self.world.is_over:
                self.world.beat(self.name)
                time.sleep(0.2)
        self.world.retire(self.name)

    def fill_queue(self) -> None:
        engine = self.world.engine
        waiting: list[Any] = []
        try:
            for _ in range(5000):
                waiting.append(engine.generate(random_prompt(self.rng), max_tokens=1))
                self.world.count("requests")
            self.world.fail("a queue without an end")
        except errors.QueueFull:
            self.world.count("crowds")
        self.world.count("ended: dropped", len(waiting))


class Control:
    """A greedy request whose ids and attention are the same in the crowd as alone.

    Slots with its tokens are shifted, saved and restored like any other: what that leaves in a
    cache is marked, and no request of this kind takes it over.
    """

    def __init__(self, world: World, name: str) -> None:
        self.world = world
        self.name = name
        self.rng = Random(f"{world.seed} {name}")
        self.cases = [make_control(world.engine, self.rng) for _ in range(N_CONTROLS)]
        self.saved: list[tuple[bytes, SlotMarks]] = []

    def run(self) -> None:
        while not self.world.is_over:
            self.world.beat(self.name)
            try:
                self.check(*self.rng.choice(self.cases))
            except Exception as error:
                self.world.fail(f"{self.name}: {type(error).__name__}: {error}")
            time.sleep(self.rng.random() * 0.2)
        self.world.retire(self.name)

    def check(self, prompt: list[int], ids: list[int], rows: list[np.ndarray[Any, Any]]) -> None:
        try:
            generation, tokens = ask(self.world.engine, prompt)
        except errors.QueueFull:
            return
        except errors.DecodeError:
            self.world.count("requests")
            return
        self.world.count("requests")
        self.world.count("tokens", len(tokens))
        self.world.count(f"ended: {generation.finish_reason}")
        self.world.count("controls")
        if [token.id for token in tokens] != ids:
            self.world.fail(
                f"control: {[token.id for token in tokens]}, alone {ids}; {generation.usage}"
            )
            return
        for token, alone in zip(tokens, rows, strict=True):
            if token.attention is not None and not np.allclose(token.attention, alone, atol=1e-4):
                self.world.fail(f"control: attention of token {token.index} is another one")
        with contextlib.suppress(errors.BusyError, errors.DecodeError):
            slot = self.world.engine.slots[generation.slot or 0]
            if slot.tokens[: len(prompt)] == prompt:
                self.saved = [*self.saved[-3:], slot.save_marked()]
                self.world.count("saves")
        with contextlib.suppress(errors.BusyError, errors.DecodeError):
            if self.saved:
                slot = self.rng.choice(self.world.engine.slots)
                slot.restore_marked(*self.rng.choice(self.saved))
                self.world.count("restores")


def ask(engine: Engine, prompt: list[int]) -> tuple[Any, list[Any]]:
    generation = engine.generate(
        prompt,
        max_tokens=N_CONTROL_TOKENS,
        temperature=0,
        ignore_eos=True,
        top_logprobs=2,
        priority=5,
        capture=Capture("probs", on_full="drop"),
    )
    return generation, list(generation)


def make_control(
    engine: Engine, rng: Random
) -> tuple[list[int], list[int], list[np.ndarray[Any, Any]]]:
    """A prompt, its greedy ids and rows, computed alone, no choice of which is a close one."""
    while True:
        prompt = rng.sample(range(256), 40)
        _, tokens = ask(engine, prompt)
        gaps = [t.top_logprobs[0][1] - t.top_logprobs[1][1] for t in tokens]
        if min(gaps) > GAP_MIN:
            return prompt, [t.id for t in tokens], [np.array(t.attention) for t in tokens]
