"""Kills processes at random moments, again and again, and compares what is left with what was acknowledged.

    python -m tests.system.kills                                the scenarios, with a sentence each
    python -m tests.system.kills SCENARIO --kills N --seed S    plays one
    python -m tests.system.kills SCENARIO --help                what runs, who is killed, and what is compared

A scenario is a row of SCENARIOS. Its workload is a class in `tests/system/scenarios`, which knows what is peculiar to
it: how its parts start, when the moment to kill has come, how a victim dies, and what must be there at the end. The
exit status is 1 if a promise was broken.
"""

from __future__ import annotations

import argparse
import importlib
import os
import random
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.kit.faults import Books
from tests.system.scenarios.workload import Workload

MOST_SHOWN = 20
"""Violations that the program prints."""


@dataclass(frozen=True)
class Option:
    """A setting of a workload, and an option of the command line. One that is off by default is a flag."""

    default: Any
    meaning: str


@dataclass(frozen=True)
class Scenario:
    name: str
    sentence: str
    """What holds, whoever is killed."""
    runs: str
    """The processes and clients at work."""
    victims: Mapping[str, int]
    """Who is killed, each kind with its share of the kills."""
    checks: str
    """What the books compare."""
    workload: str
    """The class of the workload: module:class, imported when the scenario is played."""
    kills: int
    """How many kills a run of the program has by default."""
    signal: str = "SIGKILL"
    kills_of_a_workload: int = 1 << 30
    """After so many kills another workload starts anew, in a folder of its own."""
    options: Mapping[str, Option] = field(default_factory=dict)

    def load(self) -> type[Workload]:
        module, name = self.workload.split(":")
        loaded: type[Workload] = getattr(importlib.import_module(f"tests.system.scenarios.{module}"), name)
        return loaded


FSYNC = Option("always", "the server's setting fsync")
FLEET = Option(2, "how many generators work at a time")

