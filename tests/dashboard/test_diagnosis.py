"""What the diagnosis says of healthy and of sick servers: one situation a line."""

from __future__ import annotations

import json
from typing import Any

import pytest

from replay_client.records import ServerInfo, TableInfo, server_info_of
from replay_client.shards.merging import merge_infos
from replay_dashboard import diagnosis
from replay_dashboard.diagnosis import Finding, Level, diagnose
from replay_dashboard.health import verdict
from replay_generator import GeneratorConfig, ScorerConfig
from replay_generator.engines import SamplingConfig
from replay_protos import replay_pb2 as pb
from replay_server import TableConfig
from replay_trainer import GRPOConfig

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

WARNINGS = {
    "two versions of the package": (server(version="9.9"), "version", "the server is 9.9"),
    "a clock that is ahead": (server(time=NOW + 60), "clock", "1 min ahead of"),
    "nothing bounds memory": (
        server(*(table(f"t{i}") for i in range(7)), max_bytes=0, bytes=10**9),
        "memory",
        "nothing bounds the bytes of t0, t1, t2, t3, t4 and 2 more",
    ),
    "memory nearly at its bound": (server(bytes=95 * 10**7), "memory", "95% of max_bytes 1.0 GB"),
    "a machine with less memory than the bound": (
        server(memory_available=2 * 10**8),
        "memory",
        "200.0 MB left, and its tables may grow by 1.0 GB",
    ),
    "one machine of three with less memory than its server's bound": (
        three(memory_available=15 * 10**8),
        "memory of b",
        "1.5 GB left, and its tables may grow by 2.0 GB",
    ),
    "one disk of three that is nearly full": (three(disk_available=10**6), "disk of b", "1.0 MB left"),
    "a disk that is nearly full": (server(disk_available=10**6), "disk", "1.0 MB left"),
    "one damaged record": (server(damaged=1), "disk", "1 item lost, because"),
    "damaged records": (server(damaged=3), "disk", "3 items lost, because bytes on disk are damaged"),
    "a trainer that publishes no version": (
        server(table("pool", samples=5), policy=pb.Policy()),
        "policy",
        "no policy version was ever published",
    ),
    "permits that expire": (tutorial(admission=admission(expired=4)), "permits", "4 permits expired unused"),
    "generators without permits and no trainer": (
        tutorial(admission=admission(acquiring=waiting())),
        "permits",
        "1 permit request waits, none was served for 40 s: ",
    ),
    "a queue that nobody samples": (
        tutorial({"inserting": waiting(reason="9 > max_diff 8")}),
        "rollouts",
        "1 insert waits, none was served for 40 s: 9 > max_diff 8",
    ),
    "a queue that nobody fills": (tutorial({"sampling": waiting()}), "rollouts", "1 sample request waits"),
    "items that nobody extends": (
        tutorial(
            lacks(3 * LONG, teacher_logprobs=14),
            clients=[pb.ClientInfo(name="gpu-7", role="teacher, trainer", age=61.0)],
        ),
        "rollouts",
        "waits for teacher_logprobs: 14 items; nobody has extended one for 1 min; last seen: gpu-7 (1 min 1 s ago)",
    ),
    "a balance over a tag that no item has": (
        pool({"balance": {"tag": "enviroment"}}, size=9, values=[pb.ValueInfo(items=9, weight=1.0)]),
        "pool",
        "it balances 'enviroment', and no item has this tag: its draws are as without balance",
    ),
    "a balance that lets nothing be drawn": (
        pool({"balance": {"tag": "level", "weights": {"1": 0.0}}}, size=9, values=[pb.ValueInfo(name="1", items=9)]),
        "pool",
        "balance gives weight 0 to every value of 'level' that its items have: nothing is ever drawn",
    ),
    "a table that fills once and blocks": (pool({"when_full": "block"}), "pool", "full, it blocks inserting for ever"),
    "a queue larger than its table": (
        server(table("queue", QUEUE | {"max_size": 4, "forward_to": None})),
        "queue",
        "admits 64 items, and the table evicts beyond max_size 4",
    ),
    "a table that has no room for what its items wait for": (
        pool({"requires": ["value"], "max_bytes": "1GB"}),
        "pool",
        "it requires value and evicts beyond max_bytes: while it is full, what its items wait for is refused",
    ),
    "a pool without a priority above 0": (
        pool({"sampler": "prioritized"}, size=3, priority=pb.Quantiles()),
        "pool",
        "every item has priority 0",
    ),
    "a table that no client fills": (server(table("spare", inserts=0)), "spare", "no client has ever"),
    "a pool whose queue nobody samples": (
        tutorial({"samples": 0, "forwarded": 0}, {"inserts": 0, "stale": 0}),
        "replay",
        "nobody has sampled rollouts, which feeds it",
    ),
    "a pool whose queue forwards nothing": (
        tutorial({"forwarded": 0}, {"inserts": 0, "stale": 0}),
        "replay",
        "rollouts was sampled and has forwarded nothing",
    ),
    "some groups come too late": (
        pool({"max_staleness": 1}, inserts=80, stale_refused=20, samples=80),
        "pool",
        "20% of what was generated was dropped unused",
    ),
    "a slow environment that loses more groups than the others": (
        pool({"max_staleness": 1}, inserts=200, samples=190, tags=[environments(math=(160, 1, 159), code=(40, 9, 31))]),
        "pool",
        "groups with the tag environment=code starve: 22% of 40 groups were too old before anybody trained on them, "
        "and 1% of the others",
    ),
    "an archive that nobody writes": (
        server(table("rollouts", {"copy_to": "archive"}), table("archive", evicted=60, evicted_unsampled=60)),
        "archive",
        "60 items of rollouts (60% of all) were not archived",
    ),
    "copies that nobody draws": (
        server(table("rollouts", {"copy_to": "archive"}), table("archive", size=9, age=pb.Quantiles(max=180.0))),
        "archive",
        "9 items wait, the oldest for 3 min",
    ),
    "a table too small for what is inserted": (
        pool(evicted=60, evicted_unsampled=60),
        "pool",
        "60 items (60% of all) evicted before anybody sampled them",
    ),
    "a pool that refuses what its queue forwards": (
        tutorial({"forward_refused": 5}),
        "rollouts",
        "5 items could not join replay",
    ),
}

