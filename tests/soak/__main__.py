"""Run the soak test: ``python -m tests.soak --minutes 10 [--seed N] [--slots 4]``.

Threads and tasks use one engine on a tiny model in every way there is, at random from a seed, and
the engine's decodes fail now and then. A progress line every few seconds, a summary at the end, and
the exit status: 0 when nothing was wrong, 1 with the list of what was, 2 where it got stuck (all
stacks are printed then). What has to hold:

- every call returns or raises what is documented; every generation ends; views never change;
- the trace of a request with random mods rebuilds its ids, and views that mods keep never change;
- a greedy request among all the others gives the ids and the attention that it gives alone;
- at the end no generation runs or waits, no block is leased, and the budget can be leased whole;
- memory is flat: the median of the last sixth of the time is at most 5 % above that of the sixth
  behind the first third, in which the process warms up.
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import itertools
import os
import random
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from kqview import Capture, Engine, errors
from tests.support import tiny_gguf
from tests.support.engines import open_engine as open_faulty_engine

from .actors import AsyncCallers, Caller
from .choices import N_CTX
from .keepers import Control, Crowd, SlotKeeper
from .steerers import Steerer
from .world import World

if TYPE_CHECKING:
    from kqview.types import EngineStats

BUDGET_BYTES = 512 * 1024  # about a hundred rows: it is full most of the time
N_CALLERS = 3
STALL_S = 60.0
STANDSTILL_S = 30.0
GROWTH_MAX = 0.05
SAMPLE_S = 0.25
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def rss_bytes() -> int:
    """Memory of this process that is in use now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE_BYTES


def can_go_on(stats: EngineStats) -> bool:
    """Whether a slot waits for nothing but the engine."""
    return any(slot.state in ("prefill", "decode") for slot in stats.slots)


def give_up(why: str, stats: EngineStats) -> NoReturn:
    """Print what is known of a process that got stuck, and end it: its threads will not."""
    print(f"soak: stuck: {why}; {stats}", flush=True)
    faulthandler.dump_traceback(all_threads=True)
    os._exit(2)


class Watch(threading.Thread):
    """Samples memory, prints progress, and ends the process when an actor got stuck."""

    def __init__(self, world: World, every_s: float) -> None:
        super().__init__(name="watch", daemon=True)
        self.world = world
        self.every_s = every_s
        self.samples: list[tuple[float, int]] = []
        self.is_done = threading.Event()

    def run(self) -> None:
        next_print_s = self.world.started_s + self.every_s
        last = moved = self.world.engine.stats()
        while not self.is_done.wait(SAMPLE_S):
            now_s = time.monotonic()
            self.samples.append((now_s - self.world.started_s, rss_bytes()))
            if now_s >= next_print_s:
                next_print_s += self.every_s
                stats = self.world.engine.stats()
                print(self.line(stats, stats.since(last)), flush=True)
                last = stats
            now = self.world.engine.stats()
            if now.n_decodes != moved.n_decodes or not can_go_on(now):
                moved = now
            if now.uptime_s - moved.uptime_s > STANDSTILL_S:
                give_up(f"no decode for {STANDSTILL_S} s", now)
            if stuck := self.world.silent_since(STALL_S):
                give_up(f"nothing heard of {', '.join(stuck)} for {STALL_S} s", now)

    def line(self, now: EngineStats, lately: EngineStats) -> str:
        slots = " ".join(slot.state for slot in now.slots)
        return (
            f"soak: {now.uptime_s:4.0f} s  {lately.n_tokens / lately.uptime_s:6.0f} tokens/s  "
            f"load {lately.busy_s / lately.uptime_s:4.0%}  [{slots}]  {now.n_queued} queued  "
            f"pool {now.pool.leased_bytes / now.pool.budget_bytes:4.0%} ({now.pool.n_leased} views)"
            f"  {self.samples[-1][1] / 2**20:.1f} MiB  {self.world.tally['FAILURES']} failures"
        )

    def medians(self) -> tuple[float, float, float]:
        """Bytes behind the warm-up, at the end, and the most."""
        limit_s = self.world.ends_s - self.world.started_s
        early = [n for at, n in self.samples if limit_s / 3 <= at < limit_s / 2]
        late = [n for at, n in self.samples if limit_s * 5 / 6 <= at < limit_s]
        return statistics.median(early), statistics.median(late), max(n for _, n in self.samples)


def open_engine(model: Path, seed: int, n_slots: int) -> Engine:
    rng = random.Random(seed)
    gaps = itertools.chain([1500], (rng.randrange(100, 1500) for _ in range(20_000)))
    return open_faulty_engine(
        model,
        n_ctx=N_CTX,
        n_slots=n_slots,
        n_threads=1,
        n_ubatch=32,
        kv_type="f32",
        flash_attn=False,
        attention_budget_bytes=BUDGET_BYTES,
        poisons_blocks=True,
        aborted_decodes=list(itertools.accumulate(gaps)),
    )


