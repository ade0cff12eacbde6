"""Dockerfile and compose.yaml say what the server understands; `.ci/run` lints both."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kqview.errors import RequestError
from kqview.server.settings import PREFIX, Settings, values_in
from kqview.server.settings_table import rows_of

ROOT = Path(__file__).parents[2]
DOCKERFILE = (ROOT / "Dockerfile").read_text("utf-8")
COMPOSE = (ROOT / "compose.yaml").read_text("utf-8")


def test_every_variable_is_a_setting() -> None:
    named = set(re.findall(rf"\b{PREFIX}(\w+)", DOCKERFILE + COMPOSE))
    assert named >= {"HOST", "MODEL", "API_KEYS"}
    assert {name.lower() for name in named} <= set(rows_of(Settings))


def test_port_is_the_servers_own() -> None:
    port = Settings(demo=True).port
    assert f"EXPOSE {port}\n" in DOCKERFILE
    assert f"http://127.0.0.1:{port}/health" in DOCKERFILE
    assert f"- 127.0.0.1:{port}:{port}\n" in COMPOSE


def test_image_does_not_serve_without_a_key() -> None:
    environ = dict(re.findall(rf"({PREFIX}\w+)=(\S+)", DOCKERFILE))
    with pytest.raises(RequestError, match="can be reached from other machines"):
        Settings(**values_in(environ), demo=True).check_bind()
    given = values_in({**environ, f"{PREFIX}API_KEYS": "key"})
    Settings(**given, demo=True).check_bind()


def test_container_has_time_for_the_grace_period() -> None:
    (seconds,) = re.findall(r"stop_grace_period: (\d+)s", COMPOSE)
    assert int(seconds) >= Settings(demo=True).shutdown_grace_s + 3
