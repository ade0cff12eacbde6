"""Python functions as tools: their schema is what their hints and docstring say."""

from __future__ import annotations

import enum
from collections.abc import Callable  # noqa: TC003  # the hints are read
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import pytest

from kqview.chat import tools_as_text
from kqview.chat.turn import checked_tools
from kqview.errors import RequestError


class Unit(enum.Enum):
    """A unit."""

    METRE = "m"
    MILE = "mi"


def look_up(
    word: str,
    *,
    limit: int = 3,
    exact: bool | None = None,
    kinds: list[Literal["noun", "verb"]] | None = None,
    unit: Unit = Unit.METRE,
    extra: Annotated[dict[str, float], "numbers by name"],
    anything: Any = None,
) -> str:
    """Finds a word.

    In all books.

    Args:
        word (str): What to find,
            in any case.
        limit: Most hits: 3.

    Returns:
        The hits.
    """
    return word


def test_function_is_described_by_its_hints_and_docstring():
    assert checked_tools([look_up]) == [
        {
            "type": "function",
            "function": {
                "name": "look_up",
                "description": "Finds a word.\n\nIn all books.",
                "parameters": {
                    "type": "object",
                    "properties": {
                        "word": {"type": "string", "description": "What to find, in any case."},
                        "limit": {"type": "integer", "description": "Most hits: 3."},
                        "exact": {"anyOf": [{"type": "boolean"}, {"type": "null"}]},
                        "kinds": {
                            "anyOf": [
                                {
                                    "type": "array",
                                    "items": {"type": "string", "enum": ["noun", "verb"]},
                                },
                                {"type": "null"},
                            ]
                        },
                        "unit": {"type": "string", "enum": ["m", "mi"]},
                        "extra": {
                            "type": "object",
                            "additionalProperties": {"type": "number"},
                            "description": "numbers by name",
                        },
                        "anything": {},
                    },
                    "required": ["word", "extra"],
                },
            },
        }
    ]


def test_function_without_parameters_and_words_is_a_tool():
    def stop() -> None: ...

    schema = {"type": "object", "properties": {}, "required": []}
    assert checked_tools([stop]) == [
        {"type": "function", "function": {"name": "stop", "parameters": schema}}
    ]
    assert (
        '"name": "stop"' in tools_as_text([{"role": "user", "content": "Hi"}], [stop])[0]["content"]
    )


def test_methods_leave_out_self():
    class Book:
        def find(self, word: str) -> None:
            """Finds."""

    [tool] = checked_tools([Book().find]) or []
    assert list(tool["function"]["parameters"]["properties"]) == ["word"]


@dataclass
class Place:
    """Where."""

    x: int


def go(to: Place) -> None:
    """Goes."""


def test_other_types_are_described_by_pydantic():
    pytest.importorskip("pydantic")
    [tool] = checked_tools([go]) or []
    to = tool["function"]["parameters"]["properties"]["to"]
    assert to["properties"]["x"]["type"] == "integer"


def untyped(a: int, b): ...  # type: ignore[no-untyped-def]


def starred(*words: str) -> None: ...


def of_functions(call: Callable[[], int]) -> None: ...


def of_nothing(a: Nowhere) -> None: ...  # type: ignore[name-defined]  # noqa: F821  # pyright: ignore


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (
            untyped,
            r"tools\[0\]: parameter 'b' of untyped has no type hint; add one, such as b: str",
        ),
        (starred, r"starred takes \*words: .*str.*, and a call names all arguments"),
        (of_functions, r"parameter 'call' of of_functions is .*, which has no JSON schema"),
        (of_nothing, r"hints of of_nothing cannot be read: name 'Nowhere' is not defined"),
        (lambda: 1, r"tools\[0\] is a function without a name; write it with def"),
    ],
)
def test_function_that_cannot_be_described_is_refused(function: Any, words: str):
    with pytest.raises(RequestError, match=words) as failure:
        checked_tools([function])
    assert failure.value.parameter == "tools"
