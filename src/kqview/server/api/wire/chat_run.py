"""Chat runs: what the routes of messages and of responses share, from the request to its tokens."""

from collections.abc import Callable
from typing import Any, Final, NamedTuple

from kqview.chat.turn import Reading
from kqview.engine import Engine
from kqview.server.api.wire.attention_field import AttentionWriter, Lists
from kqview.server.api.wire.chat_work import ChatRequest, ChatWork, prepare, prompt_of
from kqview.server.models.run import Run
from kqview.server.models.service import Call
from kqview.server.web.endpoint import DECODED_TIMES
from kqview.types import Token

# Templates may take seconds: their work is large enough for another thread.
_LARGE: Final = 2**20
_ID_BYTES: Final = 40  # of an id of a prompt, of which there are at most as many as bytes


class Started(NamedTuple):
    """A chat that runs: with which engine, and how its answer is read."""

    run: Run
    reading: Reading
    engine: Engine


async def started(call: Call, chat_of: Callable[[Engine], ChatRequest]) -> Started:
    """Begin a chat; raises as `prepare` and `Service.start`.

    Args:
        call: The request.
        chat_of: What it asks for, of the engine that answers; runs in another thread.
    """
    service = call.service
    engine = call.model.engine

    def prepared() -> ChatWork:
        return prepare(engine, chat_of(engine))

    with call.hold.part() as ids:  # a prompt that fits is small
        ids.take(_ID_BYTES * call.n_body_bytes)
        work = await service.converted(_LARGE, call.hold, prepared)
        if work.request.dialogue is not None:  # messages that are not the body's own, for mods
            call.hold.take(DECODED_TIMES * call.n_body_bytes)
        run = await service.start(work.request, call.caller, call.hold, model=call.model)
    return Started(run, work.reading, engine)


async def finished(
    call: Call, run: Run, attention: AttentionWriter, feed: Callable[[Token], Any]
) -> Lists:
    """Wait for the end of *run*, giving each token to *feed*; returns its lists of attention."""
    service = call.service
    lists = Lists(call.hold, service.settings.max_reply_bytes)
    async with run:
        async for block in run.prompt_blocks():
            await service.offload(_LARGE, lists.prompt, attention, run, block)
            del block  # the pool wants its memory back
        async for step in run.final_steps():
            feed(step.token)
            await service.offload(step.n_bytes, lists.token, attention, run, step)
            del step
    return lists


async def counted(call: Call, chat: Callable[[], ChatRequest]) -> int:
    """How many tokens the prompt of a chat has; raises as `prepare`."""
    engine = call.model.engine

    def count() -> int:
        ids, _ = prompt_of(engine, chat())
        return len(ids)

    with call.hold.part() as ids:
        ids.take(_ID_BYTES * call.n_body_bytes)
        return await call.service.converted(_LARGE, call.hold, count)
