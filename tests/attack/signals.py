"""Signals at any moment: SIGHUP while a server starts and serves, SIGTERM, SIGINT and SIGKILL.

SIGHUP ends nothing. The others end the server soon, with the status that they should, and no trace
of a request that a client has seen end is lost, for which the spool is read in the end.
"""

from __future__ import annotations

import json
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.attack.summary import Summary, main
from tests.support.asking import Clients

ENDS_WITHIN_S = 30.0
STARTS_WITHIN_S = 60.0
LONGEST_S = 3.0  # of serving, before it is ended
STATUSES = {
    signal.SIGKILL: {-signal.SIGKILL},
    signal.SIGTERM: {0, -signal.SIGTERM, 128 + signal.SIGTERM},
    signal.SIGINT: {0, -signal.SIGINT, 128 + signal.SIGINT},
}
CONFIG = """
[server]
demo = true
port = 0
n_slots = 4
n_threads = 1
trace = "all"
trace_url = "http://127.0.0.1:9"
access_log = false
supervise = false
trace_spool = {spool}
"""
_URL = re.compile(r"at (http://[\d.:]+)")


def hears_hangups(pid: int) -> bool:
    """Whether the program has got so far that it has a handler."""
    text = Path(f"/proc/{pid}/status").read_text()
    return bool(int(re.findall(r"SigCgt:\s*(\w+)", text)[0], 16) & 1)


def one_life(config: Path, log: Path, rng: random.Random, summary: Summary) -> list[str]:
    """One server from its start to its end; the ids that its clients have seen end."""
    with log.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "kqview", "serve", "--config", str(config)],
            stdout=file, stderr=subprocess.STDOUT,
        )  # fmt: skip
    clients = None
    how = rng.choice(tuple(STATUSES))
    starts_s = time.monotonic()
    ends_s = starts_s + (rng.uniform(0, 3) if rng.random() < 0.2 else STARTS_WITHIN_S)
    while process.poll() is None and time.monotonic() < ends_s:
        if clients is None and (found := _URL.search(log.read_text())):
            clients = Clients(found[1])
            ends_s = time.monotonic() + rng.uniform(0, LONGEST_S)
        if rng.random() < 0.2 and hears_hangups(process.pid):
            process.send_signal(signal.SIGHUP)
            summary.count("SIGHUP")
        time.sleep(rng.uniform(0, 0.05))
    if process.poll() is not None:
        summary.fail(f"it ended by itself with {process.returncode}: {log.read_text()[-300:]}")
    process.send_signal(how)
    try:
        process.wait(ENDS_WITHIN_S)
    except subprocess.TimeoutExpired:
        summary.fail(f"{how.name} did not end it within {ENDS_WITHIN_S:.0f} s")
        process.kill()
        process.wait()
    else:
        moment = "starts" if clients is None else "serves"
        summary.count(f"{how.name} while it {moment}: {process.returncode}")
        if process.returncode not in STATUSES[how] or (
            how != signal.SIGKILL and clients is not None and process.returncode
        ):
            summary.fail(f"{how.name} while it {moment} ended it with {process.returncode}")
    if "Traceback" in log.read_text() and clients is not None:
        summary.fail(f"a traceback: {log.read_text()[-500:]}")
    if clients is None:
        return []
    clients.close()
    return clients.ended


def run(seconds: float, seed: int) -> Summary:
    """Start and end servers for *seconds*."""
    summary = Summary("signals", seed)
    rng = random.Random(seed)
    ends_s = time.monotonic() + seconds
    with tempfile.TemporaryDirectory() as folder:
        spool, config = Path(folder, "spool"), Path(folder, "kqview.toml")
        config.write_text(CONFIG.format(spool=json.dumps(str(spool))))
        ended: set[str] = set()
        while time.monotonic() < ends_s:
            ended |= set(one_life(config, Path(folder, "log"), rng, summary))
        kept = {
            json.loads(one.read_bytes())["request"]["request_id"] for one in spool.glob("*.json")
        }
        summary.count("requests that ended", len(ended))
        if ended - kept:
            summary.fail(f"{len(ended - kept)} of {len(ended)} traces are lost")
    return summary


if __name__ == "__main__":
    raise SystemExit(main(run))
