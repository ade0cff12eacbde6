"""The scripts of bench/: what they save, read back and print, and the CUDA comparison."""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from bench import report
from kqview.bench.pairs import Pairs
from kqview.bench.records import LeftOut, SweepRow, append_record

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import ModuleType

pytestmark = pytest.mark.full

BENCH = Path(report.__file__).parent
ABOUT: dict[str, Any] = {
    "date": "2025-01-02T03:04:05+00:00", "machine": "x86_64", "system": "Linux", "cpu": "some cpu",
    "n_cores": 2, "load_average": 0.1, "kqview_commit": "abc",
    "llama_cpp_commit": "0123456789abcdef",
    "flags": "--threads 2 --pairs 20", "n_context": 1024, "is_quick": False,
}  # fmt: skip


def timing(ratio: float, n_pairs: int, target: float | None, name: str = "r") -> report.Timing:
    pairs = Pairs([10.0] * n_pairs, [10.0 * ratio] * n_pairs)
    return report.Timing(name, "what", "against", "a token", pairs, target, "python bench/x.py")


def sweep_row(capture: str, ratio: float, n_context: int = 256, *, flash: bool = True) -> SweepRow:
    return SweepRow(capture, flash, n_context, 1000, Pairs([10.0] * 5, [10.0 * ratio] * 5))


@pytest.mark.parametrize(
    ("ratio", "n_pairs", "target", "verdict"),
    [(1.04, 20, 1.05, "yes"), (1.06, 20, 1.05, "no"), (1.0, 4, 1.05, "?"), (9.0, 20, None, "")],
)
def test_verdict_compares_the_bound_with_the_target(
    ratio: float, n_pairs: int, target: float | None, verdict: str
) -> None:
    assert timing(ratio, n_pairs, target).verdict == verdict


