"""Mods that act on a guard while text is generated; see `kqview.mods` for how they are called.

Each is made for one prompt, whose spans it captures: pass its ``capture`` to `generate` with it.
"""

import inspect
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final, cast

import numpy as np

from kqview.arguments import flag, invalid, to_number, whole_number
from kqview.engine import Engine
from kqview.errors import InvalidCapture, RequestError, shown
from kqview.guards.scores import InjectionScore, judged_injection
from kqview.heads.file import Floats, HeadFile, Pair, checked_layers, checked_numbers, weighed
from kqview.heads.measures import Measures, Prompt, lookback_ratios, pairs_of
from kqview.mods.actions import Action, ActionBuilder
from kqview.mods.attention import AlignAtt, Place, Row, put_last
from kqview.mods.decorator import Mod
from kqview.mods.events import Added, ForwardPass, Prefilled
from kqview.mods.tokenizer import ModTokenizer
from kqview.types import Capture
from kqview.types.capture import Span

_ENDS: Final = (b".", b"!", b"?", b"\n")

Ask = Callable[[InjectionScore], bool | Awaitable[bool]]
"""Whether to go on all the same: a person's decision, or another model's."""


def check_spans(prompt: Prompt) -> None:
    """Refuse a prompt without a span, or with one outside of it."""
    outside = [one for one in prompt.spans if not 0 <= one[0] < one[1] <= len(prompt.ids)]
    if outside or not prompt.spans:
        raise RequestError(
            f"prompt has {'the span ' + str(outside[0]) if outside else 'no span'}, but "
            f"{len(prompt.ids)} tokens; spans are positions inside of it",
            parameter="prompt",
        )


class _SpanMod(Mod):
    """A mod that reads sums over spans of one prompt.

    Attributes:
        capture: What to pass to `generate` as ``capture``.
    """

    def __init__(
        self,
        engine: Engine,
        prompt: Prompt,
        spans: Sequence[Span],
        heads: HeadFile | None,
        task: str,
    ) -> None:
        check_spans(prompt)
        self._layers = checked_layers(heads, task, engine) or engine.model.attention_layers
        self._numbers = checked_numbers(heads, engine.model)
        self.capture = Capture(layers=self._layers, heads=self._numbers, spans=spans)
        self._heads = heads
        self._prompt = prompt
        self._n_spans = len(spans)
        self._pairs: tuple[Pair, ...] = ()  # layer and head of each row, once there was one

    @classmethod
    def check_capture(cls, capture: Capture | None) -> None:
        if capture is None or capture.spans is None or capture.reduce is not None:
            raise InvalidCapture(
                f"{cls.__name__} reads sums over the spans of its prompt; pass its own capture to "
                "generate: capture=guard.capture",
                parameter="capture",
            )

    def on_prefilled(
        self, event: Prefilled, actions: ActionBuilder, tokenizer: ModTokenizer
    ) -> Action | None:
        """Refuse another prompt than that whose spans are known."""
        if event.prompt_ids == self._prompt.ids:
            return None
        return actions.emit_error(
            f"{self.name}: the prompt is not the one that the mod was made for; generate from the "
            "ids of that Prompt"
        )

    def _rows(self, event: ForwardPass) -> Floats:
        """Sums over the spans, which are last, heads in the order of the pairs; the event's own."""
        rows: Any = () if event.attention is None else event.attention
        numbers, n_spans = self._numbers, self._n_spans
        if (
            len(rows) != len(self._layers)
            or rows[0].shape[-1] != n_spans
            or (numbers is not None and len(rows[0]) != len(numbers))
        ):
            raise InvalidCapture(
                f"{self.name}: the captured rows are not those of its own capture; pass "
                "capture=guard.capture to generate"
            )
        if not self._pairs:
            self._pairs = pairs_of(self._layers, rows, numbers)
        if isinstance(rows, tuple):  # layers differ in heads
            return np.concatenate(cast("tuple[Any, ...]", rows))
        return rows


def ends_sentence(last: bytes) -> bool:
    """Whether a text whose last token has these bytes ends a sentence, or a blank line."""
    return last.rstrip(b" ").endswith(_ENDS)


def back_and_new(sums: Floats) -> Floats:
    """What heads looked at: all sources together, and the answer so far; ``(n_heads, 2)``.

    Args:
        sums: Sums over each source and, last, over the answer: ``(..., n_sources + 1)``.
    """
    both = np.stack((sums[..., :-1].sum(axis=-1), sums[..., -1]), axis=-1)
    return both.reshape(-1, 2)


def sentence_score(
    heads: HeadFile | None,
    pairs: Sequence[Pair],
    prompt: Prompt,
    sums: Sequence[Floats],
    places: Sequence[int],
) -> float:
    """The score of a sentence, as `grounding` has it.

    Args:
        heads: A head file for "grounding"; None for all heads alike.
        pairs: Layer and head of each row.
        prompt: Its spans are the sources.
        sums: What each token looked at, as `back_and_new` has it.
        places: Place of each in the answer; there may be more.
    """
    back, new = np.moveaxis(np.array(sums), -1, 0)
    n_new = np.array(places[: len(sums)], np.float64)[:, None]
    ratios = lookback_ratios(back, new, prompt.n_marked, n_new).mean(axis=0)
    return float(weighed(heads, "grounding", ratios, pairs))


