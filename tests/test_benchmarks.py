"""The benchmark: its orchestration with our server alone, its sums, and what it must never delete."""

import io
import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks import tables
from benchmarks.cells import (
    CHECKPOINT,
    Comparison,
    Figure,
    Measurement,
    Side,
    Table,
    all_comparisons,
    rate,
    select,
    value,
)
from benchmarks.environments import FILES, OURS, ROOT, BuiltEnvironment
from benchmarks.interpreter import build_of, installed
from benchmarks.loops import BYTES_A_TOKEN, Task
from benchmarks.measure import CellResult, Effort, Round, measure
from benchmarks.report import Report
from benchmarks.run import run
from benchmarks.trainer import run as trainer
from experiments.learning import page as learning_page

QUICK = Effort(seconds=0.0, rounds=2)  # as on a machine that keeps a process waiting for longer than it measures
QUICK_SIDE = ["step", "equal", "1", "plain"]


def make_cell(name: str, *ratios: float, against: str = "reverb") -> CellResult:
    return CellResult(name, against, "items/s", True, tuple(Round(100.0 * ratio, 100.0, ratio) for ratio in ratios))


def our_side() -> Side:
    table = Table("pool", "prioritized", "min_heap", max_size=512)
    return Side("ours", (table,), (Task("fill", "pool", 100, items=512),))


@pytest.mark.long
def test_every_operation_runs_against_our_server_in_processes_of_its_own():
    figures = {
        "insert": (Figure("insert", "items/s", rate),),
        "sample": (Figure("sample", "items/s", rate),),
        "latency": (Figure("p50", "ms", value("p50"), higher_is_better=False),),
        "update": (Figure("update", "keys/s", rate),),
        "request": (Figure("request", "items/s", rate),),
    }
    measurements = tuple(
        Measurement(figures[name], Task(name, "pool", 100, items=8), clients=2 if name in ("insert", "sample") else 1)
        for name in figures
    )
    results: list[CellResult] = []
    measure(Comparison("ours", our_side(), our_side(), measurements), QUICK, results.append)
    assert [cell.error for cell in results] == [None] * len(figures)
    for cell in results:
        assert len(cell.rounds) == 2
        assert all(each.ours > 0 and each.theirs > 0 and math.isfinite(each.ratio) for each in cell.rounds)


@pytest.mark.long
def test_groups_pass_from_generators_to_a_reader_that_decodes_them():
    side = Side("ours", (Table("queue", "fifo", "fifo", 16, queue=True),))
    nbytes = 8 * 16 * BYTES_A_TOKEN
    tokens = Measurement(
        (Figure("tokens", "tokens/s", rate),),
        Task("write_groups", "queue", nbytes, items=32),
        clients=2,
        beside=Task("read_groups", "queue", nbytes, items=64),
        rounds=1,
    )
    results: list[CellResult] = []
    tls = replace(side, system="ours_tls")
    measure(Comparison("ours", side, tls, (tokens,), tcp=replace(side, system="ours_tcp")), QUICK, results.append)
    (cell,) = results
    assert cell.error is None
    assert len(cell.rounds) == 1
    assert cell.median("ours") > 0 < cell.median("theirs")
    assert cell.median("tcp") > 0


def test_a_dict_of_arrays_comes_back_as_it_was():
    side = Side("ours", (Table("inserts", "fifo", "fifo", 4),))
    names = ("put", "get", "both")
    parts = Measurement(tuple(Figure(name, "GB/s", value(name)) for name in names), Task("fields", "inserts", 1 << 20))
    results: list[CellResult] = []
    measure(Comparison("ours", side, side, (parts,)), QUICK, results.append)
    assert [cell.error for cell in results] == [None] * 3
    put, get, both = (cell.rounds[0].ours for cell in results)
    assert 1 / both == pytest.approx(1 / put + 1 / get)


@pytest.mark.parametrize("durability", ["always", pytest.param(CHECKPOINT, marks=pytest.mark.long)])
@pytest.mark.long
def test_a_restart_is_timed_only_if_all_items_are_there_after_it(durability):
    side = Side("ours", (Table("kept", "fifo", "fifo", 64),), durability=durability)
    restart = Measurement((Figure("restart", "items/s", rate),), Task("restart", "kept", 400, items=64), rounds=1)
    lost = Measurement((Figure("lost", "items/s", rate),), Task("restart", "kept", 400, items=65), rounds=1)
    results: list[CellResult] = []
    measure(Comparison("ours", side, side, (restart, lost)), QUICK, results.append)
    assert results[0].rounds[0].ours > 0
    assert "64 of 65 items are there after a restart" in results[1].error
    assert not any(FILES.glob("ours-*"))


