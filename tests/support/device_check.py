"""One model's rows on this machine's devices beside those of the CPU, in a process of its own.

Owns: the comparison; ``python -m tests.support.device_check MODEL`` prints it as JSON. A model that
ends its process, as ggml does for what a device cannot compute, ends no other, and the environment
of that process may choose how a device computes: with NVIDIA_TF32_OVERRIDE=0 cuBLAS keeps float32.
The CPU has flash attention off, an F32 cache and llama.cpp's attention: the rows that its tests
compare with the stock build's.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from kqview import Engine, errors

from .archs import N_CTX, N_TOKENS, ROOT, WITHOUT_CACHE, relative
from .rows import random_ids

N_PROMPT = 20  # fewer than those from which the CPU's products are computed on a device as well
TIMEOUT_S = 120


@dataclass
class DeviceReport:
    """Largest errors by "<flash attention> <part>", where part is "prompt" or "tokens".

    Each is (of the first layer, of all layers), relative to the largest value of a row.
    """

    errors: dict[str, tuple[float, float]] = field(default_factory=dict[str, Any])
    refused: dict[str, str] = field(default_factory=dict[str, str])  # by flash attention
    n_equal: int = 0  # generated tokens, before the first one that another device chose otherwise
    layers: list[int] = field(default_factory=list[int])  # with attention
    failure: str = ""


def compare(model: Path, device: int = -1) -> DeviceReport:
    """Probs of a prompt and of tokens after it, by layers on a device and by those of the CPU."""
    report = DeviceReport()
    want = _rows(model, flash_attn=False, n_gpu_layers=0, attention_kernel="llama.cpp")
    report.layers = list(want.layers)
    for flash_attn in (False, True):
        flash = "on" if flash_attn else "off"
        try:
            got = _rows(model, flash_attn=flash_attn, n_gpu_layers=device)
        except errors.UnsupportedModel as refused:
            report.refused[flash] = str(refused)
            continue
        pairs = zip(want.ids, got.ids, strict=True)
        report.n_equal = next((i for i, (a, b) in enumerate(pairs) if a != b), len(want.ids))
        if not want.layers:
            continue
        report.errors[f"{flash} prompt"] = _largest(got.prompt, want.prompt)
        # A token's row belongs to the ids before it.
        n = min(report.n_equal + 1, len(want.tokens))
        found = [_largest(got.tokens[i], want.tokens[i]) for i in range(n)]
        if found:
            first, every = zip(*found, strict=True)
            report.errors[f"{flash} tokens"] = (max(first), max(every))
    return report


@dataclass
class _Found:
    layers: tuple[int, ...]
    prompt: Any = ()
    tokens: list[Any] = field(default_factory=list[Any])
    ids: list[int] = field(default_factory=list[int])


def _rows(model: Path, **options: Any) -> _Found:
    prompt = [one % 128 for one in random_ids(N_PROMPT, seed=3)]
    options = {"n_ctx": N_CTX, "n_threads": 1, "kv_type": "f32", **options}
    with Engine(model, **options) as engine:
        found = _Found(engine.model.attention_layers)
        capture = "probs" if found.layers else None
        if capture:
            found.prompt = engine.attend(prompt, capture).array()
        if model.stem not in WITHOUT_CACHE:
            generation = engine.generate(
                prompt, max_tokens=N_TOKENS, temperature=0, ignore_eos=True, capture=capture
            )
            for token in generation:
                found.ids.append(token.id)
                found.tokens.append(token.attention)
        return found


def _largest(got: Any, want: Any) -> tuple[float, float]:
    by_layer = [
        relative(np.asarray(a), np.asarray(b, np.float64)) for a, b in zip(got, want, strict=True)
    ]
    return by_layer[0], max(by_layer)


def check(model: Path, **environment: str) -> DeviceReport:
    """`compare` in a new process; a failure says how that ended."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.device_check", str(model)],
        capture_output=True, text=True, timeout=TIMEOUT_S, check=False, cwd=ROOT,
        env={**os.environ, **environment},
    )  # fmt: skip
    lines = done.stdout.splitlines()
    if done.returncode != 0 or not lines:
        why = " | ".join(done.stderr.strip().splitlines()[-4:])
        return DeviceReport(failure=f"the process ended with {done.returncode}: {why}")
    return DeviceReport(**json.loads(lines[-1]))


if __name__ == "__main__":
    print(json.dumps(asdict(compare(Path(sys.argv[1])))))
