"""What the diagnosis says of healthy and of sick servers: one situation a line."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import pytest

from replay_client.records import ServerInfo, TableInfo, server_info_of
from replay_client.shards.merging import merge_infos
from replay_dashboard import diagnosis
from replay_dashboard.diagnosis import Finding, Level, diagnose
from replay_dashboard.health import verdict
from replay_dashboard.tag_counts import tag_counts
from replay_generator import GeneratorConfig, ScorerConfig
from replay_generator.engines import SamplingConfig
from replay_protos import replay_pb2 as pb
from replay_server import TableConfig
from replay_trainer import GRPOConfig
from tests.kit.golden import sections

VERSION = "0.1.0"
NOW = 1000.0
LONG = 20.0

QUEUE = {"rate_limiter": {"type": "queue", "max_size": 64}, "forward_to": "replay"}
POOL = {"sampler": "prioritized", "remover": "min_heap", "max_size": 512, "max_staleness": 20}


def table(name: str, config: dict[str, Any] | None = None, **counts: Any) -> pb.TableInfo:
    """A table with these counters; it has been fed, and its items have priority 1."""
    counts = {"inserts": 100, "priority": pb.Quantiles(max=1.0)} | counts
    return pb.TableInfo(name=name, config=TableConfig(name=name, **(config or {})).model_dump_json(), **counts)


def server(*tables: TableInfo, **fields: Any) -> ServerInfo:
    """A server that has run for an hour at policy version 60, with room on its machine."""
    defaults = {
        "version": VERSION,
        "time": NOW,
        "uptime": 3600.0,
        "max_bytes": 10**9,
        "memory_available": 10**10,
        "long_wait": LONG,
        "policy": pb.Policy(version=60, weights="step-60", age=1.0),
    }
    return server_info_of(pb.ServerInfo(tables=tables, **defaults | fields))


def three(**of_b: Any) -> ServerInfo:
    """Three servers on machines of their own. Each has room for its own bound, but not for that of all three."""
    room = {"bytes": 2 * 10**9, "max_bytes": 4 * 10**9, "memory_available": 5 * 10**9, "disk_available": 5 * 10**9}
    tables = table("pool", samples=100)
    return merge_infos({name: server(tables, **room | (of_b if name == "b" else {})) for name in "abc"}, ())


def waiting(seconds: float = 2 * LONG, reason: str = "the reason", count: int = 1) -> pb.Waiting:
    return pb.Waiting(count=count, reason=reason, seconds=seconds)


def admission(**fields: Any) -> pb.AdmissionInfo:
    return pb.AdmissionInfo(**{"fresh_groups_per_step": 16, "max_staleness": 2} | fields)


def tutorial(queue: dict[str, Any] | None = None, pool: dict[str, Any] | None = None, **fields: Any) -> ServerInfo:
    """The two tables of the tutorial after 60 steps of 16 groups, 500 of which had variance."""
    queue = {"inserts": 990, "samples": 960, "consumed": 960, "forwarded": 500, "size": 30} | (queue or {})
    pool = {"inserts": 500, "samples": 460, "stale": 370, "size": 130} | (pool or {})
    fields = {"admission": admission(accepted=990)} | fields
    return server(table("rollouts", QUEUE, **queue), table("replay", POOL, **pool), **fields)


def pool(config: dict[str, Any] | None = None, **counts: Any) -> ServerInfo:
    """A server with one table."""
    return server(table("pool", config, **counts))


def lacks(seconds: float, **columns: int) -> dict[str, Any]:
    """What a table says whose items wait for these columns, so many for each."""
    lacking = [pb.MissingColumn(name=name, items=items) for name, items in columns.items()]
    return {"incomplete_items": max(columns.values()), "missing_columns": lacking, "incomplete_seconds": seconds}


def environments(too_many: bool = False, **groups: tuple[int, int, int]) -> pb.TagCounts:
    """The groups of environments: generated, stale and sampled."""
    values = []
    for name, (generated, stale, sampled) in groups.items():
        values.append(pb.TagValueCounts(name=name, generated=generated, stale=stale, sampled=sampled))
    return pb.TagCounts(name="environment", values=values, too_many=too_many)


def overdue_clients(*roles: str) -> list[pb.OverdueClient]:
    return [pb.OverdueClient(role=role, reason=f"{role}: no sign") for role in roles]


HEALTHY = {
    "a tutorial run whose pool groups went stale after they were trained on": tutorial(),
    "a pool that replaces nothing, because every group has variance": tutorial(pool={"samples": 0}),
    "a pool that is full and evicts groups that were trained on": tutorial(
        pool={"evicted": 370, "evicted_unsampled": 370, "stale": 0}
    ),
    "generators that wait for a step that takes longer than their groups": tutorial(
        admission=admission(accepted=990, acquiring=waiting(LONG / 2))
    ),
    "a trainer that waits for as long as steps of this run take": tutorial(
        {"sampling": waiting(3 * LONG)}, long_wait=4 * LONG, admission=admission(acquiring=waiting(3 * LONG))
    ),
    "a trainer that waits a moment for its next batch": tutorial({"sampling": waiting(LONG / 2)}),
    "a server that started a moment ago": server(
        table("rollouts", QUEUE, inserts=0), table("replay", POOL, inserts=0), uptime=1.0
    ),
    "a pool that clients feed directly and sample often": pool(
        {"max_staleness": 4}, inserts=1000, samples=4000, stale=900, size=100
    ),
    "environments that lose equally little": pool(
        {"max_staleness": 1}, samples=90, tags=[environments(math=(50, 2, 48), code=(50, 4, 46))]
    ),
    "environments that lose equally much": pool(
        {"max_staleness": 1}, samples=78, tags=[environments(math=(50, 10, 40), code=(50, 12, 38))]
    ),
    "an environment of which few groups are known": pool(
        {"max_staleness": 1}, samples=90, tags=[environments(math=(100, 1, 99), code=(7, 7, 0))]
    ),
    "a tag with too many values to count them": pool(
        {"max_staleness": 1}, samples=90, tags=[environments(too_many=True)]
    ),
    "a queue whose groups went stale after they were drawn from the queue before it": server(
        table("first", QUEUE | {"forward_to": "second"}, inserts=100, samples=100, consumed=100, forwarded=90),
        table("second", QUEUE | {"max_staleness": 1, "forward_to": None}, inserts=100, samples=60, stale=40),
    ),
    "a pool whose environments went stale after they were trained on": tutorial(
        pool={"tags": [environments(math=(250, 10, 240), code=(250, 200, 50))]}
    ),
    "items that wait a moment for a column": tutorial(lacks(LONG / 2, value=1)),
    "three servers, each with room for what it may hold": three(),
    "an on-disk server with room on its disk": tutorial(disk_available=10**11, commits=100),
    "priorities of 0 in a queue, which ignores them": tutorial({"priority": pb.Quantiles()}),
    "tables with bounds of their own on a server without one": server(
        table("pool", {"max_bytes": "1GB"}, size=1, samples=1), max_bytes=0
    ),
    "tables without a bound that hold less than a gigabyte": server(
        table("pool", samples=1), max_bytes=0, bytes=10**9 - 1
    ),
}


def starving_rollouts(**counts: Any) -> TableInfo:
    """A queue that drops most groups of one environment."""
    tags = [environments(math=(90, 1, 89), code=(10, 9, 1))]
    return table("rollouts", QUEUE | {"max_staleness": 1, "forward_to": None}, samples=90, **{"tags": tags} | counts)


STALE = table("rollouts", QUEUE | {"max_staleness": 1, "forward_to": None}, stale=74, samples=26)
SICK = {
    "two versions of the package": server(version="9.9"),
    "a clock that is ahead": server(time=NOW + 60),
    "nothing bounds memory": server(*(table(f"t{i}") for i in range(7)), max_bytes=0, bytes=10**9),
    "memory nearly at its bound": server(bytes=95 * 10**7),
    "a machine with less memory than the bound": server(memory_available=2 * 10**8),
    "one machine of three with less memory than its server's bound": three(memory_available=15 * 10**8),
    "one disk of three that is nearly full": three(disk_available=10**6),
    "a disk that is nearly full": server(disk_available=10**6),
    "one damaged record": server(damaged=1),
    "damaged records": server(damaged=3),
    "a trainer that publishes no version": server(table("pool", samples=5), policy=pb.Policy()),
    "permits that expire": tutorial(admission=admission(expired=4)),
    "generators without permits and no trainer": tutorial(admission=admission(acquiring=waiting())),
    "a queue that nobody samples": tutorial({"inserting": waiting(reason="9 > max_diff 8")}),
    "a queue that nobody fills": tutorial({"sampling": waiting()}),
    "items that nobody extends": tutorial(
        lacks(3 * LONG, teacher_logprobs=14),
        clients=[pb.ClientInfo(name="gpu-7", role="teacher, trainer", age=61.0)],
    ),
    "a balance over a tag that no item has": pool(
        {"balance": {"tag": "enviroment"}}, size=9, values=[pb.ValueInfo(items=9, weight=1.0)]
    ),
    "a balance that lets nothing be drawn": pool(
        {"balance": {"tag": "level", "weights": {"1": 0.0}}}, size=9, values=[pb.ValueInfo(name="1", items=9)]
    ),
    "a table that fills once and blocks": pool({"when_full": "block"}),
    "a queue larger than its table": server(table("queue", QUEUE | {"max_size": 4, "forward_to": None})),
    "a table that has no room for what its items wait for": pool({"requires": ["value"], "max_bytes": "1GB"}),
    "a pool without a priority above 0": pool({"sampler": "prioritized"}, size=3, priority=pb.Quantiles()),
    "a table that no client fills": server(table("spare", inserts=0)),
    "a pool whose queue nobody samples": tutorial({"samples": 0, "forwarded": 0}, {"inserts": 0, "stale": 0}),
    "a pool whose queue forwards nothing": tutorial({"forwarded": 0}, {"inserts": 0, "stale": 0}),
    "some groups come too late": pool({"max_staleness": 1}, inserts=80, stale_refused=20, samples=80),
    "a slow environment that loses more groups than the others": pool(
        {"max_staleness": 1}, inserts=200, samples=190, tags=[environments(math=(160, 1, 159), code=(40, 9, 31))]
    ),
    "a slow environment of which hardly anything is trained on": pool(
        {"max_staleness": 1}, inserts=200, samples=190, tags=[environments(math=(190, 0, 190), code=(10, 9, 1))]
    ),
    "a slow environment that starves, though [admission] lets no generator run ahead further": server(
        starving_rollouts(), admission=admission(table="rollouts")
    ),
    "an archive that nobody writes": server(
        table("rollouts", {"copy_to": "archive"}), table("archive", evicted=60, evicted_unsampled=60)
    ),
    "copies that nobody draws": server(
        table("rollouts", {"copy_to": "archive"}), table("archive", size=9, age=pb.Quantiles(max=180.0))
    ),
    "a table too small for what is inserted": pool(evicted=60, evicted_unsampled=60),
    "a pool that refuses what its queue forwards": tutorial({"forward_refused": 5}),
    "retained rows that were discarded": pool(retained_discarded=3),
    "partial groups that nobody goes on with": server(
        table("partial_groups", size=1, age=pb.Quantiles(max=2 * LONG), sampled=pb.ArrivalTimes(age=2 * LONG)),
        admission=admission(permit_tables=["partial_groups"]),
    ),
    "a shard that hangs or is away": merge_infos({"a": tutorial()}, ["b"]),
    "a disk that fails": server(commit_error="No space left on device"),
    "a start that lost changes": server(fell_back="fell back to commit 7"),
    "permits that no step returns, while the trainer waits for groups": tutorial(
        {"sampling": waiting()}, admission=admission(accepted=64, acquiring=waiting())
    ),
    "a queue full of items that nobody extends": tutorial(
        lacks(2 * LONG, teacher_logprobs=2, value=1) | {"inserting": waiting(), "sampling": waiting()}
    ),
    "both sides of a table wait": pool(inserting=waiting(), sampling=waiting()),
    "a ratio that max_times_sampled does not allow": pool(
        {"rate_limiter": {"type": "sample_to_insert_ratio", "samples_per_insert": 4.0}, "max_times_sampled": 2}
    ),
    "a min_size that does not fit into max_bytes": pool(
        {"rate_limiter": {"type": "min_size", "min_size": 10}, "max_bytes": 50}, size=4, bytes=40
    ),
    "most of a queue goes stale unused, and nothing bounds how far generators run ahead": server(STALE),
    "most of a queue goes stale unused, and [admission] lets generators run ahead further than that": server(
        STALE, admission=admission(max_staleness=2)
    ),
    "most of a queue goes stale unused, though [admission] forbids it": server(
        STALE, admission=admission(max_staleness=1)
    ),
    "a pool that loses what clients insert before it is sampled": pool({"max_staleness": 1}, stale=90, samples=10),
    # What stops the run has a headline.
    "the trainer does not come": tutorial({"inserting": waiting(), "sampled": pb.ArrivalTimes(age=LONG)}),
    "the trainer comes too seldom": tutorial({"inserting": waiting(), "sampled": pb.ArrivalTimes(age=1.0)}),
    "the generators do not come": tutorial(pool={"sampling": waiting(), "inserted": pb.ArrivalTimes(age=LONG)}),
    "no version comes": tutorial(admission=admission(acquiring=waiting()), policy=pb.Policy(version=3, age=60.0)),
    "the teacher does not come": tutorial(lacks(LONG, value=1) | {"sampling": waiting()}),
    "the trainer is gone": tutorial(overdue=overdue_clients("trainer")),
    "the generators are gone": tutorial(
        overdue=[pb.OverdueClient(role="generator", table="rollouts", reason="nobody inserts into rollouts")]
    ),
    "both are gone": tutorial(overdue=overdue_clients("generator", "trainer")),
}
"""Servers in trouble; tests/golden/findings/troubles.txt has what the diagnosis finds."""


def troubles(info: ServerInfo) -> list[Finding]:
    return [finding for finding in diagnose(info, VERSION, NOW) if finding.level is not Level.OK]


def text_of(findings: Iterable[Finding]) -> str:
    """Findings as a golden file has them: level, check and message, then the remedy and the headline."""
    lines = []
    for finding in findings:
        lines.append(f"{finding.level} {finding.check}: {finding.message}")
        if finding.remedy:
            lines.append(f"    remedy: {finding.remedy}")
        if finding.headline:
            lines.append(f"    {finding.stops}: {finding.headline}")
    return "\n".join(lines)


@pytest.mark.parametrize("situation", HEALTHY)
def test_a_healthy_server_has_no_trouble(situation):
    assert troubles(HEALTHY[situation]) == []


def test_each_trouble_of_a_sick_server_has_a_level_a_sentence_a_remedy_and_a_headline_if_it_stops_the_run(golden):
    golden("findings/troubles.txt", sections({name: text_of(troubles(info)) for name, info in SICK.items()}))


def test_groups_given_up_count_with_those_of_the_server_and_not_without_them():
    settings = GeneratorConfig(tables=("rollouts",)).described() | {"given_up": json.dumps({"code": 20})}
    generator = pb.ClientInfo(name="gpu-7", role="generator", settings=json.dumps(settings))

    def counted(tags: list[pb.TagCounts]) -> dict[str, int]:
        """The generated groups of each environment."""
        info = server(table("rollouts", QUEUE, tags=tags), clients=[generator])
        counts = list(tag_counts(info, info.tables["rollouts"]))
        return {value: of_value.generated for each in counts for value, of_value in each.values.items()}

    assert counted([]) == {"code": 20}
    assert counted([environments(math=(90, 0, 90), code=(10, 0, 10))]) == {"math": 90, "code": 30}
    assert counted([environments(too_many=True)]) == {}


OF_THE_COMMAND = {"not-encrypted", "no-server", "server-hangs", "refused", "slow"}
"""Rules about the connection: tests/cli/test_doctor.py."""


def generator(name: str, **facts: Any) -> pb.ClientInfo:
    return client("generator", name, GeneratorConfig().described(), **facts)


# ----------------------------------------------------------------------------------------- the headline of situations


def client(role: str, name: str, says: dict[str, str] | None = None, **facts: Any) -> pb.ClientInfo:
    return pb.ClientInfo(name=name, role=role, settings=json.dumps(says or {}), **facts)


def run(*clients: pb.ClientInfo, **fields: Any) -> ServerInfo:
    """The tutorial's run with these clients."""
    return tutorial(clients=clients, **fields)


