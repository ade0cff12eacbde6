"""Run: one request that was admitted, as an async iterator of its tokens.

Whatever ends it from outside (a client that left, a timeout, another model, the end of the server)
calls `Run.end`: the engine releases the slots at its next step, and the iteration raises the
reason.

Belongs to one event loop. `Service` starts runs and owns them until they end; knows no protocol.
"""

import asyncio
import math
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Final, TypedDict

import numpy as np

from kqview.engine import Engine
from kqview.errors import KqviewError
from kqview.generation.stream import Generation, count_copied, is_parked
from kqview.mods.events import Dialogue
from kqview.mods.steering import Forcing
from kqview.server.models.attention import AttentionWanted
from kqview.server.models.mod_runs import ModWanted
from kqview.server.models.phrases import Held, Phrases
from kqview.server.web.budget import Reservation
from kqview.submission import Reuse
from kqview.types import PromptBlock, Sampling, Token, Usage

if TYPE_CHECKING:
    from kqview.types.token import Attention

_STEPS_AHEAD: Final = 1
_UNREAD_S: Final = 0.5  # that a client takes for a token, if it reads at all
_LOGPROB_BYTES: Final = 128  # an id and a number in a tuple, and their place in a list
_WRITTEN_BYTES: Final = 4096
_TRACED_BYTES: Final = 10 * 1024  # of a token in a trace: its events, with the most probable ones
_TEXT_BYTES: Final = 64  # a short text and its place in a list
MOST_TOP: Final = 20
"""Most top logprobs of a token that `Run.logprobs` keeps."""


