"""Session: one WebSocket of this dialect, from its first message to its end.

A socket runs one generation at a time and any number one after another. One task reads messages
all the time, so that a cancel is heard while tokens are sent; another one sends the generation's
events. Both end with the socket.
"""

import asyncio
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from kqview.errors import BusyError, KqviewError, RequestError
from kqview.server.api.dream import schema
from kqview.server.api.dream.events import EventRenderer, error_frame, message_of, name_in
from kqview.server.api.dream.planning import answer_for, plan_for, token_bytes_of
from kqview.server.budget import Hold, uncounted
from kqview.server.caller import ANYONE, Caller
from kqview.server.run import Run
from kqview.server.service import Service
from kqview.server.sockets import Socket

_BUSY: Final = (
    "session.generate: a generation runs on this socket; wait for its done event, cancel it, or "
    "open another socket"
)


@dataclass(frozen=True, slots=True)
class _Running:
    run: Run
    sending: "asyncio.Task[None]"


class Session:
    """Serves one socket; belongs to the event loop."""

    def __init__(
        self,
        service: Service,
        socket: Socket,
        caller: Caller = ANYONE,
        hold: Hold | None = None,
    ) -> None:
        """Serve *caller*'s *socket*; messages are MessagePack where its subprotocol says so.

        What runs keep in memory is counted in *hold*.
        """
        self._service = service
        self._socket = socket
        self._caller = caller
        self._hold = hold or uncounted()
        self._packs = socket.subprotocol == schema.SUBPROTOCOL
        self._running: _Running | None = None
        self._last_id: str | None = None

    async def serve(self) -> None:
        """Return when the socket was closed because a generation failed.

        Raises:
            ClientGone: The client is gone, or reads nothing any more.
            TimeoutError: It asks for nothing.
            KqviewError: A message was refused, and the socket with it: too large, too often.
        """
        reading = asyncio.ensure_future(self._socket.receive())
        try:
            while not self._socket.is_closed:
                await self._wait(reading)
                if self._running is not None and self._running.sending.done():
                    await self._end_running()
                elif reading.done():
                    raw = reading.result()
                    reading = asyncio.ensure_future(self._socket.receive())
                    await self._take(raw)
        finally:
            for task in self._tasks(reading):
                task.cancel()
            await asyncio.gather(*self._tasks(reading), return_exceptions=True)

    def _tasks(self, reading: "asyncio.Future[Any]") -> "list[asyncio.Future[Any]]":
        return [reading] if self._running is None else [reading, self._running.sending]

    async def _wait(self, reading: "asyncio.Future[Any]") -> None:
        """Until there is a message, or the generation is over."""
        idle_s = None if self._running else self._service.settings.idle_timeout_s
        done, _ = await asyncio.wait(
            self._tasks(reading), timeout=idle_s, return_when=asyncio.FIRST_COMPLETED
        )
        if not done:
            raise TimeoutError

    async def _end_running(self) -> None:
        """Wait until its last event is sent; the socket is free, or closed where it failed."""
        assert self._running is not None
        await self._running.sending
        self._running = None

    # ---- messages

    async def _take(self, raw: bytes | str) -> None:
        """Do what a message says."""
        try:
            message = await self._converted(raw, message_of, raw, packs=self._packs)
        except RequestError as error:
            name = await self._converted(raw, name_in, raw, packs=self._packs)
            await self._refuse(error, name)
            return
        if isinstance(message, schema.Cancel):
            await self._cancel(message)
            return
        # Who was told the end may ask again, even if the task that told it has a step left.
        if self._running is not None and self._running.run.is_over:
            await self._end_running()
        if not self._socket.is_closed:
            await self._generate(message, raw)

    async def _converted(
        self, raw: bytes | str, convert: Callable[..., Any], *args: Any, **options: Any
    ) -> Any:
        return await self._service.converted(len(raw), self._hold, convert, *args, **options)

    async def _cancel(self, message: schema.Cancel) -> None:
        running, wanted = self._running, message.request_id
        if running is not None and wanted in (None, running.run.request_id):
            running.run.end()
        elif wanted is None or wanted != self._last_id:  # its end may have crossed the message
            error = RequestError(
                "session.cancel: no generation of that name runs on this socket; name one that does"
            )
            await self._refuse(error, wanted)

    async def _generate(self, message: schema.Generate, raw: bytes | str) -> None:
        request_id = message.request_id or uuid.uuid4().hex
        if self._running is not None:
            await self._refuse(BusyError(_BUSY), request_id)
            return
        service = self._service
        try:
            plan = await self._converted(
                raw, plan_for, service, message, request_id, always_logprob=True
            )
            token_bytes = token_bytes_of(service)
            run = await service.start(plan.request, self._caller, self._hold)
        except KqviewError as error:
            await self._refuse(error, request_id, message)
            return
        renderer = EventRenderer(
            plan,
            lambda id_: token_bytes(id_).decode("utf-8", "replace"),
            lambda error: answer_for(service, error, message, n_prompt=run.usage.prompt_tokens),
            packs=self._packs,
        )
        self._last_id = request_id
        self._running = _Running(run, asyncio.ensure_future(self._socket.pump(run, renderer)))

    async def _refuse(
        self, error: KqviewError, request_id: str | None, body: schema.Generate | None = None
    ) -> None:
        """Send an error event; the socket stays usable."""
        answer = answer_for(self._service, error, body)
        await self._socket.send([error_frame(answer, request_id, packs=self._packs)])
