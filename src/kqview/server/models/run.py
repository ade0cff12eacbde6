"""Run: a request in neutral terms, and once it is admitted, an async iterator of its tokens.

Every dialect makes a `GenerateRequest` of its own bodies.

Whatever ends it from outside (a client that left, a timeout, another model, the end of the server)
calls `Run.end`: the engine releases the slots at its next step, and the iteration raises the
reason.

Belongs to one event loop. `Service` starts runs and owns them until they end; knows no protocol.
"""

import asyncio
import contextlib
import math
import time
from collections import OrderedDict, deque
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Generator,
    Mapping,
    Sequence,
)
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from kqview.edit import Edit
from kqview.engine import Engine
from kqview.errors import InvalidCapture, KqviewError, RequestError
from kqview.generation.stream import Generation, count_copied, is_parked
from kqview.mods.events import Dialogue
from kqview.mods.steering import Forcing
from kqview.server.models.phrases import Held, Phrases
from kqview.server.web.access import Caller
from kqview.server.web.budget import Reservation
from kqview.types import Capture, ModelInfo, PromptBlock, Sampling, Token, Usage
from kqview.types.capture import DType, Kind, Reduce, Span

if TYPE_CHECKING:
    from kqview.types.token import Attention

# ---- what is asked for

Format = Literal["per_layer", "aggregated", "sparse", "viz"]
Aggregation = Literal["mean", "max", "last_layer", "weighted_layers"]

