"""llama.cpp's own tests of its server: a copy of them, run against a server.

Owns: the copy and the models that stand for those of the hub. Nothing of llama.cpp's is changed
or kept. Never: judges a result (`__main__`).
"""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tests.support import stock, tiny_gguf

if TYPE_CHECKING:
    from collections.abc import Sequence

ROOT = Path(__file__).parents[2]
RUNS_WITHIN_S = 1800  # a file of tests
FIM = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|repo_name|>", "<|file_sep|>")
# What depends on the vocabulary of a model or on the name of the program.
_SUBSTITUTIONS = (
    (
        r"""(assert .*["'](?:prompt_n|cache_n|n_saved|n_restored|prompt_tokens|cached_tokens"""
        r"""|predicted_n)["']\] == )(?!0\b|1\b)(\d+|n_prompt|n_tokens|n_cache|n_token_output)"""
        r"""\b(?! \*)""",
        r"\1ANY",
    ),
    (r"(from utils import \*)", r"\1\nfrom unittest.mock import ANY"),
    (r'startswith\("b"\)', 'startswith(("b", "kqview-"))'),
    (r"dict\(response\.headers\)", "response.headers"),  # their names have no case
    (r"bosId = 1", "bosId = 0"),
    (r'"<s> ', '"<|endoftext|>'),
    (r'\["id"\] > 0', '["id"] >= 0'),
)


@dataclass(frozen=True)
class Prepared:
    """A copy of the tests, and the models."""

    folder: Path
    tests: Path
    models: Path

    def files(self) -> list[str]:
        """Names of the files of tests."""
        return sorted(file.name for file in (self.tests / "unit").glob("test_*.py"))

    def run(self, name: str, wanted: Sequence[str]) -> dict[str, dict[str, str]]:
        """Run tests against a program.

        Args:
            name: "control" for llama-server; others run kqview. Logs and results have it as their
                name.
            wanted: Files, or cases, by their names in ``unit``.

        Returns:
            For each case, by its id without the folder, its outcome and, where it failed, why.
        """
        results = self.folder / f"{name}.jsonl"
        results.touch()
        program = stock.find_binary("llama-server") if name == "control" else "kqview"
        environ = {
            **os.environ,
            "LLAMA_SERVER_BIN_PATH": str(program),
            "LLAMA_SUITE_MODELS": str(self.models),
            "LLAMA_SUITE_RESULTS": str(results),
            "KQVIEW_SUPERVISE": "false",
            "PYTHONPATH": os.pathsep.join([str(self.tests), str(ROOT)]),
        }
        for i, one in enumerate(wanted):
            # A process of its own: a crash ends that one only.
            command = [
                sys.executable, "-m", "pytest", "-q", "-c", "pytest.ini", "--rootdir", ".",
                "-p", "tests.llama_suite.plugin", "-p", "no:cacheprovider", "-m", "not slow",
                f"unit/{one}",
            ]  # fmt: skip
            log = self.folder / f"{name}-{i}.log"
            with log.open("w") as out:
                subprocess.run(
                    command, cwd=self.tests, env={**environ, "PORT": str(free_port())},
                    stdout=out, stderr=subprocess.STDOUT, timeout=RUNS_WITHIN_S, check=False,
                )  # fmt: skip
            last = log.read_text(errors="replace").rstrip().rpartition("\n")[2]
            print(f"{name}: {one[:60]}: {last}", flush=True)
        rows = map(json.loads, results.read_text("utf-8").splitlines())
        return {row["case"]: row for row in rows}


def prepare(folder: Path) -> Prepared:
    """Copy the tests into *folder*, and write the models there."""
    command = [sys.executable, ROOT / "vendor" / "fetch.py"]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    llama_cpp = Path(done.stdout.strip())
    # At the place beside the templates that they name.
    tests = folder / "tools" / "server" / "tests"
    shutil.copytree(llama_cpp / "tools" / "server" / "tests", tests)
    (folder / "models").symlink_to(llama_cpp / "models")
    (tests / "tmp").mkdir()
    for file in [tests / "utils.py", *(tests / "unit").glob("*.py")]:
        text = file.read_text("utf-8")
        for pattern, replacement in _SUBSTITUTIONS:
            text = re.sub(pattern, replacement, text)
        file.write_text(text, "utf-8")
    models = folder / "stand-ins"
    models.mkdir()
    write_models(models, tests)
    return Prepared(folder, tests, models)


def write_models(folder: Path, tests: Path) -> None:
    """Write the models that stand for those of the hub."""
    words = sorted(
        {
            word
            for name in ("test_embedding.py", "test_rerank.py")
            for word in re.findall(r"[a-z]+", (tests / "unit" / name).read_text("utf-8").lower())
        }
    )
    shutil.copy(ROOT / "src" / "kqview" / "demo" / "model.gguf", folder / "demo.gguf")
    tiny_gguf.write_model(folder / "infill.gguf", specials=FIM)
    tiny_gguf.write_preset(folder / "lora-base.gguf", "tiny_llama")
    tiny_gguf.write_lora(folder / "lora.gguf", "tiny_llama", merged=folder / "merged.gguf")
    cls = tiny_gguf.gguf.PoolingType.CLS
    tiny_gguf.write_bert(folder / "bert.gguf", pooling=cls, words=words, n_positions=1024)
    rank = tiny_gguf.gguf.PoolingType.RANK
    tiny_gguf.write_bert(folder / "rerank.gguf", pooling=rank, n_classes=1, words=words)


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]
