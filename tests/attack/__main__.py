"""Run the whole attack: ``python -m tests.attack [--minutes 15] [--seed N] [--only NAME ...]``.

Each way in is a process of its own, one after another, with its share of the time. What it prints:
counts of outcomes, the worst gaps of an ordinary client, peak memory. The exit status is 0 when
nothing was wrong, else 1; a process that died or hung is named with its seed, which repeats it.
"""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
# Share of the time for each module; the crowd needs many short stretches.
SHARES = {
    "models": 3,
    "blobs": 2,
    "calls": 3,
    "grammars": 3,
    "templates": 2,
    "answers": 1,
    "interrupts": 2,
    "raw_http": 2,
    "configs": 1,
    "signals": 2,
    "bodies": 2,
    "frames": 2,
    "crowd": 8,
    "greedy": 2,
}
SLACK_S = 120.0
"""For what each one does beside attacking: opening models, starting and ending servers."""


def run_one(name: str, seconds: float, seed: int) -> bool:
    """Run one module; True where nothing was wrong."""
    command = [
        sys.executable, "-X", "faulthandler", "-m", f"tests.attack.{name}",
        "--minutes", f"{seconds / 60:.4f}", "--seed", str(seed),
    ]  # fmt: skip
    started_s = time.monotonic()
    try:
        done = subprocess.run(command, cwd=ROOT, timeout=seconds + SLACK_S, check=False)
    except subprocess.TimeoutExpired:
        print(f"{name}: WRONG: no end {SLACK_S:.0f} s after its time; seed {seed}", flush=True)
        return False
    if done.returncode < 0:
        died_of = signal.Signals(-done.returncode).name
        print(f"{name}: WRONG: it died of {died_of}; seed {seed}", flush=True)
    print(f"{name}: {time.monotonic() - started_s:.0f} s\n", flush=True)
    return done.returncode == 0


def main() -> int:
    """Run what the command line says."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=15.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", nargs="+", choices=tuple(SHARES), default=tuple(SHARES))
    given = parser.parse_args()
    whole = sum(SHARES[name] for name in given.only)
    failed = [
        name
        for name in given.only
        if not run_one(name, given.minutes * 60 * SHARES[name] / whole, given.seed)
    ]
    print(f"attack: {len(given.only) - len(failed)} passed, {len(failed)} failed", *failed)
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
