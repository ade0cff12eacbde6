"""llama.cpp's own tiny models, one per architecture and variant, and a check of many at once.

Owns: making the models (``test-llama-archs -o``, 128 at the pinned commit); comparing one model's
rows with the stock build's, layer by layer (`ModelCheck`); and worker processes that do so
(`Checks`): a model that ends its worker is named, and the others go on. The error of a row is
max|a - b| / max|b| over the columns that the row shows, infinite where a column is hidden in one
and not in the other.
Never: keeps the models, the caller names a folder; tolerates anything, limits stand in the tests.
"""

from __future__ import annotations

import json
import struct
import subprocess
import sys
import tempfile
import threading
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import numpy as np

from kqview import Capture, Engine
from kqview.errors import InvalidCapture, UnsupportedModel

from . import stock
from .rows import KINDS, Kind

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from kqview.types import Token


# ---- one model against the stock build

N_TOKENS = 6
N_CTX = 256
# exp of a score this far below the row's largest one is 0 in float32.
UNDERFLOW = 80.0
N_KERNEL_PROMPT = 6
SPANS = [(0, 7), (5, None), (19, 20)]


@dataclass
class Report:
    """What one model gave. Errors by "<kind> <flash attention>" and layer.

    The kind "prompt" are the probs of the prompt's own tokens, from `attend`.
    """

    name: str
    mode: str = ""  # "generate" or "attend"
    expected_layers: list[int] = field(default_factory=list[int])
    layers: dict[str, list[int]] = field(default_factory=dict[str, list[int]])
    errors: dict[str, dict[int, float]] = field(default_factory=dict[str, dict[int, float]])
    n_heads: list[int] = field(default_factory=list[int])
    # Hidden columns of the last token's logits, over all heads.
    n_hidden: dict[int, int] = field(default_factory=dict[int, int])
    # Smallest and largest sum of a row of probabilities, in all layers.
    sums: dict[str, tuple[float, float]] = field(default_factory=dict[str, tuple[float, float]])
    # The same of the stock build's rows, with columns that are no tokens.
    stock_sums: tuple[float, float] = (np.inf, -np.inf)
    is_tuple: bool = False
    # Largest error of a pooled vector against those of every token; below 0: it does not embed.
    embedding_error: float = np.inf
    # Largest difference of a generated token's logprob from its score.
    score_error: float = 0.0
    # Largest error of a hidden state of the prompt against a token's; below 0: it has none.
    states_error: float = 0.0
    # Largest difference of a sum over a span of the prompt's rows from that of the whole rows.
    span_error: float = 0.0
    # Layers whose attention kqview computes if asked to, and the largest difference of their rows
    # from those without flash attention, where the whole text goes through that kernel.
    kernel_layers: int = 0
    kernel_error: float = 0.0
    failure: str = ""

    def largest(self, flash_attn: bool, *, first_layer: bool = False) -> float:
        """Largest error of any kind, of all layers or of the first one."""
        found = [
            error
            for key, by_layer in self.errors.items()
            if key.endswith(" on") == flash_attn
            for layer, error in by_layer.items()
            if not first_layer or layer == min(by_layer)
        ]
        return max(found, default=0.0)


def row_error(kind: Kind, got: NDArray[np.float32], layer: stock.Layer) -> float:
    """Largest error of rows (n_heads, ..., n_context) against the stock rows of the same shape."""
    probs = layer.probs.reshape(got.shape).astype(np.float64)
    if kind == "probs":
        return relative(got, probs)
    want = (layer.kq if kind == "logits" else layer.scores).reshape(got.shape).astype(np.float64)
    shown = np.isfinite(got)
    if np.isnan(got).any() or (~shown & (probs > 0)).any():
        return np.inf
    seen = shown if kind == "logits" else shown & (probs > 0)
    if kind == "scores":
        # Shown, and yet the stock probability is 0: only because it is too small for a float32.
        peak = np.where(shown, got, -np.inf).max(axis=-1, keepdims=True)
        if (shown & (probs == 0) & (got > peak - UNDERFLOW)).any():
            return np.inf
    return relative(np.where(seen, got, 0.0), np.where(seen, want, 0.0))


