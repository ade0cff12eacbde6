"""``kqview ingest`` as its users type it."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

pytest.importorskip("typer")
pytest.importorskip("sqlalchemy")
pytest.importorskip("uvicorn")

from typer.testing import CliRunner, Result

from kqview.cli import ingest_command, ingesting
from kqview.cli.main import app

if TYPE_CHECKING:
    from kqview.ingest import IngestSettings
    from kqview.ingest.app import IngestApp


def ingest(*words: str, env: dict[str, str] | None = None) -> Result:
    return CliRunner().invoke(app, ["ingest", "--port", "0", *words], env=env)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[IngestSettings]:
    """Settings with which the command would receive; it does not. Its folder is empty."""
    seen: list[IngestSettings] = []

    def run(app: IngestApp, listener: socket.socket) -> None:
        seen.append(app.receiver.options)
        app.receiver.store.close()

    monkeypatch.setattr(ingesting, "run", run)
    monkeypatch.setattr(ingest_command, "log_to_stderr", lambda: None)
    monkeypatch.chdir(tmp_path)
    return seen


def test_command_alone_makes_a_database_here_and_listens_to_this_machine(
    started: list[IngestSettings],
) -> None:
    assert ingest().exit_code == 0
    assert started[0].web.host == "127.0.0.1"
    assert started[0].web.max_body_bytes == 75 * 2**20
    assert Path("traces.db").is_file()


def test_file_of_any_name_is_a_database(started: list[IngestSettings]) -> None:
    assert ingest("--database", "100% mine?.db").exit_code == 0
    assert Path("100% mine?.db").is_file()


def test_flags_win_over_the_environment(started: list[IngestSettings]) -> None:
    env = {"KQVIEW_INGEST_KEYS": "a, b", "KQVIEW_INGEST_POST_KEYS": "c"}
    env["KQVIEW_INGEST_DATABASE"] = "other.db"
    assert ingest("--post-key", "d", "--post-key", "e", env=env).exit_code == 0
    assert started[0].web.admin_keys == ("a", "b")
    assert started[0].web.api_keys == ("d", "e")
    assert Path("other.db").is_file()


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("--host", "0.0.0.0"), "--key for reading and --post-key for posting"),
        (("--post-key", "x"), "--key"),
        (("--max-traces", "-1"), "max_traces"),
        (("--max-posts", "0"), "max_posts"),
        (("--database", "/no/such/folder/x.db"), "unable to open database file"),
        (("--ssl-keyfile", "x.pem"), "ssl_certfile"),
    ],
)
def test_wrong_setting_is_one_line_and_exit_code_2(
    started: list[IngestSettings], words: tuple[str, ...], named: str
) -> None:
    result = ingest(*words)
    assert result.exit_code == 2
    assert named in result.output
    assert result.output.count("\n") == 1


def test_taken_port_is_said_before_the_database_is_made(started: list[IngestSettings]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        result = CliRunner().invoke(app, ["ingest", "--port", port])
    assert result.exit_code == 1
    assert port in result.output
    assert not Path("traces.db").exists()
