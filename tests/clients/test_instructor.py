"""Instructor: models that are filled by a tool call or by a schema."""

from __future__ import annotations

from typing import Literal

import pytest

from tests.clients.conftest import KEY, QUESTION, ZONES

instructor = pytest.importorskip("instructor")
openai = pytest.importorskip("openai")
pydantic = pytest.importorskip("pydantic")


class Clock(pydantic.BaseModel):
    """A clock."""

    # Else its schema lets the model add fields without end.
    model_config = pydantic.ConfigDict(extra="forbid")

    zone: Literal["UTC", "CET"]


@pytest.mark.parametrize("mode", ["TOOLS", "JSON_SCHEMA"])
def test_model_is_filled(base_url: str, mode: str) -> None:
    with openai.OpenAI(base_url=base_url, api_key=KEY) as plain:
        client = instructor.from_openai(plain, mode=instructor.Mode[mode])
        clock = client.chat.completions.create(
            model="demo", response_model=Clock, max_retries=0, max_tokens=60, temperature=0,
            messages=[{"role": "user", "content": QUESTION}],
        )  # fmt: skip
    assert clock.zone in ZONES
