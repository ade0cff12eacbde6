"""Service: what is admitted, what is refused, and what becomes of everything when it ends."""

from __future__ import annotations

import asyncio
import shutil
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest

from kqview.demo import MODEL_PATH
from kqview.errors import (
    InvalidToken,
    KqviewError,
    ModelLoadError,
    PromptTooLong,
    QueueFull,
    RequestError,
)
from kqview.server import Settings, create_app
from kqview.server.errors import NoModel, ShuttingDown, TimedOut
from kqview.server.models.run import AttentionWanted
from kqview.server.models.service import OFFLOAD_BYTES, Service
from kqview.server.web.budget import uncounted
from tests.server.test_run import busy, request, wait_free
from tests.support.waiting import until

if TYPE_CHECKING:
    from pathlib import Path

    from kqview import Engine

WITHIN_S = 60.0  # until a test fails; no measure of anything


# ---- text


@pytest.mark.parametrize("text", ["", "Tom has", "é🙂 ünï", "<|im_start|>user\n", "a" * 40_000])
async def test_pieces_of_a_text_join_to_it(engine: Engine, text: str):
    service = Service(engine, Settings())
    pieces = await service.pool.default.texts.tokenize(text, add_special=False, hold=uncounted())
    assert "".join(piece for _, piece in pieces) == text
    assert [id_ for id_, _ in pieces] == engine.tokenize(text, add_special=False)
    ids = [id_ for id_, _ in pieces]
    assert await service.pool.default.texts.detokenize(ids, client="") == text


async def test_long_text_does_not_hold_the_event_loop_up(engine: Engine):
    service = Service(engine, Settings())
    longest_s = 0.0

    async def tick() -> None:
        nonlocal longest_s
        while True:
            # Processor time of this thread: other work of the machine does not count.
            started_s = time.thread_time()
            await asyncio.sleep(0)
            longest_s = max(longest_s, time.thread_time() - started_s)

    ticking = asyncio.create_task(tick())
    started_s = time.process_time()
    await service.pool.default.texts.tokenize(
        "word " * 300_000, add_special=False, hold=uncounted()
    )
    took_s = time.process_time() - started_s
    ticking.cancel()
    assert longest_s < took_s / 10


async def test_work_goes_to_another_thread_where_it_is_large(engine: Engine):
    service = Service(engine, Settings())
    here = threading.get_ident()
    assert await service.offload(OFFLOAD_BYTES - 1, threading.get_ident) == here
    assert await service.offload(OFFLOAD_BYTES, threading.get_ident) != here


# ---- admission


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ({"prompt": []}, RequestError),
        ({"prompt": [768]}, InvalidToken),
        ({"prompt": [2**70]}, RequestError),
        ({"prompt": [1] * 513}, PromptTooLong),
        ({"prompt": "word " * 40_000}, PromptTooLong),
        ({"n_samples": 0}, RequestError),
        ({"n_samples": 17}, RequestError),
        ({"max_tokens": 0}, RequestError),
    ],
)
async def test_request_that_cannot_work_is_refused_and_leaves_nothing(
    engine: Engine, given: dict[str, Any], error: type[Exception]
):
    service = Service(engine, Settings())
    with pytest.raises(error):
        await service.start(request(**given))
    assert not service.runs
    assert busy(engine) == 0


async def test_failure_of_a_later_sample_cancels_the_earlier_ones(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
):
    service = Service(engine, Settings())
    generate = engine.generate
    made: list[Any] = []

    def refuse_the_second(*args: Any, **options: Any) -> Any:
        if made:
            raise QueueFull("full")
        made.append(generate(*args, **options))
        return made[0]

    monkeypatch.setattr(engine, "generate", refuse_the_second)
    with pytest.raises(QueueFull):
        await service.start(request(n_samples=2))
    assert not service.runs
    await asyncio.to_thread(wait_free, engine)


async def test_name_in_use_is_refused_and_free_again_afterwards(engine: Engine):
    service = Service(engine, Settings())
    async with await service.start(request()):
        with pytest.raises(RequestError, match="in use"):
            await service.start(request())
    async with await service.start(request(max_tokens=1)):
        pass