FAILURES = {
    "a shard that hangs or is away": (merge_infos({"a": tutorial()}, ["b"]), "shard b", "does not answer"),
    "a disk that fails": (
        server(commit_error="No space left on device"),
        "disk",
        "cannot write to data_dir and refuses inserts: No space left on device",
    ),
    "a start that lost changes": (server(fell_back="fell back to commit 7"), "disk", "to commit 7"),
    "a trainer that is gone": (
        tutorial(overdue=[pb.OverdueClient(role="trainer", reason="no new policy version since version 29, 94 s ago")]),
        "trainer",
        "no new policy version since version 29, 94 s ago",
    ),
    "generators that are gone": (
        tutorial(overdue=[pb.OverdueClient(role="generator", table="rollouts", reason="nobody inserts into rollouts")]),
        "generator",
        "nobody inserts into rollouts",
    ),
    "permits that no step returns, while the trainer waits for groups": (
        tutorial({"sampling": waiting()}, admission=admission(accepted=64, acquiring=waiting())),
        "permits",
        "a trainer waits for groups of rollouts: neither can move",
    ),
    "a queue full of items that nobody extends": (
        tutorial(lacks(2 * LONG, teacher_logprobs=2, value=1) | {"inserting": waiting(), "sampling": waiting()}),
        "rollouts",
        "waits for teacher_logprobs: 2 items, value: 1 item; nobody has extended one for 40 s",
    ),
    "both sides of a table wait": (pool(inserting=waiting(), sampling=waiting()), "pool", "wait for each other"),
    "a ratio that max_times_sampled does not allow": (
        pool({"rate_limiter": {"type": "sample_to_insert_ratio", "samples_per_insert": 4.0}, "max_times_sampled": 2}),
        "pool",
        "inserting will block for ever",
    ),
    "a min_size that does not fit into max_bytes": (
        pool({"rate_limiter": {"type": "min_size", "min_size": 10}, "max_bytes": 50}, size=4, bytes=40),
        "pool",
        "min_size 10 wants more items of 10 bytes than ever fit into max_bytes 50 bytes",
    ),
    "most of a queue goes stale unused": (
        server(table("rollouts", QUEUE | {"max_staleness": 1, "forward_to": None}, stale=74, samples=26)),
        "rollouts",
        "74% of what was generated was dropped unused",
    ),
    "a slow environment of which hardly anything is trained on": (
        pool({"max_staleness": 1}, inserts=200, samples=190, tags=[environments(math=(190, 0, 190), code=(10, 9, 1))]),
        "pool",
        "groups with the tag environment=code starve: 90% of 10 groups were too old",
    ),
    "a pool that loses what clients insert before it is sampled": (
        pool({"max_staleness": 1}, stale=90, samples=10),
        "pool",
        "80% of what was generated was dropped unused",
    ),
}


