"""How much memory does `kqview serve` take beside llama-server, with the same model and settings?

One thread, one slot of 2,048 tokens, flash attention. Printed in MB, after the start and after 20
completions of 128 tokens and one chat: what the processes have for themselves (private), their
share of pages that others have as well (PSS), and all their pages. Libraries of Python are shared
with other processes of Python that run meanwhile, so PSS falls where there are some.
"""

from __future__ import annotations

import argparse
import json
import urllib.request
from pathlib import Path
from time import perf_counter

from models import NotHere
from server_peers import Request, Server
from settings import Settings

from kqview.bench.sweep import prompt_ids
from kqview.demo import MODEL_PATH

N_PROMPT, N_CONTEXT, N_VOCAB, N_REQUESTS = 128, 2000, 256, 20
KINDS = {"private": "Private_", "PSS": "Pss:", "all": "Rss:"}


def processes(pid: int) -> list[int]:
    """*pid* and what it has started."""
    found = [pid]
    for one in found:
        for task in Path(f"/proc/{one}/task").iterdir():
            found += map(int, (task / "children").read_text().split())
    return found


def memory_mb(pid: int) -> dict[str, float]:
    """Memory of *pid* and what it has started, in MB, by kind."""
    lines = [
        line
        for one in processes(pid)
        for line in Path(f"/proc/{one}/smaps_rollup").read_text().splitlines()[1:]
    ]
    return {
        kind: sum(int(line.split()[1]) for line in lines if line.startswith(start)) * 1024 / 1e6
        for kind, start in KINDS.items()
    }


def chat(port: int) -> None:
    """One chat, without a stream."""
    body = {"messages": [{"role": "user", "content": "Tell me a story."}], "max_tokens": 16}
    headers = {"Content-Type": "application/json"}
    url = f"http://127.0.0.1:{port}/v1/chat/completions"
    urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers)).read()


def main() -> None:
    """Print a line for each server, model and moment."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="2 layers in place of 24")
    settings = Settings(is_quick=parser.parse_args().quick)
    servers = {
        "llama-server": {"is_stock": True},
        "kqview serve --no-supervise": {"is_stock": False},
        "kqview serve": {"is_stock": False, "is_supervised": True},
    }
    for model in (MODEL_PATH, None):
        for name, how in servers.items():
            start_s = perf_counter()
            try:
                server = Server(settings, 1, N_CONTEXT, model=model, **how)
            except NotHere as error:
                print(f"{name}: {error}")
                continue
            with server:
                ready_s = perf_counter() - start_s
                moments = {f"ready after {ready_s:.1f} s": memory_mb(server.pid)}
                for i in range(N_REQUESTS):
                    server.run([Request(prompt_ids(N_PROMPT, N_VOCAB, seed=i))], {})
                moments[f"after {N_REQUESTS} requests"] = memory_mb(server.pid)
                if model is not None:  # the other has no chat template
                    chat(server.port)
                    moments["after a chat"] = memory_mb(server.pid)
            for moment, found in moments.items():
                figures = ", ".join(f"{kind} {mb:.1f}" for kind, mb in found.items())
                print(f"{'demo' if model else settings.shape}, {name}, {moment}: {figures}")


if __name__ == "__main__":
    main()
