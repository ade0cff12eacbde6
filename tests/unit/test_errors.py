"""The taxonomy of kqview.errors, and that it and the core's enum name the same failures."""

import inspect
import re
from pathlib import Path

import pytest

from kqview import errors

HEADER = Path(__file__).parents[2] / "cpp" / "base" / "error.h"
CLASSES = [
    value
    for value in vars(errors).values()
    if inspect.isclass(value) and value.__module__ == errors.__name__
]


def test_errc_enum_and_by_code_name_the_same_failures():
    body = re.search(r"enum class errc \{(.*?)\};", HEADER.read_text(encoding="utf-8"), re.DOTALL)
    assert body is not None
    code = re.sub(r"//.*", "", body[1])
    names = re.findall(r"\w+", code)
    assert len(names) > 10
    assert set(names) == set(errors.BY_CODE)


def test_by_code_reaches_every_class_that_has_no_subclass():
    leaves = {cls for cls in CLASSES if not cls.__subclasses__()}
    not_of_the_core = {
        errors.InvalidActionError,
        errors.EmittedError,
        errors.InvalidEdit,
        errors.InvalidMod,
        errors.ModFailed,
        errors.CorpusError,
        errors.HeadFileError,
        errors.ModFileError,
        errors.UnknownAttribute,
        errors.UnknownOption,
    }
    assert leaves - not_of_the_core <= set(errors.BY_CODE.values())


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_class_is_documented_and_a_kqview_error(cls: type[Exception]):
    assert issubclass(cls, errors.KqviewError)
    assert cls.__doc__


def test_request_error_is_caught_as_value_error():
    with pytest.raises(ValueError, match="too long"):
        raise errors.PromptTooLong("too long")


def test_out_of_memory_is_caught_as_memory_error():
    with pytest.raises(MemoryError):
        raise errors.OutOfMemory("full")
