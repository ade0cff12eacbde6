"""How does the tap compare with llama.cpp's eval callback, the alternative without kqview?

The stock program is kq-eval-rows of bench/peers: a callback copies rows of the `kq` tensor of every
layer to the host, which needs flash attention off. Ours captures the logits of all heads, with
flash attention on and off. A round is one start of kq-eval-rows, which runs without and with its
callback, plus a prompt and a generation of ours: one pair for each row of that setting. Both take
the last row of the prompt; in the rows "all" both take every row.
"""

from __future__ import annotations

import json
import subprocess
from typing import TYPE_CHECKING, Any

from console import main
from models import model_path, peer
from report import Timing
from runs import PrefillRuns, decode_runs, open_engine

from kqview.bench.pairs import Pairs, quantile, step_ms

if TYPE_CHECKING:
    from collections.abc import Iterator

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
# The rows of a setting come out of the same rounds.
WEIGHTS = {name: 90.0 / len(CASES) for name in CASES}
MOST_ROUNDS = 5  # each is four prompts long; 5 is the least that has a bound


def measure(settings: Settings, line: ProgressLine) -> Iterator[Timing]:
    """Measure all cases of a setting in the same rounds and yield the chosen ones."""
    names = settings.chosen(CASES)
    if not names:
        return
    program = str(peer("kq-eval-rows"))
    n_rounds = min(settings.n_pairs, MOST_ROUNDS)
    found = {name: Pairs() for name in CASES}
    for name in names[:-1]:
        line.start(name, 1)
    line.start(names[-1], n_rounds * 2)
    for setting in ("flash", "plain"):
        # One engine at a time: a second one's threads and buffers would be noise to the first.
        with open_engine(settings, flash_attn=setting == "flash") as engine:
            prefills = PrefillRuns(settings, engine)
            for i in range(n_rounds):
                stock = run_stock(program, settings) if i % 2 == 0 else None
                ours = run_ours(settings, prefills)
                stock = stock or run_stock(program, settings)
                without, callback = (
                    stock_ms(settings, stock[run][0]) for run in ("plain", "callback")
                )
                for part in ("prefill", "decode"):
                    found[f"callback-{part}-stock"].add(without[part], callback[part])
                    found[f"callback-{part}-{setting}"].add(callback[part], ours[part])
                if any("all" in name for name in names):
                    (every_row,) = run_stock(program, settings, rows="all")["callback"]
                    found[f"callback-all-{setting}"].add(
                        every_row["prefill_ms"], prefills.attend_ms("logits")
                    )
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
