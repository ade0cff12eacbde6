"""Those who generate with mods: random ones, that also fail, cancel, and call the engine again."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import numpy as np

from kqview import errors, mod
from kqview.mods import ForwardPass
from kqview.trace import final_ids

from .actors import Caller, documented_ends
from .choices import random_options, random_prompt

if TYPE_CHECKING:
    from random import Random

    from kqview import Generation

    from .world import World


class Steerer(Caller):
    """One thread: requests with mods, taken to the end or left; their traces must tell the ids."""

    def act(self) -> None:
        options = random_options(self.rng, len(self.world.engine.slots))
        options["max_tokens"] = min(options["max_tokens"], 40)
        capture = options["capture"]
        mods = [self.random_mod() for _ in range(self.rng.randrange(3))]
        views: list[tuple[Any, Any]] = []
        if self.rng.random() < 0.3:
            mods.append(keeping(views))
        with documented_ends(self.world, capture):
            generation = self.world.engine.generate(
                random_prompt(self.rng),
                mods=mods,
                trace=True,
                mod_time_limit_s=self.rng.choice((None, None, 20.0)),
                **options,
            )
            self.drive(generation, self.rng.choice((10**6, self.rng.randrange(25))))
        for view, copy in views:
            if not np.array_equal(view, copy):
                self.world.fail(f"{generation!r}: logits that a mod has kept changed")

    def drive(self, generation: Generation, n_most: int) -> None:
        is_begun = False
        try:
            for _ in range(n_most):
                token = next(generation, None)
                if not is_begun:
                    is_begun = True
                    self.world.count("requests")
                if token is None:
                    break
                self.keep(token)
        except errors.QueueFull:
            raise
        except errors.InvalidSampling:  # a grammar does not allow every forced token
            self.world.count("ended: steered against a grammar")
            self.count_begun(is_begun)
        except errors.EmittedError:
            self.count_begun(is_begun)
        except errors.KqviewError:
            self.count_begun(is_begun)
            raise
        generation.close()
        self.ended(generation)
        trace = generation.trace
        assert trace is not None
        if final_ids(trace) != generation.tokens != []:
            self.world.fail(f"{generation!r}: its trace has other ids")
        self.world.count("steps with mods", sum(1 for one in trace.events if one.added_tokens))

    def count_begun(self, is_begun: bool) -> None:
        if not is_begun:
            self.world.count("requests")

    def random_mod(self) -> Any:
        rng, world = self.rng, self.world

        def answer(event: Any, actions: Any) -> Any:
            match rng.randrange(60):
                case 0 | 1:
                    return actions.backtrack(rng.randrange(6), some(rng, 3))
                case 2 | 3 | 4:
                    return actions.force_tokens(some(rng, 5))
                case 5 | 6:
                    return actions.adjust_logits(token_temp=rng.random())
                case 7:
                    raise ValueError("now and then")
                case 8:
                    return "nonsense"
                case 9:
                    time.sleep(rng.random() * 0.005)
                case 10 if event.step > 0 and rng.random() < 0.2:
                    return actions.force_output(some(rng, 5))
                case 11 if event.step > 0 and rng.random() < 0.2:
                    return actions.emit_error("now and then")
                case 12 if rng.random() < 0.2:
                    nested(world)
                case _:
                    return None

        return mod(answer)


def some(rng: Random, most: int) -> list[int]:
    return rng.choices(range(256), k=rng.randrange(most))


def keeping(views: list[tuple[Any, Any]]) -> Any:
    """A mod that keeps the logits of the first steps."""

    @mod
    def keep(event: Any) -> None:
        if isinstance(event, ForwardPass) and len(views) < 4:
            views.append((event.logits, event.logits.copy()))

    return keep


def nested(world: World) -> None:
    """Generate inside a mod: a slot is free, or this is told that it waits for itself."""
    try:
        generation = world.engine.generate([1, 2, 3], max_tokens=2, ignore_eos=True)
    except errors.QueueFull:
        return
    world.count("requests")
    try:
        generation.read()
    except (errors.BusyError, errors.DecodeError):
        generation.close()
    world.count("generations inside a mod")
