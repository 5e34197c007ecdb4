"""Cells: what is measured. A cell is one figure of one measurement, on both sides of a comparison."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from benchmarks.loops import BYTES_A_TOKEN, Result, Task
from benchmarks.systems import at_once

PAYLOADS = {"400B": 400, "4kB": 4_000, "40kB": 40_000, "106kB": 106_496, "400kB": 400_000, "4MB": 4_000_000}
"""Bytes by name; 106 kB is a group of 8 x 1024 tokens."""
SCALES = (3, 4, 5, 6)
"""Powers of ten: items in the table whose operations are timed."""
_TABLE_BYTES = 256 << 20
"""What a table holds at most."""
_WRITERS = 4
"""Client processes that fill tables, and the most that a cell uses."""


@dataclass(frozen=True)
class Table:
    name: str
    sampler: str
    remover: str
    max_size: int
    queue: bool = False
    """Each item is sampled once, and inserts wait while it is full."""


@dataclass(frozen=True)
class Side:
    """A server of one system, and what its tables hold at the start."""

    system: str
    tables: tuple[Table, ...] = ()
    fills: tuple[Task, ...] = ()
    """Each is shared out over several clients."""
    durability: str = ""
    """When the system syncs its tables to the disk, in its own word; empty: they are in memory."""


@dataclass(frozen=True)
class Figure:
    """One number out of the results of all clients."""

    cell: str
    unit: str
    of: Callable[[Sequence[Result]], float]
    higher_is_better: bool = True

    def ratio(self, ours: float, theirs: float) -> float:
        """Above 1: ours is better."""
        better, worse = (ours, theirs) if self.higher_is_better else (theirs, ours)
        return better / worse if worse else math.nan


@dataclass(frozen=True)
class Measurement:
    figures: tuple[Figure, ...]
    task: Task
    clients: int = 1
    their_task: Task | None = None
    """Absent: the same as ours."""
    beside: Task | None = None
    """What one more client does at the same time. The figures are then its own."""
    rounds: int = 1_000
    """At most so many."""


@dataclass(frozen=True)
class Comparison:
    """Measurements on the same two servers."""

    against: str
    ours: Side
    theirs: Side
    measurements: tuple[Measurement, ...] = field(default=())
    tcp: Side | None = None
    """Ours with payloads over gRPC, as between two hosts; None: no payloads are measured."""


def rate(results: Sequence[Result]) -> float:
    """Items per second of all clients together, who started at once."""
    return float(sum(result["items"] for result in results) / max(result["seconds"] for result in results))


def value(name: str) -> Callable[[Sequence[Result]], float]:
    """The figure `name` of the first client."""
    return lambda results: float(results[0][name])


GROUPS = {"8x1k": 8 * 1024, "8x8k": 8 * 8192, "8x32k": 8 * 32_768}
"""Tokens of the completions of a group."""
DICTS = {"256MB": 256_000_000, "1GB": 1_000_000_000}
FSYNC = {"always": "always", "never": "no"}
"""Our values of `fsync`, and Redis's of `appendfsync` that promise as much."""
ASKED = r"^(?!.*(/(4|40|400)kB|/2-(writers|readers)|8x32k|/tls|fsync-never|scaling|large|ray_store|zmq_pickle))"
"""Matches the names of the cells that are measured without --all."""
CHECKPOINT = "checkpoint"
"""The durability of a server in memory that writes its tables when a client asks."""


def all_comparisons(gigabytes: float) -> Iterator[Comparison]:
    """`gigabytes`: what the larger restarts load. With them a million small items come for each 10 GB."""
    for payload, nbytes in PAYLOADS.items():
        yield _against_reverb(payload, nbytes)
    yield _priorities()
    yield _process()
    yield _against_transferqueue()
    for power in SCALES[1:]:
        yield _scaling(power)
    yield _large_payloads()
    for writers in (1, _WRITERS):
        yield _tokens(writers)
    yield _tokens_encrypted()
    for rival in ("transferqueue", "ray_store", "zmq_pickle"):
        yield _fields(rival)
    for ours, redis in FSYNC.items():
        yield _durable(ours, redis)
    yield _restart("always", "always", gigabytes)
    yield _checkpoints(gigabytes)


def select(comparisons: Iterator[Comparison], wanted: Callable[[str], bool]) -> list[Comparison]:
    """What is left of the comparisons where only cells with a wanted name are."""
    selected = []
    for comparison in comparisons:
        measurements = []
        for measurement in comparison.measurements:
            if figures := tuple(figure for figure in measurement.figures if wanted(figure.cell)):
                measurements.append(replace(measurement, figures=figures))
        if measurements:
            selected.append(replace(comparison, measurements=tuple(measurements)))
    return selected


def _on_both(against: str, side: Side, measurements: tuple[Measurement, ...]) -> Comparison:
    return Comparison(against, side, replace(side, system=against), measurements)