SCENARIOS = {
    scenario.name: scenario
    for scenario in (
        Scenario(
            name="servers",
            sentence="A server that is killed under load comes back with all that it acknowledged, and nothing else.",
            runs="a durable server, or several shards; writers (one by one, pipelined, with permits), samplers (plain, "
            "prefetching, leased), an updater, a deleter, and a trainer that publishes versions",
            victims={"servers": 1},
            checks="items, priorities, payloads, counters, permits and versions, after each kill (tests/kit/ledger.py)",
            workload="servers:ServersUnderLoad",
            kills=100,
            options={"shards": Option(1, "how many servers there are"), "fsync": FSYNC},
        ),
        Scenario(
            name="columns",
            sentence="A server that is killed while items are extended loses no column, and puts none on another item.",
            runs="a durable server; generators, teachers that draw, extend and acknowledge, others that extend any "
            "item, a trainer, and a deleter",
            victims={"servers": 1},
            checks="the columns and bytes of each item, and which rows wait for a column, after each kill",
            workload="columns:ServerOfTeachers",
            kills=200,
            options={"fsync": FSYNC},
        ),
        Scenario(
            name="rows",
            sentence="A server that is killed while it holds rows of TransferQueue loses none that it acknowledged.",
            runs="a durable server; clients that put rows, read them, clear them and save checkpoints",
            victims={"servers": 1},
            checks="the bytes of all rows in use and of the last two checkpoints, after each kill; every third time "
            "the last checkpoint is loaded",
            workload="rows:ServerOfRows",
            kills=200,
            options={"fsync": FSYNC},
        ),
        Scenario(
            name="rollouts",
            sentence="Generators that are killed in the middle of rollouts leave whole groups, and hold up nobody.",
            runs="a server under admission; `replay generate --rollout` with several turns; a trainer's client",
            victims={"generators": 1},
            checks="masks, log-probabilities, rewards and advantages of each group, and that permits come back",
            workload="rollouts:Rollouts",
            kills=50,
            options={"generators": FLEET},
        ),
        Scenario(
            name="partial-groups",
            sentence="What a killed generator has finished of its groups, others go on with.",
            runs="a durable server under admission; an engine server; generators with partial groups; a trainer's "
            "client",
            victims={"generators": 1},
            checks="each acknowledged rollout is in its group once, no permit is out, and how many tokens are lost",
            workload="partial_groups:PartialGroups",
            kills=200,
            options={
                "generators": FLEET,
                "in-memory": Option(False, "generators build their groups in their own memory, for comparison"),
            },
        ),
        Scenario(
            name="sessions",
            sentence="Whoever is killed while agents play sessions, each rollout comes once, with its agent's reward.",
            runs="a durable server under admission; an engine server; generators that offer sessions; agents that play "
            "them; a trainer's client",
            victims={"agents": 5, "generators": 2, "servers": 2},
            checks="each acknowledged rollout and each answered end is in one group, with its reward; no permit is out",
            workload="sessions:Sessions",
            kills=90,
            options={"generators": FLEET, "agents": Option(6, "how many agents work at a time")},
        ),
        Scenario(
            name="scoring",
            sentence="Whoever is killed while groups are scored, each group is scored once, and none is lost.",
            runs="a durable server under admission; an engine server; generators of groups without rewards; scorers; a "
            "trainer's client",
            victims={"scorers": 5, "generators": 2, "servers": 2},
            checks="each group that was handed on is trained on once, with its rewards; each acknowledged rollout is "
            "in it; no permit is out",
            workload="scoring:Scoring",
            kills=90,
            options={"generators": FLEET, "scorers": Option(3, "how many scorers work at a time")},
        ),
        Scenario(
            name="prompts",
            sentence="Each prompt is done once an epoch, whichever generators and servers are killed.",
            runs="a durable server with a table of prompts; generators with small windows, until all epochs are done",
            victims={"generators": 4, "servers": 1},
            checks="the number of groups of each prompt, and that one cursor is left",
            workload="prompts:Epochs",
            kills=50,
            options={
                "prompts": Option(10_000, "how many prompts an epoch has"),
                "epochs": Option(1, "how many epochs there are"),
                "generators": Option(3, FLEET.meaning),
                "partial-groups": Option(False, "groups are partial until they are whole"),
            },
        ),
        Scenario(
            name="trainers",
            sentence="A killed trainer, and one killed with a shard, trains on every group, and on none twice.",
            runs="three durable shards; a trainer with checkpoints; a writer that fills the queue without pause",
            victims={"shards": 2, "trainers": 7, "both": 7},
            checks="each acknowledged group is one that the weights are trained on, or is in its queue, once",
            workload="trainers:TrainerOnShards",
            kills=80,
            kills_of_a_workload=7,
        ),
        Scenario(
            name="ray-head",
            sentence="A trainer trains on every group, and on none twice, when the head of Ray dies.",
            runs="three durable shards on Ray; a trainer with checkpoints; a writer that fills the queue without pause",
            victims={"heads": 1},
            checks="each acknowledged group is one that the weights are trained on, or is in its queue, once",
            workload="trainers:TrainerOnRay",
            kills=20,
            kills_of_a_workload=7,
        ),
        Scenario(
            name="parts-of-a-run",
            sentence="A run whose parts are killed ends by itself, with each step once.",
            runs="`replay run` of 60 steps, and a client that inserts groups",
            victims={"servers": 1, "trainers": 1, "generators": 1},
            checks="the steps, the groups that they trained on, and that no acknowledged group is lost",
            workload="run:RunWithKilledParts",
            kills=60,
            kills_of_a_workload=8,
        ),
        Scenario(
            name="runs",
            sentence="A killed run leaves no process, and the same command finishes it.",
            runs="`replay run` of 60 steps, started again after each kill, and a client that inserts groups",
            victims={"runs": 1},
            checks="nothing that the run started lives five seconds later; else as parts-of-a-run",
            workload="run:Run",
            kills=10,
            options={"stubborn": Option(False, "the reward leaves a child behind that ignores SIGTERM")},
        ),
        Scenario(
            name="stopped-runs",
            sentence="A run that is stopped repeats no step when it is started again.",
            runs="`replay run` of 60 steps, started again after each stop, and a client that inserts groups",
            victims={"runs": 1},
            signal="SIGTERM",
            checks="the exit status, and that no step was made twice; else as parts-of-a-run",
            workload="run:StoppedRun",
            kills=20,
            kills_of_a_workload=5,
        ),
        Scenario(
            name="hung-shard",
            sentence="Calls of every kind go on while a shard stands still, and no item is lost or comes twice.",
            runs="three shards; a client for each kind of call",
            victims={"shards": 1},
            signal="SIGSTOP, and SIGCONT later",
            checks="each acknowledged item is delivered once, a call of each kind ends meanwhile; it tells the longest",
            workload="hung_shard:HungShard",
            kills=1,
            kills_of_a_workload=1,
            options={
                "seconds": Option(60.0, "how long the shard stands still"),
                "around": Option(5.0, "seconds of work before and after"),
            },
        ),
    )
}


