"""An engine as a model of lm-evaluation-harness (``pip install lm-eval``), named "kqview" there.

Importing this module registers it. The command ``lm_eval`` imports no module of others, so in a
shell this one is run in its place, with the same arguments: ``python -m kqview.integrations.lm_eval
run --model kqview --model_args model=model.gguf --tasks ...``.

Answers are generated in all slots of the engine at once; log-probabilities are those of
`Engine.score`, with all texts of a call queued together, each in steps of its own. For tasks with
log-probabilities, rolling ones (perplexity) and generated answers.
"""

# lm-eval has no types, and need not be installed.
# pyright: basic, reportMissingImports=false

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from kqview import json_input
from kqview.engine import Engine
from kqview.errors import RequestError, UnsupportedModel, shown

_MAX_TOKENS: Final = 256
_IGNORED: Final = ("do_sample", "until", "max_gen_toks", "max_tokens", "max_new_tokens")


@register_model("kqview")
class KqviewLM(TemplateLM):
    """A GGUF model for ``lm_eval.simple_evaluate(model=...)``.

    A context that does not fit in a slot loses its beginning, as with the harness' own models.

    Args:
        model: Path of a GGUF file; or an open Engine, which stays open.
        **options: Options of Engine, with a path: ``n_ctx=2048, n_slots=8``.

    Raises:
        UnsupportedModel: The model has no id to begin a text with.
        KqviewError: As Engine.
    """

    def __init__(self, model: str | Engine, **options: Any) -> None:
        super().__init__()
        # What the harness passes to every model, and has no meaning here.
        for name in ("batch_size", "max_batch_size", "device"):
            options.pop(name, None)
        self.engine: Final = model if isinstance(model, Engine) else Engine(model, **options)
        info = self.engine.model
        prefix = info.bos_token_id if info.bos_token_id is not None else info.eos_token_id
        if prefix is None:
            raise UnsupportedModel("the model has neither a begin-of-text nor an end-of-text id")
        self._prefix: int = prefix

    @property
    def eot_token_id(self) -> int:
        """Id that ends a text."""
        eos = self.engine.model.eos_token_id
        return self._prefix if eos is None else eos

    @property
    def prefix_token_id(self) -> int:
        """Id before a text without context."""
        return self._prefix

    @property
    def max_length(self) -> int:
        """Tokens of a slot."""
        return self.engine.n_ctx

    @property
    def tokenizer_name(self) -> str:
        """Name of the model, under which the harness caches requests."""
        return self.engine.model.name or self.engine.model.architecture

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **kwargs: Any
    ) -> list[int]:
        """Ids of a text. Special tokens are added unless told otherwise, or BOS begins the text."""
        bos = self.engine.model.special_tokens.get("bos")
        is_begun = bool(bos) and string.startswith(bos)  # by a chat template
        return self.engine.tokenize(
            string, add_special=add_special_tokens is not False and not is_begun
        )

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """The text of a chat, whose special tokens are written out."""
        return self.engine.apply_chat_template(
            chat_history,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """The template, by which the harness tells results apart."""
        return self.engine.model.chat_template if chat_template else None

    def _loglikelihood_tokens(
        self,
        requests: list[tuple[tuple[str, str], list[int], list[int]]],
        disable_tqdm: bool = False,
        **kwargs: Any,
    ) -> list[tuple[float, bool]]:
        pairs = [(context, continuation) for _, context, continuation in requests]
        found = self._scored(pairs)
        for (names, *_), result in zip(requests, found, strict=True):
            self.cache_hook.add_partial("loglikelihood", names, result)
        return found

    def _scored(self, pairs: Sequence[tuple[list[int], list[int]]]) -> list[tuple[float, bool]]:
        """(log-probability of the second ids after the first, whether each is the likeliest)."""
        ids = [[*context, *rest][-self.engine.n_ctx :] for context, rest in pairs]
        last = [min(len(rest), len(one) - 1) for one, (_, rest) in zip(ids, pairs, strict=True)]
        scores = self.engine.score(ids, last=last)
        return [(one.total, one.is_greedy) for one in scores]

    def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> list[float]:
        """The log-probability of each whole text, in windows of a slot that do not overlap."""
        windows: list[tuple[list[int], list[int]]] = []
        ends: list[int] = []
        for request in requests:
            (text,) = request.args
            ids = self.tok_encode(text, add_special_tokens=False)
            rolling = get_rolling_token_windows(ids, self._prefix, self.engine.n_ctx - 1, 1)
            windows += map(make_disjoint_window, rolling)
            ends.append(len(windows))
        scores = [one for one, _ in self._scored(windows)]
        starts = [0, *ends]
        found = [sum(scores[start:end]) for start, end in zip(starts, ends, strict=False)]
        for request, result in zip(requests, found, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, result)
        return found

    def generate_until(self, requests: Any, disable_tqdm: bool = False) -> list[str]:
        """The answers to prompts, greedy unless the task samples."""
        by_options: dict[str, list[int]] = {}
        for i, request in enumerate(requests):
            by_options.setdefault(json.dumps(request.args[1], sort_keys=True), []).append(i)
        answers: dict[int, str] = {}
        for given, places in by_options.items():
            options = _sampling(json_input.loads(given))
            most = max(self.engine.n_ctx - options["max_tokens"], 1)
            prompts = [self.tok_encode(requests[i].args[0])[-most:] for i in places]
            results = self.engine.map(prompts, **options)
            for i, result in zip(places, results, strict=True):
                answers[i] = result.text
                self.cache_hook.add_partial("generate_until", requests[i].args, result.text)
        return [answers[i] for i in range(len(requests))]


def _sampling(given: Mapping[str, Any]) -> dict[str, Any]:
    """The options of the harness as those of `generate`."""
    until = given.get("until") or []
    sizes = [given[name] for name in _IGNORED[2:] if given.get(name) is not None]
    options: dict[str, Any] = {
        "temperature": given.get("temperature", 0.0) if given.get("do_sample", True) else 0.0,
        "max_tokens": sizes[0] if sizes else _MAX_TOKENS,
        "stop": [until] if isinstance(until, str) else [one for one in until if one],
    }
    for name, value in given.items():
        if name in ("top_p", "top_k", "min_p", "seed"):
            options[name] = value
        elif name not in (*_IGNORED, "temperature"):
            raise RequestError(
                f"the task asks for {name}={shown(value)} when generating, which is not known here",
                parameter=name,
            )
    return options


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()