def unscored(*clients: pb.ClientInfo, size: int = 12, queue: dict[str, Any] | None = None, **counts: Any) -> ServerInfo:
    """A trainer, these clients, and a table of groups that lack rewards. `counts` are of this table."""
    groups = table("unscored", {"max_times_sampled": 1}, size=size, age=pb.Quantiles(max=300.0), **counts)
    rollouts = table("rollouts", QUEUE, samples=9, **queue or {})
    return server(rollouts, groups, admission=admission(permit_tables=["unscored"]), clients=[TRAINS, *clients])


def scored_without_permits(*clients: pb.ClientInfo) -> ServerInfo:
    """A generator, a scorer at work, and no [admission]. Nobody samples the groups that have rewards."""
    groups = table("unscored", {"max_times_sampled": 1}, size=12, samples=9)
    return server(table("rollouts", QUEUE, size=9, **RESTS), groups, clients=[NO_SCORES, SCORES, *clients])


def inserted_without_a_name(*clients: pb.ClientInfo, ago: float) -> ServerInfo:
    """A trainer, these clients, and groups that somebody without a name inserted `ago` seconds ago."""
    groups = table("unscored", {"max_times_sampled": 1}, size=12, inserted=pb.ArrivalTimes(age=ago))
    return server(table("rollouts", QUEUE, samples=9), groups, clients=[TRAINS, *clients])


