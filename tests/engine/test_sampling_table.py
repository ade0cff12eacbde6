"""The one table of sampling options: the fields of Sampling, and those of the core.

The core's list is that of a developer build (tests/native/bind_sampling_options.cpp).
"""

import dataclasses
import inspect
import sys
from collections.abc import Mapping
from typing import Any, get_type_hints

import pytest

from kqview import Sampling
from kqview.types.sampling import OPTIONS, SamplingOptions

# The engine ends a generation by these; the sampler never sees them.
NOT_IN_CORE = {"stop", "stop_tokens"}


def core_options() -> Mapping[str, tuple[Any, float | None, float | None, bool | None]]:
    core: Any = sys.modules["kqview._sampling"]
    return core.OPTIONS


def test_the_table_has_every_field_of_sampling():
    assert list(OPTIONS) == [field.name for field in dataclasses.fields(Sampling)]
    assert OPTIONS.keys() == get_type_hints(SamplingOptions).keys()
    for name, annotation in get_type_hints(SamplingOptions).items():
        option = OPTIONS[name]
        # None stands for an empty collection, which Sampling stores.
        assert annotation in (option.type, option.type | None)
        assert getattr(Sampling(), name) == option.default
        assert option.doc.endswith(".")
        assert f"\n    {name}: {option.doc}" in inspect.cleandoc(str(Sampling.__doc__))


@pytest.mark.needs("developer build")
def test_the_core_has_the_same_names_and_in_the_same_order():
    assert list(core_options()) == [name for name in OPTIONS if name not in NOT_IN_CORE]


@pytest.mark.needs("developer build")
def test_the_core_has_the_same_defaults():
    for name, (default, *_) in core_options().items():
        wanted = OPTIONS[name].default
        if isinstance(wanted, float):
            assert default == pytest.approx(wanted, rel=1e-7), name
        else:
            assert default == (list(wanted) if isinstance(wanted, tuple) else wanted), name


@pytest.mark.needs("developer build")
def test_the_core_has_the_same_ranges():
    for name, (_, *limits) in core_options().items():
        option = OPTIONS[name]
        is_number = option.low is not None
        excluded = option.low_excluded if is_number else None
        assert limits == [option.low, option.high, excluded], name