def _threshold(given: object, heads: HeadFile | None, name: str) -> float:
    known = None if heads is None else heads.thresholds.get(name)
    threshold = known if given is None else to_number(given)
    if threshold is None:
        raise invalid("threshold", f"a number, or heads with a threshold {name!r}", shown(given))
    return threshold


class StopOnInjection(_SpanMod):
    """Ends a request before its first token if the data distract the model from its instruction.

    Experimental, like `injection_score`. It costs one row: the request's own prompt is what is
    judged. It is required: if it fails, the request ends.

    Args:
        engine: The engine that generates.
        prompt: The prompt; its spans are the instruction, as of `instruction_prompt`.
        heads: A head file for "injection"; None for all heads alike.
        threshold: Score from which the request ends; None for that of *heads*.
        message: Text of the answer in this case; None ends with `EmittedError` instead.
        ask: Asked in this case, before the first token; if it returns True, the request goes on.
            It runs where mods do, on the thread that iterates the generation; an async function
            is awaited, by ``async for`` only. Other requests go on meanwhile; the
            ``mod_time_limit_s`` of `generate` ends the request if nobody answers.

    Attributes:
        capture: What to pass to `generate` as ``capture``.

    Raises:
        RequestError: There is no threshold, or the prompt has no span or one outside of it.
        HeadFileError: *heads* are of another model.
    """

    required = True

    def __init__(
        self,
        engine: Engine,
        prompt: Prompt,
        heads: HeadFile | None = None,
        *,
        threshold: float | None = None,
        message: str | None = None,
        ask: Ask | None = None,
    ) -> None:
        super().__init__(engine, prompt, prompt.spans, heads, "injection")
        self._threshold = _threshold(threshold, heads, "injected")
        self._message = message
        self._ask = ask

    def begin(self, request_id: str, tokenizer: ModTokenizer) -> None:
        self.result: InjectionScore | None = None
        """The score, once the prompt is evaluated."""
        self.answer: bool | None = None
        """What *ask* said; None if it was not asked."""
        if inspect.iscoroutinefunction(self._ask):  # who calls a handler looks whether it is async
            vars(self)["on_forward_pass"] = self._judge_and_await

    def on_forward_pass(
        self, event: ForwardPass, actions: ActionBuilder, tokenizer: ModTokenizer
    ) -> Action | None:
        """Judge the prompt in the first step."""
        if (found := self._suspicion(event)) is None:
            return None
        said = False if self._ask is None else self._ask(found)
        return self._answered(said, found, actions, tokenizer)

    async def _judge_and_await(
        self, event: ForwardPass, actions: ActionBuilder, tokenizer: ModTokenizer
    ) -> Action | None:
        """As `on_forward_pass`, with an *ask* that is async."""
        if (found := self._suspicion(event)) is None:
            return None
        said = await cast("Callable[[InjectionScore], Awaitable[bool]]", self._ask)(found)
        return self._answered(said, found, actions, tokenizer)

    def _suspicion(self, event: ForwardPass) -> InjectionScore | None:
        """The score of the prompt, in the first step, if it reaches the threshold."""
        if event.step > 1:
            return None
        sums = self._rows(event).astype(np.float64).sum(axis=-1).ravel()
        found = judged_injection(self._heads, Measures(sums[None], self._pairs))
        self.result = InjectionScore(found.score, self._threshold)
        return self.result if self.result.is_injected else None

    def _answered(
        self, said: object, found: InjectionScore, actions: ActionBuilder, tokenizer: ModTokenizer
    ) -> Action | None:
        """What follows from what *ask* has said, or from nobody's being asked."""
        goes_on = flag("what ask returns", said)
        self.answer = None if self._ask is None else goes_on
        if goes_on:
            return None
        if self._message is not None:
            return actions.force_output(tokenizer.encode(self._message, add_special_tokens=False))
        return actions.emit_error(
            f"the data contain orders: score {found.score:.3f}, threshold {self._threshold:.3f}"
        )


