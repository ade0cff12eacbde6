"""Scoring: log-probabilities of given texts; a base of Engine.

Each text becomes a request that evaluates its prompt and samples nothing. The engine thread turns
the logits of each step into scores before the next one, so only one step's logits are in memory at
a time, however long the text is.
"""

from abc import abstractmethod
from asyncio import to_thread
from collections.abc import Iterable, Sequence
from contextlib import closing
from typing import Any, Final, TypedDict, Unpack, cast, overload

from kqview._core import Engine as CoreEngine
from kqview._core import Model as CoreModel
from kqview.arguments import checked_ids, whole_number
from kqview.errors import RequestError, UnsupportedModel
from kqview.generation.stream import Generation
from kqview.lora import LoraScales
from kqview.option_names import names_options
from kqview.submission import Submission
from kqview.text_batch import Requests, Text, in_turn, items_of
from kqview.types import ModelInfo, PromptBlock, Score

_MOST_TOP: Final = 1000


class ScoreOptions(TypedDict, total=False):
    """Options of `Scoring.score`."""

    last: int | Sequence[int] | None
    top_logprobs: int | None
    priority: int
    lora: LoraScales | None
    add_special: bool
    parse_special: bool


class _Work:
    """Texts to score: their requests, and the scores found so far."""

    def __init__(self, is_one: bool, scores: list[Score], requests: Requests) -> None:
        self.is_one = is_one
        self.scores = scores
        self.requests = requests

    def take(self, i: int, block: PromptBlock) -> None:
        self.scores[i].set(block.start, block.scores)

    @property
    def result(self) -> Score | list[Score]:
        return self.scores[0] if self.is_one else self.scores


class Scoring:
    """`score` and `ascore`; any thread. `score` waits without the GIL until all texts are done;
    `ascore` does not block the event loop.
    """

    _core: CoreEngine
    _model: CoreModel
    _info: ModelInfo
    _submission: Submission
    _can_generate: bool

    @abstractmethod
    def _text_ids(
        self, name: str, text: str, add_special: object, parse_special: object
    ) -> list[int]:
        """See Vocabulary."""

    # A str is also a sequence of str; the first overload that fits applies.
    @overload
    def score(  # pyright: ignore[reportOverlappingOverload]
        self, texts: Text, **options: Unpack[ScoreOptions]
    ) -> Score: ...

    @overload
    def score(self, texts: Sequence[Text], **options: Unpack[ScoreOptions]) -> list[Score]: ...

    @names_options("score")
    def score(
        self,
        texts: Text | Sequence[Text],
        *,
        last: int | Sequence[int] | None = None,
        top_logprobs: int | None = None,
        priority: int = 0,
        lora: LoraScales | None = None,
        add_special: bool = True,
        parse_special: bool = True,
    ) -> Score | list[Score]:
        """Compute the log-probability that the model gives each token of one or more texts.

        The whole text is evaluated as a prompt, in steps whose logits take at most 64 MiB. Use it
        for perplexity and for comparing given answers (lm-eval's loglikelihood). Only tokens whose
        scores are not requested can come from a slot's KV cache: with ``last``, a prefix that texts
        share is evaluated once. In a coroutine, use `ascore`.

        Args:
            texts: A text, or its token ids, used unchanged; or a list of these.
            last: Number of tokens, counted from the end, to score; for a list of texts also a list
                with the number for each. None for all but the first, which nothing precedes.
            top_logprobs: Number of most probable tokens to return for each scored token, at most
                1000; None for none.
            priority: As in `Engine.generate`.
            lora: As in `Engine.generate`.
            add_special: As in `tokenize`. If a beginning-of-text token is added, every token of the
                text itself gets a score.
            parse_special: As in `tokenize`.

        Returns:
            A Score for one text, a list of them for a list. Values differ from those of a
            generation by rounding, because its matrices have other sizes (about 1e-3 with a float16
            cache, less with float32).

        Raises:
            PromptTooLong: A text has more tokens than a slot can hold; nothing was computed.
            RequestError: A text is empty, or an option is out of range.
            InvalidToken: An id is not in the vocabulary.
            UnsupportedModel: The model is an encoder or a diffusion model, which does not predict
                the next token.
            BusyError: Every slot is kept until tokens are taken that nobody takes, see `generate`.
            QueueFull: Too many other requests wait for a slot.
            ClosedError: The engine is closed.
        """
        work = self._to_score(texts, last, top_logprobs, priority, lora, add_special, parse_special)
        with closing(work.requests):
            for i, one in work.requests:
                while (block := one.next_block()) is not None:
                    work.take(i, block)
        return work.result

    @overload
    async def ascore(  # pyright: ignore[reportOverlappingOverload]
        self, texts: Text, **options: Unpack[ScoreOptions]
    ) -> Score: ...

    @overload
    async def ascore(
        self, texts: Sequence[Text], **options: Unpack[ScoreOptions]
    ) -> list[Score]: ...

    @names_options("ascore", also=ScoreOptions.__annotations__)
    async def ascore(self, texts: Text | Sequence[Text], **options: Any) -> Score | list[Score]:
        """Like `score`, without blocking the event loop.

        Cancelling the task drops the texts that are not done.
        """
        work = await to_thread(self._to_score, texts, **options)
        with closing(work.requests):
            for i, one in work.requests:
                while (block := await one.anext_block()) is not None:
                    work.take(i, block)
        return work.result

    def _to_score(
        self,
        texts: object,
        last: int | Sequence[int] | None = None,
        top_logprobs: int | None = None,
        priority: int = 0,
        lora: LoraScales | None = None,
        add_special: bool = True,
        parse_special: bool = True,
    ) -> _Work:
        self._core.check_open()
        if not self._can_generate:
            raise UnsupportedModel(
                f"{self._info.architecture} models do not predict the next token, so they "
                "cannot score texts; use a causal language model"
            )
        n_top = (
            None
            if top_logprobs is None
            else whole_number("top_logprobs", top_logprobs, low=0, high=_MOST_TOP)
        )
        is_one, items = items_of(texts)
        ids: list[list[int]] = []
        for i, item in enumerate(items):
            name = "texts" if is_one else f"texts[{i}]"
            if isinstance(item, str):
                one = self._text_ids(name, item, add_special, parse_special)
            else:
                one = checked_ids(name, cast("Iterable[object]", item))
            self._submission.check_prompt(name, one)
            ids.append(one)
        n_last = _counts("last", last, ids)

        def submit(i: int) -> Generation:
            wanted = self._submission.options(ids[i], request_id=None, priority=priority, lora=lora)
            wanted.only_attends = True
            wanted.n_scores = n_last[i]
            wanted.n_top_scores = n_top or 0
            return self._submission.submit("score", wanted, prompt=ids[i], request_id=None)

        scores = [Score.empty(one, has_top=n_top is not None) for one in ids]
        return _Work(is_one, scores, in_turn(ids, self._core.n_slots, submit))


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
