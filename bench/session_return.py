"""How soon does a chat session that returns answer, and what does saving its cache cost the others?

A session has a history of --context tokens and a new message of 24. "Evaluated" is the time to its
first token where nothing is saved, "restored" where its file is in `states_dir` and no slot has it
(it is read, checked and put into a slot), "warm" where its slot still has it. The last rows have
another request that streams: its longest gap between two tokens, and the time of its next tokens,
from the end of a turn on, whose slot is copied between two steps and then written to a file, or is
not. Turns go through the server's own classes, without HTTP.
"""

from __future__ import annotations

import asyncio
import tempfile
from contextlib import asynccontextmanager
from itertools import pairwise
from typing import TYPE_CHECKING

from console import attempt, main
from msgspec import structs
from report import Timing
from runs import open_engine

from kqview.bench.sweep import prompt_ids
from kqview.server.apps.conversations import ChatService
from kqview.server.config import ChatSessions, Config
from kqview.server.live_config import LiveConfig
from kqview.server.models.run import GenerateRequest
from kqview.server.settings import Settings as ServerSettings
from kqview.server.web.access import Caller
from kqview.types import Sampling

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator, Sequence

    from console import ProgressLine
    from report import Row
    from settings import Settings

    from kqview import Engine
    from kqview.bench.records import LeftOut
    from kqview.server.models.run import Run

N_NEW = 24  # tokens of the message with which the session returns
N_STREAMED = 12  # tokens of the other request from the end of a turn on
# Name: most that the time may be, of that of evaluating the history: a fifth.
RETURNS = {"session-return-restored": 1 / 5, "session-return-warm": 1 / 5}
SAVES = ("session-save-gap", "session-save-tokens")
WEIGHTS = {**dict.fromkeys(RETURNS, 120.0), **dict.fromkeys(SAVES, 60.0)}
_CALLER = Caller("bench")


def measure(settings: Settings, line: ProgressLine) -> Iterator[Row | LeftOut]:
    """Measure the chosen rows with one engine of two slots."""
    names = settings.chosen(WEIGHTS)
    if not names:
        return
    with (
        tempfile.TemporaryDirectory() as folder,
        open_engine(settings, flash_attn=True, n_slots=2) as engine,
        asyncio.Runner() as runner,
    ):
        turns = _Turns(settings, engine, folder)
        runner.run(turns.open())
        try:
            for name in names:
                yield attempt(name, _measure, settings, line, runner.run, turns, name)
        finally:
            runner.run(turns.close())