class TakeBackUngrounded(_SpanMod):
    """Takes a sentence that its sources do not say back, and lets the model try again.

    Experimental, like `grounding`, by which each sentence is judged at its end. Each further
    attempt at a sentence begins with another token, if a constraint allows one; if none is
    grounded, the best one stays.

    Args:
        engine: The engine that generates.
        prompt: The prompt; its spans are the sources, as of `source_prompt`.
        heads: A head file for "grounding"; None for all heads alike.
        threshold: Smallest accepted score; None for that of *heads*.
        retries: Number of further attempts at each sentence.

    Attributes:
        capture: What to pass to `generate` as ``capture``.

    Raises:
        RequestError: There is no threshold, *retries* is out of range, or the prompt has no span or
            one outside of it.
        HeadFileError: *heads* are of another model.
    """

    def __init__(
        self,
        engine: Engine,
        prompt: Prompt,
        heads: HeadFile | None = None,
        *,
        threshold: float | None = None,
        retries: int = 2,
    ) -> None:
        spans = [*prompt.spans, (len(prompt.ids), None)]
        super().__init__(engine, prompt, spans, heads, "grounding")
        self._threshold = _threshold(threshold, heads, "grounded")
        self._retries = whole_number("retries", retries, low=0)

    def begin(self, request_id: str, tokenizer: ModTokenizer) -> None:
        self.scores: list[float] = []
        """Score of each sentence that stays."""
        self.n_taken_back = 0
        """Number of tokens taken back."""
        # By the place of a token in the answer. What is made of them waits for the end of the
        # sentence: this is between tokens.
        self._sums: dict[int, Floats] = {}
        self._begin_sentence(0)

    def on_forward_pass(
        self, event: ForwardPass, actions: ActionBuilder, tokenizer: ModTokenizer
    ) -> Action | None:
        """Measure a token; keep another attempt from beginning as those before it."""
        place = event.n_tokens - len(self._prompt.ids)
        if place != self._start + len(self._ids):  # by another mod, or to make room
            self._begin_sentence(place)
        self._sums[place] = back_and_new(self._rows(event))
        if place != self._start or not self._attempts:
            return None
        first = [ids[0] for _, ids in self._attempts]
        return actions.adjust_logits(put_last(event.logits, first))

    def on_added(
        self, event: Added, actions: ActionBuilder, tokenizer: ModTokenizer
    ) -> Action | None:
        """Judge a sentence that has ended."""
        ids = self._ids
        ids += event.added_tokens
        end = self._start + len(ids)
        if event.forced:  # by another mod
            self._begin_sentence(end)
            return None
        if not ends_sentence(tokenizer.token_bytes(ids[-1])):
            return None
        if not self._attempts and b"".join(map(tokenizer.token_bytes, ids)).isspace():
            self._begin_sentence(end)  # behind a blank line
            return None
        score = self._score()
        self._attempts.append((score, ids))
        best, kept = max(self._attempts, key=lambda one: one[0])
        if score >= self._threshold or (len(self._attempts) > self._retries and best == score):
            self.scores.append(score)
            self._begin_sentence(end)
            return None
        self.n_taken_back += len(ids)
        if len(self._attempts) <= self._retries:
            self._ids = []
            return actions.backtrack(len(ids))
        self.scores.append(best)
        self._begin_sentence(self._start + len(kept))  # no event tells of what is added
        return actions.backtrack(len(ids), kept)

    def _score(self) -> float:
        """That of the sentence that has ended."""
        end = self._start + len(self._ids)
        places = [i for i in range(self._start, end) if i in self._sums]
        sums = [self._sums[i] for i in places]
        return sentence_score(self._heads, self._pairs, self._prompt, sums, places)

    def _begin_sentence(self, start: int) -> None:
        self._start = start  # place of its first token
        self._ids: list[int] = []  # its tokens
        self._attempts: list[tuple[float, list[int]]] = []  # score and ids
        self._sums.clear()


class AlignAttByHeads(AlignAtt):
    """`kqview.mods.attention.AlignAtt` with the heads of a head file, such as AlignAtt4LLM's.

    Experimental: where text is copied, the longest match of text finds the place more often. Rows
    are averaged by the weights of the heads. The rows of these heads are captured whole, in
    each of their layers, because what counts is which position of the source gets most.

    Args:
        engine: The engine that generates.
        source: The source, as text or as positions in the prompt.
        heads: A head file for "align" or "needle".
        frontier: As of AlignAtt.

    Attributes:
        capture: What to pass to `generate` as ``capture``.

    Raises:
        RequestError: An argument is out of range, or *heads* are for another task.
        HeadFileError: *heads* are of another model.
    """

    def __init__(self, engine: Engine, source: Place, heads: HeadFile, frontier: int = 1) -> None:
        super().__init__(source, frontier)
        layers = checked_layers(heads, "align", engine)
        if layers is None:
            raise invalid("heads", "a HeadFile, as HeadFile.load reads it", "None")
        self.capture = Capture(layers=layers, heads=checked_numbers(heads, engine.model))
        self._file = heads

    def begin(self, request_id: str, tokenizer: ModTokenizer) -> None:
        super().begin(request_id, tokenizer)
        self._weights = np.zeros(0, np.float32)  # of each row, once there was one

    def handle_rows(
        self, rows: Row, event: ForwardPass, actions: ActionBuilder, tokenizer: ModTokenizer
    ) -> Action | None:
        captured: Any = event.attention
        layers = self.capture.layers or ()
        if not len(self._weights) and len(captured) == len(layers):
            pairs = pairs_of(layers, captured, self.capture.heads)
            if len(pairs) == len(rows):
                self._weights = self._file.weights(pairs).astype(np.float32)
        if len(rows) != len(self._weights):
            return actions.emit_error(
                f"{self.name}: the {len(rows)} heads that were captured are not those of its file; "
                "pass capture=guard.capture to generate"
            )
        return super().handle_rows(self._weights[None] @ rows, event, actions, tokenizer)
