"""Embedding: vectors and labels of texts; a base of Engine.

A text becomes a request that evaluates its prompt and samples nothing. Several are queued together
(`text_batch`), so that no slot is idle and the texts of several slots share a step.
"""

from abc import abstractmethod
from asyncio import to_thread
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import closing
from functools import cached_property
from typing import Any, Final, TypedDict, Unpack, cast, overload

import numpy as np
from numpy.typing import NDArray

from kqview._core import Engine as CoreEngine
from kqview._core import Model as CoreModel
from kqview.arguments import checked_ids, encode
from kqview.errors import InternalError, UnsupportedModel
from kqview.generation.stream import Generation
from kqview.option_names import names_options
from kqview.submission import Submission
from kqview.text_batch import Requests, Text, in_turn, items_of, ordered
from kqview.types import Classification, ModelInfo, PromptBlock

Pair = tuple[str, str]
Vectors = NDArray[np.float32]

# llama.cpp adds a softmax after the classifier head of these (llama-graph.cpp, build_pooling).
_GIVES_PROBABILITIES: Final = ("qwen3", "qwen3vl")


class TextOptions(TypedDict, total=False):
    """Options of `Embedding.classify`."""

    priority: int
    add_special: bool
    parse_special: bool


class EmbedOptions(TextOptions, total=False):
    """Options of `Embedding.embed`."""

    normalize: bool


