"""Embedding: vectors and labels of texts; a part of Engine.

A text becomes a request that evaluates its prompt and samples nothing. Several are queued together
(`text_batch`), so that no slot is idle and the texts of several slots share a step.
"""

from collections import Counter
from collections.abc import Callable
from functools import cached_property, partial
from typing import Any, Final, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from kqview import _core
from kqview.arguments import encode
from kqview.errors import InternalError, UnsupportedModel
from kqview.generation.stream import Generation
from kqview.submission import Submission
from kqview.text_batch import Batch, TextOptions, in_turn, items_of
from kqview.types import Classification, ModelInfo, PromptBlock

Pair = tuple[str, str]
Vectors = NDArray[np.float32]

# llama.cpp adds a softmax after the classifier head of these (llama-graph.cpp, build_pooling).
_GIVES_PROBABILITIES: Final = ("qwen3", "qwen3vl")


_Result = TypeVar("_Result")


class EmbedOptions(TextOptions, total=False):
    """Options of `Engine.embed`."""

    normalize: bool


class Embedding:
    """`Engine.embed` and `Engine.classify`; any thread."""

    def __init__(
        self, core: _core.Engine, model: _core.Model, info: ModelInfo, submission: Submission
    ) -> None:
        self._core = core
        self._model = model
        self._info = info
        self._submission = submission

    def embed(
        self, texts: object, *, normalize: bool = True, **options: Any
    ) -> Batch[Vectors | list[Vectors]]:
        """As of Engine."""
        finish = partial(self._embedded, normalize=normalize)
        return self._begin("embed", texts, finish, **options)

    def classify(
        self, texts: object, **options: Any
    ) -> Batch[Classification | list[Classification]]:
        """As of Engine."""

        def finish(found: list[Vectors], is_one: bool) -> Classification | list[Classification]:
            classes = [self._classified(one[0]) for one in found]
            return classes[0] if is_one else classes

        return self._begin("classify", texts, finish, **options)

    def _begin(
        self,
        who: str,
        texts: object,
        finish: Callable[[list[Vectors], bool], _Result],
        *,
        priority: int = 0,
        add_special: bool = True,
        parse_special: bool = True,
    ) -> Batch[_Result]:
        """The requests of *texts*, all of which are checked before any is computed."""
        self._core.check_open()
        name, pooling = self._info.name or self._info.architecture, self._core.pooling
        if who == "classify" and self._core.n_classes == 0:
            raise UnsupportedModel(
                f"{name} has no classifier head; use a sequence classifier or a reranker, or embed "
                "for vectors"
            )
        if who == "classify" and pooling != "rank":
            raise UnsupportedModel(
                f"this engine's pooling is {pooling or None!r}; open it with "
                "Engine(..., pooling='rank')"
            )
        if not pooling:
            raise UnsupportedModel(
                f"{name} is not an embedding model; open it with "
                "Engine(..., pooling='mean'), or 'last', 'cls', 'none'"
            )
        if who == "embed" and pooling == "rank":
            raise UnsupportedModel(
                "this engine has pooling 'rank', which is for classifiers; use classify, or "
                "open it with Engine(..., pooling='cls') or 'mean'"
            )
        is_one, items = items_of(texts)
        ids: list[list[int]] = []
        for i, given in enumerate(items):
            name, item = "texts" if is_one else f"texts[{i}]", given
            if who == "classify" and not is_one and _is_pair(item):
                item = self.pair_ids(name, *cast("Pair", item))
            submission = self._submission
            ids.append(submission.prompt_ids(item, add_special, parse_special, name, embeds=True))

        def submit(i: int) -> Generation:
            request = self._submission.request(ids[i], priority=priority)
            request.only_attends = request.embeds = True
            return self._submission.submit(who, request, ids[i])

        found: dict[int, Vectors] = {}

        def put(i: int, block: PromptBlock) -> None:
            if block.hidden is not None:
                found[i] = block.hidden

        def finished() -> _Result:
            if len(found) < len(ids):
                raise InternalError(f"{who} ended without the vectors of a text")
            return finish([found[i] for i in range(len(ids))], is_one)

        return Batch(in_turn(ids, self._core.n_slots, submit), put, finished)

    def _embedded(
        self, found: list[Vectors], is_one: bool, *, normalize: bool
    ) -> Vectors | list[Vectors]:
        if not found:
            return (
                [] if self._core.pooling == "none" else np.empty((0, self._info.n_embd), np.float32)
            )
        if normalize:
            for vectors in found:
                length = np.linalg.norm(vectors, axis=-1, keepdims=True)
                vectors /= np.where(length > 0, length, 1)
        if self._core.pooling == "none":
            return found[0] if is_one else found
        return found[0][0] if is_one else np.concatenate(found)

    def pair_ids(self, name: str, query: str, document: str) -> list[int]:
        """The prompt of a reranker, joined as in llama-server (format_prompt_rerank)."""
        facts = self._model
        template: str | None = facts.rerank_template
        if template is not None:
            # One pass, so that {document} in a query stays text.
            parts = template.replace("{document}", "{query}\0").split("{query}")
            text = parts[0] + "".join(
                document + part[1:] if part[:1] == "\0" else query + part for part in parts[1:]
            )
            return self._model.tokenize(encode(name, text), False, True)
        end = facts.sep_token_id if facts.eos_token_id is None else facts.eos_token_id
        ids = [
            *self._info.begin_ids,
            *self._model.tokenize(encode(name, query), False, False),
            end if facts.adds_eos else None,
            facts.sep_token_id if facts.adds_sep else None,
            *self._model.tokenize(encode(name, document), False, False),
            end if facts.adds_eos else None,
        ]
        return [token_id for token_id in ids if token_id is not None]

    @cached_property
    def _labels(self) -> list[str]:
        """A name for each score, all different."""
        names = self._info.classifier_labels[: self._core.n_classes]
        found = [f"LABEL_{i}" for i in range(self._core.n_classes)]
        count = Counter(names)
        for i, name in enumerate(names):
            if name and count[name] == 1:
                found[i] = name
        return found

    def _classified(self, raw: NDArray[np.float32]) -> Classification:
        labels = self._labels
        scores = raw.astype(np.float64)
        if self._info.architecture not in _GIVES_PROBABILITIES:
            # tanh does not overflow.
            is_several = len(scores) > 1
            scores = _softmax(scores) if is_several else 0.5 * (1 + np.tanh(0.5 * scores))
        best = int(scores.argmax())
        return Classification(
            label=labels[best],
            score=float(scores[best]),
            scores=dict(zip(labels, scores.tolist(), strict=True)),
            raw=tuple(raw.tolist()),
        )


def _is_pair(item: object) -> bool:
    if not isinstance(item, tuple) or len(cast("tuple[object, ...]", item)) != 2:
        return False
    return all(isinstance(part, str) for part in cast("tuple[object, ...]", item))


def _softmax(values: NDArray[np.float64]) -> NDArray[np.float64]:
    weights = np.exp(values - values.max())
    return weights / weights.sum()
