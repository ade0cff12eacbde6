"""Bus: what happens in the server, told to subscribers that may be slow or leave at any time.

Whoever publishes never waits. A subscription holds a bounded number of events; one that is not read
in time loses its oldest events and is told how many. Events belong to the caller whose request they
are about, and others do not see them; those without an owner are for everybody.

Belongs to the server's event loop.
"""

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Mapping
from typing import Annotated, Any, Final, Self

import msgspec

from kqview.errors import QueueFull
from kqview.server.web.described import example

_log: Final = logging.getLogger("kqview.server")

N_KEPT: Final = 256
"""Events that a subscription holds for its reader."""
_MOST_SUBSCRIBERS: Final = 256


class Event(msgspec.Struct, kw_only=True):
    """Base of what is published; its name is that of its class.

    Attributes:
        at_s: When it was made, in seconds since 1970.
    """

    at_s: Annotated[float, example(1767225600.5)] = msgspec.field(default_factory=time.time)


class GenerationStarted(Event, kw_only=True):
    """A generation was admitted.

    Attributes:
        request_id: Its request.
        session_id: The conversation that it continues; None without one.
        model_id: The model that answers.
        prompt_tokens: Tokens of the prompt.
        sampling: How tokens are chosen, with ``max_tokens`` and, if there are any,
            ``filtered_out``.
        sampling_origin: Where the value of each field of *sampling* comes from.
        passport_hash: Of the model's passport.
        passport_version: The same.
        system_prompt_hash: Of its system prompt; unset without one.
        system_prompt_version: The same.
        app_persona_hash: Of the persona; unset without one.
        app_persona_version: The same.
    """

    request_id: Annotated[str, example("r1")]
    session_id: Annotated[str | None, example("s1")]
    model_id: Annotated[str, example("demo")]
    prompt_tokens: Annotated[int, example(14)]
    sampling: Annotated[Mapping[str, Any], example({"temperature": 0.8})]
    sampling_origin: Annotated[Mapping[str, str], example({"temperature": "default"})]
    passport_hash: Annotated[str, example("sha256:0a1b")]
    passport_version: Annotated[int, example(1)]
    system_prompt_hash: Annotated[str | msgspec.UnsetType, example("sha256:0a1b")] = msgspec.UNSET
    system_prompt_version: Annotated[int | msgspec.UnsetType, example(1)] = msgspec.UNSET
    app_persona_hash: Annotated[str | msgspec.UnsetType, example("sha256:0a1b")] = msgspec.UNSET
    app_persona_version: Annotated[int | msgspec.UnsetType, example(1)] = msgspec.UNSET


class ReasoningPresetApplied(Event, kw_only=True):
    """A request named a preset of reasoning.

    Attributes:
        request_id: The request.
        model_id: The model that answers.
        preset: Name of the preset.
        reasoning_max_tokens: Most tokens of reasoning; None for no limit.
    """

    request_id: Annotated[str, example("r1")]
    model_id: Annotated[str, example("demo")]
    preset: Annotated[str, example("brief")]
    reasoning_max_tokens: Annotated[int | None, example(64)]


class GenerationCompleted(Event, kw_only=True):
    """A generation ended.

    Attributes:
        request_id: Its request.
        session_id: As of GenerationStarted.
        model_id: The model that answered.
        status: "ok" or "error".
        stop_reason: "stop", "stop_sequence", "length", "cancelled" or "error".
        code: Of the error; None without one.
        result_summary: ``sampling`` as of GenerationStarted, and the figures of the usage.
        reasoning_buffer_latency_ms: From the mark that ended the reasoning to the end of the
            stream; None without reasoning.
    """

    request_id: Annotated[str, example("r1")]
    session_id: Annotated[str | None, example("s1")]
    model_id: Annotated[str, example("demo")]
    status: Annotated[str, example("ok")]
    stop_reason: Annotated[str, example("length")]
    code: Annotated[str | None, example("MODEL_CHANGED")]
    result_summary: Annotated[Mapping[str, Any], example({"output_tokens": 4})]
    reasoning_buffer_latency_ms: Annotated[float | None, example(1.5)] = None


