"""The one table of sampling options, and what adding an option to it takes.

The core's list is that of a developer build (tests/native/bind_sampling_options.cpp).
"""

import dataclasses
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_type_hints

import pytest

from kqview import Sampling
from kqview.types.sampling import OPTIONS, SamplingOptions

REPOSITORY = Path(__file__).parents[2]
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
        assert f"{name}: {option.doc}" in str(Sampling.__doc__)


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


def test_an_option_touches_three_files():
    """The recipe of CONTRIBUTING: the table, the core's list, and the sampler that uses it."""
    files = [
        path
        for root, ending in (("src/kqview", "py*"), ("cpp", "*"))
        for path in (REPOSITORY / root).rglob(f"*.{ending}")
        if "server" not in path.parts
        and path.suffix != ".pyc"
        # Flags and options of other programs, which they translate.
        and path.name not in ("llama_server_flags.py", "option_names.py")
    ]
    texts = {path: path.read_text(encoding="utf-8", errors="ignore") for path in files}
    for name in ("typical_p", "dry_base", "mirostat_eta", "xtc_threshold"):
        found = {
            str(path.relative_to(REPOSITORY)): len(re.findall(rf"\b{name}\b", text))
            for path, text in texts.items()
            if re.search(rf"\b{name}\b", text)
        }
        assert found.keys() == {
            "src/kqview/types/sampling.py",
            "cpp/sample/params.h",
            "cpp/sample/chain.cpp",
        }
        assert found["src/kqview/types/sampling.py"] == 2, "its row, and its type for callers"
        assert found["cpp/sample/params.h"] == 3, "its member, and its row (name and pointer)"
