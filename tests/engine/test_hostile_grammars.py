"""One request's grammar, schema or expression neither stops nor harms the others.

Each of them ends with InvalidSampling or within its limits, while another request goes on.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import pytest

from kqview import Engine
from kqview.errors import InvalidSampling
from tests.support.hostile_grammars import (
    AMBIGUOUS,
    CONSTRAINTS,
    GRAMMARS,
    write_spaced_model,
)
from tests.support.rows import random_ids

if TYPE_CHECKING:
    from collections.abc import Iterator

PROMPT = random_ids(12)
PLAIN = random_ids(9, seed=5)
N_PLAIN = 60
HUNG_S = 60.0
"""Long beyond every limit: only what never ends reaches it."""


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    path = write_spaced_model(tmp_path_factory.mktemp("model") / "spaced.gguf")
    with Engine(path, n_ctx=512, n_slots=2, n_threads=1) as engine:
        yield engine


@pytest.fixture(scope="module")
def expected(engine: Engine) -> list[int]:
    return [token.id for token in engine.generate(PLAIN, temperature=0, max_tokens=N_PLAIN)]


def outcome_of(engine: Engine, options: dict[str, Any]) -> str:
    """Generate; "refused", "stop" or "length"."""
    try:
        generation = engine.generate(
            PROMPT, temperature=1, top_k=0, seed=1, max_tokens=12, **options
        )
        for _ in generation:
            pass
    except InvalidSampling:
        return "refused"
    return str(generation.finish_reason)


def check_beside_plain(engine: Engine, expected: list[int], options: dict[str, Any]) -> str:
    """Run a hostile request and plain ones side by side; the outcome of the former."""
    outcomes: list[str] = []
    hostile = threading.Thread(
        target=lambda: outcomes.append(outcome_of(engine, options)), daemon=True
    )
    hostile.start()
    while True:
        plain = engine.generate(PLAIN, temperature=0, max_tokens=N_PLAIN)
        assert [token.id for token in plain] == expected
        if not hostile.is_alive():
            break
        hostile.join(0.02)
    hostile.join(HUNG_S)
    assert outcomes, "the hostile request has not ended, or raised what it should not"
    return outcomes[0]


def test_ambiguous_grammar_of_45_bytes_is_followed(engine: Engine, expected: list[int]) -> None:
    assert check_beside_plain(engine, expected, {"grammar": AMBIGUOUS}) == "length"


@pytest.mark.parametrize("name", GRAMMARS)
def test_hostile_grammar_leaves_the_others_alone(
    engine: Engine, expected: list[int], name: str
) -> None:
    outcome = check_beside_plain(engine, expected, {"grammar": GRAMMARS[name]})
    assert outcome in ("refused", "stop", "length")


@pytest.mark.parametrize("name", CONSTRAINTS)
def test_hostile_constraint_leaves_the_others_alone(
    engine: Engine, expected: list[int], name: str
) -> None:
    pytest.importorskip("llguidance")
    outcome = check_beside_plain(engine, expected, CONSTRAINTS[name])
    assert outcome in ("refused", "stop", "length")


def test_grammar_that_is_cancelled_while_it_is_matched_frees_its_slot(engine: Engine) -> None:
    for _ in range(5):
        generation = engine.generate(PROMPT, grammar=GRAMMARS["all inside all"], temperature=1)
        generation.cancel()
    texts = [engine.generate(PROMPT, grammar='root ::= "yes"', slot=i).read() for i in range(2)]
    assert texts == ["yes", "yes"]