class _Turns:
    """A session with a history in its file, and others of the same length without one."""

    def __init__(self, settings: Settings, engine: Engine, folder: str) -> None:
        self._now_s = settings.now_s
        self._engine = engine
        config = Config.of(ServerSettings())
        config = structs.replace(config, sessions=ChatSessions(states_dir=folder))
        self._service = ChatService(engine, LiveConfig(config))
        n_vocab = engine.model.n_vocab
        self._history = prompt_ids(settings.n_context, n_vocab)
        self._ids = [*self._history, *prompt_ids(N_NEW, n_vocab, seed=1)]
        self._n_turns = 0
        self.n_mb = 0.0

    async def open(self) -> None:
        """Evaluate the history once and let it be saved."""
        await self._service.open()
        async with self._turn("returns", self._history, is_saved=True):
            pass
        self.n_mb = (await self._saved()) / 1e6

    async def close(self) -> None:
        await self._service.close()

    @asynccontextmanager
    async def _turn(
        self, session: str, ids: Sequence[int], *, is_saved: bool, n_tokens: int = 1
    ) -> AsyncGenerator[Run]:
        """A turn after its first token; at the end its slot is saved, or not."""
        self._n_turns += 1
        request = GenerateRequest(
            prompt=ids, max_tokens=n_tokens, sampling=Sampling(temperature=0.0, ignore_eos=True),
            request_id=str(self._n_turns),
        )  # fmt: skip
        conversations, hold = self._service.conversations, self._service.budget.hold("bench")
        with hold:
            async with (
                conversations.turn("", session, hold) as turn,
                self._service.pool.using() as model,
                turn.seat(model, _CALLER, ids) as seat,
            ):
                run = await self._service.start(request, _CALLER, hold, model=model)
                if is_saved:
                    seat.run = run
                async with run:
                    await anext(run)
                    yield run

    async def _saved(self) -> int:
        """Wait until nothing is being saved; bytes of the files."""
        conversations = self._service.conversations
        with self._service.budget.hold("bench") as hold:
            async with conversations.turn("", "returns", hold):  # when its slot has been copied
                await conversations.states.written()
        return conversations.states.n_bytes

    # ---- to the first token

    async def evaluated_ms(self) -> float:
        """The session is new here."""
        return await self._first_ms("new", is_warm=False)

    async def restored_ms(self) -> float:
        """It has a file, and no slot has it."""
        return await self._first_ms("returns", is_warm=False)

    async def warm_ms(self) -> float:
        """A slot has it, up to the new message."""
        return await self._first_ms("returns", is_warm=True)

    async def _first_ms(self, session: str, *, is_warm: bool) -> float:
        for slot in self._engine.slots:
            slot.truncate(min(slot.n_tokens, len(self._history)) if is_warm else 0)
        start_s = self._now_s()
        async with self._turn(session, self._ids, is_saved=False):
            return (self._now_s() - start_s) * 1e3

    # ---- beside another request

    async def streamed_s(self, *, is_saved: bool) -> list[float]:
        """Times of the other request's tokens from the end of a turn on."""
        await self._saved()
        async with self._stream() as other:
            async with self._turn("returns", self._ids, is_saved=is_saved):
                await anext(other)
            stamps = [self._now_s()]
            for _ in range(N_STREAMED):
                await anext(other)
                stamps.append(self._now_s())
        return stamps

    @asynccontextmanager
    async def _stream(self) -> AsyncGenerator[Run]:
        request = GenerateRequest(
            prompt=prompt_ids(64, self._engine.model.n_vocab, seed=2), max_tokens=200,
            sampling=Sampling(temperature=0.0, ignore_eos=True), request_id="stream",
        )  # fmt: skip
        with self._service.budget.hold("stream") as hold:
            run = await self._service.start(request, _CALLER, hold)
            async with run:
                await anext(run)
                yield run


def _measure(
    settings: Settings,
    line: ProgressLine,
    run: Callable[[Coroutine[None, None, float]], float],
    turns: _Turns,
    name: str,
) -> Timing:
    target = settings.target(RETURNS.get(name))
    if name in RETURNS:
        ours = turns.restored_ms if name == "session-return-restored" else turns.warm_ms
        pairs = line.pairs(
            name, lambda: run(turns.evaluated_ms()), lambda: run(ours()),
            settings.pairs_for(target),
        )  # fmt: skip
        return Timing(
            name=name,
            what=f"its file of {turns.n_mb:.0f} MB restored" if "restored" in name else "warm slot",
            baseline="history evaluated",
            work=f"first token of a session with {settings.n_context} tokens of history",
            pairs=pairs,
            target=target,
            command=f"python bench/session_return.py --row {name} {settings.flags}",
        )

    async def beside_ms(is_saved: bool) -> float:
        stamps = await turns.streamed_s(is_saved=is_saved)
        gaps = [after - before for before, after in pairwise(stamps)]
        return (max(gaps) if name == "session-save-gap" else sum(gaps)) * 1e3

    pairs = line.pairs(
        name, lambda: run(beside_ms(False)), lambda: run(beside_ms(True)),
        settings.pairs_for(None),
    )  # fmt: skip
    is_gap = name == "session-save-gap"
    return Timing(
        name=name,
        what=f"a turn of {turns.n_mb:.0f} MB is saved",
        baseline="it is not saved",
        work=f"{'longest gap in' if is_gap else 'all of'} {N_STREAMED} tokens of another request",
        pairs=pairs,
        target=None,
        command=f"python bench/session_return.py --row {name} {settings.flags}",
    )


if __name__ == "__main__":
    main(__doc__, WEIGHTS, measure)
