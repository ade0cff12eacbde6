"""The pool of models: loaded on first use, under a budget of memory, without a network."""

from __future__ import annotations

import asyncio
import contextlib
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

import kqview.server.models.pool
from kqview import Engine, Sampling
from kqview.errors import CapacityError, KqviewError
from kqview.server import Settings
from kqview.server.config import Config
from kqview.server.errors import ModelChanged, NoModel, NotSupported, ShuttingDown, UnknownModel
from kqview.server.live_config import LiveConfig
from kqview.server.models.events_bus import ModelFailed, ModelLoaded, ModelLoading, ModelUnloaded
from kqview.server.models.run import GenerateRequest
from kqview.server.models.service import Service
from kqview.server.web.access import Caller
from tests.support.pool import NAMES, WITHIN_S, config_of, gated, n_vocab, write_models
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator
    from pathlib import Path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_models(tmp_path_factory.mktemp("models"))


@contextlib.asynccontextmanager
async def opened(config: Config, engine: Engine | None = None) -> AsyncGenerator[Service]:
    service = Service(engine, LiveConfig(config))
    await service.open()
    try:
        yield service
    finally:
        await service.close()


async def use(service: Service, *names: str) -> None:
    for name in names:
        async with service.pool.using(name) as served:
            assert served.engine.model.n_vocab == n_vocab(name)


def loaded(service: Service) -> set[str]:
    return {served.id for served in service.pool if served.loaded is not None}


def is_waiting(service: Service, name: str) -> bool:
    """Whether the model waits for room: its need is known and not yet held."""
    served = service.pool.find(name)
    return served.state == "loading" and bool(served.estimated_bytes) and not served.held_bytes


# ---- loading


async def test_model_is_loaded_by_its_first_use_and_its_load_is_told(folder: Path):
    async with opened(config_of(folder)) as service:
        told: list[Any] = []
        service.pool.listeners.add(told.append)
        assert not loaded(service)
        await use(service, "bob", "bob")
        served = service.pool.find("bob")
        assert (loaded(service), served.state, served.progress) == ({"bob"}, "loaded", 1.0)
        assert served.n_loads == 1
        fractions = [one.progress for one in told if isinstance(one, ModelLoading)]
        assert fractions == sorted(fractions)
        assert (fractions[0], fractions[-1]) == (0.0, 1.0)
        [done] = [one for one in told if isinstance(one, ModelLoaded)]
        assert (done.model_id, done.memory_bytes) == ("bob", served.held_bytes)


async def test_name_that_is_no_model_is_refused_and_none_is_the_default(folder: Path):
    async with opened(config_of(folder)) as service:
        with pytest.raises(UnknownModel, match=r"'eve'.*'ada', 'bob', 'cleo', 'dan'"):
            service.pool.find("eve")
        assert service.pool.find(None).id == "ada"
        assert service.pool.find("cleo/brief").id == "cleo"
    async with opened(config_of(folder, "bob")) as service:
        assert service.pool.find("gpt-4").id == "bob"


async def test_requests_share_the_load_that_they_wait_for(
    folder: Path, monkeypatch: pytest.MonkeyPatch
):
    async with opened(config_of(folder)) as service:
        gate = gated(monkeypatch)
        waiting = [asyncio.create_task(use(service, "ada")) for _ in range(5)]
        await asyncio.to_thread(gate.wait)
        served = service.pool.find("ada")
        assert (served.state, served.progress, served.work.n_uses) == ("loading", 0.5, 5)
        gate.open()
        await asyncio.gather(*waiting)
        assert (len(gate.begun), served.n_loads, served.work.n_uses) == (1, 1, 0)


async def test_models_load_beside_each_other(folder: Path, monkeypatch: pytest.MonkeyPatch):
    async with opened(config_of(folder)) as service:
        gate = gated(monkeypatch)
        waiting = [asyncio.create_task(use(service, name)) for name in ("ada", "bob")]
        await until(lambda: len(gate.begun) == 2)
        gate.open()
        await asyncio.gather(*waiting)
        assert loaded(service) == {"ada", "bob"}