HEADLINES = {
    "healthy": (tutorial(), []),
    "the trainer does not come": (
        tutorial({"inserting": waiting(), "sampled": pb.ArrivalTimes(age=LONG)}),
        ["Inserts into rollouts are blocked: nobody samples it"],
    ),
    "the trainer comes too seldom": (
        tutorial({"inserting": waiting(), "sampled": pb.ArrivalTimes(age=1.0)}),
        ["Inserts into rollouts are blocked"],
    ),
    "the generators do not come": (
        tutorial(pool={"sampling": waiting(), "inserted": pb.ArrivalTimes(age=LONG)}),
        ["Samples of replay are blocked: nobody inserts into it"],
    ),
    "a short wait": (tutorial({"sampling": waiting(seconds=1.0)}), []),
    "no version comes": (
        tutorial(admission=admission(acquiring=waiting()), policy=pb.Policy(version=3, age=60.0)),
        ["Generators are blocked: no policy version was published"],
    ),
    "the teacher does not come": (
        tutorial(lacks(LONG, value=1) | {"sampling": waiting()}),
        ["rollouts is blocked: nobody extends its items"],
    ),
    "the trainer is gone": (tutorial(overdue=overdue_clients("trainer")), ["The trainer is gone"]),
    "both are gone": (
        tutorial(overdue=overdue_clients("generator", "trainer")),
        ["Trainer and generators are gone"] * 2,
    ),
}


@pytest.mark.parametrize(("info", "headlines"), HEADLINES.values(), ids=HEADLINES)
def test_a_finding_that_stops_the_run_has_a_headline(info, headlines):
    assert [finding.headline for finding in troubles(info) if finding.headline] == headlines


def troubles(info: ServerInfo) -> list[Finding]:
    return [finding for finding in diagnose(info, VERSION, NOW) if finding.level is not Level.OK]


@pytest.mark.parametrize("situation", HEALTHY)
def test_a_healthy_server_has_no_trouble(situation):
    assert troubles(HEALTHY[situation]) == []


@pytest.mark.parametrize("situation", WARNINGS | FAILURES)
def test_a_sick_server_has_one_trouble_with_its_remedy(situation):
    info, check, words = (WARNINGS | FAILURES)[situation]
    found = [finding for finding in troubles(info) if finding.check == check]
    level = Level.FAILURE if situation in FAILURES else Level.WARNING
    assert [(finding.check, finding.level) for finding in found] == [(check, level)]
    assert words in found[0].message
    assert found[0].remedy


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

