"""How does the tap compare with llama.cpp's eval callback, the alternative without kqview?

The stock program is kq-eval-rows of bench/peers: a callback copies rows of the `kq` tensor of every
layer to the host, which needs flash attention off. Ours captures the logits of all heads, with
flash attention on and off, each in a process of its own. A round is one start of kq-eval-rows,
which runs without and with its callback, and a prompt and a generation of both of ours: one pair
for each row. All take the last row of the prompt; in the rows "all", for which kq-eval-rows is
started once more, all take every row.
"""

from __future__ import annotations

import json
import subprocess
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from console import main
from models import model_path, peer
from processes import OwnProcess
from report import Timing
from runs import PrefillRuns, decode_runs, open_engine

from kqview.bench.pairs import Pairs, quantile, step_ms

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator

    from console import ProgressLine
    from settings import Settings


CALLBACK = "eval callback (stock build); flash attention off"
PLAIN = "stock build without callback; flash attention off"
ALL = f"{CALLBACK}; every row"
TAP = "tap: logits, all heads; flash attention"
PREFILL_TARGET, DECODE_TARGET = 1 / 1.5, 1.0
# name -> (what, against, target)
CASES = {
    "callback-prefill-flash": (f"{TAP} on", CALLBACK, PREFILL_TARGET),
    "callback-prefill-plain": (f"{TAP} off", CALLBACK, PREFILL_TARGET),
    "callback-prefill-stock": (CALLBACK, PLAIN, None),
    "callback-all-flash": (f"{TAP} on, attend", ALL, PREFILL_TARGET),
    "callback-all-plain": (f"{TAP} off, attend", ALL, PREFILL_TARGET),
    "callback-decode-flash": (f"{TAP} on", CALLBACK, DECODE_TARGET),
    "callback-decode-plain": (f"{TAP} off", CALLBACK, DECODE_TARGET),
    "callback-decode-stock": (CALLBACK, PLAIN, None),
}
# All rows come out of the same rounds.
WEIGHTS = {name: 160.0 / len(CASES) for name in CASES}
MOST_ROUNDS = 5  # each is seven prompts long; 5 is the least that has a bound
Times = dict[str, float]


def measure(settings: Settings, line: ProgressLine) -> Iterator[Timing]:
    """Measure all cases in the same rounds and yield the chosen ones."""
    names = settings.chosen(CASES)
    if not names:
        return
    program = str(peer("kq-eval-rows"))
    n_rounds = min(settings.n_pairs, MOST_ROUNDS)
    are_all_rows = any("all" in name for name in names)
    found = {name: Pairs() for name in CASES}
    for name in names[:-1]:
        line.start(name, 1)
    line.start(names[-1], n_rounds)
    with ExitStack() as stack:
        ours = {
            setting: stack.enter_context(OwnProcess(_opened, settings, setting == "flash"))
            for setting in ("flash", "plain")
        }
        ways: dict[str, Callable[[], Times]] = {
            "stock": partial(_stock_times, program, settings, are_all_rows),
            **{setting: partial(one.ask, are_all_rows) for setting, one in ours.items()},
        }
        for i in range(n_rounds):
            order = list(ways) if i % 2 == 0 else list(reversed(ways))
            times = {way: ways[way]() for way in order}
            stock = times["stock"]
            for setting in ours:
                for part, ms in times[setting].items():
                    found[f"callback-{part}-{setting}"].add(stock[part], ms)
            for part in ("prefill", "decode"):
                found[f"callback-{part}-stock"].add(stock[f"{part} without"], stock[part])
            line.tick()
    for name in names:
        what, baseline, target = CASES[name]
        is_prefill = "decode" not in name
        piece = "a prompt of {} tokens" if is_prefill else "a decoded token at {} tokens of context"
        yield Timing(
            name=name,
            what=what,
            baseline=baseline,
            work=piece.format(settings.n_context),
            pairs=found[name],
            target=settings.target(target),
            command=f"python bench/eval_callback.py --row {name} {settings.flags}",
        )


@contextmanager
def _opened(settings: Settings, flash_attn: bool) -> Generator[Callable[[bool], Times]]:
    """An engine of ours; what it yields returns the milliseconds of each part."""
    with open_engine(settings, flash_attn=flash_attn) as engine:
        prefills = PrefillRuns(settings, engine)

        def times(are_all_rows: bool) -> Times:
            found = run_ours(settings, prefills)
            return {**found, "all": prefills.attend_ms("logits")} if are_all_rows else found

        yield times


def _stock_times(program: str, settings: Settings, are_all_rows: bool) -> Times:
    """The same of the stock program, and of its run without callback."""
    runs = run_stock(program, settings)
    without = stock_ms(settings, runs["plain"][0])
    found = stock_ms(settings, runs["callback"][0])
    found.update({f"{part} without": ms for part, ms in without.items()})
    if are_all_rows:
        (run,) = run_stock(program, settings, rows="all", bench="callback")["callback"]
        found["all"] = run["prefill_ms"]
    return found


def run_ours(settings: Settings, prefills: PrefillRuns) -> dict[str, float]:
    """Milliseconds of a prompt with capture and of a step of the generation after it."""
    prefill_ms = prefills.ms("logits")
    decodes = decode_runs(settings, prefills.engine, prefills.prompt)
    stamps_s = decodes.stamps_s(settings.n_tokens, capture="logits")
    return {"prefill": prefill_ms, "decode": step_ms(stamps_s, settings.n_skip)}


def stock_ms(settings: Settings, run: dict[str, Any]) -> dict[str, float]:
    """The same of one run of the stock program."""
    decode_ms = quantile(run["decode_ms"][settings.n_skip :], 0.5)
    return {"prefill": run["prefill_ms"], "decode": decode_ms}


def run_stock(
    program: str, settings: Settings, rows: str = "last", bench: str = "both"
) -> dict[str, Any]:
    """One start of kq-eval-rows: a run without callback and one with it, or only *bench*."""
    flags: dict[str, object] = {
        "--model": model_path(settings),
        "--prompt-len": settings.n_context,
        "--n-predict": settings.n_tokens,
        "--n-ctx": settings.n_context + 256,
        "--n-ubatch": 512,
        "--threads": settings.n_threads,
        "--n-gpu-layers": settings.n_gpu_layers,
        "--flash-attn": "off",
        "--kv-type": "f16",
        "--bench": bench,
        "--repeat": 1,
        "--rows": rows,
    }
    command = [program, *(str(word) for flag in flags.items() for word in flag)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"kq-eval-rows: exit status {done.returncode}; {done.stderr[-500:]}")
    return json.loads(done.stdout)


if __name__ == "__main__":
    main(__doc__, WEIGHTS, measure)