async def test_load_is_finished_though_its_client_left(
    folder: Path, monkeypatch: pytest.MonkeyPatch
):
    async with opened(config_of(folder)) as service:
        gate = gated(monkeypatch)
        leaving = asyncio.create_task(use(service, "ada"))
        await asyncio.to_thread(gate.wait)
        leaving.cancel()
        await asyncio.gather(leaving, return_exceptions=True)
        gate.open()
        await until(lambda: loaded(service) == {"ada"})
        assert service.pool.find("ada").work.n_uses == 0


async def test_server_that_ends_does_not_wait_for_room(folder: Path):
    service = Service(None, LiveConfig(config_of(folder, model_wait_s=600)))
    await service.open()
    async with service.pool.using("ada"), service.pool.using("bob"):
        waiting = asyncio.create_task(use(service, "cleo"))
        await until(lambda: is_waiting(service, "cleo"))
        await service.close()
        with pytest.raises(ShuttingDown):
            await waiting


# ---- memory


async def test_model_unused_for_longest_leaves_for_another(folder: Path):
    async with opened(config_of(folder)) as service:
        told: list[Any] = []
        service.pool.listeners.add(told.append)
        await use(service, "ada", "bob", "ada", "cleo")
        assert loaded(service) == {"ada", "cleo"}
        await use(service, "dan")
        assert loaded(service) == {"cleo", "dan"}
        left = [(one.model_id, one.reason) for one in told if isinstance(one, ModelUnloaded)]
        assert left == [("bob", "memory"), ("ada", "memory")]
        assert service.pool.held_bytes <= (service.pool.budget_bytes or 0)


async def test_model_in_use_never_leaves_and_the_refusal_names_those_in_use(folder: Path):
    async with opened(config_of(folder, model_wait_s=0.05)) as service:
        async with service.pool.using("ada"), service.pool.using("bob"):
            with pytest.raises(CapacityError, match=r"ada \(1 requests\), bob \(1 requests\)"):
                await use(service, "cleo")
            assert loaded(service) == {"ada", "bob"}
            assert service.pool.find("cleo").state == "unloaded"
        await use(service, "cleo")  # no back-off: the model is not at fault


async def test_load_that_waits_for_room_ends_with_its_last_client(folder: Path):
    async with opened(config_of(folder, model_wait_s=600)) as service:
        async with service.pool.using("ada"), service.pool.using("bob"):
            waiting = asyncio.create_task(use(service, "cleo"))
            await until(lambda: is_waiting(service, "cleo"))
            waiting.cancel()
            await until(lambda: service.pool.find("cleo").state == "unloaded")
        assert loaded(service) == {"ada", "bob"}


async def test_model_that_can_never_fit_is_refused_before_anything_changes(
    folder: Path, monkeypatch: pytest.MonkeyPatch
):
    large = {"cleo": {"n_ctx": 8192}, "ada": {"pinned": True}}
    async with opened(config_of(folder, models=large)) as service:
        await use(service, "bob")
        gate = gated(monkeypatch)
        with pytest.raises(CapacityError, match=r"models_budget_bytes\), and pinned ones take"):
            await use(service, "cleo")
        assert (loaded(service), gate.begun) == ({"ada", "bob"}, [])
        # Without its weights: the estimate reads the file's header alone.
        assert service.pool.find("cleo").estimated_bytes is not None
        assert service.pool.find("cleo").measured_bytes is None


async def test_estimate_is_no_less_than_what_a_model_takes(folder: Path):
    async with opened(config_of(folder)) as service, service.pool.using("ada") as served:
        assert served.estimated_bytes is not None
        assert served.measured_bytes is not None
        assert served.measured_bytes == served.engine.memory_bytes
        assert served.measured_bytes > served.engine.model.size_bytes
        assert served.measured_bytes <= served.estimated_bytes <= 2 * served.measured_bytes


