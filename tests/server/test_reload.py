"""A configuration that changes while the server runs: what counts at once, and what never stops."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import re
import shutil
import signal
import ssl
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from kqview import Engine
from kqview.cli import serving
from kqview.cli.serving import Reloads
from kqview.demo import MODEL_PATH
from kqview.errors import RequestError
from kqview.server import Settings, create_app
from kqview.server.apps.mia4 import routes as mia4_routes
from kqview.server.config import ChatSessions, Config, Llm, ModelConfig, Persona, Ui
from kqview.server.config_file import load
from kqview.server.live_config import LiveConfig, reloaded
from kqview.server.models.run import ModWanted
from kqview.server.settings_table import rows_of
from tests.server.clients import WAITS_S, read_to_close, websocket
from tests.support import mia4
from tests.support.serve_process import WITHIN_S, Parent, started, until
from tests.unit.test_heads import FILE

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kqview.server.app import App
    from tests.support.serving import Serve

pytestmark = pytest.mark.full

PAGE = Path(__file__).parents[2] / "src/kqview/server/CONFIGURATION.md"


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    """The demo model, with two slots."""
    with Engine.demo(n_threads=1, n_slots=2) as engine:
        yield engine


# ---- what changes


def config_of(**given: Any) -> Config:
    """A configuration of these settings."""
    return Config.of(Settings(**given))


OTHERS = (
    True, False, 7, 7.5, "x", "none", "probs", "aggregated", "all", "on", "chatml", "cls", "kqview",
    ("a.org",), ("top_k=3",), ("https://a.org",), ("10.0.0.0/8",),
)  # fmt: skip


def another(spec: dataclasses.Field[Any], head_file: Path) -> Any:
    """A value that a setting may have, and not by default."""
    for value in (*OTHERS, (str(head_file),)):
        with contextlib.suppress(RequestError):
            if rows_of(Settings)[spec.name].checked(value) != spec.default:
                return value
    raise AssertionError(f"no other value of {spec.name}")


@pytest.mark.parametrize("spec", dataclasses.fields(Settings), ids=lambda spec: spec.name)
def test_setting_counts_at_once_unless_it_needs_a_restart(
    spec: dataclasses.Field[Any], tmp_path: Path
):
    FILE.save(tmp_path / "heads.json")
    old = Config.of(Settings())
    given = {spec.name: another(spec, tmp_path / "heads.json")}
    new = Config(settings=Settings(**given), models=old.models)
    merged, done = reloaded(old, new)
    key = (f"server.{spec.name}",)
    if spec.metadata["restart"]:
        assert (merged, done.changed, done.needs_restart) == (old, (), key)
    else:
        assert (merged, done.changed, done.needs_restart) == (new, key, ())


def test_tables_are_replaced_but_for_the_files_of_sessions():
    old = Config(settings=Settings(), models={"a": ModelConfig(), "b": ModelConfig()})
    new = Config(
        settings=Settings(), models={"b": ModelConfig(), "c": ModelConfig(n_ctx=512)},
        llm=Llm(stop=("END",)),
        sessions=ChatSessions(ttl_s=5, database="x.db"), ui=Ui(mode="admin"),
        persona=Persona(file="p"),
    )  # fmt: skip
    merged, done = reloaded(old, new)
    assert done.changed == ("models", "llm", "sessions", "ui", "persona")
    assert done.needs_restart == ("sessions.database",)
    assert merged.sessions == ChatSessions(ttl_s=5)
    assert merged.models == new.models
    assert str(done) == (
        "changed models, llm, sessions, ui, persona; a restart is needed for sessions.database"
    )
    turned = Config(settings=Settings(), models={"b": ModelConfig(), "a": ModelConfig()})
    assert reloaded(old, turned)[1].changed == ("models",)
    assert str(reloaded(old, old)[1]) == "nothing changed"


def test_one_model_and_several_need_a_restart_to_take_turns():
    one = config_of(model="m.gguf")
    several = Config(settings=Settings(), models={"a": ModelConfig(), "b": ModelConfig()})
    for old, new in ((one, several), (several, one)):
        merged, done = reloaded(old, new)
        assert merged.models == old.models
        assert "models" in done.needs_restart
    merged, done = reloaded(one, config_of(model="n.gguf"))
    assert (merged, done.needs_restart) == (one, ("server.model",))


# ---- the holder


def test_what_is_derived_changes_with_its_part_alone():
    live = LiveConfig.of(Settings())
    made: list[int] = []

    def make(n: int) -> str:
        made.append(n)
        return f"made of {n}"

    value = live.derived(lambda config: config.settings.n_slots, make)
    live.replace(config_of(max_tokens=3))
    assert (value.value, made, live.settings.max_tokens) == ("made of 1", [1], 3)
    live.replace(config_of(n_slots=2))
    assert (value.value, made) == ("made of 2", [1, 2])


def test_configuration_that_cannot_be_used_changes_nothing(tmp_path: Path):
    live = LiveConfig.of(Settings())

    def refuse(n: int) -> int:
        if n > 2:
            raise RequestError("too many")
        return n

    first = live.derived(lambda config: config.settings.n_slots, str)
    second = live.derived(lambda config: config.settings.n_slots, refuse)
    with pytest.raises(RequestError, match="too many"):
        live.replace(config_of(n_slots=3))
    assert (first.value, second.value, live.settings.n_slots) == ("1", 1, 1)


# ---- the app


@contextlib.asynccontextmanager
async def called(app: App) -> Any:
    """A client of *app*, in this process."""
    transport = httpx.ASGITransport(app, client=("10.1.2.3", 5))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        yield client


def key(name: str) -> dict[str, str]:
    return {"authorization": f"Bearer {name}"}


async def test_keys_limits_origins_names_and_proxies_count_from_the_next_request_on(
    engine: Engine, tmp_path: Path
):
    mods = tmp_path / "mods"
    mods.mkdir()
    app = create_app(engine, Settings(api_keys=("old",)))
    async with called(app) as client:
        path = "/api/v1/tokenize"

        async def status(given: str, text: str = "a", **headers: str) -> int:
            body = json.dumps({"text": text}).encode()
            sent = {name.replace("_", "-"): value for name, value in headers.items()}
            reply = await client.post(path, content=body, headers={**key(given), **sent})
            return reply.status_code

        assert [await status("old"), await status("new")] == [200, 401]
        app.reload(
            config_of(
                api_keys=("new",), max_body_bytes=100, cors_origins=("https://a.org",),
                allowed_hosts=("b.example.org",), mods_dir=str(mods), port=1,
            )
        )  # fmt: skip
        assert [await status("old"), await status("new")] == [401, 200]
        assert await status("new", "a" * 100) == 413
        assert await status("new", origin="https://a.org") == 200
        assert await status("new", origin="http://localhost:3000") == 403
        assert await status("new", host="b.example.org") == 200
        reply = await client.post(
            path, content=b'{"text": ""}', headers={**key("new"), "origin": "https://a.org"}
        )
        assert reply.headers["access-control-allow-origin"] == "https://a.org"
        app.service.mod_runs.check([ModWanted("any")])  # there is a folder of them
        assert app.service.settings.port == 5001
        described = (await client.get("/openapi.json")).json()
        assert "securitySchemes" in described["components"]

        app.reload(config_of(rate_limit=1.0))
        assert [await status(""), await status("")] == [200, 429]
        app.reload(config_of(rate_limit=1.0, max_tokens=5))
        assert await status("") == 429  # what it has used is not forgotten
        app.reload(config_of())
        assert await status("") == 200
        described = (await client.get("/openapi.json")).json()
        assert "securitySchemes" not in described["components"]

        app.reload(config_of(trusted_proxies=("10.0.0.0/8",), rate_limit=1.0))
        clients = ("1.2.3.4", "1.2.3.4", "1.2.3.5")
        assert [await status("", x_forwarded_for=one) for one in clients] == [200, 429, 200]


def models_of(*ids: str, **settings: Any) -> Config:
    """A configuration of the demo model under several ids."""
    options = {"n_ctx": 256, "n_threads": 1, **settings}
    return Config(settings=Settings(**options), models={id_: ModelConfig() for id_ in ids})


async def test_models_come_and_go_and_the_first_is_the_default():
    app = create_app(models_of("a", "b"))
    async with called(app) as client:

        async def answered(**model: str) -> str:
            asked = {"prompt": "Anna", "max_tokens": 1, **model}
            reply = await client.post("/v1/completions", json=asked, timeout=WITHIN_S)
            return reply.json()["model"] if reply.status_code == 200 else str(reply.status_code)

        assert [await answered(), await answered(model="b")] == ["a", "b"]
        old = app.service.pool.find("b")
        done = app.reload(models_of("c", "b"))
        assert done.changed == ("models",)
        assert [await answered(), await answered(model="a")] == ["c", "404"]
        assert await answered(model="b") == "b"
        assert app.service.pool.find("b") is old
        assert old.n_loads == 1
        app.reload(models_of("c", "b", max_tokens=9))
        assert app.service.pool.find("b") is old
    await app.service.close()


async def test_last_key_of_a_public_server_cannot_be_taken_away(engine: Engine):
    app = create_app(engine, Settings(api_keys=("old",), host="0.0.0.0"))
    with pytest.raises(RequestError, match="no API key"):
        app.reload(config_of(max_tokens=3))  # its host would need a restart to change
    with pytest.raises(RequestError, match="nowhere"):
        app.reload(config_of(api_keys=("new",), mods_dir="/nowhere"))
    assert app.service.settings == Settings(api_keys=("old",), host="0.0.0.0")


def test_open_websocket_of_a_revoked_key_is_closed_at_its_next_message(
    serve: Serve, engine: Engine
):
    served = serve(Settings(api_keys=("old",)), engine)
    ask = {"type": "generate", "prompt": "Anna", "max_new_tokens": 2, "temperature": 0}
    path = "/api/v1/generate/stream"
    with websocket(served, path, additional_headers=key("old")) as socket:
        socket.send(json.dumps(ask))
        while json.loads(socket.recv(timeout=WAITS_S))["type"] != "done":
            pass
        served.service.live.replace(Config.of(Settings(api_keys=("new",))))
        socket.send(json.dumps(ask))
        messages, code = read_to_close(socket)
        assert ("key" in str(messages[0]), code) == (True, 1008)


@pytest.mark.parametrize("left", [(), ("old",)], ids=["revoked", "no admin any more"])
def test_events_end_with_the_key_that_hears_them(
    serve: Serve, engine: Engine, monkeypatch: pytest.MonkeyPatch, left: tuple[str, ...]
):
    monkeypatch.setattr(mia4_routes, "_KEEP_ALIVE_S", 0.05)
    served = serve(Settings(admin_keys=("old",), api_keys=("new",)), engine)
    with mia4.listening(served, key="old") as events:
        mia4.generate(served, key="new")
        assert next(events)[0] == "GenerationStarted"
        settings = Settings(admin_keys=("other",), api_keys=("new", *left))
        served.service.live.replace(Config.of(settings))
        assert [name for name, _ in events] in ([], ["GenerationCompleted"])
        mia4.generate(served, key="new")


# ---- the signal


class Changes:
    """Stands for an app: notes what it is reloaded with."""

    def __init__(self) -> None:
        self.seen: list[Config] = []

    def reload(self, config: Config) -> str:
        self.seen.append(config)
        return "changed something"


@pytest.fixture
def hangups() -> Iterator[None]:
    """Leave the handler of SIGHUP as it was."""
    before = signal.getsignal(signal.SIGHUP)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.usefixtures("hangups")
async def test_signals_during_a_reload_ask_for_one_more_after_it(monkeypatch: pytest.MonkeyPatch):
    app, configs = Changes(), [config_of(n_slots=n) for n in (1, 2, 3)]
    reading, go_on = threading.Event(), threading.Event()
    threads: set[int] = set()

    def read() -> Config:
        threads.add(threading.get_ident())
        reading.set()
        assert go_on.wait(WITHIN_S)
        return configs[len(app.seen)]

    reloads, asked = Reloads(app, read), asyncio.Event()  # pyright: ignore[reportArgumentType]
    os.kill(os.getpid(), signal.SIGHUP)  # while the model is loaded
    reloads.listen(lambda: None)
    await asyncio.to_thread(reading.wait, WITHIN_S)
    ask = reloads.ask
    monkeypatch.setattr(reloads, "ask", lambda: (ask(), asked.set()))
    os.kill(os.getpid(), signal.SIGHUP)
    await asyncio.wait_for(asked.wait(), WITHIN_S)
    for _ in range(4):
        reloads.ask()
    assert reloads.running is not None
    go_on.set()
    await asyncio.wait_for(reloads.running, WITHIN_S)
    assert app.seen == configs[:2]
    assert threading.get_ident() not in threads
    asyncio.get_running_loop().remove_signal_handler(signal.SIGHUP)


@pytest.mark.usefixtures("hangups")
async def test_terminal_that_has_gone_ends_the_server(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(serving.Hangup, "is_of_terminal", lambda self: True)
    left = asyncio.Event()
    Reloads(Changes(), pytest.fail).listen(left.set)  # pyright: ignore[reportArgumentType]
    os.kill(os.getpid(), signal.SIGHUP)
    await asyncio.wait_for(left.wait(), WITHIN_S)
    asyncio.get_running_loop().remove_signal_handler(signal.SIGHUP)


# ---- the page's example

EXAMPLE = re.compile(r"^## Configuration file\n.*?^```toml\n(.+?)^```", re.M | re.S)


def test_example_of_the_page_has_no_errors_and_serves(serve: Serve, tmp_path: Path):
    [text] = EXAMPLE.findall(PAGE.read_text(encoding="utf-8"))
    path = tmp_path / "kqview.toml"
    path.write_text(text, encoding="utf-8")
    for folder in ("models", "mods"):
        (tmp_path / folder).mkdir()
    for name in ("writer", "small"):
        shutil.copy(MODEL_PATH, tmp_path / "models" / f"{name}.gguf")
    for name in ("writer.txt", "persona.txt"):
        (tmp_path / name).write_text("Write well.")
    (tmp_path / "keys.txt").write_text("the-key\n")
    loaded = load(path)
    assert loaded.problems_of_files() == []
    served = serve(loaded.config)
    with served.client(headers=key("the-key")) as client:
        shown = {one["id"]: one for one in client.get("/models").json()["models"]}
        assert list(shown) == ["writer", "small"]
        assert shown["writer"]["capabilities"] == ["chat", "plan"]
        assert shown["writer"]["passport"]["version"] == 2
        assert shown["writer"]["system_prompt"]["version"] == 3
        assert client.get("/config").json()["ui_mode"] == "admin"
        asked = {"model": "small", "prompt": "Anna", "max_tokens": 2}
        reply = client.post("/v1/completions", json=asked)
        assert reply.json()["model"] == "small"
        assert client.get("/models", headers=key("other")).status_code == 401


# ---- the whole server


def kqview_serve(path: Path, *words: str) -> list[str]:
    return [sys.executable, "-m", "kqview", "serve", "--config", str(path), "--port", "0", *words]


# Becomes the program that follows, with its standard input as its terminal.
TAKE_TERMINAL = """
import fcntl, os, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.argv[1], sys.argv[1:])
"""


class Stream:
    """A generation that goes on until it is closed, and counts its events."""

    def __init__(self, url: str, name: str) -> None:
        self.n_events = 0
        self.failure: BaseException | None = None
        self._url, self._name = url, name
        self._has_news = threading.Condition()
        self._is_over = False
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        body = {"prompt": "Tom has", "max_length": 8000, "ban_eos_token": True}
        try:
            with httpx.stream(
                "POST", f"{self._url}/api/extra/generate/stream", json=body,
                headers=key(self._name), timeout=WITHIN_S, verify=False,
            ) as reply:  # fmt: skip
                reply.raise_for_status()
                for line in reply.iter_lines():
                    assert "error" not in line
                    with self._has_news:
                        self.n_events += line.startswith("data:")
                        self._has_news.notify()
                        if self._is_over:
                            return
            raise AssertionError("the stream ended")
        except BaseException as error:
            self.failure = error

    def wait_for_more(self) -> None:
        """Wait until it has gone on from here."""
        with self._has_news:
            wanted = self.n_events + 3
            assert self._has_news.wait_for(lambda: self.n_events >= wanted, WITHIN_S), self.failure

    def close(self) -> None:
        self._is_over = True
        self._thread.join(WITHIN_S)
        assert self.failure is None


@pytest.mark.skipif(not hasattr(signal, "SIGHUP"), reason="this system has no SIGHUP")
def test_twenty_reloads_under_load_change_keys_and_stop_no_request(tmp_path: Path):
    trustme = pytest.importorskip("trustme")
    path = tmp_path / "kqview.toml"

    def write(text: str) -> None:
        path.write_text(
            "[server]\ndemo = true\nn_slots = 3\nn_threads = 1\nn_ctx = 8192\n"
            'ssl_certfile = "certificate"\n' + text
        )

    def issue() -> None:
        made = trustme.CA().issue_cert("127.0.0.1")
        made.private_key_and_cert_chain_pem.write_to_path(tmp_path / "certificate")

    def shown() -> str:
        return ssl.get_server_certificate(("127.0.0.1", httpx.URL(url).port or 0))

    issue()
    write('api_keys = ["key-0", "other"]\n')
    with (
        started(kqview_serve(path)) as parent,
        httpx.Client(base_url=parent.url, timeout=WITHIN_S, verify=False) as client,
    ):
        url = parent.url
        workers = parent.workers()
        streams = [Stream(url, "key-0"), Stream(url, "other")]

        def status(name: str) -> int:
            return client.post(
                "/api/v1/tokenize", json={"text": "a"}, headers=key(name)
            ).status_code

        for stream in streams:
            stream.wait_for_more()
        for i in range(1, 21):
            write(f'api_keys = ["key-{i}"]\n')
            parent.process.send_signal(signal.SIGHUP)
            parent.wait_for("read again: changed server.api_keys", i)
            assert [status(f"key-{i - 1}"), status(f"key-{i}")] == [401, 200]
        for stream in streams:
            stream.wait_for_more()

        before = shown()
        issue()
        parent.process.send_signal(signal.SIGHUP)
        parent.wait_for("read again: nothing changed")
        assert until(lambda: shown() != before)
        (tmp_path / "certificate").write_text("half of it")
        parent.process.send_signal(signal.SIGHUP)
        parent.wait_for("the certificate stays as it was: ssl_certfile .* holds no certificate")

        write("api_keys = []\nslots = 2\nport = 80\nmax_tokens = 0\n")
        parent.process.send_signal(signal.SIGHUP)
        said = parent.wait_for("has errors and stays as it was")
        assert f'{path}: no key "slots" in [server]; it is n_slots' in said
        assert f"{path}: max_tokens is 0" in said
        path.unlink()
        parent.process.send_signal(signal.SIGHUP)
        parent.wait_for("has errors and stays as it was.*No such file", 1)
        assert [status("key-20"), status("other")] == [200, 401]

        write('api_keys = ["key-20"]\nhost = "127.0.0.2"\nmax_queued = 1\n')
        parent.process.send_signal(signal.SIGHUP)
        parent.wait_for("changed server.max_queued; a restart is needed for server.host")
        for stream in streams:
            stream.wait_for_more()
            stream.close()
        assert parent.workers() == workers
        parent.process.terminate()
        assert parent.process.wait(WITHIN_S) == 0


def hears(parent: Parent, number: int) -> bool:
    """Whether the program has got so far that it has a handler for the signal."""
    with contextlib.suppress(OSError):
        text = Path(f"/proc/{parent.process.pid}/status").read_text()
        return bool(int(re.findall(r"SigCgt:\s*(\w+)", text)[0], 16) >> (number - 1) & 1)
    return False


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's /proc")
@pytest.mark.parametrize("words", [(), ("--no-supervise",)], ids=["supervised", "alone"])
def test_hangups_while_the_server_starts_end_nothing_and_are_not_lost(
    tmp_path: Path, words: tuple[str, ...]
):
    path = tmp_path / "kqview.toml"
    path.write_text("[server]\ndemo = true\nn_threads = 1\n")
    with started(kqview_serve(path, *words)) as parent:
        assert until(lambda: hears(parent, signal.SIGHUP))
        while not any("serves" in line for line in list(parent.said)):
            assert parent.process.poll() is None, parent.said
            parent.process.send_signal(signal.SIGHUP)
            time.sleep(0.01)
        parent.wait_for("read again: nothing changed")
        assert httpx.get(f"{parent.url}/health").status_code == 200
        parent.process.terminate()
        assert parent.process.wait(WITHIN_S) == 0


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's /proc")
@pytest.mark.parametrize("words", [(), ("--no-supervise",)], ids=["supervised", "alone"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_server_that_is_stopped_while_it_starts_ends_at_once_by_that_signal(
    tmp_path: Path, words: tuple[str, ...], number: signal.Signals
):
    path = tmp_path / "kqview.toml"
    path.write_text("[server]\ndemo = true\nn_threads = 1\n")
    with started(kqview_serve(path, *words)) as parent:
        begins = (lambda: hears(parent, signal.SIGHUP)) if words else parent.workers
        assert until(lambda: bool(begins()))
        parent.process.send_signal(number)
        status = parent.process.wait(WITHIN_S)
    assert status in (128 + number, -number)
    assert not any("Traceback" in line or "worker" in line for line in parent.said), parent.said


@pytest.mark.skipif(not hasattr(signal, "SIGHUP"), reason="this system has no SIGHUP")
def test_server_ends_when_its_terminal_closes(tmp_path: Path):
    path = tmp_path / "kqview.toml"
    path.write_text("[server]\ndemo = true\nn_threads = 1\n")
    keyboard, terminal = os.openpty()
    command = [sys.executable, "-c", TAKE_TERMINAL, *kqview_serve(path)]
    with (
        contextlib.closing(os.fdopen(keyboard)) as window,
        started(command, stdin=terminal, start_new_session=True) as parent,
    ):
        os.close(terminal)
        assert parent.url
        window.close()
        assert parent.process.wait(WITHIN_S) == 0