SITUATIONS: dict[str, tuple[ServerInfo, str, str, str, str]] = {
    "trainer and generator are connected": (
        run(TRAINS, GENERATES, queue={"inserts_per_second": 1.0}), "ok", "Healthy", "Neither side waits", "",
    ),
    "the trainer said leave 50 s ago": (
        run(TRAINED, GENERATES), "blocked", "The trainer has ended",
        "trainer gpu-1 ended 50 s ago", "stop the generators too, or start a trainer",
    ),
    "the trainer said leave a moment ago, and its last draw is as young": (
        run(client("trainer", "gpu-1", ended=True, age=0.1), GENERATES),
        "blocked", "The trainer has ended", "ended 0.1 s ago", "start a trainer",
    ),
    "the trainer has ended, and 16 inserts have waited for two minutes": (
        run(TRAINED, GENERATES, queue={"inserting": waiting(120.0, "94 > max_diff 64", 16)}),
        "blocked", "The trainer has ended",
        "16 inserts wait, none was served for 2 min: 94 > max_diff 64; trainer gpu-1 ended 50 s ago",
        "stop the generators too, or start a trainer",
    ),
    "the trainer has ended, and in this run a wait of two minutes is short": (
        run(
            TRAINED, GENERATES, max_bytes=0, bytes=10**9, long_wait=900.0,
            queue={"inserting": waiting(120.0, "94 > max_diff 64", 16), "insert_blocked_share": 1.0},
        ),
        "blocked", "The trainer has ended", "16 inserts wait, none was served for 2 min", "start a trainer",
    ),
    "the trainer waits for groups that nobody scores": (
        unscored(NO_SCORES, queue={"sampling": waiting()}), "blocked", "No scorer has connected yet",
        "1 sample request waits", "`replay score --source-table unscored`",
    ),
    "the generator waits to insert groups that nobody scores any more": (
        unscored(NO_SCORES, SCORED, inserting=waiting(2.0)), "blocked", "The scorer has ended",
        "1 insert waits", "`replay score --source-table unscored`",
    ),
    "nobody is connected": (
        server(table("rollouts", QUEUE, inserts=0), max_bytes=0),
        "idle", "Nobody is connected", "no trainer has connected since the server started, 1 h ago", "replay run",
    ),
    "nobody is connected, and memory has no bound": (
        server(table("rollouts", QUEUE, inserts=0), max_bytes=0, bytes=2 * 10**9),
        "idle", "Nobody is connected", "no generator has connected", "start a trainer and a generator",
    ),
    "groups lack rewards, and no scorer has come": (
        unscored(NO_SCORES), "blocked", "No scorer has connected yet", "12 groups of unscored lack rewards",
        "start a scorer: `replay score --source-table unscored`",
    ),
    "less than a gigabyte is held without a bound": (
        run(TRAINS, GENERATES, max_bytes=0, bytes=10**9 - 1), "ok", "Healthy", "", "",
    ),
    "a gigabyte is held without a bound": (
        run(TRAINS, GENERATES, max_bytes=0, bytes=10**9), "warning", "Running, with 1 thing to look at",
        "", "memory: 1.0 GB",
    ),
    "two things are to be looked at, and memory is one of them": (
        run(TRAINS, GENERATES, max_bytes=0, bytes=10**9, admission=admission(expired=4)),
        "warning", "Running, with 2 things to look at", "", "permits: 4 permits expired unused",
    ),
    "inserts are blocked, a generator is overdue, and memory has no bound": (
        run(
            TRAINS, GENERATES, queue={"inserting": waiting()}, max_bytes=0, bytes=10**9,
            overdue=[pb.OverdueClient(role="generator", reason="nobody inserts into replay")],
        ),
        "blocked", "Inserts into rollouts are blocked", "1 insert waits", "sample or delete items",
    ),
    "what waits, waits for a trainer that is overdue": (
        run(
            GENERATES, queue={"inserting": waiting()},
            overdue=[pb.OverdueClient(role="trainer", reason="no new policy version since version 29, 94 s ago")],
        ),
        "failure", "The trainer is gone", "1 insert waits, none was served for 40 s: the reason; no new policy version",
        "see why it ended or hangs, and start it again",
    ),
    "a disk fails, and nobody is connected": (
        server(commit_error="No space left on device"), "failure", "disk: the server cannot write to data_dir", "", "",
    ),
    # Situations that nobody has listed.
    "the generator has ended, and the queue is drained": (
        run(TRAINS, GENERATED, queue={"size": 0, "sampling": waiting(5.0)}), "blocked", "The generator has ended",
        "1 sample request waits, none was served for 5.0 s: the reason; generator gen-a ended 50 s ago",
        "stop the trainer too, or start a generator",
    ),
    "the generator has ended, and the trainer still has groups": (
        run(TRAINS, GENERATED), "blocked", "The generator has ended",
        "rollouts still has 30 groups", "stop the trainer too",
    ),
    "the scorer has ended while the generator goes on": (
        unscored(NO_SCORES, SCORED, size=0), "blocked", "The scorer has ended", "scorer score-1 ended 9.0 s ago",
        "`replay score --source-table unscored`",
    ),
    "the generator has ended, and the scorer works at what it left": (
        unscored(LEFT_NO_SCORES, SCORES), "ok", "Healthy", "", "",
    ),
    "the generator has ended, and the scorer has nothing left": (
        unscored(LEFT_NO_SCORES, SCORES, size=0), "blocked", "The generator has ended", "gen-a ended", "",
    ),
    "a second run begins with another trainer": (
        run(TRAINED, client("trainer", "gpu-2", open=1), GENERATES), "ok", "Healthy", "", "",
    ),
    "of two trainers the one that was seen last has ended": (
        run(client("trainer", "gpu-2", age=15.0), client("trainer", "gpu-1", ended=True, age=1.0), GENERATES),
        "ok", "Healthy", "", "",
    ),
    "only an archive is written": (
        server(
            table("rollouts", {"copy_to": "archive"}, size=9, **RESTS), table("archive", samples=9),
            clients=[client("archiver", "archive-1", open=1)],
        ),
        "blocked", "Neither trainer nor generator is connected", "connected: archive-1 (archiver)", "replay run",
    ),
    "both are connected and only evaluate": (
        server(table("rollouts", QUEUE, samples=9, **RESTS), clients=[TRAINS, GENERATES]),
        "idle", "Idle", "Nothing has been inserted or sampled", "",
    ),
    "the trainer is paused": (
        run(
            client("trainer", "gpu-1", open=1, age=90.0), GENERATES,
            overdue=[pb.OverdueClient(role="trainer", reason="no new policy version since version 29, 94 s ago")],
        ),
        "failure", "The trainer is silent", "no new policy version", "see why it ended or hangs",
    ),
    "the teacher has ended, and items wait for it": (
        run(TRAINS, GENERATES, client("teacher, trainer", "t-1", ended=True, age=3.0), queue=lacks(2.0, value=14)),
        "blocked", "The teacher has ended", "t-1 ended 3.0 s ago; rollouts waits for value: 14 items",
        "start a teacher",
    ),
    "a teacher that draws what it extends is no trainer": (
        run(client("teacher, trainer", "t-1", open=1), GENERATES, queue={"samples": 0}, pool={"samples": 0}),
        "blocked", "No trainer has connected yet", "no trainer has connected since", "start a trainer",
    ),
    "a scorer draws its groups without [admission], and no trainer came": (
        scored_without_permits(), "blocked", "No trainer has connected yet", "no trainer has connected since", "",
    ),
    "a scorer draws its groups without [admission], and the trainer was killed": (
        scored_without_permits(KILLED), "blocked", "The trainer is not connected", "last seen 10 min ago", "",
    ),
    "a teacher samples what it extends, and no trainer came": (
        run(TEACHES, GENERATES), "blocked", "No trainer has connected yet", "no trainer has connected since", "",
    ),
    "a teacher samples what it extends, and the trainer was killed": (
        run(TEACHES, KILLED, GENERATES), "blocked", "The trainer is not connected", "last seen 10 min ago", "",
    ),
    "a teacher was killed a moment after its last sample, and no trainer came": (
        run(TAUGHT, GENERATES, queue={"sampled": pb.ArrivalTimes(age=LONG / 2 + 1)}, pool={"samples": 0}),
        "blocked", "No trainer has connected yet", "no trainer has connected since", "",
    ),
    "somebody without a name samples since the teacher was killed": (
        run(TAUGHT, GENERATES, queue={"sampled": pb.ArrivalTimes(age=1.0)}), "ok", "Healthy", "", "",
    ),
    "generators draw partial groups without [admission], and no trainer came": (
        run(client("generator, trainer", "gen-a", GeneratorConfig().described(), open=1), admission=None),
        "blocked", "No trainer has connected yet", "no trainer has connected since", "",
    ),
    "generators without names feed a scorer": (
        inserted_without_a_name(SCORES, ago=1.0), "ok", "Healthy", "", "",
    ),
    "generators without names go on after their scorer was killed": (
        inserted_without_a_name(client("scorer", "score-1", ScorerConfig("unscored").described(), age=90.0), ago=1.0),
        "blocked", "The scorer is not connected", "score-1 is not connected", "start it again",
    ),
    "generators without names have stopped, and their scorer inserts what is left": (
        inserted_without_a_name(
            client("scorer", "score-1", ScorerConfig("unscored").described(), age=2 * LONG), ago=90.0
        ),
        "blocked", "The generator is not connected", "nobody has inserted for 1 min 30 s", "",
    ),
    "a server has started again with a full table, and nobody is back yet": (
        tutorial(UNTOUCHED | {"size": 64}, UNTOUCHED, **RESTARTED), "idle", "Nobody is connected",
        "no trainer has connected since the server started, 12 s ago", "",
    ),
    "a server has started again, and the generator was faster than the trainer": (
        tutorial(UNTOUCHED, UNTOUCHED, **RESTARTED, clients=[GENERATES]),
        "idle", "No trainer has connected yet", "", "",
    ),
    "a server has started again, and the trainer has not come back for long": (
        tutorial(
            {"inserting": waiting(), "inserted": pb.ArrivalTimes(age=130.0), "sampled": pb.ArrivalTimes(age=130.0)},
            {"sampled": pb.ArrivalTimes(age=130.0)}, **RESTARTED | {"uptime": 130.0}, clients=[GENERATES],
        ),
        "blocked", "No trainer has connected yet", "1 insert waits", "start a trainer",
    ),
    "the trainer was killed, and nobody knows yet how often it comes": (
        run(client("trainer", "gpu-1", age=2 * LONG), GENERATES, queue=RESTS, pool=RESTS),
        "blocked", "The trainer is not connected", "gpu-1 is not connected, last seen 40 s ago", "start it again",
    ),
    "a trainer is in the middle of a step and has no call open": (
        run(client("trainer", "gpu-1", age=LONG / 2), GENERATES), "ok", "Healthy", "", "",
    ),
    "clients without names work": (tutorial(), "ok", "Healthy", "", ""),
    "a trainer without a name has stopped": (
        tutorial({"sampled": pb.ArrivalTimes(age=90.0)}, {"sampled": pb.ArrivalTimes(age=95.0)}),
        "blocked", "The trainer is not connected", "nobody has sampled for 1 min 30 s", "start it again",
    ),
    "one program generates and trains": (
        run(client("generator, trainer", "verl", open=1)), "ok", "Healthy", "", "",
    ),
    "one program generates, extends and trains": (
        run(client("generator, teacher, trainer", "mine", open=1)), "ok", "Healthy", "", "",
    ),
    "a stage is connected, and a generator never was": (
        server(
            table("rollouts", QUEUE, inserts=0), table("raw", inserts=0), uptime=90.0,
            clients=[TRAINS, client("stage", "filter", {"part": '"stage"', "source_table": '"raw"'}, open=1)],
        ),
        "blocked", "No generator has connected yet", "since the server started, 1 min 30 s ago", "start a generator",
    ),
    "the trainer and the generator have ended": (
        run(TRAINED, GENERATED), "idle", "The run has ended", "trainer gpu-1 ended 50 s ago, generator gen-a ended", "",
    ),
    "the trainer has ended, and the generator was killed": (
        run(TRAINED, generator("gen-a", age=2 * LONG), queue=RESTS, pool=RESTS),
        "blocked", "Nobody is connected", "generator gen-a is not connected, last seen 40 s ago", "start a trainer",
    ),
}  # fmt: skip
"""The state of a server, and what the headline says of it: level, headline, parts of the detail and of the remedy."""


