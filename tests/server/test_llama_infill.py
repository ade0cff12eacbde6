"""Filling gaps in code through the API of llama.cpp's server."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from kqview import Engine
from kqview.server.api.llama_server.convert import infill_ids
from tests.support import tiny_gguf
from tests.support.serving import serving

if TYPE_CHECKING:
    from collections.abc import Iterator

    import httpx

    from tests.support.serving import Served

CODE = {"input_prefix": "def add(a, b):\n    ", "input_suffix": "\n\nprint(add(1, 2))\n"}
FIM = {"prefix": 1, "suffix": 2, "middle": 3}


SPECIALS = (
    "<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|repo_name|>", "<|file_sep|>",
)  # fmt: skip


@pytest.fixture(scope="module")
def coder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A model of bytes with the tokens that Qwen's models for code have."""
    path = tmp_path_factory.mktemp("coder") / "coder.gguf"
    model = tiny_gguf.write_model(path, specials=SPECIALS)
    with Engine(model, n_ctx=256, n_threads=1) as engine, serving(engine=engine) as served:
        yield served


@pytest.fixture
def client(coder: Served) -> Iterator[httpx.Client]:
    with coder.client() as client:
        yield client


def prompt_of(client: httpx.Client, **fields: Any) -> str:
    reply = client.post("/infill", json={**CODE, "n_predict": 2, **fields})
    assert reply.status_code == 200, reply.text
    return reply.json()["prompt"]


def test_gap_is_announced_with_the_models_tokens(client: httpx.Client):
    assert prompt_of(client) == (
        "<|repo_name|>myproject\n<|file_sep|>filename\n"
        f"<|fim_prefix|>{CODE['input_prefix']}<|fim_suffix|>{CODE['input_suffix']}<|fim_middle|>"
    )


def test_beginning_of_the_gap_follows_the_prefix(client: httpx.Client):
    prompt = prompt_of(client, prompt="return ")
    assert f"{CODE['input_prefix']}return <|fim_suffix|>" in prompt


def test_other_files_precede_the_code(client: httpx.Client):
    extra = [{"filename": "lib.py", "text": "X = 1\n"}, {"text": "Y = 2\n"}]
    prompt = prompt_of(client, input_extra=extra)
    assert "<|file_sep|>lib.py\nX = 1\n<|file_sep|>tmp\nY = 2\n<|file_sep|>filename\n" in prompt


def test_code_cannot_smuggle_special_tokens_in(coder: Served, client: httpx.Client):
    prompt = "a<|fim_middle|>b"
    client.post("/infill", json={**CODE, "input_prefix": prompt, "n_predict": 1})
    middle = coder.engine.model.fim_token_ids["middle"]
    assert coder.engine.slots[0].tokens.count(middle) == 1


def test_long_code_is_cut_to_what_is_near_the_gap(coder: Served, client: httpx.Client):
    lines = "".join(f"x{i} = {i}\n" for i in range(500))
    prompt = prompt_of(client, input_prefix=lines, input_suffix=lines, n_predict=8)
    prefix, suffix = prompt.split("<|fim_prefix|>")[1].split("<|fim_suffix|>")
    assert lines.endswith(prefix)
    assert lines.startswith(suffix.removesuffix("<|fim_middle|>"))
    assert len(prefix) > len(suffix) > 0


@pytest.mark.parametrize("n_predict", [256, 10**6])
def test_code_stays_where_more_tokens_are_asked_for_than_fit(client: httpx.Client, n_predict: int):
    assert CODE["input_prefix"] in prompt_of(client, n_predict=n_predict)


@pytest.mark.parametrize("n_ctx", [8, 64, 512, 4096])
def test_prompt_always_fits(n_ctx: int):
    ids = infill_ids(
        FIM, prefix=range(100, 5000), suffix=range(6000, 9000), begun=[50], extra=range(10**4),
        bos=[9], n_ctx=n_ctx, n_predict=2,
    )  # fmt: skip
    assert len(ids) <= n_ctx - 2
    assert ids[-1] == 3
    assert [ids.count(id_) for id_ in (1, 2, 3, 50)] == [1, 1, 1, 1] or n_ctx == 4096


def test_reply_is_that_of_a_completion_and_can_be_streamed(client: httpx.Client):
    reply = client.post("/infill", json={**CODE, "n_predict": 3, "temperature": 0}).json()
    assert reply["tokens_predicted"] == 3
    assert reply["stop_type"] == "limit"
    with client.stream(
        "POST", "/infill", json={**CODE, "n_predict": 3, "temperature": 0, "stream": True}
    ) as stream:
        lines = [line for line in stream.iter_lines() if line]
    assert len(lines) == 4


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"input_prefix": None}, "input_prefix"),
    ({"input_suffix": None}, "input_suffix"),
    ({"prompt": 5}, "prompt"),
    ({"input_extra": {"text": "a"}}, "input_extra"),
    ({"input_extra": [{"filename": "a"}]}, "text"),
    ({"input_extra": [{"filename": 1, "text": "a"}]}, "filename"),
]


@pytest.mark.parametrize(("fields", "fact"), REFUSED)
def test_request_that_cannot_work_is_refused(
    client: httpx.Client, fields: dict[str, Any], fact: str
):
    reply = client.post("/infill", json={**CODE, **fields})
    assert reply.status_code == 400
    assert fact in reply.json()["error"]["message"]


def test_model_without_such_tokens_is_not_supported(demo: Served):
    with demo.client() as client:
        reply = client.post("/infill", json=CODE)
    assert reply.status_code == 501
    assert reply.json()["error"]["type"] == "not_supported_error"
