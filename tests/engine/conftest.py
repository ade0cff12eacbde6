"""Fixtures of the engine tests: tiny models made on the spot, and engines that are closed again.

Engines use one thread: the models are so small that more only wait for each other.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
from typing import TYPE_CHECKING, Any, Protocol

import gguf
import pytest

from kqview import Engine, engine_options, system_info
from tests.support import archs, stock, tiny_gguf
from tests.support.engines import open_engine
from tests.support.rows import has_device

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

# Two devices that are no hardware (tests/device/fake_device.cpp), in developer builds.
FAKE_DEVICE: Any = sys.modules.get("kqview._fake_device")
N_FAKE_DEVICES = 2


def _set_default(name: str, value: Any) -> None:
    """Let every Engine of this process have *value*, unless a test gives another one."""
    options: dict[str, Any] = engine_options._OPTIONS  # type: ignore[assignment]
    options[name] = (value, options[name][1])


# bench/cuda.sh and .ci/devices set the layers that engines of these tests have on devices, and
# .ci/devices where rows of such layers are computed. Without them, and in tests that start
# processes, these are Engine's defaults.
if (n_gpu_layers := os.environ.get("KQVIEW_TEST_GPU_LAYERS")) is not None:
    _set_default("n_gpu_layers", int(n_gpu_layers))
if (device_rows := os.environ.get("KQVIEW_TEST_DEVICE_ROWS")) is not None:
    _set_default("device_rows", device_rows)
# A fake device for all engines shows without a GPU which tests fail on one: "exact" those of what
# only a host has, "rounding" also those that its rounding fails.
if (fake_device := os.environ.get("KQVIEW_TEST_FAKE_DEVICE")) is not None:
    FAKE_DEVICE.register(1)
    FAKE_DEVICE.set(rounds=fake_device == "rounding")


def pytest_report_header() -> str:
    """Say where the engines run."""
    devices = ", ".join(device["description"] for device in system_info()["devices"])
    chosen = ", ".join(
        f"{name}={engine_options._OPTIONS[name][0]}" for name in ("n_gpu_layers", "device_rows")
    )
    return f"kqview: {chosen}, devices: {devices}"


class MakeEngine(Protocol):
    """Opens an Engine; the options are those of Engine, closed when the test ends."""

    def __call__(self, model: str | os.PathLike[str], **options: Any) -> Engine: ...


@pytest.fixture(
    scope="module",
    params=[
        "default",
        pytest.param("fake", marks=pytest.mark.needs("developer build", "host layers")),
    ],
)
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    """Run the tests of a module on the devices of this machine, and again on fake ones.

    A module asks for it with ``pytestmark = pytest.mark.usefixtures("backend")``. Module fixtures
    that open an engine name it as a parameter, so that they are made for each backend.
    """
    if request.param == "default":
        yield "default"
        return
    with fake_devices():
        yield "fake"


@contextlib.contextmanager
def fake_devices() -> Iterator[None]:
    """Engines opened inside have their layers on fake devices."""
    if has_device():
        pytest.skip("layers would be spread over this machine's own devices as well")
    FAKE_DEVICE.register(N_FAKE_DEVICES)
    try:
        yield
    finally:
        FAKE_DEVICE.unregister()


@pytest.fixture(scope="session")
def llama_cpp_dir() -> Path:
    """Folder of llama.cpp's pinned source, which holds vocabulary files; fetched if need be."""
    return stock.source()


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Llama: 3 layers, 4 heads on 2 KV heads, F32 weights, ids 0..255 are the bytes."""
    return tiny_gguf.write_preset(tmp_path_factory.mktemp("model") / "llama.gguf", "tiny_llama")


@pytest.fixture(scope="session")
def tiny_qwen2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Qwen2 (Q, K and V have a bias), else as `tiny_llama`."""
    return tiny_gguf.write_preset(tmp_path_factory.mktemp("model") / "qwen2.gguf", "tiny_qwen2")


@pytest.fixture(scope="session")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """BERT: 3 layers, 4 heads, 512 positions; ids 0..255 are the bytes, nothing is pooled."""
    return tiny_gguf.write_bert(tmp_path_factory.mktemp("model") / "bert.gguf")


@pytest.fixture(scope="session")
def bert_mean(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As `bert`, and its file says that it pools by the mean."""
    path = tmp_path_factory.mktemp("model") / "bert.gguf"
    return tiny_gguf.write_bert(path, pooling=gguf.PoolingType.MEAN)


@pytest.fixture(scope="session")
def architectures(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Path]]:
    """llama.cpp's own tiny models by name (`archs.NAMES`), made by its generator; 0.9 GB."""
    folder = tmp_path_factory.mktemp("architectures")
    models = archs.make_models(folder)
    yield {path.stem: path for path in models}
    shutil.rmtree(folder)  # pytest keeps folders, and these are 0.9 GB


@pytest.fixture(scope="module")
def engine(tiny_llama: Path) -> Iterator[Engine]:
    """One engine of `tiny_llama` for the tests of a module that leave it open and idle."""
    with open_engine(tiny_llama, n_threads=1, n_ctx=512) as one:
        yield one


@pytest.fixture(scope="module")
def demo() -> Iterator[Engine]:
    """The demo model, which the tests of a module leave open and idle too."""
    with Engine.demo(n_threads=1, n_ctx=512) as one:
        yield one


@pytest.fixture
def make_engine() -> Iterator[MakeEngine]:
    """Engines by `open_engine`, with n_threads=1 and n_ctx=512 unless told otherwise."""
    opened: list[Engine] = []

    def make(model: str | os.PathLike[str], **options: Any) -> Engine:
        engine = open_engine(model, **{"n_threads": 1, "n_ctx": 512, **options})
        opened.append(engine)
        return engine

    yield make
    for engine in opened:
        engine.close()
