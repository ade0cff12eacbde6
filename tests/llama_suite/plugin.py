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
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

import kqview.cli.serving
import kqview.server  # noqa: F401  # before the first fork
from kqview.__main__ import main

if TYPE_CHECKING:
    from collections.abc import Iterator

MODELS = Path(os.environ["LLAMA_SUITE_MODELS"])
RESULTS = Path(os.environ["LLAMA_SUITE_RESULTS"])
LIMIT_S = 120
KQVIEW = "kqview"
"""Stands for the program of ours, which is not started but forked."""
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


class ForkedServer:
    """``kqview serve`` in a fork of this process, with the methods of a Popen that the suite uses.

    Such a start takes a tenth of the time of one that imports everything, and there are hundreds.
    """

    def __init__(self, args: list[str], *, env: dict[str, str], stdout: Any, **_: Any) -> None:
        words = ["kqview", "serve", *args[1:]]
        if "--model" not in words:  # a router, here a server of the demo model
            words.append("--demo")
        self.returncode: int | None = None
        sys.stdout.flush()
        self.pid = os.fork()
        if self.pid:
            return
        status = 1
        try:
            os.dup2(stdout.fileno(), 1)
            os.dup2(stdout.fileno(), 2)
            os.environ.clear()
            os.environ.update(env)
            sys.argv = words
            status = main()
        except SystemExit as end:
            status = end.code if isinstance(end.code, int) else 1
        finally:
            os._exit(status or 0)

    def poll(self) -> int | None:
        """The exit status, None while it runs."""
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float) -> None:
        """Wait for the end."""
        until_s = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > until_s:
                raise subprocess.TimeoutExpired("kqview", timeout)
            time.sleep(0.01)

    def terminate(self) -> None:
        """Ask it to end."""
        if self.poll() is None:
            os.kill(self.pid, signal.SIGTERM)

    def kill(self) -> None:
        """End it."""
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)


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
        # A drafter has the vocabulary of its model, and an adapter its shape.
        return str(MODELS / ("lora.gguf" if "shakespeare" in url else "lora-base.gguf"))

    if os.environ["LLAMA_SERVER_BIN_PATH"] == KQVIEW:
        utils.subprocess = SimpleNamespace(
            Popen=ForkedServer, TimeoutExpired=subprocess.TimeoutExpired
        )
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
