"""The scenarios of `tests.system.kills` with few kills; those of `replay run` are in `run/test_kills.py`.

The id of a case says what holds. The program kills more often.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.kit.faults import Books
from tests.system import kills
from tests.system.kills import SCENARIOS, Scenario
from tests.system.scenarios.hung_shard import KINDS
from tests.system.scenarios.workload import Workload

LONG = pytest.mark.long
SCENARIOS_OF_A_RUN = {"parts-of-a-run", "runs", "stopped-runs"}


def case(
    sentence: str,
    scenario: str,
    count: int,
    *marks: pytest.MarkDecorator,
    seed: int,
    exactly: Mapping[str, int] | None = None,
    at_least: Mapping[str, int] | None = None,
    **options: Any,
) -> Any:
    """A scenario with so many kills, and what its books must have counted, exactly or at least."""
    return pytest.param(scenario, count, seed, exactly or {}, at_least or {}, options, id=sentence, marks=marks)


PARAMETERS = ("scenario", "count", "seed", "exactly", "at_least", "options")
"""The parameters of a case."""


def played(
    folder: Path,
    scenario: str,
    count: int,
    seed: int,
    exactly: Mapping[str, int],
    at_least: Mapping[str, int],
    options: Mapping[str, Any],
) -> Books:
    """The books of a case, in which no promise is broken."""
    if scenario == "ray-head":
        pytest.importorskip("ray")
    books = kills.play(scenario, count, seed, folder, **options)
    assert books.violations == []
    assert {name: books.totals[name] for name in exactly} == exactly
    too_few = {name: books.totals[name] for name, least in at_least.items() if books.totals[name] < least}
    assert too_few == {}, at_least
    return books


def server_case(sentence: str, count: int, *marks: pytest.MarkDecorator, **options: Any) -> Any:
    exactly = {"kills": count}
    at_least = {"inserts": 10 * count}
    return case(sentence, "servers", count, *marks, exactly=exactly, at_least=at_least, **options)


def columns_case(sentence: str, count: int, *marks: pytest.MarkDecorator) -> Any:
    exactly = {"kills": count}
    at_least = {"added": 10 * count, "columns seen": 1}
    return case(sentence, "columns", count, *marks, seed=7, exactly=exactly, at_least=at_least)


def rows_case(sentence: str, count: int, *marks: pytest.MarkDecorator) -> Any:
    # The clients may be killed before their first checkpoint.
    at_least = {"rows put": 10 * count, "checkpoints": min(1, count - 1), "values seen": 1}
    return case(sentence, "rows", count, *marks, seed=7, exactly={"kills": count}, at_least=at_least)


CASES_OF_BOTH_TRANSPORTS = [
    server_case("a killed server keeps its promises", 1, seed=7),
    server_case("five kills of a server break no promise", 5, LONG, seed=7),
    columns_case("a kill costs no column and puts none on another item", 1),
    columns_case("ten kills cost no column and put none on another item", 10, LONG),
    rows_case("a kill costs no row of TransferQueue", 1),
    rows_case("ten kills cost no row of TransferQueue", 10, LONG),
]


@pytest.mark.parametrize(PARAMETERS, CASES_OF_BOTH_TRANSPORTS)
def test_kills_break_no_promise_whichever_way_payloads_go(
    tmp_path, transport, scenario, count, seed, exactly, at_least, options
):
    """The clients of this process put all their payloads into rings, or none. Payloads are stored in LMDB."""
    books = played(tmp_path, scenario, count, seed, exactly, at_least, options)
    assert (books.totals["clients over rings"] > 0) == (transport == "shared memory")


CASES = [
    server_case("three shards, of which one is killed, keep their promises", 1, seed=8, shards=3),
    server_case("five kills of one of three shards break no promise", 5, LONG, seed=8, shards=3),
    case(
        "what a killed generator has finished, others go on with",
        "partial-groups",
        1,
        LONG,
        seed=1,
        generators=1,
        exactly={"kills": 2},
        at_least={"rollouts acknowledged": 1},
    ),
    case(
        "fifty kills lose no finished rollout and no permit",
        "partial-groups",
        50,
        LONG,
        pytest.mark.timeout(1800),
        seed=2,
        exactly={"kills": 52},
        at_least={"groups": 51},
    ),
    case(
        "a killed generator and a killed server cost no prompt and repeat none",
        "prompts",
        2,
        seed=1,
        prompts=40,
        generators=1,
        window=16,
        held=True,
        exactly={"groups": 40, "kills": 2, "kills of generators": 1, "kills of servers": 1},
    ),
    case(
        "fifty kills leave each of ten thousand prompts done once",
        "prompts",
        50,
        LONG,
        pytest.mark.timeout(3600),
        seed=2,
        prompts=10_000,
        exactly={"groups": 10_000, "kills of servers": 10},
    ),
    case(
        "whoever is killed amid sessions, each group comes once, in one place and with its rewards",
        "sessions",
        3,
        LONG,
        pytest.mark.timeout(600),
        seed=1,
        generators=1,
        agents=3,
        at_least={"groups": 3, "ends answered": 1},
    ),
    case(
        "ninety kills of agents, generators and servers lose no group and no permit",
        "sessions",
        90,
        LONG,
        pytest.mark.timeout(3600),
        seed=2,
        at_least={"kills": 90},
    ),
    case(
        "whoever is killed while groups are scored, each group comes once, in one place and with its rewards",
        "scoring",
        4,
        pytest.mark.timeout(600),
        seed=1,
        generators=1,
        scorers=2,
        at_least={"groups": 3},
    ),
    case(
        "ninety kills of scorers, generators and servers lose no group and no permit",
        "scoring",
        90,
        LONG,
        pytest.mark.timeout(3600),
        seed=2,
        at_least={"kills": 90},
    ),
    case(
        "a generator that is killed amid rollouts leaves whole groups, and permits that come back",
        "rollouts",
        1,
        LONG,
        seed=1,
        generators=1,
        exactly={"kills": 2},
        at_least={"groups": 2},
    ),
    case(
        "fifty kills leave whole groups and hold up nobody",
        "rollouts",
        50,
        LONG,
        pytest.mark.timeout(1800),
        seed=2,
        exactly={"kills": 52},
        at_least={"groups of survivors": 1, "permits of the dead": 1},
    ),
    case(
        "a trainer trains on every group and on none twice, whoever is killed",
        "trainers",
        3,
        LONG,
        seed=1,
        exactly={"kills of shards": 1, "kills of trainers": 1, "kills of both": 1},
        at_least={"groups acknowledged": 11},
    ),
    case(
        "a trainer trains on every group and on none twice, when the head of Ray dies",
        "ray-head",
        1,
        LONG,
        seed=1,
        exactly={"kills": 1},
        at_least={"groups acknowledged": 11},
    ),
    case(
        "calls of every kind go on while a shard stands still, and no item is lost or comes twice",
        "hung-shard",
        1,
        LONG,
        seed=1,
        seconds=6.0,
        around=1.0,
        exactly={"kinds of calls": KINDS - 1},
        at_least={"items acknowledged": 21},
    ),
]


@pytest.mark.parametrize(PARAMETERS, CASES)
def test_kills_break_no_promise(tmp_path, scenario, count, seed, exactly, at_least, options):
    played(tmp_path, scenario, count, seed, exactly, at_least, options)


# ------------------------------------------------------------------------------------------------ the program itself


def test_every_scenario_has_a_case():
    named = {case.values[0] for case in [*CASES, *CASES_OF_BOTH_TRANSPORTS]}
    assert named | SCENARIOS_OF_A_RUN == SCENARIOS.keys()


@pytest.mark.parametrize(
    ("count", "counts"),
    [
        (1, {"agents": 1, "generators": 0, "servers": 0}),
        (3, {"agents": 1, "generators": 1, "servers": 1}),
        (4, {"agents": 2, "generators": 1, "servers": 1}),
        (90, {"agents": 50, "generators": 20, "servers": 20}),
    ],
)
def test_kinds_of_victims_share_the_kills(count, counts):
    assert kills.spread(count, SCENARIOS["sessions"].victims) == counts


class Fake(Workload):
    """A workload of which two victims can be killed. It notes what is called."""

    calls: list[str]
    broken_at = ""
    """A promise is broken at this victim."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments, Books())
        self.left = 2

    def start(self) -> None:
        self.calls.append("start")

    def work(self) -> None:
        self.is_over = self.left == 0

    def kill(self, victim: str) -> None:
        self.left -= 1
        self.calls.append(victim)
        self.books.killed(victim)
        if victim == self.broken_at:
            self.books.violated("a group is lost")

    def finish(self) -> None:
        self.calls.append("finish")

    def close(self) -> None:
        self.calls.append("close")


