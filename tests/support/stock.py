"""Runs kq-eval-rows, the stock eval-callback route, and returns what it read as numpy arrays.

Owns: finding the binary (``KQVIEW_PEERS_DIR``, else what bench/peers/build.py has built) and its
output format. Never: builds anything, loads kqview. The tool is a process of its own, so nothing
is shared with the code under test.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

F32 = NDArray[np.float32]
SERVER_STARTS_WITHIN_S = 60
KvType = Literal["f16", "f32", "q8_0", "q4_0"]
BUILD = Path(__file__).resolve().parents[2] / "bench" / "peers" / "build.py"


class PeersMissing(Exception):
    """The stock binaries are not built; the message says how to build them."""


@dataclass
class Layer:
    """Rows of one attention layer; float32 arrays of shape (n_head, n_row, n_context), owned.

    ``n_row`` is 1, or the length of the prompt in step 0 of a run with ``rows="all"``. Columns that
    a row's ubatch had not reached are NaN in kq, -inf in scores and 0 in probs. ``scores`` are
    what enters the softmax; where a probability is exactly 0 they are -inf. ``sums``, of shape
    (n_head, n_row), are the probabilities of a whole row, with columns that are no tokens
    (deepseek4's compressed keys).
    """

    layer: int
    kq: F32
    scores: F32
    probs: F32
    sums: F32


@dataclass
class Step:
    """One llama_decode: step 0 is the prefill, step i the token that was produced i-th.

    ``n_past``: position of the last row's query, so ``n_context == n_past + 1`` columns.
    """

    n_past: int
    ms: float
    layers: list[Layer] = field(default_factory=list[Layer])

    @property
    def kq(self) -> F32:
        """Last rows, (n_layer, n_head, n_context); scores and probs alike. Layers must be equal."""
        return np.stack([layer.kq[:, -1] for layer in self.layers])

    @property
    def scores(self) -> F32:
        return np.stack([layer.scores[:, -1] for layer in self.layers])

    @property
    def probs(self) -> F32:
        return np.stack([layer.probs[:, -1] for layer in self.layers])


@dataclass
class Run:
    """What one call read. ``logits``: (n_steps, n_vocab) float32, which chose each token."""

    steps: list[Step]
    tokens: list[int]
    logits: F32
    meta: dict[str, Any]


def find_binary(name: str = "kq-eval-rows") -> Path:
    """Return the path of a stock binary that is built.

    Raises:
        PeersMissing: It is not there; tests skip with this message.
    """
    if own := os.environ.get("KQVIEW_PEERS_DIR"):
        path = Path(own) / name
        if not path.is_file():
            raise PeersMissing(f"stock.find: no {name} in KQVIEW_PEERS_DIR={own}; correct it")
        return path
    command = [sys.executable, str(BUILD), "--where", name]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise PeersMissing(done.stderr.strip())
    return Path(done.stdout.strip()) / name


def source() -> Path:
    """Folder of llama.cpp's pinned source; fetched if need be."""
    command = [sys.executable, str(BUILD.parents[2] / "vendor" / "fetch.py"), "--print-path"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return Path(done.stdout.strip())


def n_gpu_layers() -> int:
    """Layers on a GPU of a stock build that knows one: all where engines of the tests have any."""
    return 0 if os.environ.get("KQVIEW_TEST_GPU_LAYERS", "0") == "0" else 999


def read_rows(
    model: Path,
    ids: Sequence[int],
    *,
    n_predict: int = 1,
    forced_ids: Sequence[int] = (),
    flash_attn: bool = False,
    kv_type: KvType = "f16",
    n_ctx: int | None = None,
    n_ubatch: int = 512,
    n_threads: int = 1,
    rows: Literal["last", "all"] = "last",
    encode: bool = False,
) -> Run:
    """Prefill `ids`, decode `n_predict` - 1 tokens greedily (or `forced_ids` first), read all rows.

    Step i holds the row of the query that chose token i, so ``len(ids) + i`` columns. With flash
    attention there is no kq: steps then have no layers, tokens and logits are there. A quantised
    cache without flash attention keeps V in F16. `encode` runs the encoder of a model that has one,
    once and without logits.

    Raises:
        PeersMissing: kq-eval-rows is not built.
        ValueError: It refused the arguments or the model; its message.
    """
    with tempfile.TemporaryDirectory(prefix="kq-eval-rows-") as folder:
        out = Path(folder)
        for name, values in (("ids", ids), ("forced", forced_ids)):
            (out / name).write_text(" ".join(map(str, values)))
        command: list[str | Path] = [
            find_binary(),
            "--model",
            model,
            "--ids",
            out / "ids",
            "--out",
            out,
            "--encode" if encode else "--logits",
        ]
        options: dict[str, str | int | Path] = {
            "--n-predict": n_predict,
            "--forced-ids": out / "forced",
            "--flash-attn": "on" if flash_attn else "off",
            "--kv-type": kv_type,
            "--n-ubatch": n_ubatch,
            "--threads": n_threads,
            "--rows": rows,
            "--n-gpu-layers": n_gpu_layers(),
        }
        if n_ctx is not None:
            options["--n-ctx"] = n_ctx
        arguments = [str(word) for pair in options.items() for word in pair]
        done = subprocess.run(
            [*map(str, command), *arguments], capture_output=True, text=True, check=False
        )
        if done.returncode != 0:
            raise ValueError(
                f"stock.read_rows: {done.stderr.strip() or f'exit status {done.returncode}'}"
            )
        return _parse(out)


def read_generation(model: Path, prompt: Sequence[int], ids: Sequence[int], **options: Any) -> Run:
    """`read_rows` of *ids* after *prompt*, whose last token is decoded on its own, as in kqview."""
    if len(prompt) == 1:
        return read_rows(model, prompt, n_predict=len(ids), forced_ids=ids, **options)
    forced = [prompt[-1], *ids]
    run = read_rows(model, prompt[:-1], n_predict=len(forced), forced_ids=forced, **options)
    return Run(run.steps[1:], run.tokens[1:], run.logits[1:], run.meta)


@contextlib.contextmanager
def server(model: Path, *options: str | Path) -> Iterator[Callable[..., Any]]:
    """The stock llama-server with one slot of 256 tokens, and what asks it.

    It is called with a method, a path and a body, and returns what is answered; None for an error.

    Raises:
        PeersMissing: It is not built.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        str(find_binary("llama-server")), "--model", str(model), "--ctx-size", "256",
        "--parallel", "1", "--threads", "1", "--no-warmup", "--host", "127.0.0.1",
        "--port", str(port), *map(str, options),
    ]  # fmt: skip

    def ask(method: str, path: str, body: object = None) -> Any:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        try:
            connection.request(method, path, json.dumps(body), {"Content-Type": "application/json"})
            response = connection.getresponse()
            data = response.read()
            return json.loads(data) if response.status == http.HTTPStatus.OK else None
        except OSError:
            return None
        finally:
            connection.close()

    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            until = time.monotonic() + SERVER_STARTS_WITHIN_S
            while ask("GET", "/health") is None and process.poll() is None:
                if time.monotonic() > until:
                    break
                time.sleep(0.05)
            yield ask
        finally:
            process.kill()
            process.wait()


def _parse(out: Path) -> Run:
    meta: dict[str, Any] = json.loads((out / "meta.json").read_text())
    flat = {
        name: np.fromfile(out / f"{name}.f32", np.float32)
        for name in ("kq", "input", "probs", "logits")
    }
    used = dict.fromkeys(flat, 0)

    def take(name: str, shape: tuple[int, int, int]) -> F32:
        begin = used[name]
        used[name] = begin + int(np.prod(shape))
        return flat[name][begin : used[name]].reshape(shape)

    # A prefill longer than n_ubatch is several calls of one step; their rows follow each other.
    steps: list[Step] = []
    parts: dict[tuple[int, int], list[Layer]] = {}
    for call in meta["calls"]:
        i_step, n_past = int(call["step"]), int(call["n_past"])
        if i_step == len(steps):
            steps.append(Step(n_past, 0.0))
        steps[i_step].n_past = n_past
        steps[i_step].ms += float(call["ms"])
        for item in call["layers"]:
            shape = (item["n_head"], item["n_rows"], item["n_kv"])
            kq, probs = take("kq", shape), take("probs", shape)
            entered = take("input", shape) if item["input"] else kq
            scores = entered * np.float32(item["scale"])
            if item["max_bias"] > 0:
                scores = scores + _alibi(*shape, item["max_bias"], n_past)
            scores = np.where(probs > 0, scores, np.float32(-np.inf))
            n_context = n_past + 1
            layer = Layer(
                item["layer"],
                kq[..., :n_context],
                scores[..., :n_context],
                probs[..., :n_context],
                probs.sum(axis=-1),
            )
            parts.setdefault((i_step, item["layer"]), []).append(layer)
    for (i_step, i_layer), found in parts.items():
        n_context = steps[i_step].n_past + 1
        steps[i_step].layers.append(
            Layer(
                i_layer,
                _join([part.kq for part in found], n_context, np.nan),
                _join([part.scores for part in found], n_context, -np.inf),
                _join([part.probs for part in found], n_context, 0.0),
                np.concatenate([part.sums for part in found], axis=1),
            )
        )
    return Run(steps, meta["tokens"], flat["logits"].reshape(-1, meta["n_vocab"]), meta)


def _join(parts: list[F32], n_context: int, fill: float) -> F32:
    """Stack rows of (n_head, n_row, <= n_context), widened on the right."""
    widened = [
        np.pad(part, ((0, 0), (0, 0), (0, n_context - part.shape[2])), constant_values=fill)
        for part in parts
    ]
    return np.ascontiguousarray(np.concatenate(widened, axis=1))


def _alibi(n_head: int, n_rows: int, n_kv: int, max_bias: float, n_past: int) -> F32:
    """Position bias that a softmax with max_bias adds, (n_head, n_row, n_kv)."""
    heads = np.arange(n_head)
    n_power = 2 ** int(np.floor(np.log2(n_head)))
    exponent = np.where(heads < n_power, heads + 1.0, heads - n_power + 0.5)
    slope = np.exp2(-max_bias / n_power * exponent)
    query = n_past + 1 - n_rows + np.arange(n_rows)
    distance = np.abs(query[:, None] - np.arange(n_kv))
    return np.asarray(-slope[:, None, None] * distance, np.float32)
