"""The dream dialect's WebSocket: one generation at a time, and any number one after another.

One task reads messages all the time, so that a cancel is heard while tokens are sent; another sends
the generation's events. Both end with the socket.
"""

import asyncio
import contextlib
import uuid
from collections.abc import Callable, Sequence
from typing import Any, Final

import msgspec

from kqview._core import count_values
from kqview.errors import BusyError, KqviewError, RequestError
from kqview.json_input import DEPTH_MAX
from kqview.server.api.koboldai.events import DreamEvents, packed
from kqview.server.api.koboldai.failures import answer_for, error_body
from kqview.server.api.koboldai.request import Cancel, Generate, plan_of
from kqview.server.models.model_entry import ModelEntry, resolved
from kqview.server.models.run import Run
from kqview.server.models.service import Call
from kqview.server.models.stream import send_run
from kqview.server.web.endpoint import check_values
from kqview.server.web.lenient import LenientDecoder
from kqview.server.web.sockets import Socket

SUBPROTOCOL: Final = "msgpack"
"""WebSocket subprotocol for messages in MessagePack."""

ClientMessage = Generate | Cancel
_JSON: Final = LenientDecoder(ClientMessage)
_PACK: Final = LenientDecoder(ClientMessage, packs=True)


class NamedMessage(msgspec.Struct):
    """What is read of an invalid message, so that its error can name the request."""

    request_id: Any = None


def message_of(raw: bytes | str, *, packs: bool) -> tuple[ClientMessage, Sequence[str]]:
    """The typed message in a frame; text is JSON whatever the subprotocol.

    Returns it, and the names in it that its type does not have.

    Raises:
        RequestError: It cannot be read; the message names the field.
        TooLarge: It has too many values.
    """
    check_values(raw, packs=packs and isinstance(raw, bytes))
    decoder = _PACK if isinstance(raw, bytes) and packs else _JSON
    try:
        message = decoder.decode(raw)
        return message, decoder.unknown(raw, message)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RequestError(f"the message cannot be read: {error}; correct it") from None


def name_in(raw: bytes | str, *, packs: bool) -> str | None:
    """The ``request_id`` of an invalid message, None if not even that can be read."""
    is_packed = packs and isinstance(raw, bytes)
    data = raw if isinstance(raw, bytes) else raw.encode("utf-8", "surrogatepass")
    if count_values(data, is_packed).depth > DEPTH_MAX:
        return None
    try:
        decode = msgspec.msgpack.decode if is_packed else msgspec.json.decode
        named = decode(data, type=NamedMessage)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    return named.request_id if isinstance(named.request_id, str) else None


_BUSY: Final = (
    "a generation runs on this socket; wait for its done event, cancel it, or open another socket"
)


class DreamSession:
    """Serves one socket; belongs to the event loop."""

    def __init__(self, call: Call, socket: Socket) -> None:
        """Serve *socket*; messages are MessagePack if its subprotocol says so."""
        self._call = call
        self._socket = socket
        self._packs = socket.subprotocol == SUBPROTOCOL
        self._run: Run | None = None
        self._sending: asyncio.Task[None] | None = None  # of the run, with its end
        self._last_id: str | None = None

    async def serve(self) -> None:
        """Return if the socket was closed because a generation failed.

        Raises:
            ClientGone: The client is gone, or has stopped reading.
            TimeoutError: It is idle.
            KqviewError: A message was refused and ends the socket: too large, too many.
        """
        reading = asyncio.ensure_future(self._socket.receive())
        try:
            while not self._socket.is_closed:
                idle_s = None if self._sending else self._call.service.settings.idle_timeout_s
                done, _ = await asyncio.wait(
                    self._tasks(reading), timeout=idle_s, return_when=asyncio.FIRST_COMPLETED
                )
                if not done:
                    raise TimeoutError
                if self._sending in done:
                    await self._end_sending()
                elif reading.done():
                    raw = reading.result()
                    reading = asyncio.ensure_future(self._socket.receive())
                    await self._take(raw)
        finally:
            for task in self._tasks(reading):
                task.cancel()
            await asyncio.gather(*self._tasks(reading), return_exceptions=True)

    def _tasks(self, reading: "asyncio.Future[Any]") -> "list[asyncio.Future[Any]]":
        return [reading] if self._sending is None else [reading, self._sending]

    async def _end_sending(self) -> None:
        """Wait until the last event is sent; then the socket is free, or closed if it failed."""
        if self._sending is not None:
            await self._sending
        self._run = self._sending = None

    # ---- messages

    async def _take(self, raw: bytes | str) -> None:
        """Handle a message."""
        try:
            message, unknown = await self._converted(raw, message_of, raw, packs=self._packs)
        except RequestError as error:
            name = await self._converted(raw, name_in, raw, packs=self._packs)
            await self._refuse(error, name)
            return
        if isinstance(message, Cancel):
            await self._cancel(message)
            return
        # A client told of the end may ask again, even if the task that told it has a step left.
        if self._run is not None and self._run.is_over:
            await self._end_sending()
        if not self._socket.is_closed:
            await self._generate(message, raw, unknown)

    async def _converted(
        self, raw: bytes | str, convert: Callable[..., Any], *args: Any, **options: Any
    ) -> Any:
        return await self._call.service.converted(
            len(raw), self._call.hold, convert, *args, **options
        )

    async def _cancel(self, message: Cancel) -> None:
        wanted = message.request_id
        if self._run is not None and wanted in (None, self._run.label):
            self._run.end()
        elif wanted is None or wanted != self._last_id:  # its end and this message may have crossed
            error = RequestError(
                "no generation with this request_id runs on this socket; name one that does"
            )
            await self._refuse(error, wanted)

    async def _generate(self, message: Generate, raw: bytes | str, unknown: Sequence[str]) -> None:
        request_id = message.request_id or uuid.uuid4().hex
        if self._run is not None:
            await self._refuse(BusyError(_BUSY), request_id)
            return
        service = self._call.service
        model: ModelEntry | None = None
        async with contextlib.AsyncExitStack() as use:
            try:
                model = await use.enter_async_context(service.pool.using(message.model))
                message = resolved(message, model)
                plan = await self._converted(
                    raw, plan_of, message, model, service.settings,
                    request_id=request_id, unknown=unknown,
                )  # fmt: skip
                run = await service.start(
                    plan.request, self._call.caller, self._call.hold, model=model
                )
            except KqviewError as error:
                await self._refuse(error, request_id, message, model)
                return
            renderer = DreamEvents(
                plan,
                lambda error: answer_for(model, error, message, n_prompt=run.usage.prompt_tokens),
                packs=self._packs,
            )
            self._last_id = request_id
            self._run = run
            self._sending = asyncio.ensure_future(self._send(run, renderer, use.pop_all()))

    async def _send(self, run: Run, renderer: DreamEvents, use: contextlib.AsyncExitStack) -> None:
        async with use:
            await send_run(self._socket, run, renderer)

    async def _refuse(
        self,
        error: KqviewError,
        request_id: str | None,
        body: Generate | None = None,
        model: ModelEntry | None = None,
    ) -> None:
        """Send an error event; the socket stays usable."""
        answer = answer_for(model or self._call.service.pool.default, error, body)
        await self._socket.send([packed(error_body(answer, request_id), packs=self._packs)])