@pytest.mark.parametrize("row", [timing(1.5, 5, 1.05), sweep_row("probs", 1.2)])
def test_record_read_back_from_its_line_is_the_same_row(row: report.Row, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    append_record(path, report.to_record(row, ABOUT))
    (record,) = report.read_records(path)
    assert report.from_record(record) == row


def test_line_that_was_cut_short_takes_no_other_along(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"row": "a"}\n{"row": "b", "pai')
    append_record(path, {"row": "c"})
    assert [record["row"] for record in report.read_records(path)] == ["a", "c"]


def test_reading_a_file_without_rows_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("no JSON\n")
    with pytest.raises(ValueError, match="no JSON line"):
        report.read_records(path)


# ---- which saved rows make the table


def saved(row: str, minute: int, **changes: Any) -> dict[str, Any]:
    return {"row": row, **ABOUT, "date": f"2025-01-02T03:{minute:02}:00+00:00", **changes}


def test_newest_leaves_other_flags_and_machines_out_and_says_so() -> None:
    records = [
        saved("a", 1, flags="--threads 1 --pairs 20"), saved("b", 2, cpu="old"), saved("c", 3),
    ]  # fmt: skip
    found, notes = report.newest(records, ABOUT["flags"])
    assert [record["row"] for record in found] == ["c"]
    assert notes == ["saved, but with `--threads 1 --pairs 20`: a", "saved, but on old: b"]


def so_far(row: str, n_pairs: int) -> dict[str, Any]:
    return report.to_record(report.SoFar(timing(1.0, n_pairs, None, row)), ABOUT)


def test_newest_takes_a_row_that_was_cut_off_only_where_there_is_no_whole_one() -> None:
    whole = report.to_record(timing(1.0, 20, None, "a"), ABOUT)
    records = [whole, so_far("a", 5), so_far("b", 5), so_far("b", 15), so_far("b", 10)]
    found, notes = report.newest(records, ABOUT["flags"])
    assert found == [whole, records[3]]
    assert notes == ["cut off before all pairs were measured: b"]


def test_finished_rows_are_whole_and_of_the_same_build_gpus_and_flags() -> None:
    here = {**ABOUT, "devices": ["H100"], "build": "one"}
    records = [
        saved("a", 1, devices=["H100"], build="one", kqview_commit="later"),
        saved("b", 1, devices=["H200"], build="one"),
        saved("c", 1, devices=["H100"], build="other"),
        saved("d", 1, devices=["H100"], build="one", flags="--threads 1"),
        saved("e", 1, devices=["H100"], build="one", is_partial=True),
    ]
    assert report.finished(records, here) == {"a"}
    assert report.finished([saved("a", 1), saved("b", 1, kqview_commit="other")], ABOUT) == {"a"}


# ---- scripts: they import each other as programs of their folder do


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:

    monkeypatch.syspath_prepend(BENCH)
    return importlib.import_module


def test_collect_saves_rows_as_they_come_and_counts_only_whole_ones(
    script: Any, tmp_path: Path
) -> None:
    console, settings, own_report = script("console"), script("settings"), script("report")
    path = tmp_path / "rows.jsonl"

    def row(name: str) -> Any:
        pairs = Pairs([1.0] * 5, [1.0] * 5)
        return own_report.Timing(name, "what", "against", "a token", pairs, None, "command")

    def measure(*_: object) -> Iterator[Any]:
        yield row("a")
        assert [record["row"] for record in report.read_records(path)] == ["a"]
        yield own_report.SoFar(row("b"))
        raise RuntimeError("it broke")

    benchmarks = [(dict.fromkeys("ab", 1.0), measure)]
    outcome = console.collect(benchmarks, settings.Settings(save=path), ABOUT)
    saved_as = {one["row"]: one.get("is_partial", False) for one in report.read_records(path)}
    assert saved_as == {"a": False, "b": True}
    assert [row.name for row in outcome.rows] == ["a"]
    assert [(one.name, one.reason) for one in outcome.left_out] == [("b", "it broke")]


def test_row_that_fails_does_not_take_the_others_along(
    script: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    console, settings, models = script("console"), script("settings"), script("models")
    own_report = script("report")

    def measured(name: str) -> Any:
        if name == "broken":
            raise RuntimeError("it broke")
        if name == "missing":
            raise models.NotHere("get it")
        pairs = Pairs([1.0] * 5, [1.0] * 5)
        return own_report.Timing(name, "what", "against", "a token", pairs, None, "command")

    names = ("broken", "missing", "fine")

    def measure(*_: object) -> Iterator[Any]:
        for name in names:
            yield console.attempt(name, measured, name)

    def measure_nothing(*_: object) -> Iterator[Any]:
        raise RuntimeError("no engine")
        yield

    benchmarks = [(dict.fromkeys(names, 1.0), measure), ({"other": 1.0}, measure_nothing)]
    outcome = console.collect(benchmarks, settings.Settings(), ABOUT)
    assert [row.name for row in outcome.rows] == ["fine"]
    assert outcome.left_out == [
        LeftOut("broken", "it broke", True), LeftOut("missing", "get it"),
        LeftOut("other", "no engine", True),
    ]  # fmt: skip
    assert outcome.has_failed
    assert "it broke" in capsys.readouterr().err


# ---- processes that benchmarks start

# Prints where its process is, and then works for ever.
OWN_PROCESS = """
import signal, sys, time
from contextlib import contextmanager
from processes import OwnProcess, end_on_sigterm

@contextmanager
def opened(is_broken):
    if is_broken:
        raise ValueError("it cannot be opened")
    def work(what):
        if what == "forever":
            print("works", flush=True)
            time.sleep(3600)
        if what == "fails":
            raise ValueError("it failed")
        if what == "ends":
            sys.exit(3)
        return len(what)
    yield work

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored behind a shell's "&"
    end_on_sigterm()
    with OwnProcess(opened, len(sys.argv) > 2) as one:
        assert one.ask("four") == 4
        one.ask(sys.argv[1])
"""


def run_script(folder: Path, text: str, *arguments: str) -> subprocess.Popen[str]:
    script = folder / "script_of_the_test.py"
    script.write_text(text, "utf-8")
    return subprocess.Popen(
        [sys.executable, script, *arguments],
        env={**os.environ, "PYTHONPATH": str(BENCH)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_no_process_outlives_the_benchmark(tmp_path: Path, number: signal.Signals) -> None:
    with run_script(tmp_path, OWN_PROCESS, "forever") as script:
        assert script.stdout is not None
        assert script.stdout.readline() == "works\n"
        script.send_signal(number)
        # Its output ends when no process has it any more.
        script.communicate(timeout=60)
    assert script.returncode in (-number, 128 + number)


# Starts a program that never answers.
STARTED = """
import signal, sys
from processes import end_on_sigterm
from started import Started

class Silent(Started):
    def is_ready(self):
        print(self._process.pid, flush=True)
        return False

signal.signal(signal.SIGINT, signal.default_int_handler)
end_on_sigterm()
with Silent([sys.executable, "-c", "import time; time.sleep(3600)"]):
    pass
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_program_that_was_started_ends_with_the_benchmark(
    tmp_path: Path, number: signal.Signals
) -> None:
    with run_script(tmp_path, STARTED) as script:
        assert script.stdout is not None
        pid = int(script.stdout.readline())
        script.send_signal(number)
        script.communicate(timeout=60)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (("fails",), "ValueError: it failed"),
        (("ends",), "RuntimeError: a process of the benchmark ended with exit status 3"),
        (("", "broken"), "ValueError: it cannot be opened"),
    ],
)
def test_error_of_work_elsewhere_is_raised_here(
    tmp_path: Path, arguments: tuple[str, ...], error: str
) -> None:
    with run_script(tmp_path, OWN_PROCESS, *arguments) as script:
        _, printed = script.communicate(timeout=60)
    assert script.returncode == 1
    assert printed.splitlines()[-1] == error


# ---- perf


@pytest.fixture
def counts(script: Any) -> ModuleType:
    return script("counts")


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("123456,,instructions:u,1000,100.00,,\n", 123456),
        ("<not supported>,,instructions:u,0,100.00,,\n", None),
        ("Error: no permission\n", None),
        ("", None),
    ],
)
def test_perf_output_is_a_count_or_none(counts: ModuleType, text: str, count: int | None) -> None:
    assert counts.parse_perf(text) == count


# ---- CUDA


def test_saved_rows_of_a_gpu_can_be_printed(
    script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    table = script("cuda_table")
    before = table.README.read_bytes()
    path = tmp_path / "rows.jsonl"
    for name in ("cuda-4k-1-logits", "cuda-1k-1-logits"):
        append_record(path, report.to_record(timing(1.02, 20, 1.03, name), ABOUT))
    monkeypatch.setattr("sys.argv", ["cuda_table.py", str(path), "--print"])
    table.main()
    printed = capsys.readouterr().out
    assert 0 < printed.index("cuda-1k-1-logits") < printed.index("cuda-4k-1-logits")
    assert "1.020" in printed
    assert "no row saved: device-rows-4k-1-in-graph, " in printed
    assert table.README.read_bytes() == before


def test_figures_of_two_gpus_never_stand_in_one_table(
    script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    table = script("cuda_table")
    names = ("cuda-4k-1-logits", "cuda-1k-1-logits")
    records = [
        saved(name, minute, devices=[gpu])
        for minute, (name, gpu) in enumerate(zip(names, ("H100", "H200"), strict=True))
    ]
    rows = [report.to_record(timing(1.0, 5, None, row["row"]), row) for row in records]
    first, second = tmp_path / "first.jsonl", tmp_path / "second.jsonl"
    append_record(first, rows[0])
    # The second call carries the rows of the first one along.
    for row in rows:
        append_record(second, row)
    machines = table.by_machine(
        row for path in (first, second) for row in report.read_records(path)
    )
    assert [[row["row"] for row in found] for found in machines] == [[names[0]], [names[1]]]
    monkeypatch.setattr("sys.argv", ["cuda_table.py", str(first), str(second), "--print"])
    table.main()
    printed = capsys.readouterr().out
    places = [printed.index(text) for text in ("H100, ", names[0], "H200, ", names[1])]
    assert places == sorted(places)


def test_simulated_cluster_is_as_fast_as_its_nodes_until_the_driver_is_busy(script: Any) -> None:
    pytest.importorskip("rich")
    cluster = script("cluster")
    figures = cluster.Figures(
        row_s=1e-4, piece_s=0.01, dispatch_s=0.001, read_s=0, row_bytes=2000, index_bytes=900,
        open_bytes=2000, shard_bytes=8000, id_bytes=100,
    )  # fmt: skip
    few, many = (
        cluster.simulate(figures, cluster.Load(n, rate=10, batch=100, store_s=0.01, days=30))
        for n in (10, 1000)
    )
    assert few.rate == pytest.approx(100, rel=0.1)
    assert few.n_waiting < 10
    assert many.rate == pytest.approx(100 / (0.01 + 100 * 1e-4 + 2 * 0.01), rel=0.05)
    assert many.driver > 0.95