def check_end(world: World, before: EngineStats) -> None:
    """Nothing is left over when everybody has gone."""
    engine = world.engine
    gc.collect()
    deadline_s = time.monotonic() + 20
    while time.monotonic() < deadline_s:
        stats = engine.stats()
        if stats.n_queued == 0 and not any(slot.is_busy for slot in stats.slots):
            break
        time.sleep(0.05)
    stats = engine.stats()
    made = stats.since(before)
    n_ended = made.n_finished + made.n_cancelled + made.n_failed
    if n_ended != world.tally["requests"]:
        world.fail(f"{world.tally['requests']} generations were made, {n_ended} ended")
    if stats.n_queued or any(slot.is_busy for slot in stats.slots):
        world.fail(f"the engine still works: {stats.n_queued} queued, {stats.slots}")
    if stats.pool.n_leased or stats.pool.leased_bytes:
        world.fail(f"views are gone, blocks are not back: {stats.pool}")
    held = []
    try:
        held.extend(engine.generate([1, 2], capture=Capture("logits"), ignore_eos=True))
        world.fail("the budget is larger than a slot's rows: nothing was checked")
    except errors.PoolExhausted:
        n_leased = engine.stats().pool.leased_bytes
        if n_leased < 0.95 * BUDGET_BYTES:
            world.fail(f"only {n_leased} of {BUDGET_BYTES} bytes can be leased")
    except errors.DecodeError:
        pass  # one of those injected


def check_memory(world: World, watch: Watch) -> None:
    early, late, _ = watch.medians()
    if late > early * (1 + GROWTH_MAX):
        world.fail(f"memory grew from {early / 2**20:.1f} to {late / 2**20:.1f} MiB")


def summary(world: World, watch: Watch, made: EngineStats) -> str:
    early, late, most = watch.medians()
    tally = "\n".join(f"  {world.tally[what]:9d}  {what}" for what in sorted(world.tally))
    return (
        f"soak: seed {world.seed}, {world.ends_s - world.started_s:.0f} s\n{tally}\n"
        f"  {made.n_tokens:9d}  tokens generated, {made.tokens_per_s:.0f} tokens/s in "
        f"{made.decode_s:.1f} s of generating\n"
        f"  {made.prefill_tokens:9d}  prompt tokens, {made.prefill_tokens_per_s:.0f} tokens/s in "
        f"{made.prefill_s:.1f} s of prompts\n"
        f"  {made.n_failed:9d}  generations failed, {made.n_cancelled} cancelled, "
        f"{made.n_finished} finished, {made.dropped_rows} rows dropped\n"
        f"  memory {early / 2**20:.1f} MiB behind the warm-up, {late / 2**20:.1f} MiB at the end "
        f"({late / early - 1:+.1%}), {most / 2**20:.1f} MiB at most"
    )


def soak(model: Path, limit_s: float, seed: int, n_slots: int) -> int:
    """Run it; return the exit status."""
    with open_engine(model, seed, n_slots) as engine:
        world = World(engine, seed, limit_s)
        actors = [Control(world, "control")]  # computes what is right while it is alone
        actors += [Caller(world, f"caller {i}") for i in range(N_CALLERS)]
        actors += [AsyncCallers(world, "async"), SlotKeeper(world, "slots"), Crowd(world, "crowd")]
        actors += [Steerer(world, "steerer")]
        world.started_s = time.monotonic()
        world.ends_s = world.started_s + limit_s
        before = engine.stats()
        watch = Watch(world, every_s=5.0 if limit_s < 120 else 15.0)
        threads = [threading.Thread(target=actor.run, name=actor.name) for actor in actors]
        for actor in actors:
            world.beat(actor.name)
        watch.start()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        watch.is_done.set()
        watch.join()
        actors.clear()
        made = engine.stats().since(before)
        check_end(world, before)
    check_memory(world, watch)
    print(summary(world, watch, made))
    for failure in world.failures:
        print(f"soak: FAILED: {failure}")
    print("soak: failed" if world.failures else "soak: passed", flush=True)
    return 1 if world.failures else 0


def main() -> int:
    """Read the command line; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--minutes", type=float, default=10.0, help="default: 10")
    parser.add_argument("--seed", type=int, help="of the choices; made up and printed by default")
    parser.add_argument("--slots", type=int, default=4, help="default: 4")
    options = parser.parse_args()
    seed = random.randrange(10**6) if options.seed is None else options.seed
    print(f"soak: seed {seed}, {options.minutes:g} minutes, {options.slots} slots", flush=True)
    with tempfile.TemporaryDirectory(prefix="kqview-soak-") as folder:
        model = tiny_gguf.write_preset(Path(folder) / "llama.gguf", "tiny_llama")
        return soak(model, options.minutes * 60, seed, options.slots)


if __name__ == "__main__":
    sys.exit(main())