@pytest.mark.parametrize("situation", SITUATIONS)
def test_the_headline_names_what_a_run_lacks_first(situation):
    info, level, headline, detail, remedy = SITUATIONS[situation]
    said = verdict(info, list(diagnose(info, VERSION, NOW)), [])
    assert said["headline"].startswith(headline)
    assert said["level"] == level
    assert detail in said["detail"]
    assert remedy in said["remedy"]


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
    stale = table("rollouts", QUEUE | {"max_staleness": 1, "forward_to": None}, stale=74, samples=26)
    more = [
        *(server(stale, admission=admission(max_staleness=most)) for most in (1, 2)),
        pool(retained_discarded=3),
        server(starving_rollouts(), admission=admission(table="rollouts")),
        tutorial({"inserting": waiting()}),
        server(
            table("partial_groups", size=1, age=pb.Quantiles(max=2 * LONG), sampled=pb.ArrivalTimes(age=2 * LONG)),
            admission=admission(permit_tables=["partial_groups"]),
        ),
        server(table("rollouts", QUEUE | {"max_staleness": 1}, flow=pb.Flow(versions=9, staleness=1.5))),
        described(tr=("trainer", trainer_says(fresh_groups_per_step=8))),
        described(tr=("trainer", trainer_says(rollouts_table="other"))),
        described(gen=("generator", GeneratorConfig(sampling=SamplingConfig(top_p=0.9, sampling_masks=0)).described())),
        described(gen=("generator", one_reward())),
        described(gen=("generator", noticed(failures=FAILURES_SAID))),
        described(gen=("generator", noticed(cut_early=CUT_SAID))),
        described(gen=("generator", noticed(sessions=REFUSALS_SAID))),
        tutorial({"sampling": waiting()}, clients=[pb.ClientInfo(name="gen", role="generator", ended=True)]),
        server(clients=[generator("a", open=1), generator("b", age=2 * LONG)]),
        *(info for info, *_ in SITUATIONS.values()),
    ]
    infos = [*(info for info, _, _ in (WARNINGS | FAILURES).values()), *more]
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