class Embedding:
    """`embed` and `classify`; any thread. Both wait, without the GIL, until all texts are done;
    `aembed` and `aclassify` do so without blocking an event loop.
    """

    _core: CoreEngine
    _model: CoreModel
    _info: ModelInfo
    _submission: Submission

    @property
    def pooling(self) -> str | None:
        """How a text becomes one vector: the option of Engine, or what the model's file specifies.

        None if this engine cannot embed.
        """
        return self._core.pooling or None

    @property
    def n_classes(self) -> int:
        """Number of scores that `classify` gives: 1 for a reranker, 0 without a classifier head."""
        return self._core.n_classes

    @overload
    def embed(self, texts: Text, **options: Unpack[EmbedOptions]) -> Vectors: ...

    @overload
    def embed(
        self, texts: Sequence[Text], **options: Unpack[EmbedOptions]
    ) -> Vectors | list[Vectors]: ...

    @names_options("embed")
    def embed(
        self,
        texts: Text | Sequence[Text],
        *,
        normalize: bool = True,
        priority: int = 0,
        add_special: bool = True,
        parse_special: bool = True,
    ) -> Vectors | list[Vectors]:
        """Compute embeddings of one or more texts.

        Encoders and embedding models need no option; open other decoders with ``pooling``. A text
        is evaluated in one step, so it may have up to ``n_ubatch`` tokens (up to ``n_ctx`` with
        pooling "last" and a KV cache). With several slots, the texts of all slots are evaluated
        together, as many as have room in a step; a decoder with pooling "mean", "cls" or "rank"
        puts only texts of one length together. Nothing that a slot holds is reused, so a text
        always has the same embedding, up to rounding. In a coroutine, use `aembed`.

        Args:
            texts: A text, or its token ids, used unchanged; or a list of these.
            normalize: Divide each vector by its length, so that the dot product of two vectors is
                their cosine similarity.
            priority: As in `Engine.generate`.
            add_special: As in `tokenize`. Models are trained with the ids that this adds.
            parse_special: As in `tokenize`.

        Returns:
            Arrays owned by the caller, float32: ``(n_embd,)`` for one text, ``(n_texts, n_embd)``
            for a list, which may be empty. With pooling "none", one vector per token:
            ``(n_tokens, n_embd)`` for one text, a list of such arrays for a list.

        Raises:
            PromptTooLong: A text has more tokens than a step, or a slot, can hold; nothing was
                computed.
            RequestError: A text is empty.
            InvalidToken: An id is not in the vocabulary.
            UnsupportedModel: The engine was opened without pooling, or with the pooling of a
                classifier.
            BusyError: Every slot is kept until tokens are taken that nobody takes, see `generate`.
            QueueFull: Too many other requests wait for a slot.
            ClosedError: The engine is closed.
        """
        is_one, requests = self._to_embed(texts, priority, add_special, parse_special)
        with closing(requests):
            found = {i: _take(one) for i, one in requests}
        return self._embedded(ordered(found), is_one, normalize)

    @overload
    async def aembed(self, texts: Text, **options: Unpack[EmbedOptions]) -> Vectors: ...

    @overload
    async def aembed(
        self, texts: Sequence[Text], **options: Unpack[EmbedOptions]
    ) -> Vectors | list[Vectors]: ...

    @names_options("aembed", also=EmbedOptions.__annotations__)
    async def aembed(
        self, texts: Text | Sequence[Text], *, normalize: bool = True, **options: Any
    ) -> Vectors | list[Vectors]:
        """Like `embed`, without blocking the event loop.

        Cancelling the task drops the texts that are not done.
        """
        is_one, requests = await to_thread(self._to_embed, texts, **options)
        with closing(requests):
            found = {i: await _atake(one) for i, one in requests}
        return self._embedded(ordered(found), is_one, normalize)

    def _to_embed(
        self,
        texts: object,
        priority: int = 0,
        add_special: bool = True,
        parse_special: bool = True,
    ) -> tuple[bool, Requests]:
        """(whether it is one text, the request of each)."""
        self._core.check_open()
        if self.pooling is None:
            raise UnsupportedModel(
                f"{self._name()} is not an embedding model; open it with "
                "Engine(..., pooling='mean'), or 'last', 'cls', 'none'"
            )
        if self.pooling == "rank":
            raise UnsupportedModel(
                "this engine has pooling 'rank', which is for classifiers; use classify, or "
                "open it with Engine(..., pooling='cls') or 'mean'"
            )
        is_one, items = items_of(texts)
        ids = self._ids_of("embed", is_one, items, add_special, parse_special)
        return is_one, self._requests("embed", ids, priority)

    def _embedded(
        self, found: list[Vectors], is_one: bool, normalize: bool
    ) -> Vectors | list[Vectors]:
        if not found:
            return [] if self.pooling == "none" else np.empty((0, self._info.n_embd), np.float32)
        if normalize:
            for vectors in found:
                length = np.linalg.norm(vectors, axis=-1, keepdims=True)
                vectors /= np.where(length > 0, length, 1)
        if self.pooling == "none":
            return found[0] if is_one else found
        return found[0][0] if is_one else np.concatenate(found)

    # A str is also a sequence of str; the first overload that fits applies.
    @overload
    def classify(  # pyright: ignore[reportOverlappingOverload]
        self, texts: Text, **options: Unpack[TextOptions]
    ) -> Classification: ...

    @overload
    def classify(
        self, texts: Sequence[Text | Pair], **options: Unpack[TextOptions]
    ) -> list[Classification]: ...

    @names_options("classify")
    def classify(
        self,
        texts: Text | Sequence[Text | Pair],
        *,
        priority: int = 0,
        add_special: bool = True,
        parse_special: bool = True,
    ) -> Classification | list[Classification]:
        """Classify one or more texts with a model that has a classifier head (pooling "rank").

        For sequence classifiers and rerankers, encoders or decoders. For a reranker, each item of
        the list is a tuple (query, document). The two are joined into one prompt as in
        llama-server: by the rerank template in the model's file, in which special tokens named by a
        text count as such; otherwise with the ids that the vocabulary requires between and around
        them. llama.cpp gives all tokens of a BERT model the same segment.

        Args:
            texts: As in `embed`; or a list of (query, document) tuples.
            priority: As in `embed`.
            add_special: As in `embed`; pairs always get their special ids.
            parse_special: As in `embed`.

        Returns:
            A Classification for one text, a list of them for a list.

        Raises:
            UnsupportedModel: The model has no classifier head, or ``pooling`` is not "rank".
            RequestError: As for `embed`, like the other errors of `embed`.
        """
        is_one, requests = self._to_classify(texts, priority, add_special, parse_special)
        with closing(requests):
            found = {i: self._classified(_take(one)[0]) for i, one in requests}
        return found[0] if is_one else ordered(found)

    @overload
    async def aclassify(  # pyright: ignore[reportOverlappingOverload]
        self, texts: Text, **options: Unpack[TextOptions]
    ) -> Classification: ...

    @overload
    async def aclassify(
        self, texts: Sequence[Text | Pair], **options: Unpack[TextOptions]
    ) -> list[Classification]: ...

    @names_options("aclassify", also=TextOptions.__annotations__)
    async def aclassify(
        self, texts: Text | Sequence[Text | Pair], **options: Any
    ) -> Classification | list[Classification]:
        """Like `classify`, without blocking the event loop.

        Cancelling the task drops the texts that are not done.
        """
        is_one, requests = await to_thread(self._to_classify, texts, **options)
        with closing(requests):
            found = {i: self._classified((await _atake(one))[0]) for i, one in requests}
        return found[0] if is_one else ordered(found)

    def _to_classify(
        self,
        texts: object,
        priority: int = 0,
        add_special: bool = True,
        parse_special: bool = True,
    ) -> tuple[bool, Requests]:
        """(whether it is one text, the request of each)."""
        self._core.check_open()
        if self.n_classes == 0:
            raise UnsupportedModel(
                f"{self._name()} has no classifier head; use a sequence classifier or a "
                "reranker, or embed for vectors"
            )
        if self.pooling != "rank":
            raise UnsupportedModel(
                f"this engine's pooling is {self.pooling!r}; open it with "
                "Engine(..., pooling='rank')"
            )
        is_one, items = items_of(texts)
        ids = self._ids_of("classify", is_one, items, add_special, parse_special)
        return is_one, self._requests("classify", ids, priority)

    def _name(self) -> str:
        return self._info.name or self._info.architecture

    # ---- texts to ids

    @abstractmethod
    def _text_ids(
        self, name: str, text: str, add_special: object, parse_special: object
    ) -> list[int]:
        """See Vocabulary."""

    def _ids_of(
        self,
        who: str,
        is_one: bool,
        items: Sequence[object],
        add_special: bool,
        parse_special: bool,
    ) -> list[list[int]]:
        """Ids of every text; all texts are checked before anything is computed."""
        checked: list[list[int]] = []
        for i, item in enumerate(items):
            name = "texts" if is_one else f"texts[{i}]"
            if isinstance(item, str):
                ids = self._text_ids(name, item, add_special, parse_special)
            elif who == "classify" and not is_one and _is_pair(item):
                ids = self._joined(name, *cast("Pair", item))
            else:
                ids = checked_ids(name, cast("Iterable[object]", item))
            self._submission.check_prompt(name, ids, embeds=True)
            checked.append(ids)
        return checked

    def pair_ids(self, query: str, document: str) -> list[int]:
        """The ids that `classify` makes of the tuple (query, document), for a reranker.

        Raises:
            RequestError: A text is too long, or has surrogates, which UTF-8 cannot express.
            UnsupportedModel: The model file has no vocabulary.
            ClosedError: The engine is closed.
        """
        self._core.check_open()
        return self._joined("texts", query, document)

    def _joined(self, name: str, query: str, document: str) -> list[int]:
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
            facts.bos_token_id if self._info.adds_bos else None,
            *self._model.tokenize(encode(name, query), False, False),
            end if facts.adds_eos else None,
            facts.sep_token_id if facts.adds_sep else None,
            *self._model.tokenize(encode(name, document), False, False),
            end if facts.adds_eos else None,
        ]
        return [token_id for token_id in ids if token_id is not None]

    # ---- ids to values

    def _requests(self, who: str, texts: list[list[int]], priority: int) -> Requests:
        return in_turn(texts, self._core.n_slots, lambda i: self._submit(who, texts[i], priority))

    def _submit(self, who: str, ids: list[int], priority: int) -> Generation:
        wanted = self._submission.options(ids, request_id=None, priority=priority)
        wanted.only_attends = wanted.embeds = True
        return self._submission.submit(who, wanted, prompt=ids, request_id=None)

    @cached_property
    def _labels(self) -> list[str]:
        """A name for each score, all different."""
        names = self._info.classifier_labels[: self.n_classes]
        found = [f"LABEL_{i}" for i in range(self.n_classes)]
        count = Counter(names)
        for i, name in enumerate(names):
            if name and count[name] == 1:
                found[i] = name
        return found

    def _classified(self, raw: NDArray[np.float32]) -> Classification:
        labels = self._labels
        scores = raw.astype(np.float64)
        if self._info.architecture not in _GIVES_PROBABILITIES:
            scores = _softmax(scores) if len(scores) > 1 else _sigmoid(scores)
        best = int(scores.argmax())
        return Classification(
            label=labels[best],
            score=float(scores[best]),
            scores=dict(zip(labels, scores.tolist(), strict=True)),
            raw=tuple(raw.tolist()),
        )


def _take(generation: Generation) -> Vectors:
    """Wait for the result of a request and for its end; raise the error that ended it, if any."""
    block = generation.next_block()
    generation.next_block()
    return _values_of(block, generation)


async def _atake(generation: Generation) -> Vectors:
    """Like `_take`, without blocking the event loop."""
    block = await generation.anext_block()
    await generation.anext_block()
    return _values_of(block, generation)


def _values_of(block: PromptBlock | None, generation: Generation) -> Vectors:
    if block is None or block.hidden is None:
        raise InternalError(f"{generation.request_id} ended without an embedding")
    return block.hidden


def _is_pair(item: object) -> bool:
    if not isinstance(item, tuple) or len(cast("tuple[object, ...]", item)) != 2:
        return False
    return all(isinstance(part, str) for part in cast("tuple[object, ...]", item))


def _softmax(values: NDArray[np.float64]) -> NDArray[np.float64]:
    weights = np.exp(values - values.max())
    return weights / weights.sum()


def _sigmoid(values: NDArray[np.float64]) -> NDArray[np.float64]:
    # tanh does not overflow.
    return 0.5 * (1 + np.tanh(0.5 * values))
