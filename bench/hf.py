"""How does the tap compare with `output_attentions` of Hugging Face transformers?

A Llama of the same shape as our random model (24 layers x 16 heads, 4 KV heads, head size 64) with
random weights, eager attention as `output_attentions` needs it, on the CPU with as many threads.
Ours captures the probs of all heads for the same work, with weights of the same width: F32 beside
float32, F16 beside bfloat16. Each round runs theirs without and with attentions and ours without
and with the tap, every second round in reverse. torch and transformers are not dependencies of
kqview; without them these rows are skipped.
"""

from __future__ import annotations

import importlib.util
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from console import attempt, main
from models import NotHere
from report import Timing
from runs import PrefillRuns, decode_runs, open_engine

from kqview import Capture
from kqview.bench.pairs import Pairs, rounds, step_ms
from kqview.bench.sweep import prompt_ids

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from console import ProgressLine
    from settings import Settings

    from kqview import Engine
    from kqview.bench.records import LeftOut

    Ways = tuple[Callable[[], float], Callable[[], float]]  # without and with the tap

WAYS = ("hf-off", "hf-on", "tap-off", "tap-on")
# What is compared: (row's end, what, against, candidate's way, baseline's way)
COMPARED = (
    ("attentions", "transformers, output_attentions", "transformers eager", "hf-on", "hf-off"),
    ("tap", "tap: probs, all heads", "transformers, output_attentions", "tap-on", "hf-on"),
    ("plain", "no capture", "transformers eager", "tap-off", "hf-off"),
)
TYPES = {"float32": "F32", "bfloat16": "F16"}  # theirs -> ours
CASES = {
    f"hf-{work}-{end}-{dtype}": (work, dtype)
    for dtype in TYPES
    for work in ("decode", "prefill")
    for end, *_ in COMPARED
}
WEIGHTS = {name: 60.0 if work == "decode" else 120.0 for name, (work, _) in CASES.items()}
MOST_PROMPTS = 6  # rounds of prompts, which take long


def measure(settings: Settings, line: ProgressLine) -> Iterator[Timing | LeftOut]:
    """Measure the chosen cases; those of one type and work come out of the same rounds."""
    for dtype in TYPES:
        for work in ("decode", "prefill"):
            names = [n for n in settings.chosen(CASES) if CASES[n] == (work, dtype)]
            if not names:
                continue
            for name in names[:-1]:
                line.start(name, 1)
            n_rounds = settings.pairs_for(None)
            if work == "prefill":
                n_rounds = min(n_rounds, MOST_PROMPTS)
            line.start(names[-1], n_rounds)
            try:
                times, refused = _times(settings, line, work, dtype, n_rounds)
            except Exception as error:
                times, refused = [], dict.fromkeys(WAYS, error)
            for name in names:
                yield attempt(name, _timing, settings, name, times, refused)


def check_installed() -> None:
    missing = [name for name in ("torch", "transformers") if not importlib.util.find_spec(name)]
    if missing:
        raise NotHere(f"{' and '.join(missing)} not installed; run pip install {' '.join(missing)}")


def _timing(
    settings: Settings, name: str, times: list[dict[str, float]], refused: dict[str, Exception]
) -> Timing:
    work, dtype = CASES[name]
    end, what, baseline, ours, theirs = next(c for c in COMPARED if f"-{c[0]}-" in name)
    for way in (theirs, ours):
        if way in refused:
            raise refused[way]
    types = (dtype if end == "attentions" else TYPES[dtype], dtype)
    piece = (
        "a prompt of {} tokens" if work == "prefill" else "a decoded token at {} tokens of context"
    )
    return Timing(
        name=name,
        what=f"{what}, {types[0]}",
        baseline=f"{baseline}, {types[1]}",
        work=piece.format(settings.n_context),
        pairs=Pairs([t[theirs] for t in times], [t[ours] for t in times]),
        target=None,
        command=f"python bench/hf.py --row {name} {settings.flags}",
    )


def _times(
    settings: Settings, line: ProgressLine, work: str, dtype: str, n_rounds: int
) -> tuple[list[dict[str, float]], dict[str, Exception]]:
    """Milliseconds of each way in each round, and the ways that cannot be taken."""
    check_installed()
    with open_engine(settings, flash_attn=True, weight_type=TYPES[dtype]) as engine:
        theirs = TransformersRuns(settings, engine, dtype)
        ours = (
            _decode_ways(settings, engine) if work == "decode" else _prefill_ways(settings, engine)
        )
        run = theirs.decode_ms if work == "decode" else theirs.prefill_ms
        both = (lambda: run(attentions=False), lambda: run(attentions=True))
        ways = dict(zip(WAYS, (*both, *ours), strict=True))
        refused: dict[str, Exception] = {}
        for name in WAYS:  # also brings weights and buffers into memory
            try:
                ways[name]()
            except Exception as error:
                refused[name] = error
                del ways[name]
        times: list[dict[str, float]] = []
        for found in rounds(ways, n_rounds):
            times.append(found)
            line.tick()
    return times, refused