TRAINS = client("trainer", "gpu-1", open=1)
TRAINED = client("trainer", "gpu-1", ended=True, age=50.0)
GENERATES = generator("gen-a", open=1)
GENERATED = generator("gen-a", ended=True, age=50.0)
NO_SCORES = client("generator", "gen-a", GeneratorConfig(unscored_table="unscored").described(), open=1)
LEFT_NO_SCORES = client("generator", "gen-a", GeneratorConfig(unscored_table="unscored").described(), ended=True, age=9)
SCORES = client("scorer", "score-1", ScorerConfig("unscored").described(), open=1)
SCORED = client("scorer", "score-1", ScorerConfig("unscored").described(), ended=True, age=9.0)
TEACHES = client("teacher, trainer", "t-1", open=1)
TAUGHT = client("teacher, trainer", "t-1", age=LONG / 2)
KILLED = client("trainer", "gpu-1", age=600.0)
RESTS = {"inserted": pb.ArrivalTimes(age=500.0), "sampled": pb.ArrivalTimes(age=500.0)}
RESTARTED = {"uptime": 12.0, "policy": pb.Policy(version=60, age=12.0), "admission": admission()}
UNTOUCHED = {"inserted": pb.ArrivalTimes(age=12.0), "sampled": pb.ArrivalTimes(age=12.0)}

