"""What tests of the MIA4 dialect share: requests, the frames of streams, and models that obey."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from concurrent.futures import Future
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from unittest import mock

import msgspec

from kqview.server import Settings
from kqview.server.config import Config, ModelConfig
from kqview.server.models.model_entry import ModelEntry as ServedModel
from kqview.server.models.run import Cancelling, Run
from kqview.server.models.service import Service

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Iterator

    import httpx

    from kqview.server.models.run import GenerateRequest, Step
    from tests.support.serving import Served

Frame = tuple[str, dict[str, Any]]

GREEDY: dict[str, Any] = {"temperature": 0, "max_output_tokens": 6}
QUESTION: dict[str, Any] = {"prompt": "Who is Anna?", "overrides": GREEDY}


def config(models: dict[str, dict[str, Any]] | None = None, **tables: Any) -> Config:
    """A configuration of the demo model, or of several with these tables.

    Args:
        models: The table of each model by its id; without a path it is the demo model.
        **tables: Further tables, as a file has them, and ``settings``.
    """
    options: dict[str, Any] = {"n_slots": 2, "n_threads": 1, **tables.pop("settings", {})}
    given: dict[str, dict[str, Any]] = {"demo": {}} if models is None else models
    return msgspec.convert(
        {
            "settings": Settings(**options),
            "models": {id_: msgspec.convert(one, ModelConfig) for id_, one in given.items()},
            **tables,
        },
        Config,
    )


# ---- requests


def headers(key: str) -> dict[str, str]:
    """What a request with this API key sends."""
    return {"x-api-key": key} if key else {}


def post(served: Served, *, key: str = "", **body: Any) -> httpx.Response:
    """The reply to ``POST /generate``."""
    with served.client(headers=headers(key)) as client:
        return client.post("/generate", json={**QUESTION, **body})


def generate(served: Served, *, key: str = "", **body: Any) -> list[Frame]:
    """The frames of a request that is admitted, once all are there."""
    reply = post(served, key=key, **body)
    assert reply.status_code == 200, reply.text
    assert reply.headers["content-type"] == "text/event-stream; charset=utf-8"
    return list(frames_of(reply.text.splitlines()))


def cancel(served: Served, request_id: str, *, key: str = "") -> httpx.Response:
    """The reply to ``POST /cancel/{request_id}``."""
    with served.client(headers=headers(key)) as client:
        return client.post(f"/cancel/{request_id}")


@contextlib.contextmanager
def streaming(served: Served, *, key: str = "", **body: Any) -> Generator[Iterator[Frame]]:
    """The frames of a request while they come; leaving early closes the connection."""
    with (
        served.client(headers=headers(key)) as client,
        client.stream("POST", "/generate", json={**QUESTION, **body}) as reply,
    ):
        assert reply.status_code == 200, reply.read()
        yield frames_of(reply.iter_lines())


@contextlib.contextmanager
def listening(served: Served, *, key: str = "") -> Generator[Iterator[Frame]]:
    """Events of ``GET /events`` from here on."""
    with (
        served.client(headers=headers(key)) as client,
        client.stream("GET", "/events") as reply,
    ):
        assert reply.status_code == 200, reply.read()
        yield frames_of(reply.iter_lines())


def frames_of(lines: Iterable[str]) -> Iterator[Frame]:
    """Name and data of each event in the lines of a stream; comments are left out."""
    name = ""
    for line in lines:
        field, _, value = line.partition(": ")
        if field == "event":
            name = value
        elif field == "data":
            yield name, json.loads(value)


def named(frames: Iterable[Frame], name: str) -> list[dict[str, Any]]:
    """The data of every frame of this name."""
    return [data for one, data in frames if one == name]


def text_of(frames: Iterable[Frame], name: str = "token") -> str:
    """The text of all frames of this name together."""
    return "".join(data["text"] for data in named(frames, name))


def check_end(frames: list[Frame]) -> dict[str, Any]:
    """The data of the one ``end``, which is the last frame."""
    names = [name for name, _ in frames]
    assert names.count("end") == 1, names
    assert names[-1] == "end", names
    return frames[-1][1]


# ---- models that obey


@contextlib.contextmanager
def saying(text: str) -> Generator[None]:
    """Every answer that begins meanwhile is *text*, held to it by a grammar."""
    start = Service.start

    async def forced(self: Service, request: GenerateRequest, *args: Any, **options: Any) -> Run:
        grammar = f"root ::= {json.dumps(text, ensure_ascii=False)}"
        sampling = replace(request.sampling, grammar=grammar)
        return await start(self, replace(request, sampling=sampling), *args, **options)

    with mock.patch.object(Service, "start", forced):
        yield


@contextlib.contextmanager
def on_cancel(work: Callable[[], object]) -> Generator[None]:
    """``POST /cancel/...`` calls *work* on the server's event loop meanwhile, and nothing else."""

    def cancel(self: Cancelling, *_: object) -> str:
        work()
        return "ended"

    with mock.patch.object(Cancelling, "cancel", cancel):
        yield


class Gate:
    """Holds runs back before their token number *at*, until it is opened."""

    def __init__(self, at: int) -> None:
        self.at = at
        self.is_reached = threading.Event()
        """Whether a run waits at it."""
        self._opened: Future[None] = Future()

    def open(self) -> None:
        """Let them go on; idempotent."""
        if not self._opened.done():
            self._opened.set_result(None)

    async def wait(self) -> None:
        """Wait until it is opened."""
        self.is_reached.set()
        await asyncio.shield(asyncio.wrap_future(self._opened))


@contextlib.contextmanager
def gated(at: int) -> Generator[Gate]:
    """Runs wait before their token *at* until the gate is opened or this is left."""
    gate = Gate(at)
    following = Run.__anext__

    async def step(self: Run) -> Step:
        if self.n_tokens == gate.at:
            await gate.wait()
        return await following(self)

    with mock.patch.object(Run, "__anext__", step):
        try:
            yield gate
        finally:
            gate.open()


@contextlib.contextmanager
def loading() -> Generator[Gate]:
    """Models wait before they are loaded until the gate is opened, or this is left."""
    gate = Gate(0)
    load = ServedModel.load

    async def slow(self: ServedModel, *args: Any) -> None:
        await gate.wait()
        await load(self, *args)

    with mock.patch.object(ServedModel, "load", slow):
        try:
            yield gate
        finally:
            gate.open()
