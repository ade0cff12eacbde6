"""Given texts: their vectors, labels and log-probabilities; a part of Engine.

A text becomes a request that evaluates its prompt and samples nothing. Several are queued together
(`in_turn`), so that no slot is idle; those for vectors and labels share steps, while a text with
scores has its own, so that these do not depend on what else is scored. The engine thread turns the
logits of each step into scores before the next one, so only one step's logits are in memory at a
time, however long a text is.
"""

from asyncio import to_thread
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Final, Generic, TypedDict, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from kqview.arguments import encode, invalid, is_iterable, to_index, whole_number
from kqview.edit import Edit
from kqview.errors import InternalError, RequestError, UnsupportedModel
from kqview.generation.stream import Generation
from kqview.lora import LoraScales
from kqview.submission import Submission, be_alone, in_turn
from kqview.types import Classification, PromptBlock, Score
from kqview.types.text import Ids

Text = str | Ids
Pair = tuple[str, str]
Vectors = NDArray[np.float32]

# llama.cpp adds a softmax after the classifier head of these (llama-graph.cpp, build_pooling).
_GIVES_PROBABILITIES: Final = ("qwen3", "qwen3vl")


_Result = TypeVar("_Result")


class TextOptions(TypedDict, total=False):
    """Options of `Engine.classify`, which `Engine.embed` and `Engine.score` take as well."""

    priority: int
    add_special: bool
    parse_special: bool


class EmbedOptions(TextOptions, total=False):
    """Options of `Engine.embed`."""

    normalize: bool


class ScoreOptions(TextOptions, total=False):
    """Options of `Engine.score`."""

    last: int | Sequence[int] | None
    top_logprobs: int | None
    lora: LoraScales | None
    edits: Sequence[Edit] | Edit | None
    deterministic: bool


@dataclass(frozen=True, slots=True)
class Batch(Generic[_Result]):
    """The texts of one call, whose requests are made as results are taken.

    Attributes:
        requests: Index and request of each text.
        put: Takes each block of a text, with the index of the text.
        finish: Makes the result of the call, once all texts are done.
    """

    requests: Generator[tuple[int, Generation], None, None]
    put: Callable[[int, PromptBlock], object]
    finish: Callable[[], _Result]

    def result(self) -> _Result:
        """Wait for all texts, without the GIL."""
        with closing(self.requests):
            for i, one in self.requests:
                while (block := one.next_block()) is not None:
                    self.put(i, block)
        return self.finish()

    async def aresult(self) -> _Result:
        """Like `result`, without blocking the event loop."""
        with closing(self.requests):
            for i, one in self.requests:
                while (block := await one.anext_block()) is not None:
                    self.put(i, block)
        return self.finish()


async def awaited(begin: Callable[..., Batch[_Result]], texts: object, **options: Any) -> _Result:
    """The result of the batch that *begin*, a method of a part of the engine, makes of *texts*."""
    return await (await to_thread(begin, texts, **options)).aresult()