RUNS = {
    "trainer and generator are connected": run(TRAINS, GENERATES, queue={"inserts_per_second": 1.0}),
    "the trainer said leave 50 s ago": run(TRAINED, GENERATES),
    "the trainer said leave a moment ago, and its last draw is as young": run(
        client("trainer", "gpu-1", ended=True, age=0.1), GENERATES
    ),
    "one generator of two was killed": run(TRAINS, GENERATES, generator("gen-b", age=2 * LONG)),
    "the trainer has ended, and 16 inserts have waited for two minutes": run(
        TRAINED, GENERATES, queue={"inserting": waiting(120.0, "94 > max_diff 64", 16)}
    ),
    "the trainer has ended, and in this run a wait of two minutes is short": run(
        TRAINED,
        GENERATES,
        max_bytes=0,
        bytes=10**9,
        long_wait=900.0,
        queue={"inserting": waiting(120.0, "94 > max_diff 64", 16), "insert_blocked_share": 1.0},
    ),
    "the trainer waits for groups that nobody scores": unscored(NO_SCORES, queue={"sampling": waiting()}),
    "the generator waits to insert groups that nobody scores any more": unscored(
        NO_SCORES, SCORED, inserting=waiting(2.0)
    ),
    "nobody is connected": server(table("rollouts", QUEUE, inserts=0), max_bytes=0),
    "nobody is connected, and memory has no bound": server(
        table("rollouts", QUEUE, inserts=0), max_bytes=0, bytes=2 * 10**9
    ),
    "groups lack rewards, and no scorer has come": unscored(NO_SCORES),
    "less than a gigabyte is held without a bound": run(TRAINS, GENERATES, max_bytes=0, bytes=10**9 - 1),
    "a gigabyte is held without a bound": run(TRAINS, GENERATES, max_bytes=0, bytes=10**9),
    "two things are to be looked at, and memory is one of them": run(
        TRAINS, GENERATES, max_bytes=0, bytes=10**9, admission=admission(expired=4)
    ),
    "inserts are blocked, a generator is overdue, and memory has no bound": run(
        TRAINS,
        GENERATES,
        queue={"inserting": waiting()},
        max_bytes=0,
        bytes=10**9,
        overdue=[pb.OverdueClient(role="generator", reason="nobody inserts into replay")],
    ),
    "what waits, waits for a trainer that is overdue": run(
        GENERATES,
        queue={"inserting": waiting()},
        overdue=[pb.OverdueClient(role="trainer", reason="no new policy version since version 29, 94 s ago")],
    ),
    "a disk fails, and nobody is connected": server(commit_error="No space left on device"),
    "the generator has ended, and the queue is drained": run(
        TRAINS, GENERATED, queue={"size": 0, "sampling": waiting(5.0)}
    ),
    "the generator has ended, and the trainer still has groups": run(TRAINS, GENERATED),
    "the scorer has ended while the generator goes on": unscored(NO_SCORES, SCORED, size=0),
    "the generator has ended, and the scorer works at what it left": unscored(LEFT_NO_SCORES, SCORES),
    "the generator has ended, and the scorer has nothing left": unscored(LEFT_NO_SCORES, SCORES, size=0),
    "a second run begins with another trainer": run(TRAINED, client("trainer", "gpu-2", open=1), GENERATES),
    "of two trainers the one that was seen last has ended": run(
        client("trainer", "gpu-2", age=15.0), client("trainer", "gpu-1", ended=True, age=1.0), GENERATES
    ),
    "only an archive is written": server(
        table("rollouts", {"copy_to": "archive"}, size=9, **RESTS),
        table("archive", samples=9),
        clients=[client("archiver", "archive-1", open=1)],
    ),
    "both are connected and only evaluate": server(
        table("rollouts", QUEUE, samples=9, **RESTS), clients=[TRAINS, GENERATES]
    ),
    "the trainer is paused": run(
        client("trainer", "gpu-1", open=1, age=90.0),
        GENERATES,
        overdue=[pb.OverdueClient(role="trainer", reason="no new policy version since version 29, 94 s ago")],
    ),
    "the teacher has ended, and items wait for it": run(
        TRAINS, GENERATES, client("teacher, trainer", "t-1", ended=True, age=3.0), queue=lacks(2.0, value=14)
    ),
    "a teacher that draws what it extends is no trainer": run(
        client("teacher, trainer", "t-1", open=1), GENERATES, queue={"samples": 0}, pool={"samples": 0}
    ),
    "a scorer draws its groups without [admission], and no trainer came": scored_without_permits(),
    "a scorer draws its groups without [admission], and the trainer was killed": scored_without_permits(KILLED),
    "a teacher samples what it extends, and no trainer came": run(TEACHES, GENERATES),
    "a teacher samples what it extends, and the trainer was killed": run(TEACHES, KILLED, GENERATES),
    "a teacher was killed a moment after its last sample, and no trainer came": run(
        TAUGHT, GENERATES, queue={"sampled": pb.ArrivalTimes(age=LONG / 2 + 1)}, pool={"samples": 0}
    ),
    "somebody without a name samples since the teacher was killed": run(
        TAUGHT, GENERATES, queue={"sampled": pb.ArrivalTimes(age=1.0)}
    ),
    "generators draw partial groups without [admission], and no trainer came": run(
        client("generator, trainer", "gen-a", GeneratorConfig().described(), open=1), admission=None
    ),
    "generators without names feed a scorer": inserted_without_a_name(SCORES, ago=1.0),
    "generators without names go on after their scorer was killed": inserted_without_a_name(
        client("scorer", "score-1", ScorerConfig("unscored").described(), age=90.0), ago=1.0
    ),
    "generators without names have stopped, and their scorer inserts what is left": inserted_without_a_name(
        client("scorer", "score-1", ScorerConfig("unscored").described(), age=2 * LONG), ago=90.0
    ),
    "a server has started again with a full table, and nobody is back yet": tutorial(
        UNTOUCHED | {"size": 64}, UNTOUCHED, **RESTARTED
    ),
    "a server has started again, and the generator was faster than the trainer": tutorial(
        UNTOUCHED, UNTOUCHED, **RESTARTED, clients=[GENERATES]
    ),
    "a server has started again, and the trainer has not come back for long": tutorial(
        {"inserting": waiting(), "inserted": pb.ArrivalTimes(age=130.0), "sampled": pb.ArrivalTimes(age=130.0)},
        {"sampled": pb.ArrivalTimes(age=130.0)},
        **RESTARTED | {"uptime": 130.0},
        clients=[GENERATES],
    ),
    "the trainer was killed, and nobody knows yet how often it comes": run(
        client("trainer", "gpu-1", age=2 * LONG), GENERATES, queue=RESTS, pool=RESTS
    ),
    "a trainer is in the middle of a step and has no call open": run(
        client("trainer", "gpu-1", age=LONG / 2), GENERATES
    ),
    "clients without names work": tutorial(),
    "a trainer without a name has stopped": tutorial(
        {"sampled": pb.ArrivalTimes(age=90.0)}, {"sampled": pb.ArrivalTimes(age=95.0)}
    ),
    "one program generates and trains": run(client("generator, trainer", "verl", open=1)),
    "one program generates, extends and trains": run(client("generator, teacher, trainer", "mine", open=1)),
    "a stage is connected, and a generator never was": server(
        table("rollouts", QUEUE, inserts=0),
        table("raw", inserts=0),
        uptime=90.0,
        clients=[TRAINS, client("stage", "filter", {"part": '"stage"', "source_table": '"raw"'}, open=1)],
    ),
    "the trainer and the generator have ended": run(TRAINED, GENERATED),
    "the trainer has ended, and the generator was killed": run(
        TRAINED, generator("gen-a", age=2 * LONG), queue=RESTS, pool=RESTS
    ),
}
"""Servers in the middle of a run; tests/golden/findings/verdicts.txt has the verdict on each."""


