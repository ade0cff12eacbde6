"""What `python -m tests.llama_suite` makes of results and its table; it is run by .ci/full."""

from __future__ import annotations

from tests.llama_suite.__main__ import MOST_LEFT, judged, row_of, table

ROWS = {"test_a.py": "not offered", "test_b.py::test_x": "benign", "test_b.py::test_y[1]": "left"}
CASES = (
    "test_a.py::test_x",
    "test_b.py::test_x[1]",
    "test_b.py::test_x[2]",
    "test_b.py::test_y[1]",
)


def outcomes(**others: str) -> dict[str, dict[str, str]]:
    """Of the cases of the table and of ``test_c.py::test_z``."""
    found = dict.fromkeys(CASES, "failed") | {"test_c.py::test_z": "passed"}
    return {case: {"outcome": one} for case, one in (found | others).items()}


def test_cases_outside_the_table_pass_and_those_in_it_fail():
    control = outcomes(**dict.fromkeys(CASES, "passed"))
    assert judged(outcomes(), control, ROWS) == []
    [wrong] = judged(outcomes(**{"test_c.py::test_z": "failed"}), control, ROWS)
    assert wrong.startswith("FAILED test_c.py::test_z")
    [wrong] = judged(outcomes(**{"test_b.py::test_x[2]": "passed"}), control, ROWS)
    assert wrong == "passes, take it off the list: test_b.py::test_x[2]"
    [wrong] = judged(outcomes(), control | {"test_b.py::test_y[1]": {"outcome": "failed"}}, ROWS)
    assert wrong.endswith("take it off the list: test_b.py::test_y[1]")


def test_table_is_read():
    rows = table()
    assert rows[row_of("test_mcp_servers.py::test_x[a]", rows) or ""] == "not offered"
    assert 0 < list(rows.values()).count("left") <= MOST_LEFT
