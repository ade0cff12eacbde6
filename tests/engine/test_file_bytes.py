"""Bytes of a file that are no UTF-8 harm nobody; what a log handler raises reaches nobody."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

import gguf
import pytest

from kqview import Engine, _core
from kqview.errors import ModelLoadError
from tests.support import tiny_gguf

if TYPE_CHECKING:
    from pathlib import Path


def with_bytes(path: Path, *changes: tuple[bytes, bytes]) -> Path:
    """Replace bytes of a file by as many others."""
    data = path.read_bytes()
    for old, new in changes:
        assert data.count(old) >= 1
        assert len(old) == len(new)
        data = data.replace(old, new)
    path.write_bytes(data)
    return path


@pytest.fixture
def odd_model(tmp_path: Path) -> Path:
    path = tiny_gguf.write_preset(
        tmp_path / "odd.gguf", "tiny_llama", name="NAMENAME", chat_template="TEMPLATE"
    )
    return with_bytes(path, (b"NAMENAME", b"NA\xff\xfeNAME"), (b"TEMPLATE", b"TEMPL\xc3TE"))


def test_bytes_of_a_file_that_are_no_utf8_are_replaced(odd_model: Path):
    with Engine(odd_model, n_ctx=64, n_threads=1) as engine:
        assert engine.model.name == "NA\ufffd\ufffdNAME"
        assert engine.model.metadata["general.name"] == engine.model.name
        assert engine.model.chat_template == "TEMPL\ufffdTE"


def test_a_log_line_that_is_no_utf8_reaches_no_other_engine(
    odd_model: Path, caplog: pytest.LogCaptureFixture
):
    with caplog.at_level(logging.DEBUG, "kqview.llama"), Engine.demo(n_ctx=64) as engine:
        _core.Model.load(str(odd_model), 0, False, None)  # logs the name, and nobody drains it
        assert engine.generate("Anna", max_tokens=2).read()
    assert any("NA\ufffd\ufffdNAME" in record.getMessage() for record in caplog.records)


def test_a_message_about_a_file_that_is_no_utf8_is_still_the_error(tmp_path: Path):
    path = tiny_gguf.write_preset(tmp_path / "odd.gguf", "tiny_llama")
    with_bytes(path, (b"llama.block_count", b"llama.bl\xe4ck_count"))
    with pytest.raises(ModelLoadError):
        Engine(path, n_ctx=64)


def test_what_a_log_handler_raises_reaches_no_caller(capsys: pytest.CaptureFixture[str]):
    class Broken(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            raise RuntimeError(f"broken handler: {record.levelname}")

    logger = logging.getLogger("kqview.llama")
    handler, level = Broken(), logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    try:
        with Engine.demo(n_ctx=64) as engine:
            assert engine.generate("Anna", max_tokens=2).read()
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
    assert "broken handler" in capsys.readouterr().err


def test_metadata_takes_time_in_proportion_to_its_keys(tmp_path: Path):
    def seconds(n_keys: int) -> float:
        writer = gguf.GGUFWriter(None, "llama")
        for i in range(n_keys):
            writer.add_uint32(f"test.key_{i}", i)
        tiny_gguf.add_bytes_vocab(writer, 320, None)
        path = tiny_gguf.finish(writer, tmp_path / f"{n_keys}.gguf")
        model = _core.Model.load(str(path), 0, False, None, vocabulary_only=True)
        start = time.thread_time()
        metadata = model.metadata()
        taken = time.thread_time() - start
        assert metadata[f"test.key_{n_keys - 1}"] == str(n_keys - 1)
        return taken

    seconds(100)
    assert seconds(16_000) < 12 * seconds(4_000)  # 4 where it is linear, 16 and more where not
