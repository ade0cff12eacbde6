"""How much faster are texts embedded together, and how does that compare with llama-server?

Texts of random ids through the benchmark's decoder with pooling "last". A run embeds all of them in
one call of `Engine.embed`, in an engine with one slot and in one with as many slots as share a
step. llama-server gets the same ids in one request of its own API, with as many slots; HTTP and
JSON are part of its time, as they are for every user of that program.
"""

from __future__ import annotations

import http.client
import json
from typing import TYPE_CHECKING, Any

from console import attempt, main
from models import model_path, peer
from report import Timing
from runs import open_engine
from started import Started, free_port, is_healthy

from kqview.bench.sweep import prompt_ids

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from console import ProgressLine
    from settings import Settings

    from kqview import Engine
    from kqview.bench.records import LeftOut

N_TEXTS = 64
N_TOKENS = 24  # of a text
N_SLOTS = 16
N_CONTEXT = 512  # of a slot
ANSWER_LIMIT_S = 300
# At least 0.9 times the texts of llama-server.
CASES = {"embed-slots": None, "embed-server": 1 / 0.9}
WEIGHTS = {"embed-slots": 60.0, "embed-server": 60.0}


class EmbeddingServer(Started):
    """One start of the stock llama-server on loopback that embeds lists of ids."""

    def __init__(self, settings: Settings, texts: list[list[int]]) -> None:
        self._now_s = settings.now_s
        self._texts = texts
        self._port = free_port()
        flags: dict[str, object] = {
            "--model": model_path(settings),
            "--threads": settings.n_threads,
            "--parallel": N_SLOTS,
            "--ctx-size": N_CONTEXT * N_SLOTS,
            "--pooling": "last",
            "--flash-attn": "on",
            "--n-gpu-layers": settings.n_gpu_layers,
            "--batch-size": 2048,
            "--ubatch-size": 512,
            "--cache-ram": 0,
            "--host": "127.0.0.1",
            "--port": self._port,
        }
        command = [str(peer("llama-server")), "--embedding"]
        command += [str(word) for flag in flags.items() for word in flag]
        super().__init__(command)

    def is_ready(self) -> bool:
        """Whether it answers."""
        return is_healthy(self._port)

    def ms(self) -> float:
        """Milliseconds a text."""
        start = self._now_s()
        found = self._answer("POST", "/embedding", {"content": self._texts})
        if len(found) != len(self._texts):
            raise RuntimeError(f"llama-server: {len(found)} embeddings of {len(self._texts)} texts")
        return (self._now_s() - start) * 1000.0 / len(self._texts)

    def _answer(self, method: str, path: str, body: object = None) -> list[object]:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=ANSWER_LIMIT_S)
        try:
            headers = {"Content-Type": "application/json"}
            connection.request(method, path, json.dumps(body) if body else None, headers)
            response = connection.getresponse()
            content = response.read()
            if response.status != http.HTTPStatus.OK:
                raise RuntimeError(f"llama-server: {response.status} {content[:500]!r}")
            return json.loads(content)
        finally:
            connection.close()


def measure(settings: Settings, line: ProgressLine) -> Iterator[Timing | LeftOut]:
    """Measure the chosen cases; the engine of several slots is the candidate of both."""
    names = settings.chosen(CASES)
    if not names:
        return
    options: dict[str, Any] = {"flash_attn": True, "n_ctx": N_CONTEXT, "pooling": "last"}
    with (
        open_engine(settings, n_slots=N_SLOTS, **options) as several,
        open_engine(settings, n_slots=1, **options) as single,
    ):
        texts = [prompt_ids(N_TOKENS, single.model.n_vocab, seed=i) for i in range(N_TEXTS)]

        def ms(engine: Engine) -> float:
            start = settings.now_s()
            engine.embed(texts)
            return (settings.now_s() - start) * 1000.0 / len(texts)

        for name in names:
            if name == "embed-server":
                yield attempt(name, _measure_server, settings, line, texts, lambda: ms(several))
            else:
                one, many = (lambda: ms(single)), (lambda: ms(several))
                yield attempt(name, _measure, settings, line, name, many, "1 slot", one)


def _measure_server(
    settings: Settings, line: ProgressLine, texts: list[list[int]], together: Callable[[], float]
) -> Timing:
    with EmbeddingServer(settings, texts) as server:
        stock = f"llama-server (stock build), {N_SLOTS} slots"
        return _measure(settings, line, "embed-server", together, stock, server.ms)


def _measure(
    settings: Settings,
    line: ProgressLine,
    name: str,
    candidate: Callable[[], float],
    against: str,
    baseline: Callable[[], float],
) -> Timing:
    target = CASES[name]
    pairs = line.pairs(name, baseline, candidate, settings.pairs_for(target))
    return Timing(
        name=name,
        what=f"{N_SLOTS} slots",
        baseline=against,
        work=f"an embedded text of {N_TOKENS} tokens, {N_TEXTS} at a time",
        pairs=pairs,
        target=settings.target(target),
        command=f"python bench/embed.py --row {name} {settings.flags}",
    )


if __name__ == "__main__":
    main(__doc__, WEIGHTS, measure)