@pytest.mark.long
def test_a_cell_that_fails_says_why_and_the_next_one_is_measured():
    figure = Figure("bad", "items/s", rate)
    bad = Measurement((figure,), Task("insert", "no-such-table", 100))
    good = Measurement((Figure("good", "items/s", rate),), Task("insert", "pool", 100))
    results: list[CellResult] = []
    measure(Comparison("ours", our_side(), our_side(), (bad, good)), QUICK, results.append)
    assert "no table 'no-such-table'" in results[0].error
    assert results[0].median("ratio") is None
    assert results[1].median("ratio") is not None


def test_a_system_that_cannot_be_installed_makes_failed_cells(monkeypatch):
    def fail(self: BuiltEnvironment) -> None:
        raise RuntimeError("no network")

    monkeypatch.setattr(BuiltEnvironment, "ensure", fail)
    chosen = select(all_comparisons(1.0), lambda cell: cell.startswith("ack-"))
    report = run(chosen, QUICK, Console(quiet=True), lambda _: None)
    assert len(report.cells) == 12
    assert {cell.error for cell in report.cells} == {"no network"}


def test_the_ratio_is_the_median_over_rounds_and_above_one_when_ours_is_better():
    assert make_cell("insert/400B/1-writers", 2.0, 9.0, 1.0).median("ratio") == 2.0
    assert Figure("rate", "items/s", rate).ratio(ours=30.0, theirs=10.0) == 3.0
    assert Figure("time", "ms", value("p50"), higher_is_better=False).ratio(ours=30.0, theirs=10.0) == pytest.approx(
        1 / 3
    )


def test_the_rate_of_clients_that_start_together_is_all_items_over_the_longest_time():
    assert rate([{"items": 10, "seconds": 1.0}, {"items": 30, "seconds": 2.0}]) == 20.0


def test_the_report_has_a_ratio_in_each_cell_and_says_which_goals_are_met(tmp_path):
    failed = CellResult("sample/400B/1-readers", "reverb", "items/s", True, error="theirs: it broke")
    cells = [
        replace(make_cell("insert/400B/1-writers"), rounds=(Round(800.0, 100.0, 8.0, tcp=50.0, tcp_ratio=0.5),)),
        make_cell("ack-p50/400B", 2.0),
        make_cell("scaling/insert/1e6", 0.5, against="ours at 1e3 items"),
    ]
    report = Report({}, cells)
    lowest, one, four, ends, mean, over_tcp, scaling, large = report.goals()
    assert lowest.value == 2.0
    assert lowest.met
    assert one.met is None
    assert four.met is None
    assert ends.value == 8.0
    assert ends.met
    assert mean.value == pytest.approx(4.0)
    assert over_tcp.value == pytest.approx(1.0)  # 0.5 over TCP, and 2.0 where there is only one way
    assert scaling.value == 0.5
    assert scaling.met is False
    assert large.met is None

    report = Report({}, [*cells, failed])
    assert report.goals()[0].met is False  # a failed cell does not count as won
    report.save(tmp_path)
    saved = json.loads((tmp_path / "benchmark.json").read_text())
    assert [cell["ratio"] for cell in saved["cells"]] == [8.0, 2.0, 0.5, None]
    assert [cell["tcp_ratio"] for cell in saved["cells"]] == [0.5, None, None, None]
    round_saved = {"ours": 800.0, "theirs": 100.0, "ratio": 8.0, "tcp": 50.0, "tcp_ratio": 0.5}
    assert saved["cells"][0]["rounds"] == [round_saved]
    assert (tmp_path / "benchmark.png").stat().st_size > 1_000
    console = Console(file=io.StringIO(), record=True, width=160)
    report.print(console)
    assert "theirs: it broke" in console.export_text()


def test_our_side_of_the_trainer_benchmark_answers_each_step_with_its_time_and_memory(monkeypatch):
    start_all = trainer.start
    monkeypatch.setattr(trainer, "start", lambda name, arguments, errors: start_all(name, QUICK_SIDE, errors))
    side = trainer.Side("ours", 1, "plain", errors=None)
    try:
        answers = [side.step() for _ in range(2)]
        spent = side.profile()
        answers.append(side.step())
    finally:
        side.stop()
    assert sum(spent["parts"].values()) == pytest.approx(1.0)
    assert spent["parts"]["layers, forward"] > 0
    assert spent["parts"]["loss and backward"] > 0
    assert spent["operators"][0]["share"] >= spent["operators"][-1]["share"] > 0
    for answer in answers:
        assert answer["tokens"] == 3 * 4 * 24
        assert 0 < answer["seconds"] < 300
        assert answer["peak_bytes"] >= answer["idle_bytes"] > 0


