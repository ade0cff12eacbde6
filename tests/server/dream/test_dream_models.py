"""Switching the model while the server runs, over real sockets, with two tiny models."""

from __future__ import annotations

import asyncio
import socket as sockets
import threading
from typing import TYPE_CHECKING, Any

import pytest

from kqview import Engine, Sampling
from kqview.errors import ClosedError
from kqview.server import Settings
from kqview.server.errors import Forbidden, ModelChanged, NotFound, ShuttingDown
from kqview.server.models.model_files import model_file, model_names
from kqview.server.models.run import GenerateRequest
from kqview.server.models.service import Service
from tests.support import tiny_gguf
from tests.support.dream import WITHIN_S, DreamSocket, decoded

if TYPE_CHECKING:
    from pathlib import Path

    import httpx

    from tests.support.serving import Serve, Served

ADMIN = {"authorization": "Bearer boss"}
ASK = {"input_ids": [1, 2, 3, 4, 5], "temperature": 0, "ban_eos_token": True,
       "return_attention": True, "max_new_tokens": 2}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two models that differ in every shape, and a file that is none."""
    folder = tmp_path_factory.mktemp("models")
    tiny_gguf.write_preset(folder / "a.gguf", "tiny_llama")
    tiny_gguf.write_preset(folder / "more" / "b.gguf", "tiny_qwen2", n_layer=2, n_head=2)
    tiny_gguf.write_truncated(folder / "broken.gguf", folder / "a.gguf")
    (folder / "notes.txt").write_text("no model")
    return folder


@pytest.fixture
def served(serve: Serve, folder: Path) -> Served:
    """A server of model a that may switch."""
    return serve(settings_of(folder))


def settings_of(folder: Path, **changes: Any) -> Settings:
    return Settings(
        **{
            "model": str(folder / "a.gguf"), "models_dir": str(folder), "admin_keys": ("boss",),
            "n_threads": 1, "n_ctx": 1024, **changes,
        }
    )  # fmt: skip


def load(client: httpx.Client, name: str, **fields: Any) -> httpx.Response:
    return client.post("/api/v1/model/load", json={"model": name, **fields}, headers=ADMIN)


def shape_now(client: httpx.Client) -> list[int]:
    reply = client.post("/api/v1/generate", json=ASK).json()
    return reply["attention_data"][0]["attention"]["shape"]


def test_models_are_listed_and_switched_and_shapes_change(served: Served):
    with served.client() as client:
        listed = client.get("/api/v1/models").json()
        assert listed == {
            "models": ["a.gguf", "broken.gguf", "more/b.gguf"], "loaded": "a.gguf",
            "model_name": "random llama 3x4",
        }  # fmt: skip
        assert shape_now(client) == [3, 4, 5]
        reply = load(client, "more/b.gguf")
        assert reply.status_code == 200
        info = reply.json()
        assert info == client.get("/api/v1/model/info").json()
        assert (info["architecture"], info["num_layers"], info["num_attention_heads"]) == (
            "qwen2", 2, 2
        )  # fmt: skip
        assert shape_now(client) == [2, 2, 5]
        assert client.get("/health").json()["model"] == "random qwen2 2x2"
        listed = client.get("/api/v1/models").json()
        assert (listed["loaded"], listed["model_name"]) == ("more/b.gguf", "random qwen2 2x2")
        assert load(client, "a.gguf", n_ctx=512).json()["context_length"] == 512
        assert shape_now(client) == [3, 4, 5]


def test_model_that_is_no_file_of_the_folder_is_listed_by_its_name(serve: Serve, folder: Path):
    served = serve(settings_of(folder, models_dir=str(folder / "more")))
    with served.client() as client:
        assert client.get("/api/v1/models").json() == {
            "models": ["b.gguf"], "loaded": "random llama 3x4", "model_name": "random llama 3x4",
        }  # fmt: skip


def test_only_an_administrator_switches(serve: Serve, folder: Path):
    served = serve(settings_of(folder, api_keys=("user",)))
    with served.client() as client:
        for key, status in ((None, 401), ("user", 403), ("wrong", 401), ("boss", 200)):
            headers = {"authorization": f"Bearer {key}"} if key else {}
            reply = client.post(
                "/api/v1/model/load", json={"model": "more/b.gguf"}, headers=headers
            )
            assert reply.status_code == status, key
            if status != 200:
                assert reply.json()["error_code"] == "UNAUTHORIZED"
        assert client.get("/api/v1/models").status_code == 401
        assert (
            client.get("/api/v1/models", headers={"x-api-key": "user"}).json()["loaded"]
            == "more/b.gguf"
        )


def test_nobody_switches_where_there_is_no_admin_key_or_no_folder(serve: Serve, folder: Path):
    for changes in ({"admin_keys": ()}, {"models_dir": None}):
        served = serve(settings_of(folder, **changes))
        with served.client() as client:
            assert load(client, "more/b.gguf").status_code == 403
            assert shape_now(client) == [3, 4, 5]


def test_running_streams_end_with_an_event_and_1011_and_idle_ones_go_on(served: Served):
    with (
        DreamSocket(served.ws_url) as running,
        DreamSocket(served.ws_url) as idle,
        served.client() as client,
    ):
        running.send(**{**ASK, "max_new_tokens": 900, "num_samples": 8, "request_id": "long"})
        assert running.event()["type"] == "token"
        switched: list[httpx.Response] = []
        switching = threading.Thread(target=lambda: switched.append(load(client, "more/b.gguf")))
        switching.start()
        event = running.event()
        while event["type"] == "token":
            event = running.event()
        assert (event["type"], event["error_code"]) == ("error", "MODEL_CHANGED")
        assert event["request_id"] == "long"
        with pytest.raises(Exception, match="1011"):
            running.socket.recv(timeout=WITHIN_S)
        switching.join(WITHIN_S)
        assert switched[0].status_code == 200
        tokens, _ = idle.generate(**ASK)
        assert decoded(tokens[0]["attention"]).shape == (2, 2, 5)


def test_running_post_ends_with_an_error(served: Served):
    replies: list[httpx.Response] = []

    def ask() -> None:
        body = {**ASK, "max_new_tokens": 900, "num_samples": 8, "attention_format": "viz"}
        with served.client() as client:
            replies.append(client.post("/api/v1/generate", json=body))

    asking = threading.Thread(target=ask)
    asking.start()
    served.wait_until(lambda: served.service.runs)
    with served.client() as client:
        assert load(client, "more/b.gguf").status_code == 200
    asking.join(WITHIN_S)
    assert replies[0].status_code == 503
    assert replies[0].json()["error_code"] == "MODEL_CHANGED"
    assert "retry-after" in replies[0].headers


def test_model_that_cannot_be_loaded_leaves_the_old_one_serving(served: Served):
    with served.client() as client, DreamSocket(served.ws_url) as socket:
        before = client.get("/api/v1/models").json()["loaded"]
        failed = load(client, "broken.gguf")
        assert failed.status_code == 500
        assert failed.json()["error_code"] == "NO_MODEL"
        assert "broken.gguf" in failed.json()["error"]
        assert client.get("/health").status_code == 200
        assert client.get("/api/v1/models").json()["loaded"] == before
        assert client.post("/api/v1/generate", json=ASK).status_code == 200
        assert len(socket.generate(**ASK)[0]) == 2
        assert load(client, "a.gguf").status_code == 200
        assert len(socket.generate(**ASK)[0]) == 2


def test_switches_at_once_come_one_after_another(served: Served):
    names = ["a.gguf", "more/b.gguf"] * 3
    replies: list[tuple[str, httpx.Response]] = []

    def switch(name: str) -> None:
        with served.client() as client:
            replies.append((name, load(client, name)))

    threads = [threading.Thread(target=switch, args=(name,)) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WITHIN_S)
    assert [reply.status_code for _, reply in replies] == [200] * len(names)
    with served.client() as client:
        assert shape_now(client) in ([3, 4, 5], [2, 2, 5])
        counted = client.get("/metrics").text
    assert served.service.pool.default.n_loads == len(names) + 1
    assert "kqview_generated_tokens_total 2.0" in counted


def test_switch_is_finished_though_its_client_left(served: Served):
    host, port = served.url.removeprefix("http://").split(":")
    body = b'{"model": "more/b.gguf"}'
    with sockets.create_connection((host, int(port))) as client:
        client.sendall(
            b"POST /api/v1/model/load HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer boss\r\n"
            b"content-length: %d\r\n\r\n%s" % (len(body), body)
        )
    served.wait_until(
        lambda: served.service.pool.is_ready and served.engine.model.architecture == "qwen2"
    )


def test_engine_of_the_caller_is_not_closed_by_a_switch(serve: Serve, folder: Path):
    with Engine.demo(n_threads=1, n_ctx=256) as engine:
        served = serve(settings_of(folder, model=None), engine)
        with served.client() as client:
            assert load(client, "a.gguf").status_code == 200
            assert shape_now(client) == [3, 4, 5]
        assert engine.generate("Anna", max_tokens=2, ignore_eos=True).read()


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "status"),
    [
        ("../outside.gguf", 403),
        ("/etc/passwd", 403),
        ("more/../../outside.gguf", 403),
        ("link.gguf", 403),
        ("missing.gguf", 404),
        ("notes.txt", 404),
        ("more", 404),
        ("a\0.gguf", 404),
        ("x" * 5000 + ".gguf", 404),
        ("", 400),
    ],
    ids=lambda value: repr(value)[:30],
)
def test_names_that_are_no_model_of_the_folder_are_refused(
    served: Served, folder: Path, name: str, status: int
):
    outside = folder.parent / "outside.gguf"
    outside.write_bytes(b"GGUF")
    if not (folder / "link.gguf").is_symlink():
        (folder / "link.gguf").symlink_to(outside)
    with served.client() as client:
        reply = load(client, name)
        assert reply.status_code == status
        assert reply.json()["type"] == "error"
        assert shape_now(client) == [3, 4, 5]
    (folder / "link.gguf").unlink()


@pytest.mark.parametrize("fields", [{"n_ctx": 0}, {"n_slots": -1}, {"n_ctx": "many"}, {"model": 5}])
def test_load_of_wrong_numbers_is_refused_and_keeps_the_model(
    served: Served, fields: dict[str, Any]
):
    with served.client() as client:
        reply = client.post(
            "/api/v1/model/load", json={"model": "more/b.gguf", **fields}, headers=ADMIN
        )
        assert reply.status_code == 400
        assert next(iter(fields)) in reply.json()["error"]
        assert shape_now(client) == [3, 4, 5]


async def test_request_whose_prompt_was_read_for_another_model_is_told_so(folder: Path):
    with Engine.demo(n_threads=1, n_ctx=256) as engine:
        service = Service(engine, settings_of(folder, model=None))
        request = GenerateRequest(
            prompt="a " * 100_000,  # read in another thread
            max_tokens=2,
            sampling=Sampling(),
            request_id="x",
        )
        starting = asyncio.ensure_future(service.start(request))
        await asyncio.sleep(0)
        switching = asyncio.ensure_future(service.pool.switch("a.gguf", {}))
        with pytest.raises(ModelChanged):
            await starting
        await switching
        assert not service.runs
        await service.close()


async def test_server_that_ends_while_a_model_is_loaded_does_not_wait_for_it(folder: Path):
    service = Service(None, settings_of(folder))
    await service.open()
    old = service.pool.default.engine
    switching = asyncio.ensure_future(service.pool.switch("more/b.gguf", {}))
    for _ in range(3):  # its task begins
        await asyncio.sleep(0)
    await service.close()
    with pytest.raises(ShuttingDown):
        await switching
    with pytest.raises(ClosedError):
        old.tokenize("a")
    with pytest.raises(ShuttingDown):
        await service.pool.switch("a.gguf", {})


# ---- the folder


def test_folder_gives_files_and_nothing_else(folder: Path, tmp_path: Path):
    assert model_names(str(folder)) == ["a.gguf", "broken.gguf", "more/b.gguf"]
    assert model_file(str(folder), "more/b.gguf") == (folder / "more" / "b.gguf").resolve()
    assert model_names(None) == []
    (tmp_path / "link.gguf").symlink_to(folder / "a.gguf")
    (tmp_path / "inside.gguf").write_bytes(b"GGUF")
    (tmp_path / "alias.gguf").symlink_to(tmp_path / "inside.gguf")
    assert model_names(str(tmp_path)) == ["alias.gguf", "inside.gguf"]
    with pytest.raises(Forbidden):
        model_file(None, "a.gguf")
    with pytest.raises(Forbidden):
        model_file(str(tmp_path), "link.gguf")
    with pytest.raises(NotFound):
        model_file(str(tmp_path), "b.gguf")
