"""Stream: a run on its way to its client, over Server-Sent Events and WebSockets alike.

`pump` is the loop that every stream of tokens goes through. While it waits for a client, nobody
takes the run's next token; its mailbox fills and the engine pauses that request alone: backpressure
from the socket to the slot.
"""

import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final, Protocol

from kqview.errors import EmittedError, InternalError, KqviewError, ModFailed
from kqview.server.errors import Answer, answer_of
from kqview.server.models.run import Removal, Run, Step
from kqview.server.web.budget import Reservation
from kqview.server.web.endpoint import EVENT_HEAD, AnyCall, ClientGone, Frames, Host, Response
from kqview.server.web.sockets import Socket, close_code
from kqview.types import PromptBlock

SendFrames = Callable[[Frames], Awaitable[None]]

_log: Final = logging.getLogger("kqview.server")
_OFFLOAD: Final = 2**20  # bytes that are written in another thread


class Renderer(Protocol):
    """How a dialect writes what happens. Pure; `token` and `prompt` may run in another thread.

    Over SSE the frames of one call are bytes, the pieces of one event's data; no frames are no
    event. Over a WebSocket each frame is a message, text or binary; those of a call stay together.
    """

    def prompt(self, run: Run, block: PromptBlock) -> Frames:
        """Rows of the prompt."""
        ...

    def token(self, run: Run, step: Step) -> Frames:
        """One token."""
        ...

    def removed(self, run: Run, removal: Removal) -> Frames:
        """Tokens that mods have taken back; they were rendered before."""
        ...

    def done(self, run: Run) -> Frames:
        """The end."""
        ...

    def error(self, run: Run | None, answer: Answer) -> Frames:
        """What went wrong; nothing follows it."""
        ...


@dataclass(frozen=True, slots=True)
class Events:
    """A reply that is streamed as Server-Sent Events, each of which begins with *head*.

    *n_repeated* is about how many bytes its first event, its last and that of an error repeat of
    the request.
    """

    run: Run
    renderer: Renderer
    head: bytes = EVENT_HEAD
    n_repeated: int = 0

    async def send(self, call: AnyCall, response: Response) -> None:
        """Send the run to its end."""
        response.event_head = self.head
        response.event_headers = self.run.request.headers
        error = await pump(
            call.service, self.run, self.renderer, response.event, self.n_repeated,
            response=response,
        )  # fmt: skip
        if error is None:  # else the stream is cut: a clean end would look like success
            await response.finish()


async def send_run(socket: Socket, run: Run, renderer: Renderer) -> None:
    """Send *run* to its end over a WebSocket; if it fails, close that. See `pump`."""
    with socket.streaming():
        error = await pump(socket.host, run, renderer, socket.send)
        if error is not None:
            await socket.close(close_code(error), str(error))


async def pump(
    host: Host,
    run: Run,
    renderer: Renderer,
    send: SendFrames,
    n_repeated: int = 0,
    *,
    response: Response | None = None,
) -> KqviewError | None:
    """Send *run* to its end and close it.

    Args:
        host: Whose threads write large rows.
        run: What to send.
        renderer: How to write it.
        send: Sends the frames of one event; raises ClientGone, and Stalled after a time.
        n_repeated: As of `Events`.
        response: Until it has begun, an error of a mod is raised instead of sent.

    Returns:
        The error that ended the run, which was sent too; None if it ended well.

    Raises:
        ClientGone: Nobody reads; the run is closed.
        asyncio.CancelledError: It was cancelled from outside; the run is closed.
        EmittedError, ModFailed: See *response*.
    """
    async with run:
        try:
            with run.hold.part() as unread:
                n_sent = await _send_tokens(host, run, renderer, send, unread, n_repeated)
            for removal in run.last_removals():
                await send(renderer.removed(run, removal))
            # The slot is free before the client hears that it is.
            await run.aclose()
            # The end may have the whole answer once more.
            await send(await host.offload(n_sent + n_repeated, renderer.done, run))
        except ClientGone:
            raise
        except Exception as error:
            has_begun = response is None or response.is_started
            if isinstance(error, EmittedError | ModFailed) and not has_begun:
                raise
            failure = failure_of(run, error)
        else:
            return None
        answer = answer_of(failure)
        await send(await host.offload(n_repeated, renderer.error, run, answer))
        return failure


def failure_of(run: Run, error: Exception) -> KqviewError:
    """What the client of *run* hears of *error*; one that is none of kqview's ends the run."""
    if isinstance(error, KqviewError):
        return error
    _log.error("stream of %s failed", run.request_id, exc_info=error)
    failure = InternalError("the server failed; its log says more")
    run.end(failure)
    return failure


async def _send_tokens(
    host: Host,
    run: Run,
    renderer: Renderer,
    send: SendFrames,
    unread: Reservation,
    n_repeated: int,
) -> int:
    """Send rows and tokens, and return how many bytes that were.

    *unread* counts the bytes that the client may not have read.
    """
    n_sent = 0

    async def deliver(frames: Frames) -> None:
        nonlocal n_sent, n_repeated
        if frames:
            n_bytes = sum(map(len, frames))
            n_sent, n_repeated = n_sent + n_bytes, 0  # only the first event repeats
            unread.take(n_bytes)
            await send(frames)
            unread.set(n_bytes)  # transports wait for what was sent before

    async for block in run.prompt_blocks():
        # Rows of layers with different numbers of heads are a tuple: large enough for a thread.
        n_bytes = getattr(block.rows, "nbytes", _OFFLOAD)
        frames = await host.offload(n_bytes + n_repeated, renderer.prompt, run, block)
        del block  # the pool wants its memory back while the client reads
        await deliver(frames)
    async for step in run:
        if step.removal is not None:
            await deliver(renderer.removed(run, step.removal))
        frames = await host.offload(step.n_bytes + n_repeated, renderer.token, run, step)
        del step
        await deliver(frames)
    return n_sent
