"""llama.cpp's own tiny models, one per architecture and variant, and a check of many at once.

Owns: making the models (``test-llama-archs -o``, 128 at the pinned commit), and worker processes
that check them (``arch_check``): a model that ends its worker is named, and the others go on.
Never: keeps the models; the caller names a folder.
"""

from __future__ import annotations

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from . import stock
from .arch_check import ModelCheck, Report

if TYPE_CHECKING:
    from collections.abc import Sequence

N_MODELS = 128
ROOT = Path(__file__).resolve().parents[2]
MODEL_TIMEOUT_S = 120


def make_models(folder: Path, pattern: str = "") -> list[Path]:
    """Write the models (of architectures that match the regular expression) and return them.

    The weights follow from a fixed seed. All of them take 5 s and 0.9 GB.

    Raises:
        PeersMissing: test-llama-archs is not built.
    """
    folder.mkdir(parents=True, exist_ok=True)
    command = [str(stock.find_binary("test-llama-archs")), "-s", "1", "-o", str(folder)]
    command += ["-a", pattern] if pattern else []
    subprocess.run(command, check=True, capture_output=True, text=True)
    return sorted(folder.glob("*.gguf"))


def check_all(models: Sequence[Path], n_workers: int = 2) -> list[Report]:
    """Check each model in one of `n_workers` processes; reports in the order of `models`."""
    shares = [list(models[i::n_workers]) for i in range(n_workers)]
    with ThreadPoolExecutor(n_workers) as pool:
        found = {report.name: report for part in pool.map(_check_share, shares) for report in part}
    return [found[model.stem] for model in models]


def _check_share(models: list[Path]) -> list[Report]:
    """Feed models to a worker, and to a new one after each that ends it."""
    reports: list[Report] = []
    rest = list(models)
    while rest:
        command = [sys.executable, "-m", "tests.support.archs", *map(str, rest)]
        worker = subprocess.Popen(
            command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        try:
            out, err = worker.communicate(timeout=MODEL_TIMEOUT_S * len(rest))
        except subprocess.TimeoutExpired:
            worker.kill()
            out, err = worker.communicate()
            err += f"\ntimed out after {MODEL_TIMEOUT_S * len(rest)} s"
        done = [_report_of(line) for line in out.splitlines() if line.startswith("{")]
        reports += done
        rest = rest[len(done) :]
        if rest:
            why = " | ".join(err.strip().splitlines()[-6:])
            failure = f"the process ended with {worker.returncode}: {why}"
            reports.append(Report(rest.pop(0).stem, failure=failure))
    return reports


def _report_of(line: str) -> Report:
    report = Report(**json.loads(line))
    report.errors = {
        key: {int(layer): error for layer, error in by_layer.items()}
        for key, by_layer in report.errors.items()
    }
    return report


def main(paths: Sequence[str]) -> None:
    """Check models in this process, one line of JSON each."""
    for path in paths:
        check = ModelCheck(Path(path))
        try:
            check.run()
        except Exception as error:
            check.report.failure = f"{type(error).__name__}: {error}"
        print(json.dumps(asdict(check.report)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
