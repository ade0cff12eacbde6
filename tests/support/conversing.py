"""Chat sessions without HTTP: a service, and turns that go through it as a dialect's do."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from kqview.server.api.wire.chat import ChatRequest, prepare, prompt_of
from kqview.server.apps.conversations import ChatService
from kqview.server.config import ChatSessions, Config
from kqview.server.live_config import LiveConfig
from kqview.server.settings import Settings
from kqview.server.web.access import Caller
from kqview.types import Sampling

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence

    from kqview import Engine
    from kqview.server.apps.conversations import TurnMessage
    from kqview.server.models.run import GenerateRequest

WITHIN_S = 60.0
OWNER = "owner"


def config_of(settings: Settings | None = None, **sessions: Any) -> Config:
    """A configuration whose table [sessions] is given."""
    config = Config.of(settings or Settings())
    return msgspec.structs.replace(config, sessions=ChatSessions(**sessions))


@dataclass
class Answered:
    """A turn that ended; *n_cached* of the *n_prompt* tokens of its prompt were in its slot."""

    text: str
    n_prompt: int
    n_cached: int
    n_left_out: int
    slot: int | None
    messages: Sequence[TurnMessage]


class Chats:
    """Sessions of one service."""

    def __init__(self, service: ChatService) -> None:
        self.service = service
        self._n = 0

    @property
    def engine(self) -> Engine:
        return self.service.pool.default.engine

    async def turn(
        self,
        session: str,
        prompt: str,
        *,
        owner: str = OWNER,
        n_tokens: int = 4,
        n_most: int = 10_000,
        is_left: bool = False,
    ) -> Answered:
        """One turn; with *is_left* its client leaves after the first token."""
        self._n += 1
        name, service, caller = f"{self._n}", self.service, Caller(owner, owner=owner)
        messages: Sequence[TurnMessage] = ()

        def chat(history: Sequence[TurnMessage]) -> ChatRequest:
            said = [*msgspec.to_builtins(history), {"role": "user", "content": prompt}]
            sampling = Sampling(temperature=0.0, ignore_eos=True)
            return ChatRequest(
                messages=said, sampling=sampling, request_id=name, max_tokens=n_tokens
            )

        with service.budget.hold(owner) as hold:
            async with (
                service.pool.using() as model,
                service.conversations.turn(owner, session, hold) as turn,
            ):
                engine, messages = model.engine, turn.messages
                n_most = min(n_most, model.max_context - n_tokens)
                history = turn.fit(lambda said: len(prompt_of(engine, chat(said))[0]), n_most)
                request: GenerateRequest = prepare(engine, chat(history)).request
                assert not isinstance(request.prompt, str)
                async with turn.seat(model, caller, request.prompt) as seat:
                    run = await service.start(request, caller, hold, model=model)
                    seat.run = run
                    async with run:
                        async for _ in run:
                            if is_left:
                                run.end()
                await turn.append(prompt, run.text, model=model.id)
                usage = run.usage
                return Answered(
                    run.text, usage.prompt_tokens, usage.cached_tokens, turn.n_left_out,
                    run.generations[0].slot, messages,
                )  # fmt: skip

    async def saved(self, *sessions: str, owner: str = OWNER) -> None:
        """Wait until the sessions' slots are copied, and written."""
        for session in sessions:
            with self.service.budget.hold(owner) as hold:
                async with self.service.conversations.turn(owner, session, hold):
                    pass
        await self.service.conversations.states.written()

    def clear(self) -> None:
        """Empty all slots."""
        for slot in self.engine.slots:
            slot.clear()


@contextlib.asynccontextmanager
async def chats(
    engine: Engine, config: Config | None = None, **sessions: Any
) -> AsyncGenerator[Chats]:
    """Open a service of *engine* whose table [sessions] is given, and close it."""
    async with asyncio.timeout(WITHIN_S):
        service = ChatService(engine, LiveConfig(config or config_of(**sessions)))
        await service.open()
        try:
            yield Chats(service)
        finally:
            await service.close()
