"""What does our loop cost compared with llama.cpp itself, and what do sampling and logprobs add?

No capture anywhere. The stock program is llama-bench: the same model, depth, threads, batch sizes
and cache, alternating with ours; it decodes given ids, we sample each one (greedy) and hand it to
Python. Both times are the whole run divided by its tokens. A round is one start of
llama-bench with several repetitions and as many of our runs, paired in order; which program goes
first changes from round to round. The other rows compare our loop with itself.
"""

from __future__ import annotations

import json
import subprocess
from typing import TYPE_CHECKING, Any

from console import attempt, main
from models import model_path, peer
from report import Timing
from runs import decode_runs, open_engine

from kqview.bench.pairs import Pairs, alternate, mean_step_ms, step_ms

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from console import ProgressLine
    from settings import Settings

    from kqview.bench.records import LeftOut
    from kqview.bench.sweep import DecodeRuns

OWN_CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "loop-sampled": (
        "sampled: temperature 0.8, top-k 40, top-p 0.95, min-p 0.05",
        {"temperature": 0.8, "seed": 1},
    ),
    "loop-logprobs": ("greedy with 5 top logprobs", {"top_logprobs": 5}),
}
BENCH_CASES = {"loop-flash-llama-bench": True, "loop-plain-llama-bench": False}
WEIGHTS = dict.fromkeys(OWN_CASES, 8.0) | dict.fromkeys(BENCH_CASES, 50.0)

N_BENCH_TOKENS = 32
N_REPETITIONS = 4  # of one start of llama-bench: the prompt is evaluated once and then restored
# At least 0.98 times the speed of llama-bench.
TARGET = 1 / 0.98


def measure(settings: Settings, line: ProgressLine) -> Iterator[Timing | LeftOut]:
    """Measure the chosen cases: ours against ours first, they need no stock program."""
    own = settings.chosen(OWN_CASES)
    if own:
        with open_engine(settings, flash_attn=True) as engine:
            runs = decode_runs(settings, engine)
            for name in own:
                line.start(name, settings.pairs_for(None))
                yield attempt(name, _measure_own, settings, line, runs, name)
    for name in settings.chosen(BENCH_CASES):
        yield attempt(name, _measure_against_bench, settings, line, name)


def _measure_own(settings: Settings, line: ProgressLine, runs: DecodeRuns, name: str) -> Timing:
    what, options = OWN_CASES[name]

    def run(**options: Any) -> float:
        return step_ms(runs.stamps_s(settings.n_tokens, **options), settings.n_skip)

    pairs = Pairs()
    for baseline, candidate in alternate(run, lambda: run(**options), settings.pairs_for(None)):
        pairs.add(baseline, candidate)
        line.tick()
    return Timing(
        name=name,
        what=f"{what}; flash attention on",
        baseline="greedy",
        work=_work(settings),
        pairs=pairs,
        target=None,
        command=f"python bench/loop.py --row {name} {settings.flags}",
    )


def _measure_against_bench(settings: Settings, line: ProgressLine, name: str) -> Timing:
    flash_attn = BENCH_CASES[name]
    program = str(peer("llama-bench"))
    n_rounds = -(-settings.n_pairs // N_REPETITIONS)
    line.start(name, n_rounds)
    pairs = Pairs()
    with open_engine(settings, flash_attn=flash_attn) as engine:
        runs = decode_runs(settings, engine)

        def ours() -> list[float]:
            # The first of the tokens comes from the prompt, the others from the depths that
            # llama-bench decodes at.
            return [mean_step_ms(runs.stamps_s(N_BENCH_TOKENS + 1)) for _ in range(N_REPETITIONS)]

        def stock() -> list[float]:
            return llama_bench_ms(program, settings, flash_attn=flash_attn)

        ours()
        for i in range(n_rounds):
            if i % 2 == 0:
                baseline, candidate = stock(), ours()
            else:
                candidate, baseline = ours(), stock()
            for pair in zip(baseline, candidate, strict=True):
                pairs.add(*pair)
            line.tick()
    flash = "on" if flash_attn else "off"
    return Timing(
        name=name,
        what=f"greedy, no capture; flash attention {flash}",
        baseline="llama-bench (stock build)",
        work=_work(settings),
        pairs=pairs,
        target=settings.target(TARGET),
        command=f"python bench/loop.py --row {name} {settings.flags}",
    )


def _work(settings: Settings) -> str:
    return f"a decoded token at {settings.n_context} tokens of context"


def llama_bench_ms(
    program: str, settings: Settings, *, flash_attn: bool, n_repetitions: int = N_REPETITIONS
) -> list[float]:
    """Milliseconds a token of each repetition of one start of llama-bench."""
    flags = {"-p": 0, "-n": N_BENCH_TOKENS, "-d": settings.n_context, "-r": n_repetitions}
    found = _samples_ms(program, settings, {"-fa": int(flash_attn), **flags})
    return [ms / N_BENCH_TOKENS for ms in found]


def llama_bench_prompt_ms(program: str, settings: Settings, n_tokens: int, n_prompts: int) -> float:
    """Mean milliseconds of *n_prompts* prompts in one start of llama-bench, flash attention on."""
    flags = {"-fa": 1, "-p": n_tokens, "-n": 0, "-r": n_prompts}
    found = _samples_ms(program, settings, flags)
    return sum(found) / len(found)


def _samples_ms(program: str, settings: Settings, more: Mapping[str, object]) -> list[float]:
    flags: dict[str, object] = {
        "-m": model_path(settings),
        "-t": settings.n_threads,
        "-ngl": settings.n_gpu_layers,
        "-b": 2048,
        "-ub": 512,
        "-ctk": "f16",
        "-ctv": "f16",
        "-o": "json",
        **more,
    }
    command = [program, *(str(word) for flag in flags.items() for word in flag)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"llama-bench: exit status {done.returncode}; {done.stderr[-500:]}")
    (result,) = json.loads(done.stdout)
    return [n_ns / 1e6 for n_ns in result["samples_ns"]]


if __name__ == "__main__":
    main(__doc__, WEIGHTS, measure)
