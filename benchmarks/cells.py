"""Declares the cells of the benchmark. A cell is one figure of one measurement, on both sides of a comparison."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from benchmarks.loops import BYTES_A_TOKEN, Result, Task
from benchmarks.systems import at_once

PAYLOADS = {"400B": 400, "4kB": 4_000, "40kB": 40_000, "106kB": 106_496, "400kB": 400_000, "4MB": 4_000_000}
"""Bytes by name; 106 kB is a group of 8 x 1024 tokens."""
SCALES = (3, 4, 5, 6)
"""Numbers of items in the table whose operations are timed, as powers of ten."""
_TABLE_BYTES = 256 << 20
"""Most bytes of a table."""
_WRITERS = 4
"""Client processes that fill tables, and the most client processes of a cell."""


@dataclass(frozen=True)
class Table:
    """A table of a server."""

    name: str
    sampler: str
    remover: str
    max_size: int
    queue: bool = False
    """If True, each item is sampled once, and inserts wait while the table is full."""


@dataclass(frozen=True)
class Side:
    """A server of one system, with its tables and their contents at the start."""

    system: str
    tables: tuple[Table, ...] = ()
    fills: tuple[Task, ...] = ()
    """The tasks that fill the tables. Several clients share each of them."""
    durability: str = ""
    """The time at which the system syncs its tables to the disk, in its own word; empty: they are in memory."""


@dataclass(frozen=True)
class Figure:
    """One number out of the results of all clients."""

    cell: str
    unit: str
    of: Callable[[Sequence[Result]], float]
    higher_is_better: bool = True

    def ratio(self, ours: float, theirs: float) -> float:
        """The factor by which ours is better: above 1, it is better. NaN where the divisor is 0."""
        if self.higher_is_better:
            return ours / theirs if theirs else math.nan
        return theirs / ours if ours else math.nan


@dataclass(frozen=True)
class Measurement:
    """A task of clients, and the figures that come out of it."""

    figures: tuple[Figure, ...]
    task: Task
    clients: int = 1
    their_task: Task | None = None
    """The task of their clients; None: the same as ours."""
    beside: Task | None = None
    """A task of one more client at the same time. The figures are then those of that client."""
    rounds: int = 1_000
    """Most rounds of this measurement."""


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
"""Pattern of the names of the cells that are measured without --all."""
CHECKPOINT = "checkpoint"
"""The durability of a server in memory that writes its tables when a client asks."""


def all_comparisons(gigabytes: float) -> Iterator[Comparison]:
    """All comparisons. `gigabytes`: the size of the larger restarts. The small ones load 100,000 items for each GB."""
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
    """The comparisons with only those figures whose cells have a wanted name."""
    selected = []
    for comparison in comparisons:
        measurements = []
        for measurement in comparison.measurements:
            figures = tuple(figure for figure in measurement.figures if wanted(figure.cell))
            if figures:
                measurements.append(replace(measurement, figures=figures))
        if measurements:
            selected.append(replace(comparison, measurements=tuple(measurements)))
    return selected


def _on_both(against: str, side: Side, measurements: tuple[Measurement, ...]) -> Comparison:
    """Our side against the same side of another system."""
    return Comparison(against, side, replace(side, system=against), measurements)


def _against_reverb(payload: str, nbytes: int) -> Comparison:
    inserts = Table("inserts", "fifo", "fifo", max_size=at_once(nbytes, budget=_TABLE_BYTES, most=16_384))
    samples = Table("samples", "uniform", "fifo", max_size=at_once(nbytes, budget=_TABLE_BYTES // 2, most=4_096))
    fills = (
        Task("fill", "inserts", nbytes, items=inserts.max_size),  # full, so that each insert evicts
        Task("fill", "samples", nbytes, items=samples.max_size),
    )
    measurements = []
    for writers in (1, 2, _WRITERS):
        figure = Figure(f"insert/{payload}/{writers}-writers", "items/s", rate)
        measurements.append(Measurement((figure,), Task("insert", "inserts", nbytes), clients=writers))
    for readers in (1, 2):
        figure = Figure(f"sample/{payload}/{readers}-readers", "items/s", rate)
        measurements.append(Measurement((figure,), Task("sample", "samples", nbytes), clients=readers))
    p50 = Figure(f"ack-p50/{payload}", "ms", value("p50"), higher_is_better=False)
    p99 = Figure(f"ack-p99/{payload}", "ms", value("p99"), higher_is_better=False)
    measurements.append(Measurement((p50, p99), Task("latency", "inserts", nbytes)))
    side = Side("ours", (inserts, samples), fills)
    comparison = _on_both("reverb", side, tuple(measurements))
    return replace(comparison, tcp=replace(side, system="ours_tcp"))


def _priorities() -> Comparison:
    table = Table("pool", "prioritized", "fifo", max_size=16_384)
    side = Side("ours", (table,), (Task("fill", "pool", 400, items=table.max_size),))
    figure = Figure("update/1024-priorities", "keys/s", rate)
    return _on_both("reverb", side, (Measurement((figure,), Task("update", "pool", items=1_024)),))


def _process() -> Comparison:
    side = Side("ours", (Table("queue", "fifo", "fifo", 512), Table("pool", "prioritized", "min_heap", 4_096)))
    memory = Figure("memory/idle-server", "MB", value("megabytes"), higher_is_better=False)
    loading = Figure("import/client", "s", value("seconds"), higher_is_better=False)
    measurements = (
        Measurement((memory,), Task("idle_memory", "")),
        Measurement((loading,), Task("import_time", "")),
    )
    return _on_both("reverb", side, measurements)


def _against_transferqueue() -> Comparison:
    side = Side("ours", (Table("inserts", "fifo", "fifo", max_size=4_096),))
    measurements = []
    for payload, nbytes in PAYLOADS.items():
        put = Figure(f"put/{payload}/transferqueue", "items/s", value("put"))
        get = Figure(f"get/{payload}/transferqueue", "items/s", value("get"))
        measurements.append(Measurement((put, get), Task("put_and_get", "inserts", nbytes)))
    return Comparison("transferqueue", side, Side("transferqueue"), tuple(measurements))


def _scaling(power: int) -> Comparison:
    """Our operations on a pool of 10^power small items, against those on one of 10^3."""
    tasks = {
        "insert": Task("insert", "pool", 64),
        "sample-256": Task("request", "pool", items=256),
        "update-1024": Task("update", "pool", items=1_000),  # the small table has no more items
    }
    measurements = []
    for operation, task in tasks.items():
        figure = Figure(f"scaling/{operation}/1e{power}", "items/s", rate)
        measurements.append(Measurement((figure,), task))
    return Comparison(f"ours at 1e{SCALES[0]} items", _pool(10**power), _pool(10 ** SCALES[0]), tuple(measurements))


def _pool(items: int) -> Side:
    table = Table("pool", "prioritized", "min_heap", max_size=items)
    return Side("ours", (table,), (Task("fill", "pool", 64, items=items),))


def _large_payloads() -> Comparison:
    """Bytes per second of payloads of 32 MB, against those of 4 MB."""
    large = 32_000_000
    small = 4_000_000
    fills = []
    tables = []
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
"""Bytes that pass through the queue in one round."""


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
    """The same over TLS, against the same over TCP."""
    tokens = _tokens(1)
    measurements = []
    for measurement in tokens.measurements:
        figures = tuple(replace(figure, cell=f"{figure.cell}/tls") for figure in measurement.figures)
        measurements.append(replace(measurement, figures=figures))
    tls = replace(tokens.ours, system="ours_tls")
    tcp = replace(tokens.ours, system="ours_tcp")
    return Comparison("ours over TCP, not encrypted", tls, tcp, tuple(measurements))


def _queue(name: str, tokens: int) -> Table:
    """A queue for groups that have this number of tokens."""
    size = at_once(tokens * BYTES_A_TOKEN, budget=_TABLE_BYTES, most=512)
    return Table(name, "fifo", "fifo", size, queue=True)


def _fields(rival: str) -> Comparison:
    """A rollout as a dict of 32 arrays."""
    measurements = []
    for name, nbytes in DICTS.items():
        figures = tuple(Figure(f"dict-{part}/{name}/{rival}", "GB/s", value(part)) for part in ("put", "get", "both"))
        measurements.append(Measurement(figures, Task("fields", "inserts", nbytes), rounds=2))
    tables = (Table("inserts", "fifo", "fifo", max_size=4),)
    their_tables = tables if rival == "zmq_pickle" else ()
    return Comparison(rival, Side("ours", tables), Side(rival, their_tables), tuple(measurements))


def _durable(ours: str, redis: str) -> Comparison:
    """Inserts whose acknowledgement means that they are in the journal."""
    measurements = []
    tables = []
    for payload in ("400B", "106kB"):
        nbytes = PAYLOADS[payload]
        tables.append(Table(payload, "fifo", "fifo", at_once(nbytes, budget=_TABLE_BYTES, most=16_384)))
        inserts = Figure(f"durable/insert/{payload}/fsync-{ours}", "items/s", rate)
        measurements.append(Measurement((inserts,), Task("insert", payload, nbytes), rounds=3))
        p50 = Figure(f"durable/ack-p50/{payload}/fsync-{ours}", "ms", value("p50"), higher_is_better=False)
        p99 = Figure(f"durable/ack-p99/{payload}/fsync-{ours}", "ms", value("p99"), higher_is_better=False)
        measurements.append(Measurement((p50, p99), Task("latency", payload, nbytes), rounds=3))
    fills = tuple(Task("fill", table.name, PAYLOADS[table.name], items=table.max_size) for table in tables)
    side = Side("ours", tuple(tables), fills, durability=ours)
    theirs = replace(side, system="redis", durability=redis)
    return Comparison(f"redis, appendfsync {redis}", side, theirs, tuple(measurements))


def _restart(ours: str, redis: str, gigabytes: float) -> Comparison:
    """Starts after SIGKILL, with nothing in the cache of files."""
    side = Side("ours", durability=ours)
    theirs = Side("redis", durability=redis)
    return _restarts(side, theirs, f"fsync-{ours}", small=int(1e5 * gigabytes), large=int(1e9 * gigabytes))


def _checkpoints(gigabytes: float) -> Comparison:
    """Starts of servers in memory, from the checkpoint that they wrote last."""
    side = Side("ours", durability=CHECKPOINT)
    theirs = replace(side, system="reverb")
    # Smaller than the restarts against Redis: Reverb writes 10 to 30 MB a second.
    return _restarts(side, theirs, CHECKPOINT, small=int(2e4 * gigabytes), large=int(3e7 * gigabytes))


def _restarts(ours: Side, theirs: Side, kind: str, *, small: int, large: int) -> Comparison:
    """Restarts with small items, and with large ones. `small`: items of 400 B. `large`: bytes of items of 106 kB."""
    group = PAYLOADS["106kB"]
    measurements = (
        _restart_of("items", kind, "items/s", rate, nbytes=400, items=small),
        _restart_of("bytes", kind, "MB/s", megabytes, nbytes=group, items=max(1, large // group)),
    )
    tables = (Table("kept", "fifo", "fifo", max(small, large // group)),)
    against = f"redis, appendfsync {theirs.durability}" if theirs.system == "redis" else theirs.system
    return Comparison(against, replace(ours, tables=tables), replace(theirs, tables=tables), measurements)


def _restart_of(
    name: str, kind: str, unit: str, speed: Callable[[Sequence[Result]], float], *, nbytes: int, items: int
) -> Measurement:
    """A restart with this number of items: the speed of the start and, for checkpoints, the speed of writing them."""

    def writing_speed(results: Sequence[Result]) -> float:
        result = results[0]
        return speed([result | {"seconds": result["seconds_of_checkpoint"]}])

    figures = [Figure(f"restart/{name}/{kind}", unit, speed)]
    if kind == CHECKPOINT:
        figures.append(Figure(f"checkpoint/{name}", unit, writing_speed))
    return Measurement(tuple(figures), Task("restart", "kept", nbytes, items=items), rounds=1)
