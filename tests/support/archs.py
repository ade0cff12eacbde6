"""llama.cpp's own tiny models, one per architecture and variant, and a check of many at once.

Owns: making the models (``test-llama-archs -o``, 128 at the pinned commit), and worker processes
that check them (``arch_check``): a model that ends its worker is named, and the others go on.
Never: keeps the models; the caller names a folder.
"""

from __future__ import annotations

import json
import struct
import subprocess
import sys
import tempfile
import threading
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from . import stock
from .arch_check import ModelCheck, Report

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

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
