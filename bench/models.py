"""What is measured: the random model, and where the stock programs lie.

Owns: the cached model file, made once a machine by tests/support/tiny_gguf.py. Never: downloads.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

from peers.build import cache_root

ROOT = Path(__file__).resolve().parents[1]
_QUICK_CHANGES = {"n_layer": 2, "n_vocab": 2000}


class NotHere(Exception):
    """A program or package to compare with is missing; the message says how to get it."""


def model_path(*, is_quick: bool, weight_type: str = "Q8_0") -> Path:
    """Path of the model: 24 layers x 16 heads (4 KV heads, head size 64), Q8_0, 320 MB.

    With *is_quick* 2 of the layers and a small vocabulary, 26 MB. With another *weight_type*, F16
    or F32, the same shape in that type.
    """
    changes: dict[str, object] = dict(_QUICK_CHANGES) if is_quick else {}
    if weight_type != "Q8_0":
        changes["weight_type"] = weight_type
    generator = ROOT / "tests" / "support" / "tiny_gguf.py"
    key = hashlib.sha256(generator.read_bytes() + repr(changes).encode()).hexdigest()[:8]
    size = "quick" if is_quick else "24x16"
    path = cache_root() / f"bench-{size}-{key}.gguf"
    if not path.is_file():
        print(f"bench: writing {path.name} into the cache folder, once", file=sys.stderr)
        sys.path.insert(0, str(ROOT))
        from tests.support import tiny_gguf

        partial = path.with_suffix(f".partial-{os.getpid()}")
        tiny_gguf.write_preset(partial, "bench_24x16", **changes)
        partial.replace(path)
    return path


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