def test_the_headline_names_what_a_run_lacks_first(golden):
    said = {name: verdict(info, list(diagnose(info, VERSION, NOW)), []) for name, info in RUNS.items()}
    lines = {name: [f"{part}: {words}" for part, words in each.items() if words] for name, each in said.items()}
    golden("findings/verdicts.txt", sections({name: "\n".join(each) for name, each in lines.items()}))


@pytest.mark.parametrize("trains", [True, False])
@pytest.mark.parametrize("generates", [True, False])
@pytest.mark.parametrize("held", [0, 2 * 10**9])
@pytest.mark.parametrize("signs", [[], [Finding("policy", Level.WARNING, "a sign")]])
def test_nothing_is_healthy_or_running_without_a_trainer_and_a_generator(trains, generates, held, signs):
    people = [TRAINS if trains else TRAINED, GENERATES if generates else GENERATED]
    info = run(*people, max_bytes=0, bytes=held)
    said = verdict(info, list(diagnose(info, VERSION, NOW)), signs)
    assert said["headline"].startswith(("Healthy", "Running")) == (trains and generates)
    assert (said["level"] == "ok") == (trains and generates and not held and not signs)


def test_a_scorer_that_died_is_named_beside_the_others_of_its_part():
    def scorer(name: str, **facts: Any) -> pb.ClientInfo:
        settings = json.dumps(ScorerConfig("unscored").described())
        return pb.ClientInfo(name=name, role="scorer", settings=settings, **facts)

    idle = table("unscored", size=3, age=pb.Quantiles(max=2 * LONG), sampled=pb.ArrivalTimes(age=2 * LONG))
    alone = server(idle, admission=admission(permit_tables=["unscored"]), clients=[scorer("b", age=2 * LONG)])
    (said,) = [each for each in troubles(alone) if each.check == "unscored"]
    assert said.message == "scorer b is not connected, last seen 40 s ago; 3 groups of unscored lack rewards"
    assert "replay score --source-table unscored" in said.remedy
    stuck = server(idle, admission=admission(permit_tables=["unscored"]), clients=[scorer("b", open=1)])
    assert [each.rule for each in troubles(stuck) if each.check == "unscored"] == ["partial-groups-idle"]
    info = server(clients=[scorer("a", open=1), scorer("b", age=2 * LONG), generator("c", open=1)])
    (said,) = [each.message for each in diagnose(info, info.version, 0.0) if "is not connected" in each.message]
    assert said.startswith("scorer b is not connected")
    assert said.endswith("others: a")