def relative(got: NDArray[Any], want: NDArray[np.float64]) -> float:
    """max|a - b| / max|b| of the worst row; 0 where both are all zero."""
    if not np.isfinite(got).all():
        return np.inf
    distance = np.abs(got - want).max(axis=-1)
    size = np.abs(want).max(axis=-1)
    return float(np.where(distance == 0, 0.0, distance / np.maximum(size, 1e-30)).max())


class ModelCheck:
    """Runs one model through the engine and the stock build."""

    def __init__(self, path: Path, n_prompt: int = 20, kv_type: stock.KvType = "f32") -> None:
        self.path = path
        self.kv_type: stock.KvType = kv_type
        self.prompt: list[int] = np.random.default_rng(3).integers(0, 128, n_prompt).tolist()
        self.report = Report(path.stem)
        self._stock: dict[tuple[int, ...] | None, stock.Run] = {}

    def run(self) -> Report:
        """Generate with each kind and flash attention off and on; compare every row."""
        for flash_attn in (False, True):
            for kind in KINDS:
                with self._open(flash_attn) as engine:
                    self._check(engine, kind, flash_attn)
            if self.report.expected_layers:
                with self._open(flash_attn) as engine:
                    self._check_prompt(engine, flash_attn)
        self._check_embedding()
        if self.report.mode == "generate" and self.report.expected_layers:
            self._check_kernel()
        return self.report

    def _check_embedding(self) -> None:
        try:
            rows = self._embed("none")
        except UnsupportedModel:
            self.report.embedding_error = -1.0
            return
        assert rows.shape[0] == len(self.prompt)
        pooled = {"mean": rows.mean(axis=0), "cls": rows[0], "last": rows[-1]}
        self.report.embedding_error = max(
            relative(self._embed(pooling), want) for pooling, want in pooled.items()
        )

    def _check_kernel(self) -> None:
        runs: list[list[Token]] = []
        for flash_attn in (False, True):
            kernel = "kqview" if flash_attn else "llama.cpp"
            with self._open(flash_attn, attention_kernel=kernel) as engine:
                options: dict[str, Any] = {"max_tokens": N_TOKENS, "ignore_eos": True}
                prompt = self.prompt[:N_KERNEL_PROMPT]
                generation = engine.generate(prompt, temperature=0.0, capture="probs", **options)
                runs.append(list(generation))
                self.report.kernel_layers = engine.stats().attended_layers
        plain, ours = runs
        for one, other in zip(plain, ours, strict=True):
            assert one.attention is not None
            assert other.attention is not None
            layers = zip(one.attention, other.attention, strict=True)
            for a, b in layers:
                error = relative(np.asarray(b), np.asarray(a, np.float64))
                self.report.kernel_error = max(error, self.report.kernel_error)
            if one.id != other.id:  # their logits were nearly equal
                break

    def _embed(self, pooling: Any) -> NDArray[np.float64]:
        with self._open(False, pooling=pooling) as engine:
            return engine.embed(self.prompt, normalize=False).astype(np.float64)

    def _open(self, flash_attn: bool, **options: Any) -> Engine:
        # A fresh one each time: reusing the prompt's cache would round differently.
        return Engine(
            self.path,
            n_ctx=N_CTX,
            n_threads=1,
            kv_type=self.kv_type,
            flash_attn=flash_attn,
            attention_budget_bytes=2**28,
            **options,
        )

    def _check_prompt(self, engine: Engine, flash_attn: bool) -> None:
        found = engine.attend(self.prompt, capture="probs").array()
        layers = engine.model.attention_layers
        sums = engine.attend(self.prompt, capture=Capture("probs", spans=SPANS)).array()
        for part, whole in zip(sums, found, strict=True):
            want = [whole[..., slice(*span)].sum(-1, dtype=np.float64) for span in SPANS]
            error = float(np.abs(part - np.stack(want, -1)).max())
            self.report.span_error = max(error, self.report.span_error)
        self._compare("prompt", flash_attn, layers, [found], self._stock_rows([]))

    def _states_error(self, engine: Engine, ids: Sequence[int]) -> float:
        capture = Capture(layers=(), hidden="all")
        try:
            states = engine.attend(ids, capture).hidden
        except InvalidCapture:
            return -1.0
        errors: list[float] = []
        for n in (len(self.prompt), len(ids)):
            options: dict[str, Any] = {"cache_prompt": False, "ignore_eos": True, "max_tokens": 1}
            token = next(engine.generate(ids[:n], capture=capture, **options))
            assert token.hidden is not None
            errors += [
                relative(ours, theirs.astype(np.float64))
                for ours, theirs in zip(states[:, n - 1], token.hidden, strict=True)
            ]
        return max(errors)

    def _check(self, engine: Engine, kind: Kind, flash_attn: bool) -> None:
        layers = engine.model.attention_layers
        options: dict[str, Any] = {
            "max_tokens": N_TOKENS, "temperature": 0.0, "ignore_eos": True,
            "capture": kind if layers else None, "top_logprobs": 0,
        }  # fmt: skip
        try:
            tokens = list(engine.generate(self.prompt, **options))
        except UnsupportedModel:
            self.report.mode = "attend"
            found = engine.attend(self.prompt, capture=kind).array()
            self._compare(kind, flash_attn, layers, [found], self._stock_rows([]))
            return
        self.report.mode = "generate"
        assert len(tokens) == N_TOKENS
        if kind == "scores" and not flash_attn:
            ids = self.prompt + [token.id for token in tokens]
            self.report.states_error = self._states_error(engine, ids)
            score = engine.score(ids, last=N_TOKENS)
            logprobs = np.array([token.logprob for token in tokens])
            self.report.score_error = float(np.abs(score.logprobs[-N_TOKENS:] - logprobs).max())
        run = self._stock_rows([token.id for token in tokens])
        self._compare(kind, flash_attn, layers, [token.attention for token in tokens], run)

    def _compare(
        self,
        kind: Kind | Literal["prompt"],
        flash_attn: bool,
        layers: tuple[int, ...],
        found: list[Any],
        run: stock.Run,
    ) -> None:
        """`found`: for each step rows (n_layers, n_heads, ..., n_context), or a tuple of layers."""
        report = self.report
        key = f"{kind} {'on' if flash_attn else 'off'}"
        report.expected_layers = [layer.layer for layer in run.steps[0].layers]
        report.layers[key] = list(layers)
        report.errors[key] = dict.fromkeys(layers, 0.0)
        if not layers:
            return
        report.is_tuple = isinstance(found[0], tuple)
        low, high = np.inf, -np.inf
        for attention, step in zip(found, run.steps, strict=True):
            rows_of = dict(zip(layers, (np.asarray(rows) for rows in attention), strict=True))
            report.n_heads = [len(rows) for rows in rows_of.values()]
            assert [layer.layer for layer in step.layers] == report.expected_layers
            for layer in step.layers:
                if layer.layer not in rows_of:
                    continue
                rows = rows_of[layer.layer]
                # A token has one query, a prompt one of each id.
                assert rows.shape == (layer.kq[:, 0] if rows.ndim == 2 else layer.kq).shape
                before = report.errors[key][layer.layer]
                error = row_error("probs" if kind == "prompt" else kind, rows, layer)
                report.errors[key][layer.layer] = max(before, error)
                if kind == "logits" and step is run.steps[-1]:
                    report.n_hidden[layer.layer] = int((rows == -np.inf).sum())
                if kind == "probs":
                    sums = rows.sum(axis=-1)
                    low, high = min(low, float(sums.min())), max(high, float(sums.max()))
                    known = report.stock_sums
                    report.stock_sums = (
                        min(known[0], float(layer.sums.min())),
                        max(known[1], float(layer.sums.max())),
                    )
        if kind == "probs":
            report.sums[key] = (low, high)

    def _stock_rows(self, ids: list[int]) -> stock.Run:
        """The stock build's rows of the prompt and then `ids`, or of the prompt alone."""
        # The same tokens in most runs: the stock build runs once for all of them.
        key = tuple(ids[:-1]) if ids else None
        if key not in self._stock:
            options: dict[str, Any] = {"kv_type": self.kv_type, "n_ctx": N_CTX}
            self._stock[key] = (
                stock.read_generation(self.path, self.prompt, ids, **options)
                if ids
                else stock.read_rows(self.path, self.prompt, rows="all", **options)
            )
        return self._stock[key]