class ShiftOptions(TypedDict, total=False):
    """Options of `Engine.generate` that move positions in the KV cache."""

    context_shift: bool
    n_keep: int
    n_discard: int | None
    reuse: Reuse
    reuse_min_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """A dialect's request for text in neutral terms.

    Attributes:
        prompt: Text, tokenized as ``engine.generate`` does, or ids.
        truncates: Whether a text that is too long loses its front; see `truncation.truncated`.
        memory: Beginning of the text that stays then.
        more_prompts: Further prompts, whose samples follow those of the first.
        max_tokens: Most tokens to generate.
        sampling: How they are chosen, with the dialect's defaults.
        request_id: Name for events, logs and `Service.find`; unique among its owner's runs.
        shares_name: Whether others of its owner may have that name; the run then gets another one,
            and `Run.label` is what its client calls it.
        attention: What attention to send, None for none.
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
        mods: Mods that steer it, in their order.
        banned_phrases: Texts that it must not generate.
        dialogue: The chat that its prompt was made of, for its mods; None without either.
        forcing: Makes the ``forcing`` of `Engine.generate` for each text; None for none.
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
    mods: Sequence[ModWanted] = ()
    banned_phrases: Sequence[str] = ()
    dialogue: Dialogue | None = None
    forcing: Callable[[Engine], Forcing] | None = None

    @property
    def n_generations(self) -> int:
        """How many texts it makes."""
        return self.n_samples * (1 + len(self.more_prompts))

    @property
    def shift_options(self) -> ShiftOptions:
        """The options of `Engine.generate` that move positions."""
        options: ShiftOptions = {}
        if self.context_shift:
            options["context_shift"] = True
            options["n_keep"] = self.n_keep
            options["n_discard"] = self.n_discard
        if self.n_reuse_min:
            options["reuse"] = "shift"
            options["reuse_min_tokens"] = self.n_reuse_min
        elif self.slot is not None:
            # Who names a slot goes on from what it holds, however it came there.
            options["reuse"] = "prefix"
        return options


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


class Run:
    """Async iterator of Step; also a context manager that closes it.

    Iterating raises what ended it: the engine's error, or the one given to `end`.
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
        self.owner = owner
        """`Caller.owner` of the caller who started it."""
        self.label = request.request_id if label is None else label
        """What its client calls it; other runs may have the same."""
        self.n_truncated = n_truncated
        """Tokens of the prompt's text that were left out."""
        self.generations = tuple(generations)
        self.hold = hold
        self.count_copied = partial(count_copied, generations[0])
        """Tells the engine how many bytes of attention were copied; any thread."""
        self.started_s = time.monotonic()
        self.ended_s: float | None = None
        self.n_tokens = 0
        self.logprobs: list[TokenLogprobs] = []
        """If the request wants them; of each token the best `MOST_TOP`."""
        self.error: BaseException | None = None
        self.deadline: asyncio.TimerHandle | None = None
        self._handed_out_s = math.inf  # the last token, to a client that was not back for the next
        self._is_over = False
        self._on_close = on_close
        self._token_bytes = token_bytes
        # Several samples have a task each, which waits until its step was taken, so that a slow
        # client holds all of them back.
        self._tasks: list[asyncio.Task[None]] = []
        # Texts of the tokens of each sample, where mods may take them back.
        self._texts: list[list[str]] = [[] for _ in self.generations] if request.mods else []
        # Tokens that may become a banned phrase, and those that no longer can.
        phrases = Phrases(request.banned_phrases)
        self._held = [Held[Step](phrases) for _ in self.generations if phrases]
        self._clear: deque[Step] = deque()
        self._n_dropped = [0] * len(self.generations)  # tokens that were held at the end
        self._kept = hold.part()
        self._is_traced = any(one.trace is not None for one in self.generations)
        self._traces_stored = traces_stored
        self._logprob_at: list[int] = []  # index of the token of each of `logprobs`
        self._n_left = len(self.generations)
        self._steps: asyncio.Queue[Step | BaseException | None] = asyncio.Queue(_STEPS_AHEAD)

    # ---- iteration

    def __aiter__(self) -> AsyncIterator[Step]:
        return self

    async def __anext__(self) -> Step:
        self._handed_out_s = math.inf
        try:
            step = await self._next_clear() if self._held else await self._next()
        except StopAsyncIteration:
            await self._settle()
            self._finish()
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
        if self._is_traced:
            self.hold.take(_TRACED_BYTES)
        if self._texts:
            step = self._watched(step)
        if self.request.keeps_logprobs and token.logprob is not None and step.sample == 0:
            top = tuple((token.top_logprobs or ())[:MOST_TOP])
            self.hold.take(_LOGPROB_BYTES * (1 + len(top)))
            self.logprobs.append(TokenLogprobs(token.id, token.logprob, top))
            self._logprob_at.append(token.index)
        self._handed_out_s = time.monotonic()
        return step

    async def _next_clear(self) -> Step:
        """The next token that cannot become a banned phrase any more."""
        while not self._clear:
            try:
                step = await self._next()
            except StopAsyncIteration:
                for i, held in enumerate(self._held):
                    self._n_dropped[i] += len(held.drop(self.generations[i].n_removed))
                    self._clear += held.rest()
                if not self._clear:
                    raise
                break
            held, token = self._held[step.sample], step.token
            token.n_removed -= len(held.drop(token.n_removed))
            clear = held.add(step, self._token_bytes(token.id))
            if not clear or clear[-1] is not step:
                _detach(token)  # the engine may need its memory for the tokens to come
            self._clear += clear
            self._kept.set(sum(one.n_bytes for held in self._held for one in held))
        return self._clear.popleft()

    def _watched(self, step: Step) -> Step:
        """Note the text of a token that may be taken back, and what was taken back before it."""
        token = step.token
        removal = self._removal(step.sample, token.n_removed) if token.n_removed else None
        self.hold.take(_TEXT_BYTES)
        self._texts[step.sample].append(token.text)
        return replace(step, removal=removal)

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
        return [
            self._removal(i, n)
            for i, generation in enumerate(self.generations)
            if self._texts and (n := generation.n_removed - self._n_dropped[i])
        ]

    async def final_steps(self) -> AsyncIterator[Step]:
        """The steps of the final text, for replies that are not streamed.

        Where mods may take tokens back they come at the end, sample by sample, with copies of their
        attention: the engine's own memory could not hold all of them.
        """
        if not self._texts:
            async for step in self:
                held = [step]
                del step
                yield held.pop()
            return
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

    async def _next(self) -> Step:
        if len(self.generations) == 1:
            return Step(0, await anext(self.generations[0]))
        if not self._tasks:
            self._tasks = [
                asyncio.create_task(self._forward(i, one)) for i, one in enumerate(self.generations)
            ]
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

    # ---- ending it

    def end(self, error: KqviewError | None = None) -> None:
        """End it now: iterating raises *error*, or stops with finish reason "cancelled"."""
        if self._is_over:
            return
        self.error = self.error or error
        for generation in self.generations:
            generation.cancel()

    async def aclose(self) -> None:
        """Cancel what still runs and wait until the slots are free; idempotent."""
        for task in self._tasks:
            task.cancel()
        for generation in self.generations:
            generation.cancel()
        try:
            await asyncio.gather(*self._tasks, return_exceptions=True)
            await self._settle()
        finally:  # a caller that is cancelled meanwhile is done with it too
            self._finish()

    async def _settle(self) -> None:
        # Only then are the slots free, is the usage of a stopped run complete, and are the traces
        # where a crash does not lose them.
        for generation in self.generations:
            await generation.aclose()
        if self._is_traced and self._traces_stored is not None and not self._is_over:
            await self._traces_stored()

    def _finish(self) -> None:
        if not self._is_over:
            self._is_over = True
            self.ended_s = time.monotonic()
            if self.deadline is not None:
                self.deadline.cancel()
            self._on_close(self)
            self._kept.close()
            self.hold.close()

    async def __aenter__(self) -> "Run":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    # ---- what is known

    @property
    def request_id(self) -> str:
        """The request's name."""
        return self.request.request_id

    @property
    def is_over(self) -> bool:
        """Whether it has ended."""
        return self._is_over

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
