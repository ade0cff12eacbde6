"""Those who generate: threads, and tasks of one event loop, doing at random what callers may do."""

from __future__ import annotations

import asyncio
import contextlib
import time
from random import Random
from typing import TYPE_CHECKING, Any

from kqview import errors

from .choices import bad_requests, random_capture, random_options, random_prompt
from .world import Holding

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kqview import Generation
    from kqview.types import PromptBlock, Token

    from .world import World


@contextlib.contextmanager
def documented_ends(world: World, capture: Any) -> Iterator[None]:
    """Lets the errors pass that the documentation names for this request."""
    try:
        yield
    except errors.PoolExhausted:
        if capture is None or capture.on_full == "drop":
            world.fail(f"PoolExhausted with capture={capture}")
        world.count("ended: pool exhausted")
    except errors.DecodeError:  # those that __main__.py injects
        world.count("ended: decode failed")
    except errors.QueueFull:
        world.count("refused: queue full")
        time.sleep(0.002)


class Caller:
    """One thread: one request after the other, some left open for a while."""

    def __init__(self, world: World, name: str) -> None:
        self.world = world
        self.name = name
        self.rng = Random(f"{world.seed} {name}")
        self.holding = Holding(world, self.rng)
        self.left_open: Generation | None = None

    def run(self) -> None:
        while not self.world.is_over:
            self.world.beat(self.name)
            try:
                self.act()
            except Exception as error:
                self.world.fail(f"{self.name}: {type(error).__name__}: {error}")
            self.holding.release()
            if self.rng.random() < 0.2:
                time.sleep(self.rng.random() * 0.05)
        self.resume()
        self.holding.release(everything=True)
        self.world.retire(self.name)

    def act(self) -> None:
        chance = self.rng.random()
        if chance < 0.03:
            self.refused()
        elif chance < 0.10:
            self.attend()
        elif chance < 0.2 and self.left_open:
            self.resume()
        else:
            self.generate()

    def generate(self) -> None:
        options = random_options(self.rng, 0 if self.left_open else len(self.world.engine.slots))
        capture = options["capture"]
        with documented_ends(self.world, capture):
            generation = self.world.engine.generate(random_prompt(self.rng), **options)
            self.world.count("requests")
            if capture and capture.prompt and self.rng.random() < 0.7:
                with documented_ends(self.world, capture):
                    for block in generation.prompt_attention:
                        self.keep_block(block)
            self.take(generation, capture)

    def take(self, generation: Generation, capture: Any) -> None:
        is_whole = self.rng.random() < 0.5
        n_most = 10**6 if is_whole else self.rng.randrange(25)
        n_taken = 0
        with documented_ends(self.world, capture):
            while n_taken < n_most and (token := next(generation, None)) is not None:
                n_taken += 1
                self.keep(token)
                if self.rng.random() < 0.02:
                    time.sleep(self.rng.random() * 0.01)
        self.world.count("tokens", n_taken)
        if generation.finish_reason is None:
            self.leave(generation)
        else:
            self.ended(generation)

    def leave(self, generation: Generation) -> None:
        how = self.rng.randrange(4)
        if how == 0:
            generation.close()
        elif how == 1:
            generation.cancel()
        elif how == 2 and not self.left_open and self.world.may_leave_open.acquire(blocking=False):
            self.left_open = generation
            self.world.count("left open")
            return
        else:
            self.world.count("ended: dropped")
            return  # dropping it is the end
        self.ended(generation)

    def resume(self) -> None:
        """Read the generation that was left open to its end, or close it."""
        generation, self.left_open = self.left_open, None
        if generation is None:
            return
        try:
            if self.rng.random() < 0.5:
                with contextlib.suppress(errors.PoolExhausted, errors.DecodeError):
                    generation.read()
            else:
                generation.close()
            self.ended(generation)
        finally:
            self.world.may_leave_open.release()

    def ended(self, generation: Generation) -> None:
        reason = generation.finish_reason
        if reason is None:
            self.world.fail(f"{generation!r} did not end")
        self.world.count(f"ended: {reason}")
        if generation.usage.completion_tokens != len(generation.tokens):
            self.world.fail(f"{generation!r} counts {generation.usage}")

    def attend(self) -> None:
        capture = random_capture(self.rng, prompt=True)
        with documented_ends(self.world, capture):
            last = self.rng.choice((None, self.rng.randrange(1, 30)))
            assert capture is not None
            attention = self.world.engine.attend(random_prompt(self.rng), capture, last=last)
            self.world.count("requests")
            for block in attention:
                self.keep_block(block)
                if self.rng.random() < 0.1:
                    attention.close()
                    break

    def refused(self) -> None:
        options, expected = self.rng.choice(bad_requests(self.rng))
        try:
            self.world.engine.generate(**options)
        except expected:
            self.world.count("refused: bad request")
        except errors.QueueFull:
            self.world.count("refused: queue full")
        else:
            self.world.fail(f"generate took {options}")

    def keep(self, token: Token) -> None:
        if self.rng.random() < 0.5:
            self.holding.keep(token.attention)
            self.holding.keep(token.hidden)
        if self.rng.random() < 0.2:
            self.holding.release()

    def keep_block(self, block: PromptBlock) -> None:
        self.world.count("prompt blocks")
        self.holding.keep(block.rows)
        self.holding.release()


class AsyncCallers:
    """One thread with an event loop and some tasks, which are also cancelled from outside."""

    N_TASKS = 3

    def __init__(self, world: World, name: str) -> None:
        self.world = world
        self.name = name

    def run(self) -> None:
        self.world.retire(self.name)  # each task is heard of by itself
        asyncio.run(self.main())

    async def main(self) -> None:
        tasks = [asyncio.create_task(self.task(i)) for i in range(self.N_TASKS)]
        await asyncio.gather(*tasks)

    async def task(self, number: int) -> None:
        rng = Random(f"{self.world.seed} {self.name} {number}")
        holding = Holding(self.world, rng, n_most=15)
        while not self.world.is_over:
            self.world.beat(f"{self.name} {number}")
            try:
                limit_s = rng.choice((0.002, 0.02, None))
                await asyncio.wait_for(self.generate(rng, holding), limit_s)
            except TimeoutError:
                self.world.count("tasks cancelled")
            except Exception as error:
                self.world.fail(f"{self.name}: {type(error).__name__}: {error}")
            holding.release()
            await asyncio.sleep(rng.choice((0, 0, 0.03)))
        holding.release(everything=True)
        self.world.retire(f"{self.name} {number}")

    async def generate(self, rng: Random, holding: Holding) -> None:
        options = random_options(rng, n_slots=0)
        capture = options["capture"]
        try:
            generation = self.world.engine.generate(random_prompt(rng), **options)
        except errors.QueueFull:
            self.world.count("refused: queue full")
            await asyncio.sleep(0.005)
            return
        self.world.count("requests")
        n_most = 10**6 if rng.random() < 0.5 else rng.randrange(25)
        n_taken = 0
        try:
            with documented_ends(self.world, capture):
                async for token in generation:
                    n_taken += 1
                    if rng.random() < 0.5:
                        holding.keep(token.attention)
                    holding.release()
                    if n_taken >= n_most:
                        break
            if rng.random() < 0.7:
                await generation.aclose()
                self.world.count(f"ended: {generation.finish_reason}")
                if generation.finish_reason is None:
                    self.world.fail(f"{generation!r} did not end")
            else:
                self.world.count("ended: dropped")
        finally:
            self.world.count("tokens", n_taken)
