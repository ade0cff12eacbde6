"""A server killed again and again loses no trace of a request that a client has seen end."""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from typing import TYPE_CHECKING

import pytest

from tests.support.asking import Clients
from tests.support.serve_process import started
from tests.support.trace_receiver import receiving

if TYPE_CHECKING:
    from pathlib import Path

N_ROUNDS = 4


@pytest.mark.full
def test_killed_server_loses_no_trace_of_what_a_client_has_seen_end(tmp_path: Path):
    rng = random.Random(1)
    with receiving() as receiver:
        command = [
            sys.executable, "-m", "kqview", "serve", "--demo", "--port", "0", "--threads", "1",
            "--slots", "4", "--trace", "all", "--trace-url", receiver.url,
            "--trace-spool", str(tmp_path / "spool"), "--no-access-log",
        ]  # fmt: skip
        with started(command) as parent:
            clients = Clients(parent.url)
            for n in range(1, N_ROUNDS + 1):
                parent.wait_for("serves", n)
                n_before = len(clients.ended)
                while len(clients.ended) < n_before + rng.randrange(5, 60):
                    time.sleep(0.01)
                time.sleep(rng.random() / 10)
                [worker] = parent.workers()
                os.kill(worker, signal.SIGKILL)
            parent.wait_for("serves", N_ROUNDS + 1)
            clients.close()
            assert len(clients.ended) > N_ROUNDS
            wanted = set(clients.ended)
            receiver.wait(lambda: wanted <= set(receiver.names))
