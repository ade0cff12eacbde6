"""Bus: what happens in the server, told to subscribers that may be slow or leave at any time.

Whoever publishes never waits. A subscription holds a bounded number of events; one that is not read
in time loses its oldest events and is told how many. Events belong to the caller whose request they
are about, and others do not see them; those without an owner are for everybody.

Belongs to the server's event loop.
"""

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Mapping
from typing import Annotated, Any, Final, Self

import msgspec

from kqview.errors import QueueFull
from kqview.server.web.described import about

N_KEPT: Final = 256
"""Events that a subscription holds for its reader."""
_MOST_SUBSCRIBERS: Final = 256


class Event(msgspec.Struct, kw_only=True):
    """Base of what is published; its name is that of its class."""

    at_s: Annotated[float, about("When it was made, in seconds since 1970.", 1767225600.5)] = (
        msgspec.field(default_factory=time.time)
    )


class GenerationStarted(Event, kw_only=True):
    """A generation was admitted."""

    request_id: Annotated[str, about("Its request.", "r1")]
    session_id: Annotated[
        str | None, about("The conversation that it continues; None without one.", "s1")
    ]
    model_id: Annotated[str, about("The model that answers.", "demo")]
    prompt_tokens: Annotated[int, about("Tokens of the prompt.", 14)]
    sampling: Annotated[
        Mapping[str, Any],
        about(
            "How tokens are chosen, with ``max_tokens`` and, if there are any, ``filtered_out``.",
            {"temperature": 0.8},
        ),
    ]
    sampling_origin: Annotated[
        Mapping[str, str],
        about(
            "Where the value of each field of *sampling* comes from.", {"temperature": "default"}
        ),
    ]
    passport_hash: Annotated[str, about("Of the model's passport.", "sha256:0a1b")]
    passport_version: Annotated[int, about("The same.", 1)]
    system_prompt_hash: Annotated[
        str | msgspec.UnsetType, about("Of its system prompt; unset without one.", "sha256:0a1b")
    ] = msgspec.UNSET
    system_prompt_version: Annotated[int | msgspec.UnsetType, about("The same.", 1)] = msgspec.UNSET
    app_persona_hash: Annotated[
        str | msgspec.UnsetType, about("Of the persona; unset without one.", "sha256:0a1b")
    ] = msgspec.UNSET
    app_persona_version: Annotated[int | msgspec.UnsetType, about("The same.", 1)] = msgspec.UNSET


class ReasoningPresetApplied(Event, kw_only=True):
    """A request named a preset of reasoning."""

    request_id: Annotated[str, about("The request.", "r1")]
    model_id: Annotated[str, about("The model that answers.", "demo")]
    preset: Annotated[str, about("Name of the preset.", "brief")]
    reasoning_max_tokens: Annotated[
        int | None, about("Most tokens of reasoning; None for no limit.", 64)
    ]


class GenerationCompleted(Event, kw_only=True):
    """A generation ended."""

    request_id: Annotated[str, about("Its request.", "r1")]
    session_id: Annotated[str | None, about("As of GenerationStarted.", "s1")]
    model_id: Annotated[str, about("The model that answered.", "demo")]
    status: Annotated[str, about('"ok" or "error".', "ok")]
    stop_reason: Annotated[
        str, about('"stop", "stop_sequence", "length", "cancelled" or "error".', "length")
    ]
    code: Annotated[str | None, about("Of the error; None without one.", "MODEL_CHANGED")]
    result_summary: Annotated[
        Mapping[str, Any],
        about(
            "``sampling`` as of GenerationStarted, and the figures of the usage.",
            {"output_tokens": 4},
        ),
    ]
    reasoning_buffer_latency_ms: Annotated[
        float | None,
        about(
            "From the mark that ended the reasoning to the end of the stream; None without "
            "reasoning.",
            1.5,
        ),
    ] = None


class ModelLoading(Event, kw_only=True):
    """A model is being loaded."""

    model_id: Annotated[str, about("The model.", "demo")]
    progress: Annotated[float, about("Loaded fraction, 0..1.", 0.5)]


class ModelLoaded(Event, kw_only=True):
    """A model was loaded."""

    model_id: Annotated[str, about("The model.", "demo")]
    memory_bytes: Annotated[
        int, about("What it takes: weights, KV cache and compute buffers.", 50331648)
    ]
    seconds: Annotated[float, about("How long it took.", 0.4)]


class ModelUnloaded(Event, kw_only=True):
    """A model was unloaded."""

    model_id: Annotated[str, about("The model.", "demo")]
    reason: Annotated[
        str,
        about(
            '"memory" if another one needed its memory, "admin", or "removed" from the '
            "configuration.",
            "memory",
        ),
    ]


class ModelFailed(Event, kw_only=True):
    """A model could not be loaded."""

    model_id: Annotated[str, about("The model.", "demo")]
    error: Annotated[str, about("Why.", "the file is cut off")]
    retry_s: Annotated[float, about("Seconds until a request tries again.", 1.0)]


class Dropped(Event, kw_only=True):
    """This client read too slowly: events were lost here."""

    n: Annotated[int, about("Events that it lost here.", 3)]


EVENTS: Final = (
    ReasoningPresetApplied, GenerationStarted, GenerationCompleted, ModelLoading, ModelLoaded,
    ModelUnloaded, ModelFailed, Dropped,
)  # fmt: skip
"""What subscribers get."""


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
        self.subscriptions: set[Subscription] = set()
        """Those that are open."""
        self._is_closed = False

    def publish(self, event: msgspec.Struct, owner: str | None = None) -> None:
        """Tell everybody who may see what belongs to *owner*; None is for all."""
        for subscription in self.subscriptions:
            subscription.put(event, owner)

    @contextlib.asynccontextmanager
    async def subscribed(
        self, limit: int = N_KEPT, *, sees: Callable[[str], bool] = lambda owner: True
    ) -> AsyncGenerator[Subscription]:
        """A subscription that holds up to *limit* events of the owners that *sees* allows.

        Raises:
            QueueFull: There are too many.
        """
        if len(self.subscriptions) >= _MOST_SUBSCRIBERS:
            raise QueueFull(
                f"{_MOST_SUBSCRIBERS} clients are listening to events, the limit; try again later"
            )
        subscription = Subscription(limit, sees)
        self.subscriptions.add(subscription)
        if self._is_closed:
            subscription.close()
        try:
            yield subscription
        finally:
            self.subscriptions.discard(subscription)

    async def close(self) -> None:
        """End every subscription after what it holds."""
        self._is_closed = True
        for subscription in self.subscriptions:
            subscription.close()