def test_the_situations_of_this_file_meet_every_rule_of_the_table():
    infos = [*SICK.values(), *RUNS.values(), *(info for info, _ in PARTS.values())]
    assert {finding.rule for info in infos for finding in troubles(info)} == set(diagnosis.RULES) - OF_THE_COMMAND


@pytest.mark.parametrize("name", diagnosis.RULES)
def test_a_rule_has_a_level_a_sentence_and_unless_the_server_refused_a_remedy(name):
    rule = diagnosis.RULES[name]
    assert rule.keys() - {"headline", "stops"} == {"level", "sentence", "remedy"}
    assert ("headline" in rule) == ("stops" in rule)
    assert rule.get("stops", "idle") in diagnosis.STOPS
    assert Level(rule["level"]) is not Level.OK
    assert bool(rule["remedy"]) == (name != "refused")


@pytest.mark.parametrize("name", diagnosis.RULES)
def test_the_first_remedy_weakens_no_bound(name):
    assert not diagnosis.RULES[name]["remedy"].startswith(("raise", "widen"))


# ---------------------------------------------------------------------------------------- what the parts say


def described(**changes: Any) -> ServerInfo:
    """A server, a generator and a trainer that agree; `changes` are clients in the place of theirs, or fields."""
    people = {"gen": ("generator", GeneratorConfig().described()), "tr": ("trainer", trainer_says())}
    people |= {name: changes.pop(name) for name in ("gen", "tr") if name in changes}
    clients = [
        pb.ClientInfo(name=name, role=role, open=1, age=1.0, settings=json.dumps(settings))
        for name, (role, settings) in people.items()
    ]
    tables = table("rollouts", QUEUE), table("replay", POOL)
    permits = admission(fresh_groups_per_step=4, max_staleness=1, table="rollouts")
    return server(*tables, **{"clients": clients, "admission": permits} | changes)