# ---- all models

Value = TypeVar("Value")
# What the pinned commit makes, as architecture-variant.
_NAMES = """
    afmoe-moe arcee-dense arctic-moe baichuan-dense bailingmoe-moe bailingmoe2-moe
    bailingmoe3-moe bloom-dense chatglm-dense codeshell-dense cogvlm-dense cohere2-dense
    cohere2moe-moe command-r-dense dbrx-moe deci-dense deepseek-moe deepseek2-moe
    deepseek32-moe deepseek4-moe dots1-moe dots3note-moe dream-dense ernie4_5-moe
    ernie4_5-moe-moe exaone-dense exaone-moe-moe exaone4-dense falcon-dense falcon-h1-dense
    gemma-dense gemma2-dense gemma3-dense glm-dsa-moe glm4-dense glm4moe-moe glm5-next-moe
    gpt-oss-moe gpt2-dense gptneox-dense granite-dense granite-moe granite_swa-dense
    granitehybrid-dense granitemoe-dense granitemoe-moe grok-moe grovemoe-moe hrm_text-dense
    hunyuan-dense-dense hunyuan-moe-moe hunyuan_vl-dense hy_v3-moe hy_v4-moe internlm2-dense
    jais-dense jais2-dense jamba-dense kimi-k3-moe kimi-linear-moe laguna-moe lfm2-dense
    lfm2moe-moe llada-dense llada-moe-moe llama-dense llama-moe llama4-moe maincoder-dense
    mamba-dense mamba2-dense maple-moe mellum-moe mimo2-moe minicpm-dense minicpm-moe
    minicpm3-dense minimax-01-moe minimax-m2-moe minimax-m3-moe mistral3-dense mistral3-moe
    mistral4-moe mpt-dense muse-glimmer-dense nanbeige-dense nemotron-dense nemotron_h-dense
    nemotron_h_moe-dense olmo-dense olmo2-dense olmoe-moe openelm-dense orion-dense
    paddleocr-moe pangu-embedded-dense phi2-dense phi3-dense phimoe-moe plamo-dense
    plamo2-dense plamo3-dense pockettts-dense qwen-dense qwen2-dense qwen2moe-moe
    qwen2vl-dense qwen3-dense qwen35-dense qwen35moe-moe qwen3moe-moe qwen3next-moe
    qwen3tts-dense qwen3vl-dense qwen3vlmoe-moe qwen4exp-moe refact-dense refact-moe rnd1-moe
    seed_oss-dense smallthinker-moe smollm3-dense spark2_5-dense stablelm-dense
    starcoder-dense starcoder2-dense talkie-dense xverse-dense
"""
NAMES = tuple(_NAMES.split())
# Diffusion models: without a KV cache.
WITHOUT_CACHE = ("dream-dense", "llada-dense", "llada-moe-moe", "rnd1-moe")
ROOT = Path(__file__).resolve().parents[2]
MODEL_TIMEOUT_S = 120


