"""The pytest plugin that llama.cpp's own tests of its server run with, in a copy of their folder.

They name models of a hub and expect the texts that these write. Here each repository is a file of
the folder `MODELS`, and a text is right whatever its words are: only those that a grammar fixes are
looked for. Counts of tokens are replaced in the copy (`suite.py`).
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

MODELS = Path(os.environ["LLAMA_SUITE_MODELS"])
RESULTS = Path(os.environ["LLAMA_SUITE_RESULTS"])
LIMIT_S = 120
# Repository, or the first folder of a file in it, and the model that stands for it.
_STAND_INS = {
    "ggml-org/test-model-stories260K": "demo",
    "ggml-org/test-model-stories260K-infill": "infill",
    "ggml-org/stories15M_MOE": "lora-base",
    "ggml-org/tinygemma3-GGUF:Q8_0": "demo",
    "bert-bge-small": "bert",
    "jina-reranker-v1-tiny-en": "rerank",
    "tinyllamas": "demo",
}
_FIXED_TEXTS = ('"42"', '"foooooo"', "a{5,5}", "[ -3000 ]", "(\\{|John)+")


# What the suite downloads with.
sys.modules["wget"] = ModuleType("wget")
sys.modules["filelock"] = ModuleType("filelock")
sys.modules["filelock"].__dict__["FileLock"] = contextlib.nullcontext


def pytest_configure() -> None:
    """Replace helpers of the suite."""
    import utils  # pyright: ignore[reportMissingImports]

    real_match, real_start = utils.match_regex, utils.ServerProcess.start

    def match_regex(regex: str, text: str) -> bool:
        return real_match(regex, text) if regex in _FIXED_TEXTS else True

    def start(server: Any, *args: Any, **options: Any) -> None:
        if server.model_hf_repo is not None:
            folder = (server.model_hf_file or "").partition("/")[0]
            name = _STAND_INS.get(folder) or _STAND_INS.get(server.model_hf_repo)
            assert name, f"no model stands for {server.model_hf_repo}"
            server.model_file = str(MODELS / f"{name}.gguf")
            server.model_hf_repo = server.model_hf_file = None
        real_start(server, *args, **options)

    def download_file(url: str, output_file_path: str | None = None) -> str:
        return str(MODELS / ("lora.gguf" if "shakespeare" in url else "demo.gguf"))

    utils.match_regex, utils.download_file = match_regex, download_file
    utils.ServerProcess.start = start
    utils.ServerPreset.load_all = staticmethod(lambda: None)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """A case that hangs fails."""

    def late(*_: object) -> None:
        raise TimeoutError(f"not done within {LIMIT_S} s")

    signal.signal(signal.SIGALRM, late)
    signal.alarm(LIMIT_S)
    yield
    signal.alarm(0)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Write the outcome of a case, and the line that says why it failed."""
    if report.when == "call" or report.outcome != "passed":
        crash = getattr(report.longrepr, "reprcrash", None)
        row = {"case": report.nodeid.removeprefix("unit/"), "outcome": report.outcome}
        if report.failed:
            row["why"] = str(getattr(crash, "message", report.longrepr)).partition("\n")[0][:300]
        with RESULTS.open("a") as file:
            file.write(json.dumps(row) + "\n")