class ModelLoading(Event, kw_only=True):
    """A model is being loaded.

    Attributes:
        model_id: The model.
        progress: Loaded fraction, 0..1.
    """

    model_id: Annotated[str, example("demo")]
    progress: Annotated[float, example(0.5)]


class ModelLoaded(Event, kw_only=True):
    """A model was loaded.

    Attributes:
        model_id: The model.
        memory_bytes: What it takes: weights, KV cache and compute buffers.
        seconds: How long it took.
    """

    model_id: Annotated[str, example("demo")]
    memory_bytes: Annotated[int, example(50331648)]
    seconds: Annotated[float, example(0.4)]


class ModelUnloaded(Event, kw_only=True):
    """A model was unloaded.

    Attributes:
        model_id: The model.
        reason: "memory" if another one needed its memory, "admin", or "removed" from the
            configuration.
    """

    model_id: Annotated[str, example("demo")]
    reason: Annotated[str, example("memory")]


class ModelFailed(Event, kw_only=True):
    """A model could not be loaded.

    Attributes:
        model_id: The model.
        error: Why.
        retry_s: Seconds until a request tries again.
    """

    model_id: Annotated[str, example("demo")]
    error: Annotated[str, example("the file is cut off")]
    retry_s: Annotated[float, example(1.0)]


class Dropped(Event, kw_only=True):
    """This subscriber read too slowly.

    Attributes:
        n: Events that it lost here.
    """

    n: Annotated[int, example(3)]


class Subscription:
    """Events for one reader, from when it subscribed: an async iterator."""

    def __init__(self, limit: int, sees: Callable[[str], bool]) -> None:
        self._sees = sees
        self._events: deque[msgspec.Struct] = deque(maxlen=limit)
        self._n_dropped = 0
        self._has_news = asyncio.Event()
        self._is_closed = False

    def put(self, event: msgspec.Struct, owner: str | None) -> None:
        """Add *event* if the subscriber may see what belongs to *owner*."""
        if owner is not None and not self._sees(owner):
            return
        if len(self._events) == self._events.maxlen:
            self._n_dropped += 1
        self._events.append(event)
        self._has_news.set()

    def close(self) -> None:
        """End the iteration after what is held."""
        self._is_closed = True
        self._has_news.set()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> msgspec.Struct:
        while not self._events:
            if self._is_closed:
                raise StopAsyncIteration
            self._has_news.clear()
            await self._has_news.wait()
        if self._n_dropped:
            n, self._n_dropped = self._n_dropped, 0
            return Dropped(n=n)
        return self._events.popleft()


class Bus:
    """Passes events on."""

    def __init__(self) -> None:
        self.listeners: set[Callable[[msgspec.Struct], None]] = set()
        """Called with every event, whosever it is; they must not block."""
        self._subscriptions: set[Subscription] = set()
        self._is_closed = False

    @property
    def n_subscribers(self) -> int:
        """Subscriptions that are open."""
        return len(self._subscriptions)

    def publish(self, event: msgspec.Struct, owner: str | None = None) -> None:
        """Tell everybody who may see what belongs to *owner*; None is for all."""
        for subscription in self._subscriptions:
            subscription.put(event, owner)
        for listener in tuple(self.listeners):
            try:
                listener(event)
            except Exception:  # a listener's bug is not the publisher's
                _log.exception("a listener of %s failed", type(event).__name__)

    @contextlib.asynccontextmanager
    async def subscribed(
        self, limit: int = N_KEPT, *, sees: Callable[[str], bool] = lambda owner: True
    ) -> AsyncGenerator[Subscription]:
        """A subscription that holds up to *limit* events of the owners that *sees* allows.

        Raises:
            QueueFull: There are too many.
        """
        if len(self._subscriptions) >= _MOST_SUBSCRIBERS:
            raise QueueFull(
                f"{_MOST_SUBSCRIBERS} clients are listening to events, the limit; try again later"
            )
        subscription = Subscription(limit, sees)
        self._subscriptions.add(subscription)
        if self._is_closed:
            subscription.close()
        try:
            yield subscription
        finally:
            self._subscriptions.discard(subscription)

    async def close(self) -> None:
        """End every subscription after what it holds."""
        self._is_closed = True
        for subscription in self._subscriptions:
            subscription.close()
