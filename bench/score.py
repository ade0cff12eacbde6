"""What does a score cost beside llama.cpp's perplexity tool, and is the perplexity the same?

Both evaluate windows of 512 ids of the same text and score the second half of each, as the tool
does. The tool's time is that between its log lines "calculating perplexity" and "Final estimate",
ours that of one `Engine.score` call for all windows, so neither counts loading or tokenizing. The
mean log-probabilities must agree, or the row is an error.

The row of the kernel scores such windows with the demo model token by token, as a text is
generated, with an F32 cache: by the default attention and without flash attention. The perplexities
must be within 1e-4 of each other, or the row is an error. Random weights would not do: they make
much of the rounding of quantised products.
"""

from __future__ import annotations

import math
import re
import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from console import attempt, main
from models import NotHere, model_path, peer
from report import Timing
from runs import open_engine

from kqview import Engine

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from console import ProgressLine
    from report import Row
    from settings import Settings

    from kqview.bench.records import LeftOut

NAME: Final = "score-perplexity"
OF_KERNEL: Final = "score-kernel"
WEIGHTS: Final = {NAME: 90.0, OF_KERNEL: 15.0}
N_WINDOW = 512
N_WINDOWS = 4
MOST_PAIRS = 5  # each evaluates 2,048 tokens twice
N_SCORED = N_WINDOW - 1 - N_WINDOW // 2
# Both are sums of float32 logits of batches of other sizes.
LARGEST_DIFFERENCE = 2e-4  # relative, of the mean log-probability
LARGEST_OF_KERNEL = 1e-4  # relative, of the perplexity
N_STARTS = 3  # of the tool, at most


def measure(settings: Settings, line: ProgressLine) -> Iterator[Row | LeftOut]:
    """Measure the chosen cases."""
    for name in settings.chosen(WEIGHTS):
        yield attempt(name, _measure if name == NAME else _measure_kernel, settings, line)


def _measure(settings: Settings, line: ProgressLine) -> Timing:
    program = str(peer("llama-perplexity"))
    text = Path(__file__).with_name("NOTES.md").read_text("utf-8")
    with (
        open_engine(settings, flash_attn=True, n_ctx=N_WINDOW) as engine,
        tempfile.TemporaryDirectory() as folder,
    ):
        file = Path(folder) / "text.txt"
        file.write_text(text, "utf-8")
        windows = _windows(engine, text)
        means: dict[str, float] = {}

        def tool() -> float:
            means["tool"], ms = _tool(program, settings, file)
            return ms

        def ours() -> float:
            start = settings.now_s()
            scores = engine.score(windows, last=N_SCORED)
            ms = (settings.now_s() - start) * 1000.0
            means["ours"] = float(np.mean([score.logprobs[-N_SCORED:] for score in scores]))
            return ms

        ours()
        pairs = line.pairs(NAME, tool, ours, min(settings.n_pairs, MOST_PAIRS))
    if abs(means["ours"] - means["tool"]) > LARGEST_DIFFERENCE * abs(means["tool"]):
        raise ValueError(
            f"mean log-probabilities differ: {means['ours']} here, {means['tool']} of the tool"
        )
    return Timing(
        name=NAME,
        what=f"Engine.score of {N_WINDOWS} x {N_WINDOW} tokens, the second half of each",
        baseline="llama-perplexity (stock build)",
        work=f"all windows; {settings.shape}, {settings.n_threads} threads",
        pairs=pairs,
        target=None,
        command=f"python bench/score.py --row {NAME} {settings.flags}",
    )


def _measure_kernel(settings: Settings, line: ProgressLine) -> Timing:
    text = Path(__file__).with_name("NOTES.md").read_text("utf-8")
    options: dict[str, Any] = {
        "kv_type": "f32", "n_ubatch": 1, "n_ctx": N_WINDOW, "n_threads": settings.n_threads
    }  # fmt: skip
    perplexities: dict[str, float] = {}
    with Engine.demo(**options) as ours, Engine.demo(flash_attn=False, **options) as plain:
        if ours.attention_kernel != "kqview":
            raise NotHere("the attention of this machine's processor is llama.cpp's")
        windows = _windows(ours, text)

        def score(engine: Engine, whose: str) -> float:
            start = settings.now_s()
            scores = engine.score(windows, last=N_SCORED)
            ms = (settings.now_s() - start) * 1000.0
            logprobs = [one.logprobs[-N_SCORED:] for one in scores]
            perplexities[whose] = math.exp(-float(np.mean(logprobs, dtype=np.float64)))
            return ms

        pairs = line.pairs(
            OF_KERNEL,
            lambda: score(plain, "plain"),
            lambda: score(ours, "ours"),
            settings.pairs_for(None),
        )
    difference = abs(perplexities["ours"] / perplexities["plain"] - 1.0)
    if not difference <= LARGEST_OF_KERNEL:
        raise ValueError(f"perplexities differ by {difference:.1e}: {perplexities}")
    return Timing(
        name=OF_KERNEL,
        what=f"kqview's attention: perplexity {perplexities['ours']:.4f}",
        baseline=f"flash attention off: {perplexities['plain']:.4f}, {difference:.0e} from it",
        work=f"{N_WINDOWS} x {N_WINDOW} tokens one by one, F32 cache; "
        f"demo model, {settings.n_threads} threads",
        pairs=pairs,
        target=None,
        command=f"python bench/score.py --row {OF_KERNEL} {settings.flags}",
    )


def _windows(engine: Engine, text: str) -> list[list[int]]:
    """The tool's windows: the ids one after the other, the first of each replaced by BOS."""
    ids = engine.tokenize(text, parse_special=False)
    begin = engine.tokenize("", add_special=True)
    starts = range(0, N_WINDOWS * N_WINDOW, N_WINDOW)
    return [begin + ids[start + len(begin) : start + N_WINDOW] for start in starts]


def _tool(program: str, settings: Settings, file: Path) -> tuple[float, float]:
    """The mean log-probability and the milliseconds of one start of the tool."""
    flags: Sequence[object] = (
        "-m", model_path(settings), "-f", file, "-c", N_WINDOW, "-b", N_WINDOW, "-ub", N_WINDOW,
        "--chunks", N_WINDOWS, "-t", settings.n_threads, "-fa", "on", "-ngl", settings.n_gpu_layers,
    )  # fmt: skip
    # It may end before the thread that writes its log has written the last entries.
    for _ in range(N_STARTS):
        done = subprocess.run(
            [program, *map(str, flags)], capture_output=True, text=True, check=True, timeout=600
        )
        output = done.stdout + done.stderr
        if "Final estimate" in output:
            break
    spent_s = _logged_at_s("Final estimate", output) - _logged_at_s(
        "calculating perplexity over", output
    )
    found = re.search(r"Final estimate: PPL = ([\d.]+)", output)
    if found is None:
        raise ValueError(f"llama-perplexity printed no estimate: {output[-500:]}")
    return -math.log(float(found[1])), spent_s * 1000.0


def _logged_at_s(words: str, output: str) -> float:
    """Seconds of the log entry *words*. It begins with minutes.seconds.ms.us, not always a line."""
    found = re.search(rf"(\d+)\.(\d\d)\.(\d{{3}})\.(\d{{3}}) \w (perplexity: )?{words}", output)
    if found is None:
        raise ValueError(f"llama-perplexity has no entry {words!r} with a time: {output[-500:]}")
    minutes, seconds, ms, us = (int(group) for group in found.groups()[:4])
    return minutes * 60 + seconds + ms * 1e-3 + us * 1e-6


if __name__ == "__main__":
    main(__doc__, WEIGHTS, measure)