def _against_reverb(payload: str, nbytes: int) -> Comparison:
    inserts = Table("inserts", "fifo", "fifo", max_size=at_once(nbytes, budget=_TABLE_BYTES, most=16_384))
    samples = Table("samples", "uniform", "fifo", max_size=at_once(nbytes, budget=_TABLE_BYTES // 2, most=4_096))
    fills = (
        Task("fill", "inserts", nbytes, items=inserts.max_size),  # full, so that each insert evicts
        Task("fill", "samples", nbytes, items=samples.max_size),
    )
    measurements = [
        *(
            Measurement(
                (Figure(f"insert/{payload}/{writers}-writers", "items/s", rate),),
                Task("insert", "inserts", nbytes),
                clients=writers,
            )
            for writers in (1, 2, _WRITERS)
        ),
        *(
            Measurement(
                (Figure(f"sample/{payload}/{readers}-readers", "items/s", rate),),
                Task("sample", "samples", nbytes),
                clients=readers,
            )
            for readers in (1, 2)
        ),
        Measurement(
            tuple(Figure(f"ack-{p}/{payload}", "ms", value(p), higher_is_better=False) for p in ("p50", "p99")),
            Task("latency", "inserts", nbytes),
        ),
    ]
    side = Side("ours", (inserts, samples), fills)
    return replace(_on_both("reverb", side, tuple(measurements)), tcp=replace(side, system="ours_tcp"))


def _priorities() -> Comparison:
    table = Table("pool", "prioritized", "fifo", max_size=16_384)
    side = Side("ours", (table,), (Task("fill", "pool", 400, items=table.max_size),))
    figure = Figure("update/1024-priorities", "keys/s", rate)
    return _on_both("reverb", side, (Measurement((figure,), Task("update", "pool", items=1_024)),))


def _process() -> Comparison:
    side = Side("ours", (Table("queue", "fifo", "fifo", 512), Table("pool", "prioritized", "min_heap", 4_096)))
    memory = Figure("memory/idle-server", "MB", value("megabytes"), higher_is_better=False)
    loading = Figure("import/client", "s", value("seconds"), higher_is_better=False)
    return _on_both(
        "reverb",
        side,
        (Measurement((memory,), Task("idle_memory", "")), Measurement((loading,), Task("import_time", ""))),
    )


def _against_transferqueue() -> Comparison:
    side = Side("ours", (Table("inserts", "fifo", "fifo", max_size=4_096),))
    measurements = [
        Measurement(
            tuple(
                Figure(f"{operation}/{payload}/transferqueue", "items/s", value(operation))
                for operation in ("put", "get")
            ),
            Task("put_and_get", "inserts", nbytes),
        )
        for payload, nbytes in PAYLOADS.items()
    ]
    return Comparison("transferqueue", side, Side("transferqueue"), tuple(measurements))


def _scaling(power: int) -> Comparison:
    """Our operations on a pool of 10^power small items, against those on one of 10^3."""
    measurements = []
    for operation, task in {
        "insert": Task("insert", "pool", 64),
        "sample-256": Task("request", "pool", items=256),
        "update-1024": Task("update", "pool", items=1_000),  # as many as there are in the small table
    }.items():
        measurements.append(Measurement((Figure(f"scaling/{operation}/1e{power}", "items/s", rate),), task))
    return Comparison(f"ours at 1e{SCALES[0]} items", _pool(10**power), _pool(10 ** SCALES[0]), tuple(measurements))


def _pool(items: int) -> Side:
    table = Table("pool", "prioritized", "min_heap", max_size=items)
    return Side("ours", (table,), (Task("fill", "pool", 64, items=items),))


def _large_payloads() -> Comparison:
    """Bytes per second of payloads of 32 MB, against those of 4 MB."""
    large, small = 32_000_000, 4_000_000
    fills, tables = [], []
    for nbytes in (large, small):
        items = at_once(nbytes, budget=_TABLE_BYTES // 2, most=64)
        for role, sampler in (("inserts", "fifo"), ("samples", "uniform")):
            tables.append(Table(f"{role}-{nbytes}", sampler, "fifo", items))
            fills.append(Task("fill", f"{role}-{nbytes}", nbytes, items=items))
    measurements = []
    for role, operation in (("inserts", "insert"), ("samples", "sample")):
        figure = Figure(f"large/{operation}/32MB", "MB/s", megabytes)
        measurements.append(
            Measurement(
                (figure,),
                Task(operation, f"{role}-{large}", large),
                their_task=Task(operation, f"{role}-{small}", small),
            )
        )
    side = Side("ours", tuple(tables), tuple(fills))
    return Comparison("ours at 4 MB", side, side, tuple(measurements))


def megabytes(results: Sequence[Result]) -> float:
    """Payload megabytes per second."""
    return rate(results) * float(results[0]["nbytes"]) / 1e6


_GROUP_BYTES = 384 << 20
"""What passes through the queue in one round."""


def _tokens(writers: int) -> Comparison:
    """Groups from generators through a queue to a reader that decodes them."""
    side = Side("ours", tuple(_queue(name, tokens) for name, tokens in GROUPS.items()))
    measurements = []
    for name, tokens in GROUPS.items():
        nbytes = tokens * BYTES_A_TOKEN
        groups = at_once(nbytes, budget=_GROUP_BYTES, most=3_200) // 64 * 64
        measurements.append(
            Measurement(
                (Figure(f"tokens/{name}/{writers}-generators", "tokens/s", rate),),
                Task("write_groups", name, nbytes, items=groups // writers),
                clients=writers,
                beside=Task("read_groups", name, nbytes, items=groups),
                rounds=3,
            )
        )
    return replace(_on_both("reverb", side, tuple(measurements)), tcp=replace(side, system="ours_tcp"))


def _tokens_encrypted() -> Comparison:
    tokens = _tokens(1)
    measurements = tuple(
        replace(each, figures=tuple(replace(figure, cell=f"{figure.cell}/tls") for figure in each.figures))
        for each in tokens.measurements
    )
    tls, tcp = replace(tokens.ours, system="ours_tls"), replace(tokens.ours, system="ours_tcp")
    return Comparison("ours over TCP, not encrypted", tls, tcp, measurements)


def _queue(name: str, tokens: int) -> Table:
    size = at_once(tokens * BYTES_A_TOKEN, budget=_TABLE_BYTES, most=512)
    return Table(name, "fifo", "fifo", size, queue=True)


def _fields(rival: str) -> Comparison:
    """A rollout as a dict of 32 arrays."""
    measurements = tuple(
        Measurement(
            tuple(Figure(f"dict-{part}/{name}/{rival}", "GB/s", value(part)) for part in ("put", "get", "both")),
            Task("fields", "inserts", nbytes),
            rounds=2,
        )
        for name, nbytes in DICTS.items()
    )
    tables = (Table("inserts", "fifo", "fifo", max_size=4),)
    theirs = Side(rival, tables if rival == "zmq_pickle" else ())
    return Comparison(rival, Side("ours", tables), theirs, measurements)


def _durable(ours: str, redis: str) -> Comparison:
    """Inserts whose acknowledgement means that they are in the journal."""
    measurements: list[Measurement] = []
    tables = []
    for payload in ("400B", "106kB"):
        nbytes = PAYLOADS[payload]
        tables.append(Table(payload, "fifo", "fifo", at_once(nbytes, budget=_TABLE_BYTES, most=16_384)))
        measurements += (
            Measurement(
                (Figure(f"durable/insert/{payload}/fsync-{ours}", "items/s", rate),), Task("insert", payload, nbytes)
            ),
            Measurement(
                tuple(
                    Figure(f"durable/ack-{p}/{payload}/fsync-{ours}", "ms", value(p), higher_is_better=False)
                    for p in ("p50", "p99")
                ),
                Task("latency", payload, nbytes),
            ),
        )
    fills = tuple(Task("fill", table.name, PAYLOADS[table.name], items=table.max_size) for table in tables)
    side = Side("ours", tuple(tables), fills, durability=ours)
    return Comparison(
        f"redis, appendfsync {redis}",
        side,
        replace(side, system="redis", durability=redis),
        tuple(replace(each, rounds=3) for each in measurements),
    )


def _restart(ours: str, redis: str, gigabytes: float) -> Comparison:
    """A start after SIGKILL, with nothing in the cache of files."""
    sides = Side("ours", durability=ours), Side("redis", durability=redis)
    return _kept(*sides, f"fsync-{ours}", small=int(1e5 * gigabytes), large=int(1e9 * gigabytes))


def _checkpoints(gigabytes: float) -> Comparison:
    """The same of servers in memory, from the checkpoint that they wrote last."""
    side = Side("ours", durability=CHECKPOINT)
    theirs = replace(side, system="reverb")
    # Less than above: Reverb writes 10 to 30 MB a second.
    return _kept(side, theirs, CHECKPOINT, small=int(2e4 * gigabytes), large=int(3e7 * gigabytes))


def _kept(ours: Side, theirs: Side, kind: str, *, small: int, large: int) -> Comparison:
    """`small`: items of 400 B. `large`: bytes of items of 106 kB."""
    measurements, group = [], PAYLOADS["106kB"]
    for name, nbytes, items in (("items", 400, small), ("bytes", group, max(1, large // group))):
        unit, of = ("items/s", rate) if name == "items" else ("MB/s", megabytes)
        figures = [Figure(f"restart/{name}/{kind}", unit, of)]
        if kind == CHECKPOINT:
            figures.append(Figure(f"checkpoint/{name}", unit, lambda results, of=of: of([_written(results[0])])))
        measurements.append(Measurement(tuple(figures), Task("restart", "kept", nbytes, items=items), rounds=1))
    table = Table("kept", "fifo", "fifo", max(small, large // group))
    against = f"redis, appendfsync {theirs.durability}" if theirs.system == "redis" else theirs.system
    sides = (replace(side, tables=(table,)) for side in (ours, theirs))
    return Comparison(against, *sides, tuple(measurements))


def _written(result: Result) -> Result:
    return result | {"seconds": result["seconds_of_checkpoint"]}