def test_a_side_that_does_not_answer_within_the_budget_is_given_up(monkeypatch):
    silent = [sys.executable, "-c", "import sys; sys.stdin.read()"]

    def start(name, arguments, errors):
        return subprocess.Popen(silent, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    monkeypatch.setattr(trainer, "start", start)
    budget = trainer.Budget.of(0.2)
    figures = trainer.measure_one_by_one(3, 1, "plain", None, "equal", budget)
    assert figures["ours error"] == "out of time (--budget) while ours worked"
    assert figures["trl error"] == "out of time (--budget)"
    assert "speed_ratio" not in figures


def test_a_side_that_ends_leaves_the_figures_of_the_other(monkeypatch):
    answers = [{"ready": True}] + 3 * [{"seconds": 2.0, "tokens": 10, "peak_bytes": 4.0, "idle_bytes": 1.0}]
    answers.append({"spent": {"parts": {}, "operators": []}})
    lines = [json.dumps(answer) for answer in answers]
    # A line at once, and one for each request.
    answering = f"import sys\nfor line in {lines!r}:\n    print(line, flush=True)\n    sys.stdin.readline()"

    def start(name, arguments, errors):
        command = [sys.executable, "-c", answering if name == "ours" else "raise SystemExit(3)"]
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    monkeypatch.setattr(trainer, "start", start)
    figures = trainer.measure_one_by_one(2, 1, "plain", None, "equal", trainer.NO_LIMIT)
    assert figures["ours"]["tokens_per_second"] == 5.0
    assert figures["spent"] == {"parts": {}, "operators": []}
    assert "trl ended with status 3" in figures["trl error"]


def test_an_environment_that_the_benchmark_did_not_make_is_never_touched(tmp_path):
    precious = tmp_path / "venv/bin/python"
    precious.parent.mkdir(parents=True)
    precious.write_text("somebody else's")
    with pytest.raises(RuntimeError, match="was not made by the benchmark"):
        BuiltEnvironment(tmp_path / "venv", ("anything==1",)).ensure()
    assert precious.read_text() == "somebody else's"
    with pytest.raises(RuntimeError, match="no-such-server is not installed"):
        BuiltEnvironment(tmp_path / "other", ("anything==1",), program="no-such-server").ensure()
    OURS.ensure()
    assert OURS.python.exists()


def test_the_tables_of_the_page_have_the_figures_of_the_results_and_gaps_where_there_are_none():
    ours_in_memory = {"ours": 5_000_000.0, "theirs": 2_000_000.0, "tcp": 1_250_000.0, "ratio": 2.5, "tcp_ratio": 0.625}
    cells = {"tokens/8x1k/1-generators": ours_in_memory, "insert/4kB/1-writers": ours_in_memory}
    assert "| 8x1k | 1 | 5 | 1.25 |  | 2 |" in tables.tokens(cells)
    assert "| 8x1k | 4 |  |  |  |  |" in tables.tokens(cells)
    assert "| 4kB | 2.50 / 0.62 |" in tables.messages(cells)


def interpreter(folder: Path, *options: str) -> None:
    """A stand-in for python3.11 that was configured with these options."""
    folder.mkdir()
    program = f"#!{sys.executable}\nimport sys, sysconfig\n"
    program += f"sysconfig.get_config_vars()['CONFIG_ARGS'] = {' '.join(map(repr, options))!r}\nexec(sys.argv[2])\n"
    (folder / "python3.11").write_text(program)
    (folder / "python3.11").chmod(0o755)


def test_the_published_tables_are_those_of_the_published_records():
    published = (ROOT / "docs/record/learning.md").read_text()
    assert published.count("<!-- table: ") == 2
    assert learning_page.renewed(published, ROOT) == published


def test_the_record_has_the_tables_of_the_published_results(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["tables"])
    tables.main()
    printed = [each for each in capsys.readouterr().out.strip().split("\n\n") if each.startswith("|")]
    page = (ROOT / "docs/record/performance.md").read_text()
    assert len(printed) >= 6
    assert [each for each in printed if each not in page] == [], "python -m benchmarks.tables prints them"


def test_an_interpreter_with_optimisations_is_preferred_and_one_that_does_not_run_is_passed_over(tmp_path, monkeypatch):
    interpreter(tmp_path / "plain", "--enable-shared")
    interpreter(tmp_path / "optimised", "--enable-shared", "--enable-optimizations", "--with-lto")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken/python3.11").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "broken/python3.11").chmod(0o755)
    monkeypatch.setenv("PATH", ":".join(str(tmp_path / name) for name in ("broken", "plain", "optimised")))
    found = installed((3, 11))
    assert [Path(path).parent.name for path in found] == ["optimised", "plain"]
    assert build_of(found[0])["options"] == ["--enable-shared", "--enable-optimizations", "--with-lto"]