async def test_model_that_takes_more_than_estimated_makes_idle_ones_leave(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    async with opened(config_of(folder)) as service:
        await use(service, "ada", "bob")
        cleo = service.pool.find("cleo")
        monkeypatch.setattr(cleo, "estimate", lambda: 1)
        budget = service.pool.held_bytes + 2
        monkeypatch.setattr(type(service.pool), "budget_bytes", property(lambda _: budget))
        await use(service, "cleo")
        assert loaded(service) == {"bob", "cleo"}
        assert "over models_budget_bytes" in caplog.text
        await service.close()


async def test_pinned_model_is_loaded_at_the_start_and_never_leaves(folder: Path):
    async with opened(config_of(folder, models={"dan": {"pinned": True}})) as service:
        assert loaded(service) == {"dan"}
        await use(service, "ada", "bob", "cleo")
        assert loaded(service) == {"cleo", "dan"}


async def test_random_requests_for_more_models_than_fit_are_all_answered(folder: Path):
    async with opened(config_of(folder, model_wait_s=WITHIN_S)) as service:
        pool = service.pool
        most: list[int] = []
        pool.listeners.add(lambda _: most.append(pool.held_bytes))

        async def ask(i: int) -> None:
            name = NAMES[(i * 7 + i // 3) % len(NAMES)]
            request = GenerateRequest(
                prompt="abc", max_tokens=4, sampling=Sampling(ignore_eos=True), request_id=str(i)
            )
            async with pool.using(name) as model, await service.start(request, model=model) as run:
                assert len([step async for step in run]) == 4
                assert model.engine.model.n_vocab == n_vocab(name)

        await asyncio.gather(*map(ask, range(30)))
        assert max(most) <= (pool.budget_bytes or 0)
        assert sum(served.n_loads for served in pool) >= len(NAMES)
        assert not any(served.work.n_uses for served in pool)


# ---- failing


async def test_failing_model_says_why_and_takes_no_other_down(
    folder: Path, monkeypatch: pytest.MonkeyPatch
):
    config = config_of(folder, "ada", "broken")
    async with opened(config) as service:
        told: list[Any] = []
        service.pool.listeners.add(told.append)
        async with service.pool.using("ada"):
            with pytest.raises(NoModel, match=r"'broken' cannot be loaded: .*; it is tried again"):
                await use(service, "broken")
        broken = service.pool.find("broken")
        assert (broken.state, broken.held_bytes) == ("failed", 0)
        assert [one.model_id for one in told if isinstance(one, ModelFailed)] == ["broken"]
        assert loaded(service) == {"ada"}
        # Shortly after, it is refused without another attempt.
        monkeypatch.setattr(broken, "estimate", lambda: pytest.fail("it was tried"))
        with pytest.raises(NoModel) as refused:
            await use(service, "broken")
        assert refused.value.retry_after_s == 1


async def test_model_that_failed_is_tried_again_after_a_while(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(kqview.server.models.pool, "_FIRST_RETRY_S", 0.001)
    file = tmp_path / "bob.gguf"
    file.write_bytes((folder / "broken.gguf").read_bytes())
    config = config_of(folder, models={"bob": {"path": str(file)}})
    async with opened(config) as service:
        with pytest.raises(NoModel):
            await use(service, "bob")
        file.write_bytes((folder / "bob.gguf").read_bytes())
        await asyncio.sleep(0.01)
        await use(service, "bob")
        assert service.pool.find("bob").error is None


async def test_pinned_model_that_fails_at_the_start_leaves_the_others_serving(folder: Path):
    config = config_of(folder, "ada", "broken", models={"broken": {"pinned": True}})
    async with opened(config) as service:
        assert service.pool.find("broken").state == "failed"
        await use(service, "ada")


# ---- an administrator, and a configuration that is read again


async def test_unload_ends_runs_and_the_next_request_loads_again(folder: Path):
    async with opened(config_of(folder)) as service:
        request = GenerateRequest(
            prompt="abc", max_tokens=400, sampling=Sampling(ignore_eos=True), request_id="r"
        )
        async with service.pool.using("ada") as model, service.pool.using("bob") as other:
            run = await service.start(request, model=model)
            beside = await service.start(
                request, model=other, caller=Caller("other", owner="other")
            )
            async with run, beside:
                await service.pool.unload_now(model)
                with pytest.raises(ModelChanged):
                    async for _ in run:
                        pass
                assert (await anext(beside)).token.text is not None
        await use(service, "ada")
        assert service.pool.find("ada").n_loads == 2


async def test_unload_ends_a_request_that_has_not_begun_to_generate(folder: Path):
    async def prompt_of_model_that_leaves(service: Service) -> None:
        async with service.pool.using("ada") as model:
            engine = model.engine
            await service.pool.unload_now(model)
            engine.apply_chat_template([{"role": "user", "content": "abc"}])

    async with opened(config_of(folder)) as service:
        with pytest.raises(ModelChanged):
            await prompt_of_model_that_leaves(service)


async def test_model_that_comes_and_goes_keeps_its_counters_in_little(folder: Path):
    request = GenerateRequest(prompt="abc", max_tokens=2, sampling=Sampling(), request_id="r")
    async with opened(config_of(folder)) as service:
        for n in range(1, 6):
            async with (
                service.pool.using("ada") as model,
                await service.start(request, model=model) as run,
            ):
                async for _ in run:
                    pass
            await service.pool.unload_now(model)
            readings = model.stats()
            assert len(readings) <= 2
            assert sum(one.n_requests for one in readings) == n


async def test_load_that_is_given_up_is_told(folder: Path):
    async with opened(config_of(folder, n_fit=1, model_wait_s=0.05)) as service:
        told: list[Any] = []
        async with service.pool.using("ada"):
            service.pool.listeners.add(told.append)
            with pytest.raises(CapacityError):
                await use(service, "bob")
        assert [type(one) for one in told] == [ModelLoading, ModelFailed]
        await use(service, "bob")  # it may be tried again at once


async def test_engine_of_the_caller_is_not_unloaded():
    with Engine.demo(n_threads=1, n_ctx=256) as engine:
        async with opened(Config.of(Settings()), engine) as service:
            with pytest.raises(NotSupported):
                await service.pool.unload_now(service.pool.default)
            assert service.pool.default.loaded is engine


async def test_only_model_that_was_unloaded_is_loaded_by_the_next_request(folder: Path):
    async with opened(config_of(folder, "ada")) as service:
        await service.pool.unload_now(service.pool.default)
        assert not loaded(service)
        assert service.pool.is_ready
        await use(service, "ada")


async def test_switch_of_the_only_model_is_told(folder: Path):
    config = config_of(folder, "ada", models_dir=str(folder))
    async with opened(config) as service:
        told: list[Any] = []
        service.pool.listeners.add(told.append)
        await service.pool.switch("bob.gguf", {})
        with pytest.raises(KqviewError):
            await service.pool.switch("broken.gguf", {})
        kinds: list[type] = [type(one) for one in told]
        assert kinds == [ModelLoading, ModelLoaded, ModelLoading, ModelFailed]
        assert service.pool.default.engine.model.n_vocab == n_vocab("bob")


async def test_default_model_is_the_one_that_was_switched_to(folder: Path):
    config = config_of(folder, "ada", "bob", models_dir=str(folder))
    async with opened(config) as service:
        engine = await service.pool.switch("bob", {"n_ctx": 256})
        assert (service.pool.default.id, engine.n_ctx) == ("bob", 256)
        # A file of the folder is one more model.
        engine = await service.pool.switch("cleo.gguf", {})
        assert engine.model.n_vocab == n_vocab("cleo")
        assert [served.id for served in service.pool] == ["ada", "bob", "cleo.gguf"]
        with pytest.raises(NoModel):
            await service.pool.switch("broken.gguf", {})
        assert service.pool.default.id == "cleo.gguf"
        assert [served.id for served in service.pool] == ["ada", "bob", "cleo.gguf"]


async def test_new_configuration_brings_models_and_removes_them_when_idle(folder: Path):
    before = config_of(folder, "ada", "bob")
    after = config_of(folder, "bob", "cleo", models={"bob": {"n_ctx": 256}})
    async with opened(before) as service:
        pool = service.pool
        await use(service, "bob")
        async with pool.using("ada") as ada:
            service.live.replace(after)
            pool.reconfigure(after)
            assert [served.id for served in pool] == ["bob", "cleo"]
            assert pool.default.id == "bob"
            with pytest.raises(UnknownModel):
                pool.find("ada")
            assert ada.engine.tokenize("a")  # still in use
        await until(lambda: ada.loaded is None)
        assert pool.find("bob").engine.n_ctx == 512  # other options count from the next load on
        await pool.unload_now(pool.find("bob"))
        await use(service, "bob", "cleo")
        assert pool.find("bob").engine.n_ctx == 256


async def test_stall_of_any_model_is_seen(folder: Path, monkeypatch: pytest.MonkeyPatch):
    async with opened(config_of(folder)) as service:
        await use(service, "ada", "bob")
        assert service.pool.stall() is None
        health = SimpleNamespace(stall=lambda limit_s: f"silent for {limit_s:g} s")
        monkeypatch.setattr(service.pool.find("bob").engine, "health", lambda: health)
        assert service.pool.stall(2) == "silent for 120 s"
