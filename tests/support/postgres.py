"""A PostgreSQL server for tests, of the machine's own packages, in a folder that goes with it."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
import uuid
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Generator

_STARTS_WITHIN_S = 120
_DEBIAN = Path("/usr/lib/postgresql")  # where Debian has them, one folder for each version


def _program(name: str) -> str | None:
    versions = sorted(_DEBIAN.glob(f"*/bin/{name}"), key=lambda path: float(path.parts[-3]))
    return str(versions[-1]) if versions else shutil.which(name)


class Postgres:
    """A server that runs; listens on a socket in its own folder, and on no port."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def new_database(self) -> str:
        """The URL of an empty database."""
        import psycopg

        # A schema of its own, which takes no time to make, and no files.
        name = f"test_{uuid.uuid4().hex}"
        with psycopg.connect(f"host={self._folder} dbname=postgres user=postgres") as db:
            db.execute(f"CREATE SCHEMA {name}".encode())
        options = f"options=-csearch_path%3D{name}"
        return f"postgresql://postgres@/postgres?host={self._folder}&{options}"


@contextlib.contextmanager
def running() -> Generator[Postgres]:
    """Start a server, and end it; skips the test where there is none to start."""
    pytest.importorskip("psycopg")
    initdb, pg_ctl = _program("initdb"), _program("pg_ctl")
    if initdb is None or pg_ctl is None:
        pytest.skip("no PostgreSQL server here: apt-get install postgresql")
    # It refuses to run as root. Sockets need a short path.
    user = "postgres" if os.getuid() == 0 else None
    with tempfile.TemporaryDirectory(prefix="kqview-pg-", dir="/tmp") as name:
        folder = Path(name)
        if user is not None:
            shutil.chown(folder, user)
        data = folder / "data"

        def call(*command: str) -> None:
            done = subprocess.run(
                command, user=user, cwd=folder, capture_output=True, text=True,
                timeout=_STARTS_WITHIN_S, check=False, stdin=subprocess.DEVNULL,
            )  # fmt: skip
            assert done.returncode == 0, done.stdout + done.stderr

        call(
            initdb, "-D", str(data), "-U", "postgres", "-A", "trust", "--no-sync",
            "-E", "UTF8", "--locale=C",
        )  # fmt: skip
        options = f"-k {folder} -c listen_addresses= -c fsync=off -c max_connections=100"
        log = str(folder / "log")
        call(
            pg_ctl, "-D", str(data), "-w", "-t", str(_STARTS_WITHIN_S), "-l", log,
            "-o", options, "start",
        )  # fmt: skip
        try:
            yield Postgres(folder)
        finally:
            call(pg_ctl, "-D", str(data), "-m", "immediate", "stop")
