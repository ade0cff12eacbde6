"""A dialect of the tests' own, mounted beside the real ones: what a further protocol takes.

One file where a real dialect is a folder: typed bodies, pure functions to frames, a few lines of
glue. It can fail on request in each way that a dialect can fail.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any, Literal
from unittest import mock

import msgspec
import numpy as np

from kqview.server import Settings, app
from kqview.server.api.wire.attention import RowWriter, event_pieces
from kqview.server.models.run import AttentionWanted, GenerateRequest
from kqview.server.models.stream import Events, send_run
from kqview.server.web import endpoint
from kqview.server.web.endpoint import Frames, HttpReply, Operation
from kqview.types import PromptBlock, Sampling
from tests.support.serving import Served, serving

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kqview import Engine
    from kqview.server.errors import Answer
    from kqview.server.models.run import Removal, Run, Step
    from kqview.server.models.service import Call
    from kqview.server.web.sockets import Socket

# ---- schema


class TextBody(msgspec.Struct, kw_only=True):
    text: str
    add_special: bool = False


class GenerateBody(msgspec.Struct, kw_only=True):
    prompt: str | list[int]
    max_tokens: int = 8
    seed: int = 1
    attention: bool = True
    prompt_rows: bool = False
    n_samples: int = 1
    request_id: str | None = None
    fails_at: int | None = None
    """Index of a token that cannot be rendered, for a bug in a dialect."""


class FailBody(msgspec.Struct, kw_only=True):
    how: Literal["bug", "os", "memory", "recursion", "timeout"] = "bug"


class Generated(msgspec.Struct, kw_only=True):
    text: str
    ids: list[int]
    reason: str


class Tokens(msgspec.Struct, kw_only=True):
    ids: list[int]


class ToyFailure(msgspec.Struct, kw_only=True):
    wrong: str
    code: str


# ---- convert


def error_body(answer: Answer) -> dict[str, Any]:
    return {"wrong": answer.message, "code": answer.code, **answer.figures}


def neutral(body: GenerateBody, request_id: str) -> GenerateRequest:
    return GenerateRequest(
        prompt=body.prompt,
        max_tokens=body.max_tokens,
        sampling=Sampling(temperature=0.7, seed=body.seed, ignore_eos=True),
        request_id=body.request_id or request_id,
        attention=AttentionWanted(prompt=body.prompt_rows) if body.attention else None,
        n_samples=body.n_samples,
    )


class ToyRenderer:
    """Frames of a stream: JSON with base64 in it, or a text and a binary message."""

    def __init__(self, *, is_binary: bool, fails_at: int | None = None) -> None:
        self._is_binary = is_binary
        self._fails_at = fails_at

    def prompt(self, run: Run, block: PromptBlock) -> Frames:
        return self._rows(run, {"type": "prompt", "start": block.start}, block.rows)

    def token(self, run: Run, step: Step) -> Frames:
        token = step.token
        if token.index == self._fails_at:
            raise ZeroDivisionError("a bug of the toy dialect, at /secret/path")
        event = {"type": "token", "id": token.id, "text": token.text, "sample": step.sample}
        return self._rows(run, event, token.attention)

    def removed(self, run: Run, removal: Removal) -> Frames:
        return self._plain({"type": "removed", "n": removal.n_tokens})

    def done(self, run: Run) -> Frames:
        return self._plain({"type": "done", "reason": run.finish_reason, "n": run.n_tokens})

    def error(self, run: Run | None, answer: Answer) -> Frames:
        return self._plain({"type": "error", **error_body(answer)})

    def _plain(self, event: dict[str, Any]) -> Frames:
        data = msgspec.json.encode(event)
        return [data.decode()] if self._is_binary else [data]

    def _rows(self, run: Run, event: dict[str, Any], rows: Any) -> Frames:
        if rows is None:
            return self._plain(event)
        assert run.request.attention is not None
        writer = RowWriter(run.request.attention, None, 0, 0, has_sinks=False)
        way = "binary" if self._is_binary else "base64"
        shown, data = writer.write(rows, run.count_copied, data=way)
        event["shape"] = shown.shape
        if self._is_binary:
            return [*self._plain(event), data or b""]
        return event_pieces({**event, "data": shown.data}, data)


# ---- routes


async def tokenize(call: Call, body: TextBody) -> Tokens:
    pieces = await call.service.pool.default.texts.tokenize(
        body.text, add_special=body.add_special, hold=call.hold
    )
    return Tokens(ids=[id_ for id_, _ in pieces])


async def generate(call: Call, body: GenerateBody) -> Generated:
    run = await call.service.start(neutral(body, call.request_id), call.caller, call.hold)
    async with run:
        ids = [step.token.id async for step in run]
    return Generated(text=run.text, ids=ids, reason=run.finish_reason)


async def stream(call: Call, body: GenerateBody) -> Events:
    run = await call.service.start(neutral(body, call.request_id), call.caller, call.hold)
    return Events(run, ToyRenderer(is_binary=False, fails_at=body.fails_at))


async def socket_once(call: Call, socket: Socket) -> None:
    """One request a socket."""
    raw = await socket.receive(timeout_s=call.service.settings.idle_timeout_s)
    body = decoded(raw)
    run = await call.service.start(neutral(body, call.request_id), call.caller, call.hold)
    await socket.alone(send_run(socket, run, ToyRenderer(is_binary=True, fails_at=body.fails_at)))


async def socket_many(call: Call, socket: Socket) -> None:
    """Request after request, each while the socket is listened to."""
    pump: asyncio.Task[None] | None = None
    try:
        while True:
            raw = await socket.receive(timeout_s=call.service.settings.idle_timeout_s)
            body = decoded(raw)
            run = await call.service.start(
                neutral(body, f"{call.request_id}-{len(raw)}"), call.caller, call.hold
            )
            pump = asyncio.create_task(send_run(socket, run, ToyRenderer(is_binary=True)))
            await asyncio.wait({pump})
    finally:
        if pump is not None:
            pump.cancel()
            await asyncio.gather(pump, return_exceptions=True)


async def fail(call: Call, body: FailBody) -> HttpReply:
    if body.how == "os":
        raise FileNotFoundError(2, "no such file", "/secret/path")
    if body.how == "memory":
        raise MemoryError
    if body.how == "recursion":
        raise RecursionError("/secret/path")
    if body.how == "timeout":
        raise TimeoutError("/secret/path")
    raise ZeroDivisionError("a bug of the toy dialect, at /secret/path")


async def socket_fail(call: Call, socket: Socket) -> None:
    await socket.receive()
    raise ZeroDivisionError("a bug of the toy dialect, at /secret/path")


async def socket_sizes(call: Call, socket: Socket) -> None:
    """A text and a binary message of each of the sizes that the first message lists."""
    for n_bytes in msgspec.json.decode(await socket.receive(), type=list[int]):
        data = bytes(range(256)) * (n_bytes // 256) + bytes(range(n_bytes % 256))
        await socket.send(["\x7f" * n_bytes, data])


async def parts(call: Call) -> dict[str, str]:
    return dict(call.path)


async def large(call: Call) -> HttpReply:
    """A plain reply that no socket buffer holds."""
    return HttpReply(np.zeros(32 * 2**20, np.uint8).tobytes(), "application/octet-stream")


async def admin(call: Call) -> dict[str, str]:
    return {"caller": call.caller.name}


async def switch(call: Call, body: TextBody) -> dict[str, str]:
    await call.service.pool.switch(body.text, {})
    return {"model": call.service.pool.default.name}


def decoded(raw: bytes | str) -> GenerateBody:
    return endpoint.decoded(msgspec.json.Decoder(GenerateBody), raw)


def _operation(method: Any, path: str, handler: Any, **more: Any) -> Operation:
    return Operation(
        method=method, path=path, handler=handler, tag="toy", summary=f"The toy's {path}.",
        error_body=error_body, failure=ToyFailure, **more,
    )  # fmt: skip


OPERATIONS = [
    _operation("POST", "/toy/tokenize", tokenize, body=TextBody, reply=Tokens),
    _operation("POST", "/toy/generate", generate, body=GenerateBody, reply=Generated),
    _operation("POST", "/toy/stream", stream, body=GenerateBody, streams=True),
    _operation("POST", "/toy/fail", fail, body=FailBody),
    _operation("GET", "/toy/{kind}/parts/{name}", parts, reply=dict[str, str]),
    _operation("GET", "/toy/large", large),
    _operation("GET", "/toy/admin", admin, access="admin", reply=dict[str, str]),
    _operation("POST", "/toy/switch", switch, body=TextBody, reply=dict[str, str]),
    _operation("WS", "/toy/ws", socket_once),
    _operation("WS", "/toy/ws/many", socket_many),
    _operation("WS", "/toy/ws/fail", socket_fail),
    _operation("WS", "/toy/ws/sizes", socket_sizes),
]


# ---- serving it


class _Module:
    OPERATIONS = OPERATIONS


@contextlib.contextmanager
def mounted() -> Iterator[None]:
    """Apps created meanwhile serve the toy too: one more entry in the list of dialects."""
    with mock.patch.object(app, "DIALECTS", (*app.DIALECTS, _Module)):
        yield


@contextlib.contextmanager
def serving_toy(settings: Settings | None = None, engine: Engine | None = None) -> Iterator[Served]:
    """`serving` with the toy dialect."""
    with mounted(), serving(settings, engine) as served:
        yield served
