"""Clients that go on asking a server, whatever becomes of it."""

from __future__ import annotations

import threading
import time

import httpx

N_CLIENTS = 8
ANSWERS_WITHIN_S = 40.0


class Clients:
    """Threads that ask without a pause; ``ended`` has the ids of the answers that came whole."""

    def __init__(self, url: str) -> None:
        self.ended: list[str] = []
        self._url = url
        self._is_over = False
        self._threads = [threading.Thread(target=self._ask, daemon=True) for _ in range(N_CLIENTS)]
        for thread in self._threads:
            thread.start()

    def _ask(self) -> None:
        body = {"prompt": "Tom has", "max_tokens": 1}
        with httpx.Client(base_url=self._url, timeout=ANSWERS_WITHIN_S) as client:
            while not self._is_over:
                try:
                    reply = client.post("/v1/completions", json=body)
                except httpx.TransportError:  # it was killed, or is not there again
                    time.sleep(0.02)
                    continue
                if reply.status_code == 200:
                    self.ended.append(reply.json()["id"])
                else:  # the supervisor's: no worker yet
                    time.sleep(0.02)

    def close(self) -> None:
        self._is_over = True
        for thread in self._threads:
            thread.join(ANSWERS_WITHIN_S)