def one_reward(part: str = "generator", **said: Any) -> dict[str, str]:
    """What a part says that gave all rollouts one reward."""
    told = {"value": 0.0, "groups": 40, "expected": "#### 72", "got": "\\boxed{72}"} | said
    return {"part": json.dumps(part), "one_reward": json.dumps(told)}


@pytest.mark.parametrize("said", [3, "a", {}, {"value": "0"}, {"value": None}])
def test_what_a_client_says_of_rewards_may_be_anything(said):
    says = {"part": json.dumps("generator"), "one_reward": json.dumps(said)}
    assert said_of(described(gen=("generator", says)), "rewards") == []


FAILURES_SAID = {"failed": 40, "rollouts": 64, "reason": "RolloutError: the agent ended with exit code 1"}
CUT_SAID = {"cut": 12, "rollouts": 64, "longest": 37, "max_tokens": 512}
REFUSALS_SAID = {"open": 8, "refused": {"401": 12, "429": 1, "418": 1}, "reason": "the request needs the token"}


def noticed(part: str = "generator", **facts: Any) -> dict[str, str]:
    """What a part says that it has noticed of its rollouts."""
    return {"part": json.dumps(part)} | {name: json.dumps(value) for name, value in facts.items()}


@pytest.mark.parametrize(
    "facts",
    [
        {"sessions": {"open": 8, "nobody": 0}},
        {"sessions": {"refused": {"404": 2}, "reason": "no session is open at this address"}},
        *({name: said} for name in ("failures", "cut_early", "sessions") for said in (3, "a", {}, [], {"failed": "1"})),
        {"sessions": {"refused": {"401": "many"}, "reason": "x"}},
    ],
)
def test_sessions_at_work_and_what_no_part_says_are_no_finding(facts):
    info = described(gen=("generator", noticed(**facts)))
    for check in ("sessions", "failures", "lengths"):
        assert said_of(info, check) == []


def trainer_says(**own: Any) -> dict[str, str]:
    """What a GRPOConfig says of itself, but for `own`."""
    config = GRPOConfig(output_dir="x", groups_per_step=8, replay_share=0.5)
    return config.described() | {name: json.dumps(value) for name, value in own.items()}


def said_of(info: ServerInfo, check: str, **options: Any) -> list[tuple[Level, str, str]]:
    found = diagnose(info, VERSION, NOW, **options)
    return [(each.level, each.message, each.remedy) for each in found if each.check == check]


def test_parts_that_agree_are_no_finding():
    assert troubles(described()) == []


def sampling(**options: Any) -> ServerInfo:
    """A run whose generator draws with these options."""
    return described(gen=("generator", GeneratorConfig(sampling=SamplingConfig(**options)).described()))


def drawn(staleness: float, **fields: Any) -> ServerInfo:
    """A server whose groups are drawn at this mean staleness."""
    queue = table("rollouts", QUEUE | {"max_staleness": None, "forward_to": None})
    queue.flow.CopyFrom(pb.Flow(versions=32, drawn=4.0, staleness=staleness))
    return server(queue, **fields)


