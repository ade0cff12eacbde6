"""Stand-ins for the pinned archive, its lock file and pip: vendor/fetch.py without a network."""

from __future__ import annotations

import hashlib
import io
import os
import subprocess
import sys
import tarfile
from dataclasses import dataclass
from pathlib import Path

FETCH = Path(__file__).parents[2] / "vendor" / "fetch.py"
ROOT = "llama_cpp_python-0.3.36/vendor/llama.cpp"
COMMIT = "0c1e57098bba43ac29e6e3b677cdceebdd22334f"
REQUIRED = ("CMakeLists.txt", "include/llama.h", "ggml/CMakeLists.txt")
TREE = {**dict.fromkeys(REQUIRED, b"# one\n"), "src/llama.cpp": b"int main;\n"}
FAKE_PIP = """
import os, pathlib, shutil, sys, time
mode, log = os.environ["FAKE_PIP"], pathlib.Path(os.environ["FAKE_PIP_LOG"])
with log.open("a") as stream:
    stream.write(" ".join(sys.argv[1:]) + "\\n")
target = pathlib.Path(sys.argv[sys.argv.index("-d") + 1])
target.mkdir(exist_ok=True)
if mode == "offline":
    print("WARNING: Retrying\\nERROR: No matching distribution found\\n[notice] unrelated")
elif mode == "full":
    print("ERROR: Could not install: [Errno 28] No space left on device")
elif mode == "metadata" and "--no-build-isolation" in sys.argv:
    print("error: metadata-generation-failed")
elif mode == "hang":
    (target / "half.tar.gz").write_bytes(b"half")
    time.sleep(30)
elif mode != "empty":
    time.sleep(0.5 if mode == "slow" else 0)
    shutil.copy(os.environ["FAKE_PIP_SDIST"], target)
sys.exit(mode in ("offline", "full") or (mode == "metadata" and "--no-build-isolation" in sys.argv))
"""


def write_sdist(path: Path, files: dict[str, bytes], *extra: tarfile.TarInfo) -> None:
    with tarfile.open(path, "w:gz") as archive:
        for info in extra:
            archive.addfile(info)
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            info.mode = 0o755 if name.endswith(".sh") else 0o644
            archive.addfile(info, io.BytesIO(content))


@dataclass
class Pin:
    """A tiny archive, its lock file, an empty cache, and the environment to run with."""

    sdist: Path
    lock: Path
    cache: Path
    env: dict[str, str]

    def write(
        self, files: dict[str, bytes], *extra: tarfile.TarInfo, n: int = 4, size: int = 28
    ) -> None:
        write_sdist(self.sdist, files, *extra)
        sha256 = hashlib.sha256(self.sdist.read_bytes()).hexdigest()
        self.lock.write_text(
            f'package = "llama-cpp-python"\nversion = "0.3.36"\nsha256 = "{sha256}"\n'
            f'commit = "{COMMIT}"\nroot = "{ROOT}"\nsdist_bytes = 1000\nunpacked_bytes = 2000\n'
            f"tree_files = {n}\ntree_bytes = {size}\nrequired = {list(REQUIRED)}\n"
            'include = ["CMakeLists.txt", "include/*", "ggml/*", "src/*"]\nexclude = ["*.png"]\n'
        )

    @property
    def tree(self) -> Path:
        key = hashlib.sha256(self.lock.read_bytes()).hexdigest()[:8]
        return self.cache / f"llama.cpp-{COMMIT[:12]}-{key}"

    def pip_calls(self) -> list[str]:
        log = Path(self.env["FAKE_PIP_LOG"])
        return log.read_text().splitlines() if log.exists() else []

    def partials(self) -> list[Path]:
        """Return the folders of unfinished runs."""
        return list(self.cache.glob("partial-*"))

    def start(self, *args: str, fake_pip: str = "serve") -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, str(FETCH), "--lock", str(self.lock), *args],
            env={**self.env, "FAKE_PIP": fake_pip},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def run(self, *args: str, fake_pip: str = "serve") -> tuple[int, str, str]:
        process = self.start(*args, fake_pip=fake_pip)
        out, err = process.communicate(timeout=150)
        return process.returncode, out, err

    def fails(self, *args: str, fake_pip: str = "serve") -> str:
        """Run, expecting exit status 1, nothing on stdout and no entry; return the last line."""
        status, out, err = self.run(*args, fake_pip=fake_pip)
        assert (status, out) == (1, "")
        return self.only_error(err)

    def only_error(self, err: str) -> str:
        assert "Traceback" not in err
        lines = [line for line in err.splitlines() if "downloading llama.cpp" not in line]
        assert len(lines) == 1, err
        assert not self.tree.exists()
        assert self.partials() == []
        return lines[0]


def make_pin(tmp_path: Path) -> Pin:
    """Compose all parts below *tmp_path*; the stand-in for pip is on PYTHONPATH."""
    shim = tmp_path / "shim" / "pip"
    shim.mkdir(parents=True)
    (shim / "__init__.py").touch()
    (shim / "__main__.py").write_text(FAKE_PIP)
    dropped = ("KQVIEW_", "XDG_", "PIP_", "PYTHON", "SKBUILD_")
    env = {key: value for key, value in os.environ.items() if not key.startswith(dropped)}
    env |= {
        "KQVIEW_CACHE_DIR": str(tmp_path / "cache"),
        "PYTHONPATH": str(shim.parent),
        "FAKE_PIP_SDIST": str(tmp_path / "llama_cpp_python-0.3.36.tar.gz"),
        "FAKE_PIP_LOG": str(tmp_path / "pip.log"),
    }
    made = Pin(Path(env["FAKE_PIP_SDIST"]), tmp_path / "lock.toml", tmp_path / "cache", env)
    made.write({f"{ROOT}/{name}": content for name, content in TREE.items()})
    return made
