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

from tests.support.needs import postgres_program

if TYPE_CHECKING:
    from collections.abc import Generator

_STARTS_WITHIN_S = 120


class Postgres:
    """A server that runs; listens on a socket in its own folder, and on no port."""

    def __init__(self, folder: Path, pg_ctl: str, user: str | None) -> None:
        self._folder = folder
        self._user = user
        self._pg_ctl = [pg_ctl, "-D", str(folder / "data"), "-w", "-t", str(_STARTS_WITHIN_S)]

    def new_database(self) -> str:
        """The URL of an empty database."""
        import psycopg

        # A schema of its own, which takes no time to make, and no files.
        name = f"test_{uuid.uuid4().hex}"
        with psycopg.connect(f"host={self._folder} dbname=postgres user=postgres") as db:
            db.execute(f"CREATE SCHEMA {name}".encode())
        options = f"options=-csearch_path%3D{name}"
        return f"postgresql://postgres@/postgres?host={self._folder}&{options}"

    def call(self, *command: str) -> None:
        """Run a program of the server's as its user."""
        done = subprocess.run(
            command, user=self._user, cwd=self._folder, capture_output=True, text=True,
            timeout=_STARTS_WITHIN_S, check=False, stdin=subprocess.DEVNULL,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr

    def start(self) -> None:
        """Start it."""
        options = f"-k {self._folder} -c listen_addresses= -c fsync=off -c max_connections=100"
        self.call(*self._pg_ctl, "-l", str(self._folder / "log"), "-o", options, "start")

    def stop(self) -> None:
        """Stop it at once, as a crash would."""
        self.call(*self._pg_ctl, "-m", "immediate", "stop")


@contextlib.contextmanager
def running() -> Generator[Postgres]:
    """Start a server, and end it."""
    initdb, pg_ctl = postgres_program("initdb"), postgres_program("pg_ctl")
    assert initdb is not None
    assert pg_ctl is not None
    # It refuses to run as root. Sockets need a short path.
    user = "postgres" if os.getuid() == 0 else None
    with tempfile.TemporaryDirectory(prefix="kqview-pg-", dir="/tmp") as name:
        folder = Path(name)
        if user is not None:
            shutil.chown(folder, user)
        server = Postgres(folder, pg_ctl, user)
        server.call(
            initdb, "-D", str(folder / "data"), "-U", "postgres", "-A", "trust", "--no-sync",
            "-E", "UTF8", "--locale=C",
        )  # fmt: skip
        server.start()
        try:
            yield server
        finally:
            server.stop()
