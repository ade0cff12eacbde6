"""From a run to a transport: the one loop that every stream of tokens goes through.

A dialect gives a `Renderer`, pure functions from tokens to frames; a transport gives a function
that sends frames and waits for the client. While it waits nobody takes the run's next token, so its
mailbox fills and the engine pauses that request alone: backpressure from the socket to the slot.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from kqview.errors import KqviewError
from kqview.server.errors import Answer, answer_of
from kqview.server.run import Run, Step
from kqview.server.service import Service
from kqview.types import PromptBlock

Frames = Sequence[bytes | str]
Send = Callable[[Frames], Awaitable[None]]

EVENT_HEAD: Final = b"event: message\ndata: "
EVENT_TAIL: Final = b"\n\n"
NEXT_EVENT: Final = EVENT_TAIL + EVENT_HEAD
"""Stands between two events in the pieces of one call, over SSE."""


class Renderer(Protocol):
    """How a dialect writes what happens. Pure; `token` and `prompt` may run in another thread.

    Over SSE the frames of one call are the pieces of one event's data, bytes all, and none of them
    is no event; over a WebSocket each is a message, text or binary, and none comes between them.
    """

    def prompt(self, run: Run, block: PromptBlock) -> Frames:
        """Rows of the prompt."""
        ...

    def token(self, run: Run, step: Step) -> Frames:
        """One token."""
        ...

    def done(self, run: Run) -> Frames:
        """The end."""
        ...

    def error(self, run: Run | None, answer: Answer) -> Frames:
        """What went wrong; nothing comes after it."""
        ...


@dataclass(frozen=True, slots=True)
class Events:
    """A handler's reply that is streamed as Server-Sent Events."""

    run: Run
    renderer: Renderer


async def pump(service: Service, run: Run, renderer: Renderer, send: Send) -> KqviewError | None:
    """Send *run* to its end and close it.

    Returns:
        The error that ended it, which was sent too; None where it ended well.

    Raises:
        OSError: The client is gone, or reads nothing any more.
        asyncio.CancelledError: As it was cancelled from outside; the run is closed.
    """
    idle_s = service.settings.idle_timeout_s
    async with run:
        try:
            async for block in run.prompt_blocks():
                n_bytes = block.rows.nbytes if hasattr(block.rows, "nbytes") else 1 << 30
                frames = await service.offload(n_bytes, renderer.prompt, run, block)
                del block  # the pool wants its memory back while the client reads
                await _send(send, frames, idle_s)
            async for step in run:
                frames = await service.offload(step.n_bytes, renderer.token, run, step)
                del step
                await _send(send, frames, idle_s)
        except KqviewError as error:
            await _send(send, renderer.error(run, answer_of(error)), idle_s)
            return error
        # The slot is free before the client hears that it is.
        await run.aclose()
        await _send(send, renderer.done(run), idle_s)
        return None


async def _send(send: Send, frames: Frames, idle_s: float) -> None:
    try:
        async with asyncio.timeout(idle_s):
            await send(frames)
    except TimeoutError:
        raise ConnectionAbortedError(f"the client read nothing for {idle_s:g} s") from None