def _decode_ways(settings: Settings, engine: Engine) -> Ways:
    runs = decode_runs(settings, engine)

    def run(capture: str | None) -> float:
        return step_ms(runs.stamps_s(settings.n_tokens, capture=capture), settings.n_skip)

    return (lambda: run(None)), (lambda: run("probs"))


def _prefill_ways(settings: Settings, engine: Engine) -> Ways:
    runs = PrefillRuns(settings, engine)
    return (lambda: runs.ms(None)), (lambda: runs.attend_ms(Capture("probs")))


class TransformersRuns:
    """The same pieces of work done by transformers, with random weights of the engine's shape."""

    def __init__(
        self, settings: Settings, engine: Engine, dtype: str, attention: str = "eager"
    ) -> None:
        import torch
        from transformers import LlamaConfig, LlamaForCausalLM

        torch.set_num_threads(settings.n_threads)
        torch.manual_seed(0)
        self._torch: Any = torch
        self._settings = settings
        shape = engine.model
        config = LlamaConfig(
            vocab_size=shape.n_vocab,
            hidden_size=shape.n_embd,
            intermediate_size=int(shape.metadata[f"{shape.architecture}.feed_forward_length"]),
            num_hidden_layers=shape.n_layer,
            num_attention_heads=shape.n_head,
            num_key_value_heads=shape.n_head_kv,
            max_position_embeddings=shape.n_ctx_train,
            tie_word_embeddings=settings.shape != "7b",
            attn_implementation=attention,
            dtype=getattr(torch, dtype),
        )
        device = "cpu" if settings.device == "cpu" else "cuda"
        with torch.device(device):
            model = LlamaForCausalLM._from_config(config)
            ids = torch.tensor([prompt_ids(settings.n_context, shape.n_vocab)])
        self._model: Any = model.to(getattr(torch, dtype)).eval()
        self._prompt = ids
        self._cache: Any = None

    def prefill_ms(self, *, attentions: bool) -> float:
        """A prompt, as far as the logits of its last token, with the attention of all rows."""
        start = self._settings.now_s()
        self._forward(self._prompt, None, attentions=attentions)
        return (self._settings.now_s() - start) * 1000.0

    def decode_ms(self, *, attentions: bool) -> float:
        """A step of a greedy generation after the prompt, which stays in the cache."""
        if self._cache is None:
            self._cache = self._forward(self._prompt, None, attentions=False).past_key_values
        # The last prompt token is decoded again, as in ours.
        self._cache.crop(self._settings.n_context - 1 - self._cache.get_seq_length())
        token = self._prompt[:, -1:]
        stamps: list[float] = []
        for _ in range(self._settings.n_tokens):
            output = self._forward(token, self._cache, attentions=attentions)
            token = output.logits[:, -1:].argmax(-1)
            token.item()  # the caller of ours has the id too
            stamps.append(self._settings.now_s())
        return step_ms(stamps, self._settings.n_skip)

    def hidden_ms(self, documents: Sequence[Sequence[int]]) -> float:
        """A document, one by one, with the hidden states of all layers in a file, as float16."""
        from safetensors.torch import save_file

        start = self._settings.now_s()
        states: dict[str, Any] = {}
        for i, ids in enumerate(documents):
            output = self._forward(self._torch.tensor([ids]), None, attentions=False, hidden=True)
            states[str(i)] = self._torch.cat(output.hidden_states[1:]).half()
        with tempfile.TemporaryDirectory() as folder:
            save_file(states, Path(folder) / "hidden.safetensors")
        return (self._settings.now_s() - start) * 1000.0 / len(documents)

    def _forward(self, ids: Any, cache: Any, *, attentions: bool, hidden: bool = False) -> Any:
        with self._torch.no_grad():
            output = self._model(
                ids,
                past_key_values=cache,
                use_cache=not hidden,
                output_attentions=attentions,
                output_hidden_states=hidden,
                logits_to_keep=1,
            )
        if attentions:
            assert len(output.attentions) == self._model.config.num_hidden_layers
            assert output.attentions[0] is not None
        return output


if __name__ == "__main__":
    main(__doc__, WEIGHTS, measure)
