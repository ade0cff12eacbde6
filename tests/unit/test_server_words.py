"""The command line of ``kqview serve`` is read without typer, and as typer would."""

from __future__ import annotations

import subprocess
import sys
from typing import Any, get_args

import pytest

pytest.importorskip("msgspec")
typer = pytest.importorskip("typer")

from kqview.cli import main as cli_main  # noqa: E402
from kqview.cli.server_words import plain_options, switch_off, translated_words  # noqa: E402
from kqview.errors import RequestError  # noqa: E402
from kqview.server.settings import Settings  # noqa: E402
from kqview.server.settings_table import rows_of  # noqa: E402
from kqview.system import HAS_FORK  # noqa: E402

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(not HAS_FORK, reason="Windows always has typer"),
]

UsageError: Any = typer.BadParameter.__base__
ROWS = list(rows_of(Settings).values())
TEXTS = (
    "", " ", "a", "7", "-1", "-0.5", "007", "0.5", ".5", "5.", "1e3", "1_000", "0x10", "nan",
    "-inf", "٣", " 7", "7 ", "+7", "true", "a,b", "a=b", "--port", "-m", "-", "--", "tab\there",
    "é", "\udcff", "9" * 400, "9" * 5000,
)  # fmt: skip
# Processes with one of these are larger by megabytes that serving does not need.
UNWANTED = {
    "typer", "rich", "pydantic", "pydantic_core", "pygments", "markdown_it", "httpx", "requests",
    "huggingface_hub", "sqlalchemy", "matplotlib", "PIL", "pyarrow", "fsspec", "safetensors",
    "scipy", "torch", "gguf", "llguidance", "jinja2", "IPython",
}  # fmt: skip


@pytest.fixture(scope="module")
def command() -> Any:
    return cli_main._loaded("serve")  # pyright: ignore[reportPrivateUsage]


def by_typer(command: Any, words: list[str]) -> dict[str, Any] | None:
    """What typer makes of *words*, less what is not given; None if it refuses them."""
    try:
        found = command.make_context("serve", list(words)).params
    except (UsageError, RequestError):
        return None
    given = {name: value for name, value in found.items() if value not in (None, ())}
    lists = {row.name for row in ROWS if row.kind is tuple} & given.keys()
    return {"config": None, **given, **{name: list(given[name]) for name in lists}}


def plainly(words: list[str]) -> dict[str, Any] | None:
    """What is made of *words* without typer; None if they are left to it."""
    try:
        return plain_options(translated_words(words, lambda _: None)[0])
    except RequestError:
        return None


@pytest.mark.parametrize("row", {row.kind: row for row in ROWS}.values(), ids=lambda row: row.name)
def test_values_are_those_that_typer_reads(row: Any, command: Any):
    texts = [*TEXTS, *get_args(row.kind)]
    lines = [[row.flag, text] for text in texts] + [[f"{row.flag}={text}"] for text in texts]
    lines += [[row.flag], [row.flag, "--port", "0"], [row.flag, "a", "b"]]
    n_plain = 0
    for line in lines:
        given = plainly(line)
        n_plain += given is not None
        assert given is None or given == by_typer(command, line), line
    assert n_plain >= 2


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_every_option_is_read(row: Any, command: Any):
    if row.kind is bool:
        lines = [[row.flag], [switch_off(row)], [row.flag, switch_off(row)]]
    else:
        lines = [[row.flag, next(iter(get_args(row.kind)), "7")]]
    for line in lines:
        assert row.name in (plainly(line) or {})
        assert plainly(line) == by_typer(command, line)


def test_options_that_come_again_add_to_lists_and_else_win(command: Any):
    line = ["--api-key", "a", "--port", "1", "--api-key=b", "--port", "2", "--config", "c.toml"]
    given = plainly(line)
    assert given == by_typer(command, line)
    assert given == {"api_keys": ["a", "b"], "port": 2, "config": "c.toml"}


@pytest.mark.parametrize("variable", ["", "kqview.toml"])
def test_variable_names_the_configuration(
    variable: str, command: Any, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("KQVIEW_CONFIG", variable)
    for line in (["--demo"], ["--demo", "--config", "other.toml"], ["--config", ""]):
        assert plainly(line) == by_typer(command, line)


@pytest.mark.parametrize(
    "word",
    ["--help", "-h", "model.gguf", "--models", "--por", "--", "-x", "--supervised", "--port"],
)
def test_help_and_mistakes_are_left_to_typer(word: str):
    assert plainly(["--demo", word]) is None


SCRIPT = """
import sys
from kqview import __main__
from kqview.cli import serving

async def startup(server, sockets=None):
    print(*sys.modules)
    server.should_exit = True

serving._Server.startup = startup
sys.argv[1:] = ["serve", "--no-supervise", "--port", "0", *sys.argv[1:]]
__main__.main()
"""


@pytest.mark.parametrize("words", [("--demo",), ("--demo", "-c", "256", "-np", "2", "-fa", "on")])
def test_process_that_serves_has_imported_nothing_large_that_it_does_not_use(
    words: tuple[str, ...],
):
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, *words], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    loaded = {name.partition(".")[0] for name in done.stdout.split()}
    assert {"kqview", "uvicorn"} <= loaded
    assert not loaded & UNWANTED