PARTS: dict[str, tuple[ServerInfo, str]] = {
    "a generator that gave all rollouts one reward": (described(gen=("generator", one_reward())), "rewards"),
    "a scorer that gave all rollouts one reward": (described(gen=("scorer", one_reward("scorer"))), "rewards"),
    "rollouts that failed": (described(gen=("generator", noticed(failures=FAILURES_SAID))), "failures"),
    "rollouts that failed, of a scorer": (
        described(gen=("scorer", noticed("scorer", failures=FAILURES_SAID))),
        "failures",
    ),
    "rollouts that were cut early": (described(gen=("generator", noticed(cut_early=CUT_SAID))), "lengths"),
    "requests of agents that were refused": (
        described(gen=("generator", noticed(sessions=REFUSALS_SAID))),
        "sessions",
    ),
    "sampling masks of top_p are stored": (sampling(top_p=0.95), "sampling"),
    "sampling masks of min_p are stored": (sampling(min_p=0.05), "sampling"),
    "no sampling masks of top_p and top_k are stored": (sampling(top_p=0.95, top_k=20, sampling_masks=0), "sampling"),
    "no sampling masks of min_p are stored": (sampling(min_p=0.05, sampling_masks=0), "sampling"),
    "all tokens may be drawn": (sampling(), "sampling"),
    "a trainer that takes more groups than are admitted": (
        described(tr=("trainer", trainer_says(fresh_groups_per_step=8))),
        "permits",
    ),
    "a trainer that takes fewer groups than are admitted": (
        described(tr=("trainer", trainer_says(fresh_groups_per_step=2))),
        "permits",
    ),
    "a trainer that takes groups from another table": (
        described(tr=("trainer", trainer_says(rollouts_table="other"))),
        "tables",
    ),
    "groups are drawn old, and nothing bounds that": (drawn(3.9), "rollouts"),
    "groups are drawn older than their table allows": (
        server(table("rollouts", QUEUE | {"max_staleness": 1}, flow=pb.Flow(versions=9, staleness=1.5))),
        "rollouts",
    ),
    "groups are drawn older than [admission] allows": (
        drawn(9.0, admission=admission(max_staleness=8, table="rollouts")),
        "rollouts",
    ),
}
"""Servers whose clients say something of themselves, and the check that speaks of it."""


def test_what_generators_scorers_and_trainers_say_of_themselves_is_judged_with_the_remedy(golden):
    found = {
        name: [finding for finding in diagnose(info, VERSION, NOW) if finding.check == check]
        for name, (info, check) in PARTS.items()
    }
    golden("findings/parts.txt", sections({name: text_of(findings) for name, findings in found.items()}))


@pytest.mark.parametrize(
    ("staleness", "level", "words"),
    [
        (3.9, Level.WARNING, "drawn 3.9 versions old in the mean, and 2 is the bound"),
        (1.2, Level.OK, "drawn 1.2 versions old in the mean"),
    ],
)
def test_the_staleness_of_draws_is_told_and_compared_with_the_bound_of_the_caller(staleness, level, words):
    [found] = [each for each in said_of(drawn(staleness), "rollouts", max_staleness=2) if "drawn " in each[1]]
    assert found[0] is level
    assert words in found[1]


@pytest.mark.parametrize("junk", ["[]", "{}", "[[]]", "null", "-1", "1e999", '"x"', "not JSON", "[[[[", ""])
def test_a_client_that_says_nonsense_of_itself_stops_no_diagnosis(junk):
    names = [*trainer_says(), "tables", "source_table", "unscored_table", "max_concurrent_groups", "priority"]
    said = dict.fromkeys(names, junk)
    odd = {
        "gen": ("generator", said | {"part": '"generator"'}),
        "tr": ("trainer", said | {"part": '"trainer"'}),
    }
    assert {each.check for each in diagnose(described(**odd), VERSION, NOW)} >= {"rollouts", "replay"}
    gone = pb.ClientInfo(name="s", role="generator", ended=True, settings=json.dumps(said | {"part": '"scorer"'}))
    alone = described(clients=[gone])
    assert {each.check for each in diagnose(alone, VERSION, NOW)} >= {"rollouts", "replay"}


def test_who_was_killed_some_time_ago_is_not_compared():
    info = described(tr=("trainer", trainer_says(fresh_groups_per_step=8)))
    assert said_of(info, "permits")[0][0] is Level.WARNING
    for client in info.clients:
        client.open, client.age = 0, 2 * LONG
    assert said_of(info, "permits") == []


def test_dynamic_sampling_takes_more_groups_than_a_step_trains_on():
    said = trainer_says(fresh_groups_per_step=2, zero_variance="dynamic")
    assert said_of(described(tr=("trainer", said)), "permits") == []


def test_the_remedy_for_a_starved_environment_depends_on_the_admission():
    (without,) = troubles(server(starving_rollouts()))
    (admitted,) = troubles(server(starving_rollouts(), admission=admission(table="rollouts")))
    assert without.remedy.startswith("use [admission]")
    assert admitted.remedy.startswith("lower [admission] max_staleness (2)")
    assert "max_staleness (1) of this table" in admitted.remedy


def test_every_environment_that_loses_twice_as_much_as_the_others_starves():
    tags = [environments(math=(300, 0, 300), code=(20, 8, 12), games=(10, 9, 1))]
    (finding,) = troubles(server(starving_rollouts(tags=tags)))
    assert "environment=games starve: 90% of 10 groups" in finding.message
    assert finding.message.endswith("; 1 more value of environment starve too")
