"""Run llama.cpp's own tests of its server: ``python -m tests.llama_suite [FILE...]``.

Against kqview, and against stock llama-server as the control, side by side. README.md beside this
file lists what the control passes and kqview does not, with the reason. The exit status is 0 when
every other case that the control passes is passed here, and none of that list.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from tests.llama_suite import suite

if TYPE_CHECKING:
    from collections.abc import Mapping

TABLE = Path(__file__).with_name("README.md")
# | `test_file.py::test_name[parameters]` | kind | why |
ROW = re.compile(
    r"^\| `(?P<case>.+)` \| (?P<kind>not offered|benign|left) \| (?P<why>.+) \|$", re.M
)
MOST_LEFT = 20

Outcomes = dict[str, dict[str, str]]


def table() -> dict[str, str]:
    """Kind of each row: of a case, a test (a case without its parameters) or a whole file."""
    rows = {row["case"]: row["kind"] for row in ROW.finditer(TABLE.read_text("utf-8"))}
    assert rows, f"{TABLE} has no rows"
    return rows


def row_of(case: str, rows: Mapping[str, str]) -> str | None:
    """The row that *case* belongs to, None if none."""
    names = (case, case.partition("[")[0], case.partition("::")[0])
    return next((name for name in names if name in rows), None)


def judged(ours: Outcomes, control: Outcomes, rows: Mapping[str, str]) -> list[str]:
    """Lines about what is wrong; prints what both did."""
    counted = [case for case, one in control.items() if one["outcome"] == "passed"]
    wrong: list[str] = []
    found = Counter[str]()
    for case in counted:
        row = row_of(case, rows)
        outcome = ours.get(case, {"outcome": "not run", "why": "not run"})
        if row is not None:
            found[rows[row]] += 1
            if outcome["outcome"] == "passed":
                wrong.append(f"passes, take it off the list: {case}")
        elif outcome["outcome"] == "passed":
            found["passed"] += 1
        else:
            wrong.append(f"FAILED {case}: {outcome.get('why', outcome['outcome'])}")
    files = {case.partition("::")[0] for case in control}
    unused = set(rows) - {row_of(case, rows) for case in counted}
    wrong += [
        f"the control does not pass, take it off the list: {row}"
        for row in sorted(unused)
        if row.partition("::")[0] in files
    ]
    if found["left"] > MOST_LEFT:
        wrong.append(f"{found['left']} cases are left, the limit is {MOST_LEFT}")
    print(f"stock passes {len(counted)} of {len(control)}; of these kqview: {dict(found)}")
    return wrong


def main() -> int:
    """Run all of it."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("files", nargs="*", help="such as test_basic.py; all without any")
    parser.add_argument("--keep", type=Path, help="new folder for the copy, the logs, the results")
    args = parser.parse_args()
    rows = table()
    with tempfile.TemporaryDirectory(prefix="llama-suite-") as temporary:
        folder = args.keep or Path(temporary)
        prepared = suite.prepare(folder)
        files = args.files or prepared.files()
        ran = [name for name in files if name not in rows]
        with ThreadPoolExecutor(2) as pool:
            control = pool.submit(prepared.run, "control", files)
            mine = pool.submit(prepared.run, "kqview", ran)
            stock, ours = control.result(), mine.result()
        # A machine that others use may be slow: those that fail are tried once more, alone.
        failed = [
            case
            for case, one in ours.items()
            if one["outcome"] == "failed"
            and row_of(case, rows) is None
            and stock.get(case, {}).get("outcome") == "passed"
        ]
        if failed:
            ours |= prepared.run("again", failed)
        wrong = judged(ours, stock, rows)
    print(*wrong, f"{len(wrong)} wrong", sep="\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
