"""The stock llama-server as a piece of work: generations in its slots, on loopback.

Each slot gets a prompt of ids that stays in it, and streams its tokens. HTTP and JSON are a part of
what a user of that program pays, and of its time here.
"""

from __future__ import annotations

import http.client
import json
import threading
import time
from typing import TYPE_CHECKING, Self

from models import model_path, peer
from started import Started, free_port

if TYPE_CHECKING:
    from collections.abc import Sequence

    from settings import Settings

ANSWER_LIMIT_S = 300


class ServerRuns(Started):
    """One start of llama-server, its prompts evaluated."""

    def __init__(self, settings: Settings, prompts: Sequence[list[int]], n_tokens: int) -> None:
        self._prompts = prompts
        self._n_tokens = n_tokens
        self._port = free_port()
        n_ctx = (len(prompts[0]) + n_tokens + 255) // 256 * 256
        flags: dict[str, object] = {
            "--model": model_path(settings),
            "--threads": settings.n_threads,
            "--parallel": len(prompts),
            "--ctx-size": n_ctx * len(prompts),
            "--flash-attn": "on",
            "--n-gpu-layers": settings.n_gpu_layers,
            "--batch-size": 2048,
            "--ubatch-size": 512,
            "--cache-ram": 0,
            "--host": "127.0.0.1",
            "--port": self._port,
        }
        command = [str(peer("llama-server")), "--no-kv-unified"]
        command += [str(word) for flag in flags.items() for word in flag]
        super().__init__(command)

    def __enter__(self) -> Self:
        super().__enter__()
        self.ms()  # evaluates the prompts
        return self

    def ms(self) -> float:
        """Milliseconds a token, one generation a slot, from when all have their first one on."""
        firsts: list[float] = []
        lasts: list[float] = []
        failures: list[Exception] = []

        def generate(i_slot: int) -> None:
            try:
                first, last = self._stamps_s(i_slot)
                firsts.append(first)
                lasts.append(last)
            except Exception as error:
                failures.append(error)

        threads = [threading.Thread(target=generate, args=(i,)) for i in range(len(self._prompts))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if failures:
            raise failures[0]
        n_left = len(self._prompts) * (self._n_tokens - 1)
        return (max(lasts) - max(firsts)) * 1000.0 / n_left

    def is_ready(self) -> bool:
        """Whether it answers."""
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=5)
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status == http.HTTPStatus.OK
        except OSError:
            return False
        finally:
            connection.close()

    def _stamps_s(self, i_slot: int) -> tuple[float, float]:
        """When the first and the last token of a generation in this slot came."""
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=ANSWER_LIMIT_S)
        body = {
            "prompt": self._prompts[i_slot],
            "id_slot": i_slot,
            "n_predict": self._n_tokens,
            "temperature": 0.0,
            "ignore_eos": True,
            "cache_prompt": True,
            "stream": True,
        }
        try:
            connection.request(
                "POST", "/completion", json.dumps(body), {"Content-Type": "application/json"}
            )
            response = connection.getresponse()
            if response.status != http.HTTPStatus.OK:
                raise RuntimeError(f"llama-server: {response.status} {response.read(500)!r}")
            stamps: list[float] = []
            n_predicted = 0
            for line in response:
                if not line.startswith(b"data: "):
                    continue
                stamps.append(time.perf_counter())
                event = json.loads(line[6:])
                if event.get("stop"):
                    n_predicted = event["tokens_predicted"]
            if n_predicted != self._n_tokens:
                raise RuntimeError(
                    f"llama-server: {n_predicted} tokens, {self._n_tokens} were asked for"
                )
            return stamps[0], stamps[-1]
        finally:
            connection.close()
