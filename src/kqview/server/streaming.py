"""From a run to a transport: the one loop that every stream of tokens goes through.

A dialect gives a `Renderer`, pure functions from tokens to frames; a transport gives a function
that sends frames and waits for the client. While it waits nobody takes the run's next token, so its
mailbox fills and the engine pauses that request alone: backpressure from the socket to the slot.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np
from starlette.types import Message
from starlette.types import Send as ASGISend

from kqview.errors import InternalError, KqviewError
from kqview.server.budget import Hold
from kqview.server.connection import Connection
from kqview.server.errors import Answer, answer_of
from kqview.server.run import Run, Step
from kqview.server.service import OFFLOAD_BYTES, Service
from kqview.types import PromptBlock

_log: Final = logging.getLogger("kqview.server")

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


class ClientGone(ConnectionError):
    """The client left."""


class Stalled(ClientGone):
    """The client is there, but reads nothing."""


async def pump(service: Service, run: Run, renderer: Renderer, send: Send) -> KqviewError | None:
    """Send *run* to its end and close it.

    Args:
        service: Whose run it is.
        run: What to send.
        renderer: How to write it.
        send: Sends the frames of one event; raises ClientGone, and Stalled after a time.

    Returns:
        The error that ended it, which was sent too; None where it ended well.

    Raises:
        ClientGone: Nobody reads; the run is closed.
        asyncio.CancelledError: As it was cancelled from outside; the run is closed.
    """
    async with run:
        try:
            with run.hold.part() as unread:
                await _send_tokens(service, run, renderer, _counted(send, unread))
            # The slot is free before the client hears that it is.
            await run.aclose()
            await send(renderer.done(run))
        except ClientGone:
            raise
        except KqviewError as error:
            failure = error
        except Exception as error:
            _log.error("stream of %s failed", run.request_id, exc_info=error)
            failure = InternalError("server.stream: the server failed; its log says more")
            run.end(failure)
        else:
            return None
        await send(renderer.error(run, answer_of(failure)))
        return failure


async def _send_tokens(service: Service, run: Run, renderer: Renderer, send: Send) -> None:
    async for block in run.prompt_blocks():
        # Rows of layers that differ in heads are a tuple; large enough for another thread.
        n_bytes = block.rows.nbytes if isinstance(block.rows, np.ndarray) else OFFLOAD_BYTES
        frames = await service.offload(n_bytes, renderer.prompt, run, block)
        del block  # the pool wants its memory back while the client reads
        await _send(send, frames)
    async for step in run:
        frames = await service.offload(step.n_bytes, renderer.token, run, step)
        del step
        await _send(send, frames)


def _counted(send: Send, unread: Hold) -> Send:
    """*send*, with the bytes in *unread* that the client may not have read."""

    async def count(frames: Frames) -> None:
        n_bytes = sum(map(len, frames))
        unread.take(n_bytes)
        await send(frames)
        unread.set(n_bytes)  # transports wait for what was sent before

    return count


async def _send(send: Send, frames: Frames) -> None:
    if frames:
        await send(frames)


async def sent(send: ASGISend, message: Message, idle_s: float, connection: Connection) -> None:
    """Give *message* to a transport and wait until it takes it.

    Raises:
        Stalled: The client read nothing for *idle_s*.
        ClientGone: The client left.
    """
    n_left = connection.n_left
    while True:
        try:
            if connection.is_clear:  # nobody is waited for
                await send(message)
            else:
                async with asyncio.timeout(idle_s):
                    await send(message)
            return
        except TimeoutError:
            pass  # nothing of it was written: uvicorn waits first
        except ClientGone:
            raise
        except OSError as error:  # what ASGI servers raise; uvicorn's is no ConnectionError
            raise ClientGone(str(error)) from error
        n_before, n_left = n_left, connection.n_left
        if n_left >= n_before:  # one that reads slowly makes room all the time
            # Not where the timeout is caught: that error's frames hold the task, which holds this.
            raise Stalled(f"the client read nothing for {idle_s:g} s")