async def test_full_queue_is_said_before_a_long_prompt_is_tokenized(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
):
    service = Service(engine, Settings(max_running=1))
    async with await service.start(request()):

        def fail(*args: Any, **options: Any) -> Any:
            raise AssertionError("tokenized for nothing")

        monkeypatch.setattr(engine, "tokenize", fail)
        with pytest.raises(QueueFull):
            await service.start(request(prompt="word " * 100, request_id="two"))


async def test_no_more_than_the_limit_are_admitted_while_prompts_are_tokenized(engine: Engine):
    service = Service(engine, Settings(max_running=2))
    long = "word " * 8000
    requests = [
        service.start(request(prompt=long[: 40_000 + i], request_id=str(i))) for i in range(4)
    ]
    results = await asyncio.gather(*requests, return_exceptions=True)
    assert all(isinstance(one, PromptTooLong | QueueFull) for one in results)
    fits = [service.start(request(prompt=[5], request_id=str(i))) for i in range(4)]
    results = await asyncio.gather(*fits, return_exceptions=True)
    assert [isinstance(one, QueueFull) for one in results] == [False, False, True, True]
    for run in list(service.runs.values()):
        await run.aclose()


async def test_deadline_ends_a_run(engine: Engine):
    service = Service(engine, Settings(request_timeout_s=0.1))
    async with await service.start(request(n_samples=8)) as run, asyncio.timeout(WITHIN_S):
        await until(lambda: run.error)  # nobody reads, so it cannot end before
        with pytest.raises(TimedOut):
            async for _ in run:
                pass
    assert busy(engine) == 0


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"max_tokens": 0}, "^max_length is 0"),
        ({"n_samples": 99}, "^num_samples is 99"),
        ({"attention": AttentionWanted(layers=())}, "^attention_layers is empty"),
        ({"attention": AttentionWanted(format="sparse", top_k=0)}, "^sparse_top_k is 0"),
        ({"prompt": []}, "^prompt has no tokens"),
    ],
    ids=str,
)
async def test_message_names_the_clients_field_and_no_function(
    engine: Engine, wrong: dict[str, Any], says: str
):
    names = {
        "max_tokens": "max_length", "n_samples": "num_samples", "layers": "attention_layers",
        "top_k": "sparse_top_k",
    }  # fmt: skip
    with pytest.raises(RequestError, match=says):
        await Service(engine, Settings()).start(request(names=names, **wrong))


async def test_deadline_does_not_outlive_its_run(engine: Engine):
    service = Service(engine, Settings(request_timeout_s=600))
    async with await service.start(request(max_tokens=1)) as run:
        _ = [step async for step in run]
    assert run.error is None
    assert run.deadline is not None
    assert run.deadline.cancelled()


async def test_runs_are_found_by_name_and_key(engine: Engine):
    service = Service(engine, Settings())
    async with (
        await service.start(request(key="k")) as one,
        await service.start(request(request_id="two")) as two,
    ):
        assert service.find(request_id="one") == [one]
        assert service.find(key="k") == [one]
        assert service.find() == [two]
        assert service.find(request_id="three") == []


# ---- the end


async def test_drain_ends_runs_refuses_others_and_is_bounded(engine: Engine):
    service = Service(engine, Settings())
    run = await service.start(request(n_samples=8))

    async def consume() -> str:
        async with run:
            try:
                async for _ in run:
                    pass
            except ShuttingDown:
                return "told"
        return "not told"

    consuming = asyncio.create_task(consume())
    await asyncio.sleep(0)
    async with asyncio.timeout(WITHIN_S):
        await service.drain(3.0)
    assert await consuming == "told"
    assert service.pool.is_closing
    assert not service.pool.is_ready
    with pytest.raises(ShuttingDown):
        await service.start(request())