def starving_rollouts(**counts: Any) -> TableInfo:
    """A queue that drops most groups of one environment."""
    tags = [environments(math=(90, 1, 89), code=(10, 9, 1))]
    return table("rollouts", QUEUE | {"max_staleness": 1, "forward_to": None}, samples=90, **{"tags": tags} | counts)


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


def test_the_remedy_for_staleness_depends_on_the_admission():
    stale = table("rollouts", QUEUE | {"max_staleness": 1, "forward_to": None}, stale=74, samples=26)

    def remedy(**fields: Any) -> str:
        return next(finding.remedy for finding in troubles(server(stale, **fields)) if finding.check == "rollouts")

    assert "use [admission]" in remedy()
    assert "set [admission] max_staleness (2) to at most that of this table (1)" in remedy(admission=admission())
    assert "every generator asks for permits" in remedy(admission=admission(max_staleness=1))


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


@pytest.mark.parametrize("part", ["generator", "scorer"])
def test_one_reward_for_all_rollouts_is_named_with_what_was_expected_and_said(part):
    ((level, message, remedy),) = said_of(described(gen=(part, one_reward(part))), "rewards")
    assert level is Level.WARNING
    assert message == (
        f"{part} gen gave every rollout of the last 40 groups or more the reward 0; expected '#### 72', and the newest "
        "answer ends with '\\\\boxed{72}'"
    )
    assert "math_answer the number in \\boxed{} or behind ####" in remedy


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
    ("part", "facts", "check", "message"),
    [
        (
            part,
            {"failures": FAILURES_SAID},
            "failures",
            f"{part} gen: 40 of the last 64 rollouts failed; the last reason: RolloutError: the agent ended with exit "
            "code 1",
        )
        for part in ("generator", "scorer")
    ]
    + [
        (
            "generator",
            {"cut_early": CUT_SAID},
            "lengths",
            "generator gen: 12 of the last 64 rollouts ended with finish reason length after 37 tokens or fewer, and "
            "max_tokens is 512",
        ),
        (
            "generator",
            {"sessions": REFUSALS_SAID},
            "sessions",
            "generator gen refused 14 requests of agents in the last 10 min: 12 with status 401 (no valid token), 1 "
            "with status 429 (too many at once), 1 with status 418; the last reason: the request needs the token",
        ),
    ],
)
def test_what_a_part_has_noticed_of_its_rollouts_is_a_warning(part, facts, check, message):
    ((level, said, remedy),) = said_of(described(gen=(part, noticed(part, **facts))), check)
    assert level is Level.WARNING
    assert said == message
    assert remedy


