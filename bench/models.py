"""The model to measure, and the folder of the stock programs.

Owns: the cached random model, written once per machine by tests/support/tiny_gguf.py.
Never: downloads.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from peers.build import cache_root

if TYPE_CHECKING:
    from collections.abc import Callable

    from settings import Settings

ROOT = Path(__file__).resolve().parents[1]
_QUICK_CHANGES = {"n_layer": 2, "n_vocab": 2000}


class NotHere(Exception):
    """A program or package to compare with is missing; the message says how to get it."""


def model_path(settings: Settings, weight_type: str = "Q8_0") -> Path:
    """Path of the random model of ``settings.shape``, written once a machine.

    "24x16": 24 layers x 16 heads (4 KV heads, head size 64), Q8_0, 320 MB; quick with 2 of the
    layers and a small vocabulary, 26 MB; with another *weight_type*, F16 or F32, the same shape in
    that type. "6x16": the same with 6 layers, 110 MB. "7b": see `wide_model`, Q8_0, 8 GB; quick
    19 MB.
    """
    if settings.shape == "7b":
        if weight_type != "Q8_0":
            raise NotHere(f"the 7b shape is written as Q8_0, not as {weight_type}")
        source = Path(__file__).with_name("wide_model.py")
        return _written(settings, "7b", source, {}, _write_wide)
    changes: dict[str, object] = dict(_QUICK_CHANGES) if settings.is_quick else {}
    if weight_type != "Q8_0":
        changes["weight_type"] = weight_type
    if settings.shape == "6x16" and not settings.is_quick:
        changes["n_layer"] = 6
    generator = ROOT / "tests" / "support" / "tiny_gguf.py"
    return _written(settings, settings.shape, generator, changes, _write_24x16)


def _written(
    settings: Settings,
    shape: str,
    source: Path,
    changes: dict[str, object],
    write: Callable[[Path, Settings, dict[str, object]], object],
) -> Path:
    """The cached file that *source* wrote with *changes*; written first where it is not there."""
    key = hashlib.sha256(source.read_bytes() + repr(changes).encode()).hexdigest()[:8]
    size = "quick" if settings.is_quick else shape
    size = "quick-7b" if settings.is_quick and shape == "7b" else size
    path = cache_root() / f"bench-{size}-{key}.gguf"
    if not path.is_file():
        print(f"bench: writing {path.name} into the cache folder, once", file=sys.stderr)
        if str(ROOT) not in sys.path:
            sys.path.insert(0, str(ROOT))
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(f".partial-{os.getpid()}")
        write(partial, settings, changes)
        partial.replace(path)
    return path


def predicting_models(settings: Settings) -> tuple[Path, Path]:
    """A model whose tokens follow from the one before, 300 MB, and one of 2 layers like it.

    Both have a layer that predicts them (`tiny_gguf.write_predicting`).
    """
    generator = ROOT / "tests" / "support" / "tiny_gguf.py"
    n_layer = 4 if settings.is_quick else 24

    def written(n: int) -> Path:
        return _written(settings, f"predicting-{n}", generator, {"n_layer": n}, _write_predicting)

    return written(n_layer), written(2)


def _write_predicting(path: Path, _settings: Settings, changes: dict[str, object]) -> None:
    from tests.support import tiny_gguf

    tiny_gguf.write_predicting(path, weight_type="Q8_0", n_embd=1024, n_ff=2816, **changes)


def _write_24x16(path: Path, _settings: Settings, changes: dict[str, object]) -> None:
    from tests.support import tiny_gguf

    tiny_gguf.write_preset(path, "bench_24x16", **changes)


def _write_wide(path: Path, settings: Settings, _changes: dict[str, object]) -> None:
    from wide_model import QUICK, WIDE, write

    write(path, QUICK if settings.is_quick else WIDE)


@cache
def peer(name: str) -> Path:
    """Path of a stock program of bench/peers.

    Raises:
        NotHere: It is not built.
    """
    folder = os.environ.get("KQVIEW_PEERS_DIR")
    if folder is None:
        build = ROOT / "bench" / "peers" / "build.py"
        done = subprocess.run(
            [sys.executable, str(build), "--where", name],
            capture_output=True,
            text=True,
            check=False,
        )
        folder = done.stdout.strip() if done.returncode == 0 else ""
    path = Path(folder) / name
    if not folder or not path.is_file():
        raise NotHere(f"{name} is not built; run python bench/peers/build.py {name}")
    return path
