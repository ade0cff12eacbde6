"""Settings: how much a benchmark measures, and the command line that all benchmarks share."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from time import perf_counter, process_time
from typing import TYPE_CHECKING, Literal

from kqview.machine import default_threads

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterable

CONTEXT, QUICK_CONTEXT = 1024, 128
TOKENS, QUICK_TOKENS = 20, 12


@dataclass(frozen=True)
class Settings:
    """What is the same for every row of one run.

    Attributes:
        is_quick: A small model and few pairs: shows that the scripts work, no more.
        n_context: Tokens of the prompt.
        n_tokens: Tokens of one run of a decode row.
        n_skip: Its first steps, which build graphs, are not counted.
        n_pairs: Pairs of a row that has a target; see `pairs_for`.
        n_threads: Compute threads.
        clock: "wall", or "cpu": time that this process computes, for machines that others use too.
            Threads that wait for each other compute as well, so it goes with one thread.
        device: "cpu", or "gpu" for all layers on the devices that the build finds.
        shape: The model's: "24x16", "6x16" with a quarter of its layers for long contexts, or "7b"
            for that of Qwen2.5-7B.
        rows: Names of the rows to measure, None for all.
        save: JSON lines file to append to, None for none.
    """

    is_quick: bool = False
    n_context: int = CONTEXT
    n_tokens: int = TOKENS
    n_skip: int = 4
    n_pairs: int = 20
    n_threads: int = 1
    clock: Literal["wall", "cpu"] = "wall"
    device: Literal["cpu", "gpu"] = "cpu"
    shape: Literal["24x16", "6x16", "7b"] = "24x16"
    rows: frozenset[str] | None = None
    save: Path | None = None

    def chosen(self, names: Iterable[str]) -> list[str]:
        """The *names* that are to be measured, in their order."""
        return [name for name in names if self.rows is None or name in self.rows]

    @property
    def n_gpu_layers(self) -> int:
        """As Engine takes it; llama.cpp's own programs take any number above the layers for all."""
        return 0 if self.device == "cpu" else 999

    def now_s(self) -> float:
        """Seconds of the chosen clock."""
        return perf_counter() if self.clock == "wall" else process_time()

    def target(self, ratio: float | None) -> float | None:
        """*ratio*, or None where the figures of this run mean nothing."""
        return None if self.is_quick else ratio

    def pairs_for(self, target: float | None) -> int:
        """Pairs of a row: all of them for a verdict, half as many (5 at least) without one."""
        return self.n_pairs if target is not None else max(5, self.n_pairs // 2)

    @property
    def flags(self) -> str:
        """The options that change a figure, as they are typed."""
        words = ["--quick"] if self.is_quick else []
        words += ["--threads", str(self.n_threads), "--pairs", str(self.n_pairs)]
        if self.n_context != (QUICK_CONTEXT if self.is_quick else CONTEXT):
            words += ["--context", str(self.n_context)]
        if self.n_tokens != (QUICK_TOKENS if self.is_quick else TOKENS):
            words += ["--tokens", str(self.n_tokens)]
        if self.clock != "wall":
            words += ["--clock", self.clock]
        if self.device != "cpu":
            words += ["--device", self.device]
        if self.shape != "24x16":
            words += ["--shape", self.shape]
        return " ".join(words)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the shared options."""
    parser.add_argument(
        "--quick", action="store_true", help="small model, few pairs: only shows that it runs"
    )
    parser.add_argument(
        "--pairs",
        type=int,
        help="pairs per row with a target (20; with --quick 5); other rows use half",
    )
    parser.add_argument(
        "--tokens", type=int, help="tokens per run of a decode row (20; with --quick 12)"
    )
    parser.add_argument("--context", type=int, help="tokens of the prompt (1024; with --quick 128)")
    parser.add_argument(
        "--threads", type=int, help="compute threads (default: all that this process may use)"
    )
    parser.add_argument(
        "--clock",
        choices=("wall", "cpu"),
        default="wall",
        help="cpu: CPU time of this process, for shared machines; needs --threads 1",
    )
    parser.add_argument(
        "--device",
        choices=("cpu", "gpu"),
        default="cpu",
        help="gpu: all layers on the GPU; needs a build with GGML_CUDA=ON or another backend",
    )
    parser.add_argument(
        "--shape",
        choices=("24x16", "6x16", "7b"),
        default="24x16",
        help="layers x heads of the random model; 7b: that of Qwen2.5-7B, 8 GB",
    )
    parser.add_argument(
        "--save",
        type=Path,
        nargs="?",
        const=Path(__file__).resolve().parent / "results",
        help="append JSON lines to FILE (default: today's file in bench/results)",
    )


def settings_of(args: argparse.Namespace, rows: Iterable[str] | None = None) -> Settings:
    """The settings that parsed options mean."""
    quick: bool = args.quick
    settings = Settings(
        is_quick=quick,
        n_context=args.context or (QUICK_CONTEXT if quick else CONTEXT),
        n_tokens=args.tokens or (QUICK_TOKENS if quick else TOKENS),
        n_pairs=args.pairs or (5 if quick else 20),
        n_threads=args.threads or default_threads(),
        clock=args.clock,
        device=args.device,
        shape=args.shape,
        rows=None if rows is None else frozenset(rows),
        save=args.save,
    )
    if settings.clock == "cpu" and settings.n_threads != 1:
        raise SystemExit(
            f"bench: --clock cpu would count the waiting of {settings.n_threads} threads; "
            "add --threads 1"
        )
    if settings.n_tokens < settings.n_skip + 2:
        raise SystemExit(
            f"bench: --tokens is {settings.n_tokens}, but the minimum is {settings.n_skip + 2}; "
            "the first steps build graphs and are not counted"
        )
    return settings