DEFAULT_TOP_K: Final = 50
# What the engine computes of each aggregation.
_REDUCE: Final[Mapping[Aggregation, Reduce]] = {
    "mean": "mean", "max": "max", "last_layer": "mean", "weighted_layers": "mean_heads",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class AttentionWanted:
    """Attention as a request asks for it.

    Attributes:
        kind: As in Capture.
        format: "per_layer": all rows, ``(n_layers, n_heads, n_context)``, or with *reduce_heads*
            ``(n_layers, n_context)``. "aggregated": one value per position, ``(n_context,)``.
            "sparse": the *top_k* positions with the largest mean over layers and heads, each with
            its mean over heads in every layer. "viz": per layer the mean and the maximum of all
            heads and positions, and the entropy of the mean row.
        reduce_heads: Of "per_layer": the mean or the maximum of each layer's heads, None for all.
        aggregation: Of "aggregated": "mean" and "max" over layers and heads; "last_layer", the mean
            over the heads of the last layer with attention; "weighted_layers", the mean over
            heads of each layer, averaged with *layer_weights*.
        top_k: Of "sparse".
        dtype: Of the values, "float32" or "float16".
        layers: Layers to keep, None for all that have attention.
        heads: Heads to keep, None for all.
        spans: Of "per_layer" and "aggregated": sums over these ranges of columns, as in Capture,
            instead of a value per column; None for whole rows.
        layer_weights: Of "weighted_layers", one for each layer kept; None weighs layer i of n with
            ``(i + 1)``, so that late layers count more. Weights are divided by their sum.
        prompt: Also send the rows of the prompt's tokens.
        is_kept: Rows are kept for whoever fetches them, instead of sent.
    """

    kind: Kind = "probs"
    format: Format = "per_layer"
    reduce_heads: Literal["mean_heads", "max_heads"] | None = None
    aggregation: Aggregation = "mean"
    top_k: int = DEFAULT_TOP_K
    dtype: DType = "float32"
    layers: tuple[int, ...] | None = None
    heads: tuple[int, ...] | None = None
    spans: tuple[Span, ...] | None = None
    layer_weights: tuple[float, ...] | None = None
    prompt: bool = False
    is_kept: bool = False

    def capture(self, model: ModelInfo) -> Capture:
        """The smallest engine capture that gives `shaped` what it needs.

        Raises:
            InvalidCapture: Layers, heads or weights do not fit *model*, *top_k* is below 1, or the
                format cannot show rows of a prompt.
        """
        if self.top_k < 1:
            raise InvalidCapture(f"top_k is {self.top_k}, the least is 1", parameter="top_k")
        if self.prompt and self.format in ("sparse", "viz"):
            raise InvalidCapture(
                f"rows of the prompt cannot be sent as {self.format}; "
                "ask for per_layer or aggregated"
            )
        if self.spans is not None and self.format in ("sparse", "viz"):
            raise InvalidCapture(
                f"spans cannot be sent as {self.format}; ask for per_layer or aggregated",
                parameter="spans",
            )
        layers = self.layers
        reduce: Reduce | None = None
        if self.format == "per_layer":
            reduce = self.reduce_heads
        elif self.format == "sparse":
            reduce = "mean_heads"
        elif self.format == "aggregated":
            reduce = _REDUCE[self.aggregation]
            if self.aggregation == "last_layer":
                layers = (layers or model.attention_layers)[-1:]
            elif self.aggregation == "weighted_layers":
                self.weights(len(layers if layers is not None else model.attention_layers))
        return Capture(
            self.kind,
            layers=layers,
            heads=self.heads,
            reduce=reduce,
            spans=self.spans,
            # What is computed further here is computed from float32 and rounded once.
            dtype=self.dtype if self.format == "per_layer" else "float32",
            prompt=self.prompt,
            on_full="wait",
        )

    def weights(self, n_layers: int) -> NDArray[np.float32]:
        """The weights of *n_layers* layers, with sum 1; raises InvalidCapture."""
        given = self.layer_weights
        weights = np.arange(1, n_layers + 1) if given is None else np.asarray(given, np.float64)
        if len(weights) != n_layers or not np.isfinite(weights).all() or not weights.sum() > 0:
            raise InvalidCapture(
                f"layer_weights has {len(weights)} weights for {n_layers} layers; "
                "send one finite weight for each layer, with a sum above 0",
                parameter="layer_weights",
            )
        return np.asarray(weights / weights.sum(), np.float32)


@dataclass(frozen=True, slots=True)
class ModWanted:
    """A mod that a request names, and its options by name."""

    name: str
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """A dialect's request for text in neutral terms.

    Attributes:
        prompt: Text, tokenized as ``engine.generate`` does, or ids.
        truncates: Whether a text that is too long loses its front; see `texts.truncated`.
        memory: Beginning of the text that stays then.
        more_prompts: Further prompts, whose samples follow those of the first.
        max_tokens: Most tokens to generate.
        sampling: How they are chosen, with the dialect's defaults.
        request_id: Name for events, logs and `Service.find`; unique among its owner's runs.
        shares_name: Whether others of its owner may have that name; the run then gets another one,
            and `Run.label` is what its client calls it.
        attention: What attention to send, None for none.
        capture: What the dialect reads of each token itself, where nothing is sent.
        n_samples: Texts to generate from each prompt, which is evaluated once.
        key: A second name, for several runs of one owner (KoboldAI's ``genkey``).
        max_context: Longest prompt that the client allows, besides the server's own limit.
        keeps_logprobs: Whether `Run.logprobs` of the first sample are kept.
        names: Parameter of the core -> the client's own name for it, for error messages.
        slot: The slot of the first sample, None for any.
        context_shift: Whether a full slot drops old tokens and goes on.
        n_keep: Tokens at the start that it keeps, -1 for the prompt.
        n_discard: Tokens after them that it drops, None for half.
        n_reuse_min: Least tokens in a row to reuse by moving them, 0 for none.
        cache_prompt: False evaluates the whole prompt; further samples share that evaluation.
        lora: Scale of each LoRA adapter by its id, None for the engine's.
        edits: Makes what it changes in the model; None for nothing.
        drafting: Options of `Engine.generate` that say how its text may go on.
        mods: Mods that steer it, in their order.
        banned_phrases: Texts that it must not generate.
        dialogue: The chat that its prompt was made of, for its mods; None without either.
        forcing: Makes the ``forcing`` of `Engine.generate` for each text; None for none.
        headers: Further ones of the reply.
    """

    prompt: str | Sequence[int]
    truncates: bool = False
    memory: str = ""
    more_prompts: Sequence[str | Sequence[int]] = ()
    max_tokens: int
    sampling: Sampling
    request_id: str
    shares_name: bool = False
    attention: AttentionWanted | None = None
    capture: Capture | None = None
    n_samples: int = 1
    key: str = ""
    max_context: int | None = None
    keeps_logprobs: bool = False
    names: Mapping[str, str] = field(default_factory=dict[str, str], compare=False)
    slot: int | None = None
    context_shift: bool = False
    n_keep: int = 0
    n_discard: int | None = None
    n_reuse_min: int = 0
    cache_prompt: bool = True
    lora: Mapping[int | str, float] | None = None
    edits: Callable[[], Sequence[Edit]] | None = None
    drafting: Mapping[str, Any] = field(default_factory=dict[str, Any])
    mods: Sequence[ModWanted] = ()
    banned_phrases: Sequence[str] = ()
    dialogue: Dialogue | None = None
    forcing: Callable[[Engine], Forcing] | None = None
    headers: Mapping[str, str] = field(default_factory=dict[str, str])

    @property
    def n_generations(self) -> int:
        """How many texts it makes."""
        return self.n_samples * (1 + len(self.more_prompts))


# ---- its run

_STEPS_AHEAD: Final = 1
_UNREAD_S: Final = 0.5  # that a client takes for a token, if it reads at all
_LOGPROB_BYTES: Final = 128  # an id and a number in a tuple, and their place in a list
_WRITTEN_BYTES: Final = 4096
_TRACED_BYTES: Final = 10 * 1024  # of a token in a trace: its events, with the most probable ones
_TEXT_BYTES: Final = 64  # a short text and its place in a list
_MOST_ENDED: Final = 256  # names of one owner that are remembered
MOST_TOP: Final = 20
"""Most top logprobs of a token that `Run.logprobs` keeps."""


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """A token's logprob, and those of the most probable tokens at its place."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class Removal:
    """Tokens that mods have taken back, off the end of one sample.

    Attributes:
        sample: The sample.
        n_tokens: How many tokens.
        n_characters: Characters of their text.
        n_left: Tokens that are left.
        texts: The text of each token that is left.
    """

    sample: int
    n_tokens: int
    n_characters: int
    n_left: int
    texts: Sequence[str]

    @property
    def text(self) -> str:
        """The text that is left."""
        return "".join(self.texts)


@dataclass(frozen=True, slots=True)
class Step:
    """A token of one sample. Its attention is a view of the engine's memory: drop it soon.

    ``removal`` is what mods took back before it.
    """

    sample: int
    token: Token
    removal: Removal | None = None

    @property
    def n_bytes(self) -> int:
        """Its bytes of attention, plus as many as take as long to write as its logprobs."""
        rows: Attention | None = self.token.attention
        n_bytes = _WRITTEN_BYTES * len(self.token.top_logprobs or ())
        if rows is None:
            return n_bytes
        return n_bytes + (sum(r.nbytes for r in rows) if isinstance(rows, tuple) else rows.nbytes)


class _Samples:
    """The steps of several samples as they come.

    Each sample has a task, which waits until its step was taken, so that a slow client holds all of
    them back.
    """

    def __init__(self, generations: Sequence[Generation]) -> None:
        self._n_left = len(generations)
        self._steps: asyncio.Queue[Step | BaseException | None] = asyncio.Queue(_STEPS_AHEAD)
        self._tasks = [
            asyncio.create_task(self._forward(i, one)) for i, one in enumerate(generations)
        ]

    async def next(self) -> Step:
        """The next one; raises as iterating the generations does."""
        while self._n_left:
            step = await self._steps.get()
            if isinstance(step, BaseException):
                raise step
            if step is not None:
                return step
            self._n_left -= 1
        raise StopAsyncIteration

    async def _forward(self, i: int, generation: Generation) -> None:
        try:
            while True:
                await self._steps.put(Step(i, await anext(generation)))
        except StopAsyncIteration:
            await self._steps.put(None)
        except Exception as error:  # raised where the run is iterated
            await self._steps.put(error)

    async def aclose(self) -> None:
        """End the tasks."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


class _Unbanned:
    """Steps that cannot become a banned phrase any more; those that may are kept back."""

    def __init__(
        self,
        source: Callable[[], Awaitable[Step]],
        generations: Sequence[Generation],
        phrases: Phrases,
        token_bytes: Callable[[int], bytes],
        hold: Reservation,
    ) -> None:
        self._source = source
        self._generations = generations
        self._bytes = token_bytes
        self.hold = hold
        """Counts what is kept back."""
        self._held = [Held[Step](phrases) for _ in generations]
        self._clear: deque[Step] = deque()
        self.n_dropped = [0] * len(generations)
        """Tokens of each sample that were kept back at the end, and taken back by mods."""

    async def next(self) -> Step:
        """The next one; raises as the source."""
        while not self._clear:
            try:
                step = await self._source()
            except StopAsyncIteration:
                for i, held in enumerate(self._held):
                    self.n_dropped[i] += len(held.drop(self._generations[i].n_removed))
                    self._clear += held.rest()
                if not self._clear:
                    raise
                break
            held, token = self._held[step.sample], step.token
            token.n_removed -= len(held.drop(token.n_removed))
            clear = held.add(step, self._bytes(token.id))
            if not clear or clear[-1] is not step:
                _detach(token)  # the engine may need its memory for the tokens to come
            self._clear += clear
            self.hold.set(sum(one.n_bytes for held in self._held for one in held))
        return self._clear.popleft()


class Run:
    """Async iterator of Step; also a context manager that closes it.

    Iterating raises what ended it: the engine's error, or the one given to `end`.

    Attributes:
        request: What was asked for.
        request_id: Its name.
        label: What its client calls it; other runs may have the same.
        owner: `Caller.owner` of the caller who started it.
        generations: One for each sample.
        n_truncated: Tokens of the prompt's text that were left out.
        hold: Counts the memory that it keeps.
        count_copied: Tells the engine how many bytes of attention were copied; any thread.
        n_tokens: Tokens so far, without those that were taken back.
        logprobs: If the request wants them; of each token the best `MOST_TOP`.
        error: What ended it.
        is_over: Whether it has ended.
        deadline: Ends it when its time is up.
    """

    def __init__(
        self,
        request: GenerateRequest,
        generations: Sequence[Generation],
        hold: Reservation,
        *,
        on_close: Callable[["Run"], None],
        owner: str = "",
        label: str | None = None,
        n_truncated: int = 0,
        token_bytes: Callable[[int], bytes] = lambda id_: b"",
        traces_stored: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        self.request = request
        self.request_id = request.request_id
        self.label = request.request_id if label is None else label
        self.owner = owner
        self.generations: Sequence[Generation] = tuple(generations)
        self.n_truncated = n_truncated
        self.hold = hold
        self.count_copied = partial(count_copied, generations[0])
        self.started_s = time.monotonic()
        self.ended_s: float | None = None
        self.n_tokens = 0
        self.logprobs: list[TokenLogprobs] = []
        self.error: BaseException | None = None
        self.is_over = False
        self.deadline: asyncio.TimerHandle | None = None
        self._handed_out_s = math.inf  # the last token, to a client that was not back for the next
        self._on_close = on_close
        self._samples: _Samples | None = None  # of several
        self._unbanned: _Unbanned | None = None
        if request.banned_phrases and (phrases := Phrases(request.banned_phrases)).n_most:
            self._unbanned = _Unbanned(
                self._next, self.generations, phrases, token_bytes, hold.part()
            )
        # Texts of the tokens of each sample, where mods may take them back.
        self._texts: list[list[str]] = [[] for _ in self.generations] if request.mods else []
        self._logprob_at: list[int] = []  # index of the token of each of `logprobs`
        is_traced = traces_stored is not None and any(
            one.trace is not None for one in self.generations
        )
        self._traces_stored = traces_stored if is_traced else None
        self._traced_bytes = _TRACED_BYTES if is_traced else 0

    # ---- iteration

    def __aiter__(self) -> AsyncIterator[Step]:
        return self

    async def __anext__(self) -> Step:
        self._handed_out_s = math.inf
        try:
            if self._unbanned is not None:
                step = await self._unbanned.next()
            elif len(self.generations) > 1:
                step = await self._next()
            else:
                step = Step(0, await anext(self.generations[0]))
        except StopAsyncIteration:
            await self.aclose()
            if self.error is not None:
                raise self.error from None
            raise
        except KqviewError as error:
            # A closed engine says only that; whoever closed it gave the reason.
            self.error = self.error or error
            await self.aclose()  # the client hears of it as of any other end
            raise self.error from error
        if self.error is not None:
            raise self.error
        self.n_tokens += 1
        token = step.token
        if self._traced_bytes:
            self.hold.take(self._traced_bytes)
        if self._texts:  # note what may be taken back, and what was before it
            removal = self._removal(step.sample, token.n_removed) if token.n_removed else None
            self.hold.take(_TEXT_BYTES)
            self._texts[step.sample].append(token.text)
            step = replace(step, removal=removal)
        if self.request.keeps_logprobs and token.logprob is not None and step.sample == 0:
            top = tuple((token.top_logprobs or ())[:MOST_TOP])
            self.hold.take(_LOGPROB_BYTES * (1 + len(top)))
            self.logprobs.append(TokenLogprobs(token.id, token.logprob, top))
            self._logprob_at.append(token.index)
        self._handed_out_s = time.monotonic()
        return step

    async def _next(self) -> Step:
        """The next token of any sample, be it one that may become a banned phrase."""
        if len(self.generations) == 1:
            return Step(0, await anext(self.generations[0]))
        if self._samples is None:
            self._samples = _Samples(self.generations)
        return await self._samples.next()

    def _removal(self, sample: int, n: int) -> Removal:
        texts = self._texts[sample]
        n_left = max(0, len(texts) - n)
        n_characters = sum(map(len, texts[n_left:]))
        del texts[n_left:]
        self.n_tokens -= n
        while sample == 0 and self._logprob_at and self._logprob_at[-1] >= n_left:
            self._logprob_at.pop()
            self.logprobs.pop()
        return Removal(sample, n, n_characters, n_left, tuple(texts))

    def last_removals(self) -> list[Removal]:
        """What mods took back after the last token of each sample; once it has ended."""
        found: list[Removal] = []
        for i in range(len(self._texts)):
            n_dropped = 0 if self._unbanned is None else self._unbanned.n_dropped[i]
            if n := self.generations[i].n_removed - n_dropped:
                found.append(self._removal(i, n))
        return found

    def final_steps(self) -> AsyncIterator[Step]:
        """The steps of the final text, for replies that are not streamed.

        Where mods may take tokens back they come at the end, sample by sample, with copies of their
        attention: the engine's own memory could not hold all of them.
        """
        return self._final_steps() if self._texts else self

    async def _final_steps(self) -> AsyncIterator[Step]:
        kept: list[list[Step]] = [[] for _ in self.generations]
        async for step in self:
            if step.removal is not None:
                del kept[step.sample][step.removal.n_left :]
            self.hold.take(step.n_bytes)
            _detach(step.token)
            kept[step.sample].append(replace(step, removal=None))
            del step
        for removal in self.last_removals():
            del kept[removal.sample][removal.n_left :]
        for steps in kept:
            steps.reverse()
            while steps:
                yield steps.pop()

    async def prompt_blocks(self) -> AsyncIterator[PromptBlock]:
        """Rows of the prompt, if they were asked for; they precede the first token."""
        if self.request.attention is None or not self.request.attention.prompt:
            return
        blocks = self.generations[0].prompt_attention
        try:
            # Keep no block: the pool wants its memory back while the client reads.
            async for block in blocks:
                held = [block]
                del block
                yield held.pop()
        except KqviewError as error:
            self.error = self.error or error
            await self.aclose()
            raise self.error from error
        if self.error is not None:
            raise self.error

    # ---- ending it

    def end(self, error: KqviewError | None = None) -> None:
        """End it now: iterating raises *error*, or stops with finish reason "cancelled"."""
        if self.is_over:
            return
        self.error = self.error or error
        for generation in self.generations:
            generation.cancel()

    async def aclose(self) -> None:
        """Cancel what still runs and wait until the slots are free; idempotent."""
        if self.is_over:
            return
        for generation in self.generations:
            generation.cancel()
        try:
            if self._samples is not None:
                await self._samples.aclose()
            # Only then are the slots free, is the usage of a stopped run complete, and are the
            # traces where a crash does not lose them.
            for generation in self.generations:
                await generation.aclose()
            if self._traces_stored is not None:
                await self._traces_stored()
        finally:  # a caller that is cancelled meanwhile is done with it too
            if not self.is_over:
                self.is_over = True
                self.ended_s = time.monotonic()
                if self.deadline is not None:
                    self.deadline.cancel()
                self._on_close(self)
                if self._unbanned is not None:
                    self._unbanned.hold.close()
                self.hold.close()

    async def __aenter__(self) -> "Run":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    # ---- what is known

    @property
    def is_parked(self) -> bool:
        """Whether its client reads nothing, and it neither holds nor waits for a slot."""
        is_unread = time.monotonic() - self._handed_out_s > _UNREAD_S
        return is_unread and all(map(is_parked, self.generations))

    @property
    def finish_reason(self) -> str:
        """That of the first sample, see `Generation.finish_reason`; "error" if it failed."""
        if self.error is not None:
            return "error"
        return self.generations[0].finish_reason or "cancelled"

    @property
    def text(self) -> str:
        """Text of the first sample so far, including the stop sequence."""
        return self.generations[0].text + (self.generations[0].stop_match or "")

    @property
    def usage(self) -> Usage:
        """Usage of the first sample."""
        return self.generations[0].usage

    @property
    def elapsed_s(self) -> float:
        """Seconds from its admission to its end, or until now."""
        return (self.ended_s or time.monotonic()) - self.started_s


def _detach(token: Token) -> None:
    """Copy the attention of *token* out of the engine's memory."""
    rows: Attention | None = token.attention
    if rows is not None:
        token.attention = tuple(map(np.copy, rows)) if isinstance(rows, tuple) else rows.copy()
    token.attention_positions = token.hidden = None  # no dialect sends them


@dataclass(frozen=True, slots=True)
class LastRun:
    """Figures of the run of an owner that ended last; zeros before the first."""

    usage: Usage = field(default_factory=Usage)
    finish_reason: str = ""
    seed: int | None = None
    ended_s: float | None = None
    key: str = ""
    logprobs: tuple[TokenLogprobs, ...] = ()
    model_id: str = ""


# ---- ending a request by its name, before and after it has a run


@dataclass(slots=True)
class CancellableRequest:
    """One request that can be cancelled: it waits within ``limit``, and then ``run`` is to end."""

    owner: str
    limit: asyncio.Timeout
    run: Run | None = None
    is_cancelled: bool = False

    def cancel(self) -> None:
        """End it; what it produced so far stays. Idempotent."""
        self.is_cancelled = True
        if self.run is not None:
            self.run.end()
        else:
            with contextlib.suppress(RuntimeError):  # it waits no more
                self.limit.reschedule(asyncio.get_running_loop().time())


class Cancelling:
    """Every request that can be cancelled by its name, in each phase.

    A request is known from when its body was read: while it waits for its conversation, for its
    model to load and for a slot, and while it generates. After its end its name is known for a
    while, so that cancelling once more is no error. Belongs to the server's event loop.
    """

    def __init__(self) -> None:
        self._running: dict[tuple[str, str], CancellableRequest] = {}
        self._ended: dict[str, OrderedDict[str, None]] = {}  # names by owner, oldest first

    @contextlib.contextmanager
    def known(
        self, owner: str, request_id: str, limit: asyncio.Timeout
    ) -> Generator[CancellableRequest]:
        """A request of *owner* that can be cancelled until the block is left.

        *limit* is that of its wait for a run.

        Raises:
            RequestError: Another one of this owner has the name.
        """
        name = owner, request_id
        if name in self._running:
            raise RequestError(
                f"request_id {request_id!r} is in use; send another one", parameter="request_id"
            )
        work = self._running[name] = CancellableRequest(owner, limit)
        try:
            yield work
        finally:
            del self._running[name]
            names = self._ended.setdefault(owner, OrderedDict())
            names[request_id] = None
            names.move_to_end(request_id)
            if len(names) > _MOST_ENDED:
                names.popitem(last=False)

    def cancel(self, caller: Caller, request_id: str) -> Literal["cancelling", "ended"] | None:
        """Cancel *caller*'s request of this name; an admin without one cancels everybody's.

        Returns:
            Whether it ends now or had ended before; None if there is none that the caller may see.
        """
        found = [
            work
            for (owner, name), work in self._running.items()
            if name == request_id and caller.may_see(owner)
        ]
        for work in [work for work in found if work.owner == caller.owner] or found:
            work.cancel()
        if found:
            return "cancelling"
        is_known = any(
            request_id in names for owner, names in self._ended.items() if caller.may_see(owner)
        )
        return "ended" if is_known else None