def test_groups_that_generators_gave_up_are_lost_too():
    queue = table("rollouts", QUEUE | {"forward_to": None}, tags=[environments(math=(90, 1, 89), code=(4, 0, 4))])
    said = noticed("generator", tables=["rollouts"], given_up={"code": 6, "games": 9, "math": "many"})
    generator_info = pb.ClientInfo(name="gen", role="generator", open=1, settings=json.dumps(said))
    info = server(queue, clients=[generator_info])
    (finding,) = [each for each in troubles(info) if each.check == "rollouts"]
    assert "environment=games starve: 100% of 9 groups were too old" in finding.message
    assert "and 7% of the others; 1 more value of environment starve too" in finding.message


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


@pytest.mark.parametrize(
    ("sampling", "level", "words"),
    [
        ({"top_p": 0.95}, Level.OK, "generator gen draws with top_p 0.95, and stores what that keeps"),
        ({"min_p": 0.05}, Level.OK, "generator gen draws with min_p 0.05, and stores what that keeps"),
        ({"top_p": 0.95, "top_k": 20, "sampling_masks": 0}, Level.WARNING, "gen draws with top_p 0.95, top_k 20, and"),
        ({"min_p": 0.05, "sampling_masks": 0}, Level.WARNING, "gen draws with min_p 0.05, and stores no sampling"),
        ({}, None, ""),
    ],
    ids=["masks are stored", "masks of min_p", "no masks", "no masks of min_p", "all tokens"],
)
def test_a_generator_that_draws_from_a_part_of_the_vocabulary_is_named_if_it_does_not_say_which(sampling, level, words):
    says = GeneratorConfig(sampling=SamplingConfig(**sampling)).described()
    found = said_of(described(gen=("generator", says)), "sampling")
    assert [each[0] for each in found] == ([level] if level else [])
    assert all(words in message for _, message, _ in found)