def spread(kills: int, shares: Mapping[str, int]) -> dict[str, int]:
    """How many of each kind are killed: in proportion to the shares, and at least one of each if there are enough."""
    counts = dict.fromkeys(shares, 0)
    for _ in range(kills):
        next_one = min(counts, key=lambda victim: counts[victim] / shares[victim])
        counts[next_one] += 1
    return counts


def play(name: str, kills: int | Mapping[str, int], seed: int, folder: Path, **options: Any) -> Books:
    """Plays a scenario in an empty folder. Returns what was counted, and what is wrong.

    `kills`: how many, or how many of each kind. `options`: settings of the workload.
    """
    scenario = SCENARIOS[name]
    rng = random.Random(seed)
    counts = spread(kills, scenario.victims) if isinstance(kills, int) else kills
    victims = [victim for victim, count in counts.items() for _ in range(count)]
    rng.shuffle(victims)
    workload_class = scenario.load()
    books = Books()
    workloads = 0
    while victims and not books.violations:
        workloads += 1
        place = folder / f"workload-{workloads}"
        place.mkdir()
        here = victims[: scenario.kills_of_a_workload]
        workload = workload_class(place, rng, len(here), **options)
        killed = kill_all(workload, here)
        del victims[:killed]
        books.add(workload.books)
    return books


def kill_all(workload: Workload, victims: Sequence[str]) -> int:
    """Lets a workload work, and kills the victims one after another. Returns how many kills there were."""
    killed = 0
    try:
        workload.start()
        for victim in victims:
            workload.work()
            if workload.is_over or workload.books.violations:
                break
            workload.kill(victim)
            killed += 1
        workload.finish()
    finally:
        workload.close()
    return killed


def main(arguments: Sequence[str]) -> int:
    """Plays the scenario that the arguments name, and prints a report. Returns the exit status."""
    parser = make_parser()
    if not arguments:
        print(list_of_scenarios())
        return 0
    given = vars(parser.parse_args(arguments))
    scenario = SCENARIOS[given.pop("scenario")]
    try:
        kills = read_kills(given.pop("kills"), scenario)
    except ValueError as error:
        parser.error(str(error))
    seed = given.pop("seed")
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    print(f"{scenario.name}, seed {seed}", flush=True)
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        books = play(scenario.name, kills, seed, Path(folder), **given)
    for line in books.report:
        print(line)
    totals = ", ".join(f"{count} {what}" for what, count in sorted(books.totals.items()))
    print(f"seed {seed}, {time.monotonic() - began:.0f} s: {totals}")
    print(f"{len(books.violations)} violations", *books.violations[:MOST_SHOWN], sep="\n  ")
    return int(bool(books.violations))


def list_of_scenarios() -> str:
    width = max(map(len, SCENARIOS)) + 2
    return "\n".join(f"{scenario.name:<{width}}{scenario.sentence}" for scenario in SCENARIOS.values())


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.system.kills")
    commands = parser.add_subparsers(dest="scenario", metavar="SCENARIO", required=True)
    for scenario in SCENARIOS.values():
        victims = ", ".join(f"{victim} {share}" for victim, share in scenario.victims.items())
        text = [
            scenario.sentence,
            f"Runs: {scenario.runs}.",
            f"Kills: {victims}; by {scenario.signal}.",
            f"Compares: {scenario.checks}.",
        ]
        command = commands.add_parser(
            scenario.name,
            help=scenario.sentence,
            description="\n".join(text),
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.add_argument(
            "--kills",
            nargs="+",
            metavar="N",
            default=[str(scenario.kills)],
            help=f"a number, which the kinds of victims share as above, or KIND=N for some kinds ({scenario.kills})",
        )
        command.add_argument("--seed", type=int, metavar="S", default=random.randrange(10**6))
        for name, option in scenario.options.items():
            if option.default is False:
                command.add_argument(f"--{name}", action="store_true", help=option.meaning)
            else:
                meaning = f"{option.meaning} ({option.default})"
                command.add_argument(f"--{name}", type=type(option.default), default=option.default, help=meaning)
    return parser


def read_kills(words: Sequence[str], scenario: Scenario) -> int | dict[str, int]:
    """The kills that somebody asks for: `90`, or `agents=50 servers=20`."""
    if len(words) == 1 and words[0].isdigit():
        return int(words[0])
    counts = {}
    for word in words:
        kind, _, count = word.partition("=")
        if kind not in scenario.victims or not count.isdigit():
            kinds = " or ".join(f"{victim}=N" for victim in scenario.victims)
            raise ValueError(f"--kills {word}: give a number, or {kinds}")
        counts[kind] = int(count)
    return counts


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