@pytest.fixture
def fake(monkeypatch):
    """The class of the workload that a scenario "fake" plays."""

    class Played(Fake):
        calls: list[str] = []  # noqa: RUF012

    scenario = Scenario("fake", "Nothing is lost.", "a fake", {"fakes": 1, "mocks": 1}, "calls", "none:Fake", kills=3)
    monkeypatch.setitem(SCENARIOS, "fake", scenario)
    monkeypatch.setattr(Scenario, "load", lambda self: Played)
    return Played


def test_kills_that_a_workload_leaves_come_in_another_one(fake, tmp_path):
    books = kills.play("fake", {"fakes": 3}, 1, tmp_path)
    first = ["start", "fakes", "fakes", "finish", "close"]
    assert fake.calls == [*first, "start", "fakes", "finish", "close"]
    assert books.totals == {"kills": 3, "kills of fakes": 3}
    assert len(list(tmp_path.iterdir())) == 2


def test_nobody_is_killed_after_a_promise_was_broken(fake, tmp_path):
    fake.broken_at = "fakes"
    books = kills.play("fake", {"fakes": 3}, 1, tmp_path)
    assert fake.calls == ["start", "fakes", "finish", "close"]
    assert books.violations == ["a group is lost"]


def test_a_workload_that_fails_is_closed(fake, tmp_path, monkeypatch):
    monkeypatch.setattr(fake, "work", lambda self: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        kills.play("fake", 1, 1, tmp_path)
    assert fake.calls == ["start", "close"]


def test_the_program_reports_what_is_broken_and_fails(fake, capsys):
    assert kills.main(["fake", "--kills", "2", "--seed", "4"]) == 0
    said = capsys.readouterr().out
    assert "2 kills, 1 kills of fakes, 1 kills of mocks\n" in said
    assert said.endswith("0 violations\n")
    fake.broken_at = "mocks"
    assert kills.main(["fake", "--kills", "mocks=1", "--seed", "4"]) == 1
    said = capsys.readouterr().out
    assert said.startswith("fake, seed 4\n")
    assert said.endswith("1 violations\n  a group is lost\n")


def test_the_program_lists_its_scenarios(capsys):
    assert kills.main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(SCENARIOS)
    assert "loses no column" in lines[1]


@pytest.mark.parametrize("words", [["fakes=x"], ["others=1"], ["2", "fakes=1"]])
def test_a_victim_that_a_scenario_does_not_have_is_refused(fake, capsys, words):
    with pytest.raises(SystemExit, match="2"):
        kills.main(["fake", "--kills", *words])
    assert "give a number, or fakes=N or mocks=N" in capsys.readouterr().err
