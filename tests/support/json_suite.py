"""Schemas of the JSON Schema Test Suite, from the pinned source archive of the package jsonschema.

``python -m tests.support.json_suite`` fetches it into kqview's cache, once a machine.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

PACKAGE, VERSION = "jsonschema", "4.26.0"
SHA256 = "0c26707e2efad8aa1bfc5b7ce170f3fccc2e4918ff85989ba9ffa9facb2be326"
DRAFTS = ("draft2020-12", "draft7", "draft2019-09", "draft6", "draft4")


def _archive() -> Path:
    root = os.environ.get("KQVIEW_CACHE_DIR")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kqview"
    return (Path(root) if root else cache) / f"{PACKAGE}-{VERSION}.tar.gz"


def is_here() -> bool:
    """Whether the archive is in the cache."""
    return _archive().is_file()


def fetch() -> Path:
    """The archive, fetched with pip if it is not in the cache."""
    if is_here():
        return _archive()
    _archive().parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=_archive().parent) as folder:
        wanted = Path(folder) / "requirements.txt"
        wanted.write_text(f"{PACKAGE}=={VERSION} --hash=sha256:{SHA256}\n", encoding="utf-8")
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        command += ["--no-binary", PACKAGE, "--require-hashes", "-r", str(wanted), "-d", folder]
        subprocess.run(command, check=True)
        (Path(folder) / _archive().name).replace(_archive())
    return _archive()


def schemas() -> list[tuple[str, str, Any]]:
    """Draft, name and text of each schema; one that several drafts have is there once."""
    data = _archive().read_bytes()
    assert hashlib.sha256(data).hexdigest() == SHA256, f"{_archive()} has changed; remove it"
    found: dict[str, tuple[str, str, Any]] = {}
    with tarfile.open(_archive()) as archive:
        names = sorted(archive.getnames())
        for draft in DRAFTS:
            for name in names:
                path = Path(name)
                if path.suffix != ".json" or path.parent.parts[1:] != ("json", "tests", draft):
                    continue
                stream = archive.extractfile(name)
                assert stream is not None
                for group in json.load(stream):
                    schema = group["schema"]
                    is_object = isinstance(schema, dict)
                    bare = {**schema, "$schema": None} if is_object else schema
                    text = json.dumps(schema)
                    key = json.dumps(bare, sort_keys=True)
                    found.setdefault(key, (draft, f"{path.name}: {group['description']}", text))
    return list(found.values())


if __name__ == "__main__":
    print(fetch())
