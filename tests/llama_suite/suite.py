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


def source() -> Path:
    """The folder of llama.cpp's pinned source."""
    command = [sys.executable, ROOT / "vendor" / "fetch.py"]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return Path(done.stdout.strip())


def copy(folder: Path, llama_cpp: Path) -> Path:
    """Copy the tests into *folder*, at their place beside the templates that they name."""
    tests = folder / "tools" / "server" / "tests"
    shutil.copytree(llama_cpp / "tools" / "server" / "tests", tests)
    (folder / "models").symlink_to(llama_cpp / "models")
    (tests / "tmp").mkdir()
    for file in [tests / "utils.py", *(tests / "unit").glob("*.py")]:
        text = file.read_text("utf-8")
        for pattern, replacement in _SUBSTITUTIONS:
            text = re.sub(pattern, replacement, text)
        file.write_text(text, "utf-8")
    return tests


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


def server_program(folder: Path, *, control: bool) -> Path:
    """The program to test: llama-server, or one that takes its flags and runs ``kqview serve``."""
    if control:
        return stock.find_binary("llama-server")
    path = folder / "server"
    # A router, which has no model, is one that serves the demo model.
    path.write_text(
        "#!/bin/sh\n"
        'case " $* " in *" --model "*) ;; *) set -- "$@" --demo ;; esac\n'
        f'exec "{sys.executable}" -m kqview serve "$@"\n'
    )
    path.chmod(0o755)
    return path


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


def run(
    tests: Path, models: Path, program: Path, files: Sequence[str], results: Path
) -> dict[str, dict[str, str]]:
    """Run *files* of the suite against *program*.

    Returns:
        For each case, by its id without the folder, its outcome and, where it failed, why.
    """
    environ = {
        **os.environ,
        "LLAMA_SERVER_BIN_PATH": str(program),
        "LLAMA_SUITE_MODELS": str(models),
        "LLAMA_SUITE_RESULTS": str(results),
        "KQVIEW_SUPERVISE": "false",
        "PYTHONPATH": os.pathsep.join([str(tests), str(ROOT)]),
    }
    results.touch()
    for name in files:
        # A file of its own: a crash ends that one only.
        command = [
            sys.executable, "-m", "pytest", "-q", "-c", "pytest.ini", "--rootdir", ".",
            "-p", "tests.llama_suite.plugin", "-p", "no:cacheprovider", "-m", "not slow",
            f"unit/{name}",
        ]  # fmt: skip
        log = results.with_suffix(f".{name}.log")
        with log.open("w") as out:
            subprocess.run(
                command, cwd=tests, env={**environ, "PORT": str(free_port())}, stdout=out,
                stderr=subprocess.STDOUT, timeout=RUNS_WITHIN_S, check=False,
            )  # fmt: skip
        print(name, log.read_text(errors="replace").rstrip().rpartition("\n")[2], flush=True)
    rows = map(json.loads, results.read_text("utf-8").splitlines())
    return {row["case"]: row for row in rows}
