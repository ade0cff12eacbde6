"""LoRA adapters in the API of llama.cpp's server: listed, scaled for all, and for one request."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest

from kqview import Engine
from kqview.server import Settings
from tests.support import tiny_gguf
from tests.support.serving import serving

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import httpx

    from tests.support.serving import Served

SCALES = (0.0, 0.5, 1.0)


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lora")
    merged = folder / "merged.gguf"
    return tiny_gguf.write_lora(folder / "lora.gguf", "tiny_llama", merged=merged)


@pytest.fixture(scope="module")
def served(byte_model: Path, adapter: Path) -> Iterator[Served]:
    settings = Settings(model=str(byte_model), lora=(f"{adapter}:0.5",), n_ctx=128, n_slots=2)
    with serving(settings) as one:
        yield one


@pytest.fixture
def client(served: Served) -> Iterator[httpx.Client]:
    with served.client() as client:
        yield client
        client.post("/lora-adapters", json=[{"id": 0, "scale": 0.5}])


@pytest.fixture(scope="module")
def expected(byte_model: Path, adapter: Path) -> dict[float, str]:
    """Text with each scale, from engines that are opened with it."""
    texts: dict[float, str] = {}
    for scale in SCALES:
        with Engine(byte_model, lora=(adapter, scale), n_ctx=128) as engine:
            texts[scale] = engine.generate("Look in", max_tokens=8, temperature=0).read()
    assert len(set(texts.values())) == len(SCALES)
    return texts


def complete(client: httpx.Client, **fields: Any) -> dict[str, Any]:
    body = {"prompt": "Look in", "n_predict": 8, "temperature": 0, **fields}
    reply = client.post("/completion", json=body)
    assert reply.status_code == 200, reply.text
    return reply.json()


def test_adapters_are_listed(client: httpx.Client, adapter: Path):
    assert client.get("/lora-adapters").json() == [
        {"id": 0, "path": str(adapter), "scale": 0.5, "task_name": "", "prompt_prefix": ""}
    ]


def test_scale_is_changed_for_requests_from_here_on(
    client: httpx.Client, expected: dict[float, str]
):
    assert complete(client)["content"] == expected[0.5]
    for scale in SCALES:
        reply = client.post("/lora-adapters", json=[{"id": 0, "scale": scale}])
        assert reply.json() == {"success": True}
        assert client.get("/lora-adapters").json()[0]["scale"] == scale
        assert complete(client)["content"] == expected[scale]
    client.post("/lora-adapters", json=[])
    assert client.get("/lora-adapters").json()[0]["scale"] == 0


def test_requests_at_a_time_have_scales_of_their_own(served: Served, expected: dict[float, str]):
    def ask(scale: float) -> str:
        with served.client() as own:
            return complete(own, lora=[{"id": 0, "scale": scale}])["content"]

    with ThreadPoolExecutor(len(SCALES)) as threads:
        assert dict(zip(SCALES, threads.map(ask, SCALES), strict=True)) == expected


def test_adapter_that_a_request_leaves_out_is_off(client: httpx.Client, expected: dict[float, str]):
    reply = complete(client, lora=[])
    assert reply["content"] == expected[0.0]
    one = complete(client, lora=[{"id": 0, "scale": 1.0}])
    assert one["generation_settings"]["lora"] == [{"id": 0, "scale": 1.0}]


REFUSED: list[tuple[str, Any, str]] = [
    ("/lora-adapters", {"id": 0, "scale": 1}, "array"),
    ("/lora-adapters", [{"scale": 1}], "id"),
    ("/lora-adapters", [{"id": 7, "scale": 1}], "7"),
    ("/lora-adapters", [{"id": 0, "scale": 1e9}], "1e+06"),
    ("/lora-adapters", [{"id": 0, "scale": "big"}], "scale"),
    ("/completion", {"prompt": "a", "lora": [{"id": 7, "scale": 1}]}, "7"),
    ("/completion", {"prompt": "a", "lora": {"id": 0}}, "lora"),
]


@pytest.mark.parametrize(("path", "body", "fact"), REFUSED)
def test_adapter_or_scale_that_cannot_be_is_refused(
    client: httpx.Client, path: str, body: Any, fact: str
):
    reply = client.post(path, json=body)
    assert reply.status_code == 400, reply.text
    assert fact in reply.json()["error"]["message"]


def test_scales_of_everybody_are_the_admins(byte_model: Path, adapter: Path):
    settings = Settings(
        model=str(byte_model), lora=(str(adapter),), n_ctx=128, api_keys=("a",), admin_keys=("b",)
    )
    with serving(settings) as one, one.client() as client:
        for key, status in (("a", 403), ("b", 200)):
            headers = {"authorization": f"Bearer {key}"}
            body = [{"id": 0, "scale": 0.25}]
            reply = client.post("/lora-adapters", json=body, headers=headers)
            assert reply.status_code == status, reply.text
            [listed] = client.get("/lora-adapters", headers=headers).json()
            assert listed["scale"] == (1.0 if status == 403 else 0.25)


def test_model_without_adapters_has_an_empty_list(demo: Served):
    with demo.client() as client:
        assert client.get("/lora-adapters").json() == []