@pytest.mark.parametrize(
    ("said", "check", "words"),
    [
        ({"fresh_groups_per_step": 8}, "permits", "takes 8 fresh groups a step, and [admission] lets 4 be generated"),
        ({"fresh_groups_per_step": 2}, "permits", "generators run ahead of it"),
        ({"rollouts_table": "other"}, "tables", "from other, and generator gen inserts into rollouts, replay"),
    ],
    ids=["more than is admitted", "less than is admitted", "another table"],
)
def test_a_trainer_that_takes_other_groups_than_are_made_is_named(said, check, words):
    info = described(tr=("trainer", trainer_says(**said)))
    [(level, message, remedy)] = said_of(info, check)
    assert level is Level.WARNING
    assert words in message
    assert remedy


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


@pytest.mark.parametrize(
    ("staleness", "fields", "options", "level", "words"),
    [
        (3.9, {}, {}, Level.OK, "drawn 3.9 versions old in the mean"),
        (3.9, {}, {"max_staleness": 2}, Level.WARNING, "drawn 3.9 versions old in the mean, and 2 is the bound"),
        (1.2, {}, {"max_staleness": 2}, Level.OK, "drawn 1.2 versions old in the mean"),
        (9.0, {"admission": admission(max_staleness=8, table="rollouts")}, {}, Level.WARNING, "and 8 is the bound"),
    ],
)
def test_the_staleness_of_draws_is_told_and_compared_with_its_bound(staleness, fields, options, level, words):
    queue = table("rollouts", QUEUE | {"max_staleness": None, "forward_to": None})
    queue.flow.CopyFrom(pb.Flow(versions=32, drawn=4.0, staleness=staleness))
    [found] = [each for each in said_of(server(queue, **fields), "rollouts", **options) if "drawn " in each[1]]
    assert found[0] is level
    assert words in found[1]