async def test_drain_does_not_wait_for_who_does_not_listen(engine: Engine):
    service = Service(engine, Settings())
    run = await service.start(request())

    async def never() -> None:
        await asyncio.Event().wait()

    service.on_drain.add(never)
    started_s = asyncio.get_running_loop().time()
    async with asyncio.timeout(WITHIN_S):
        await service.drain(0.2)
    assert asyncio.get_running_loop().time() - started_s > 0.1
    await run.aclose()


async def test_close_closes_its_own_engine_and_not_that_of_the_caller(engine: Engine):
    service = Service(engine, Settings())
    await service.open()
    await service.close()
    assert engine.generate("Tom", max_tokens=1).read() is not None
    own = Service(None, Settings(demo=True, n_threads=1))
    await own.open()
    opened = own.pool.default.engine
    await own.close()
    with pytest.raises(Exception, match="closed"):
        opened.generate("Tom", max_tokens=1)


def test_app_without_a_model_is_refused():
    with pytest.raises(RequestError, match="neither an engine nor a model"):
        create_app()
    with pytest.raises(RequestError, match="neither an engine nor a model"):
        create_app(Settings())


# ---- the model


@pytest.fixture
def models(tmp_path: Path) -> Path:
    shutil.copy(MODEL_PATH, tmp_path / "b.gguf")
    (tmp_path / "broken.gguf").write_bytes(b"GGUF" + bytes(100))
    (tmp_path / "notes.txt").write_text("no model")
    return tmp_path


async def switching(models: Path | None) -> Service:
    folder = str(models) if models is not None else None
    settings = Settings(demo=True, models_dir=folder, n_threads=1)
    service = Service(None, settings)
    await service.open()
    return service


@pytest.mark.parametrize(
    ("name", "options", "error"),
    [
        ("broken.gguf", {}, ModelLoadError),
        ("b.gguf", {"n_slots": 257}, RequestError),
        ("b.gguf", {"n_ctx": 2**30}, KqviewError),
    ],
)
async def test_model_that_is_refused_leaves_the_old_one_and_its_requests_alone(
    models: Path, name: str, options: dict[str, int], error: type[Exception]
):
    # Issue 10: the old model was closed before the new one was looked at.
    service = await switching(models)
    try:
        before = service.pool.default.engine
        run = await service.start(request(max_tokens=30))
        with pytest.raises(error):
            await service.pool.switch(name, options)
        assert service.pool.default.engine is before
        async with run:
            assert len([step async for step in run]) == 30
    finally:
        await service.close()


@pytest.mark.parametrize("is_own", [True, False])
async def test_old_model_is_opened_again_when_the_new_one_fails_after_all(
    models: Path, monkeypatch: pytest.MonkeyPatch, engine: Engine, *, is_own: bool
):
    settings = Settings(demo=True, models_dir=str(models), n_threads=1, n_ctx=512)
    service = Service(None if is_own else engine, settings)
    await service.open()
    monkeypatch.setattr("kqview.server.models.model_entry.check_opening", lambda *_, **__: None)
    try:
        with pytest.raises(ModelLoadError):
            await service.pool.switch("broken.gguf", {})
        assert (service.pool.default.engine is engine) is not is_own
        assert service.pool.default.name == ("demo" if is_own else "kqview demo")
        assert service.pool.default.engine.n_ctx == (512 if is_own else engine.n_ctx)
        async with await service.start(request(max_tokens=3)) as run:
            assert len([step async for step in run]) == 3
    finally:
        await service.close()


async def test_without_old_and_new_model_there_is_none_until_the_next_one(
    models: Path, monkeypatch: pytest.MonkeyPatch
):
    service = await switching(models)
    with monkeypatch.context() as patch:
        patch.setattr("kqview.server.models.model_entry.check_opening", lambda *_, **__: None)
        patch.setattr(
            service.pool.default, "path", str(models / "broken.gguf")
        )  # as if it had changed
        with pytest.raises(ModelLoadError):
            await service.pool.switch("broken.gguf", {})
    try:
        assert not service.pool.is_ready
        with pytest.raises(NoModel):
            await service.start(request())
        await service.pool.switch("b.gguf", {})
        async with await service.start(request(max_tokens=1)) as run:
            _ = [step async for step in run]
    finally:
        await service.close()