@dataclass(frozen=True, eq=False, repr=False)
class GivenTexts:
    """`Engine.embed`, `Engine.classify` and `Engine.score`; any thread."""

    submission: Submission

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
        submission, core, info = self.submission, self.submission.core, self.submission.info
        core.check_open()
        name, pooling = info.name or info.architecture, core.pooling
        if who == "classify" and core.n_classes == 0:
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
        is_one, items = _items_of(texts)
        ids: list[list[int]] = []
        for i, given in enumerate(items):
            name, item = "texts" if is_one else f"texts[{i}]", given
            if who == "classify" and not is_one and isinstance(given, tuple):
                match cast("tuple[object, ...]", given):
                    case str(query), str(document):
                        item = self.pair_ids(name, query, document)
                    case _:
                        pass
            ids.append(submission.prompt_ids(item, add_special, parse_special, name, embeds=True))

        def submit(i: int) -> Generation:
            request = submission.request(ids[i], priority=priority)
            request.only_attends = request.embeds = True
            return submission.submit(who, request, ids[i])

        found: dict[int, Vectors] = {}

        def put(i: int, block: PromptBlock) -> None:
            if block.hidden is not None:
                found[i] = block.hidden

        def finished() -> _Result:
            if len(found) < len(ids):
                raise InternalError(f"{who} ended without the vectors of a text")
            return finish([found[i] for i in range(len(ids))], is_one)

        return Batch(in_turn(ids, core.n_slots, submit), put, finished)

    def _embedded(
        self, found: list[Vectors], is_one: bool, *, normalize: bool
    ) -> Vectors | list[Vectors]:
        is_listed = self.submission.core.pooling == "none"
        if not found:
            return [] if is_listed else np.empty((0, self.submission.info.n_embd), np.float32)
        if normalize:
            for vectors in found:
                length = np.linalg.norm(vectors, axis=-1, keepdims=True)
                vectors /= np.where(length > 0, length, 1)
        if is_listed:
            return found[0] if is_one else found
        return found[0][0] if is_one else np.concatenate(found)

    def pair_ids(self, name: str, query: str, document: str) -> list[int]:
        """The prompt of a reranker, joined as in llama-server (format_prompt_rerank)."""
        facts = self.submission.model
        template: str | None = facts.rerank_template
        if template is not None:
            # One pass, so that {document} in a query stays text.
            parts = template.replace("{document}", "{query}\0").split("{query}")
            text = parts[0] + "".join(
                document + part[1:] if part[:1] == "\0" else query + part for part in parts[1:]
            )
            return self.submission.model.tokenize(encode(name, text), False, True)
        end = facts.sep_token_id if facts.eos_token_id is None else facts.eos_token_id
        ids = [
            *self.submission.info.begin_ids,
            *self.submission.model.tokenize(encode(name, query), False, False),
            end if facts.adds_eos else None,
            facts.sep_token_id if facts.adds_sep else None,
            *self.submission.model.tokenize(encode(name, document), False, False),
            end if facts.adds_eos else None,
        ]
        return [token_id for token_id in ids if token_id is not None]

    @cached_property
    def _labels(self) -> list[str]:
        """A name for each score, all different."""
        n = self.submission.core.n_classes
        names = [*self.submission.info.classifier_labels, *[""] * n][:n]
        count = Counter(names)
        return [name if name and count[name] == 1 else f"LABEL_{i}" for i, name in enumerate(names)]

    def _classified(self, raw: NDArray[np.float32]) -> Classification:
        labels = self._labels
        scores = raw.astype(np.float64)
        if self.submission.info.architecture not in _GIVES_PROBABILITIES:
            if len(scores) > 1:
                scores = np.exp(scores - scores.max())
                scores /= scores.sum()
            else:
                scores = 0.5 * (1 + np.tanh(0.5 * scores))  # which does not overflow
        best = int(scores.argmax())
        return Classification(
            label=labels[best],
            score=float(scores[best]),
            scores=dict(zip(labels, scores.tolist(), strict=True)),
            raw=tuple(raw.tolist()),
        )

    def score(
        self,
        texts: object,
        *,
        last: int | Sequence[int] | None = None,
        top_logprobs: int | None = None,
        priority: int = 0,
        lora: LoraScales | None = None,
        edits: Sequence[Edit] | Edit | None = None,
        deterministic: bool = False,
        add_special: bool = True,
        parse_special: bool = True,
    ) -> Batch[Score | list[Score]]:
        """As of Engine."""
        self.submission.core.check_open()
        n_top = self.submission.checked_top(top_logprobs)
        is_one, items = _items_of(texts)
        names = ["texts"] if is_one else [f"texts[{i}]" for i in range(len(items))]
        ids = [
            self.submission.prompt_ids(item, add_special, parse_special, name)
            for name, item in zip(names, items, strict=True)
        ]
        n_last = _counts("last", last, ids)

        def submit(i: int) -> Generation:
            request = self.submission.request(ids[i], priority=priority, lora=lora, edits=edits)
            request.only_attends = True
            be_alone(request, deterministic)
            request.n_scores = n_last[i]
            request.n_top_scores = n_top or 0
            return self.submission.submit("score", request, ids[i])

        scores = [Score.empty(one, has_top=n_top is not None) for one in ids]
        return Batch(
            in_turn(ids, self.submission.core.n_slots, submit),
            lambda i, block: scores[i].set(block.start, block.scores),
            lambda: scores[0] if is_one else scores,
        )


def _items_of(texts: object) -> tuple[bool, list[Any]]:
    """(whether it is one text, list of the texts), which may be empty; RequestError otherwise."""
    if isinstance(texts, str):
        return True, [texts]
    kind = type(texts).__name__
    if isinstance(texts, dict) or not is_iterable(texts):
        raise invalid("texts", "a str, a sequence of token ids, or a list of these", kind)
    items: list[Any] = list(texts)
    if not items:
        return False, []
    is_ids = isinstance(items[0], bool) or to_index(items[0]) is not None
    return (True, [items]) if is_ids else (False, items)


def _counts(name: str, given: object, ids: list[list[int]]) -> list[int]:
    """How many tokens of each text to score, at most all but the first."""
    most = [len(one) - 1 for one in ids]
    if given is None:
        return most
    if not isinstance(given, Sequence) or isinstance(given, str | bytes):
        return [min(whole_number(name, given), n) for n in most]
    counts = list(cast("Sequence[object]", given))
    if len(counts) != len(ids):
        raise RequestError(
            f"{name} has {len(counts)} numbers, but there are {len(ids)} texts; pass one for each",
            parameter=name,
        )
    return [
        min(whole_number(f"{name}[{i}]", count), n)
        for i, (count, n) in enumerate(zip(counts, most, strict=True))
    ]