def make_models(folder: Path, pattern: str = "") -> list[Path]:
    """Write the models (of architectures that match the regular expression) and return them.

    The weights follow from a fixed seed. All of them take 5 s and 0.9 GB.

    Raises:
        PeersMissing: test-llama-archs is not built.
    """
    folder.mkdir(parents=True, exist_ok=True)
    command = [str(stock.find_binary("test-llama-archs")), "-s", "1", "-o", str(folder)]
    command += ["-a", pattern] if pattern else []
    subprocess.run(command, check=True, capture_output=True, text=True)
    return sorted(folder.glob("*.gguf"))


def with_value(model: Path, path: Path, key: str, value: float) -> Path:
    """Write a copy of `model` with another metadata value of `key`, which is a u32 or f32."""
    data = bytearray(model.read_bytes())
    name = key.encode()
    # The length of a key precedes it, its type and value follow.
    at = data.index(struct.pack("<Q", len(name)) + name) + 8 + len(name)
    (kind,) = struct.unpack_from("<I", data, at)
    code = {4: "<I", 6: "<f"}[kind]
    struct.pack_into(code, data, at + 4, int(value) if code == "<I" else value)
    path.write_bytes(data)
    return path


class Checks:
    """Models being checked in worker processes; ``checks[name]`` waits for that model's report.

    Each model has its own wait, so that no test waits for all of them. A model that ends its worker
    (or takes longer than MODEL_TIMEOUT_S) is reported with a failure, and a new worker takes the
    rest. `close` ends the workers.
    """

    def __init__(
        self,
        models: Sequence[Path],
        *,
        n_prompt: int = 20,
        kv_type: stock.KvType = "f32",
        n_workers: int = 2,
    ) -> None:
        self._options = [str(n_prompt), kv_type]
        self._reports: dict[str, Report] = {}
        self._names = {model.stem for model in models}
        self._changed = threading.Condition()
        self._is_closed = False
        self._threads = [
            threading.Thread(target=self._check_share, args=(list(models[i::n_workers]),))
            for i in range(n_workers)
        ]
        for thread in self._threads:
            thread.start()

    def __getitem__(self, name: str) -> Report:
        if name not in self._names:
            raise KeyError(name)
        with self._changed:
            self._changed.wait_for(lambda: name in self._reports)
            return self._reports[name]

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._names))

    def close(self) -> None:
        """End the workers; models without a report keep having none."""
        self._is_closed = True
        for thread in self._threads:
            thread.join()

    def _check_share(self, models: list[Path]) -> None:
        while models and not self._is_closed:
            with tempfile.TemporaryFile("w+") as errors:
                command = [sys.executable, "-m", "tests.support.archs", *self._options]
                worker = subprocess.Popen(
                    [*command, *map(str, models)],
                    cwd=ROOT,
                    stdout=subprocess.PIPE,
                    stderr=errors,
                    text=True,
                )
                assert worker.stdout is not None
                with worker.stdout:
                    while models and not self._is_closed:
                        watchdog = threading.Timer(MODEL_TIMEOUT_S, worker.kill)
                        watchdog.start()
                        line = worker.stdout.readline()
                        watchdog.cancel()
                        if not line:
                            break
                        if line.startswith("{"):
                            self._publish(_report_of(line))
                            models.pop(0)
                    if self._is_closed:
                        worker.kill()
                status = worker.wait()
                errors.seek(0)
                why = " | ".join(errors.read().strip().splitlines()[-6:])
            if models and not self._is_closed:
                failure = f"the process ended with {status}: {why}"
                self._publish(Report(models.pop(0).stem, failure=failure))

    def _publish(self, report: Report) -> None:
        with self._changed:
            self._reports[report.name] = report
            self._changed.notify_all()


def _report_of(line: str) -> Report:
    report = Report(**json.loads(line))
    # JSON's keys are text.
    report.errors = {key: _by_layer(errors) for key, errors in report.errors.items()}
    report.n_hidden = _by_layer(report.n_hidden)
    return report


def _by_layer(values: dict[Any, Value]) -> dict[int, Value]:
    return {int(layer): value for layer, value in values.items()}


def main(n_prompt: str, kv_type: stock.KvType, *paths: str) -> None:
    """Check models in this process, one line of JSON each."""
    for path in paths:
        check = ModelCheck(Path(path), int(n_prompt), kv_type)
        try:
            check.run()
        except Exception as error:
            check.report.failure = f"{type(error).__name__}: {error}"
        print(json.dumps(asdict(check.report)), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])  # type: ignore[arg-type]
