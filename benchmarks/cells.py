"""Cells: what is measured. A cell is one figure of one measurement, on both sides of a comparison."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from benchmarks.loops import Result, Task
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


@dataclass(frozen=True)
class Side:
    """A server of one system, and what its tables hold at the start."""

    system: str
    tables: tuple[Table, ...] = ()
    fills: tuple[Task, ...] = ()
    """Each is shared out over several clients."""


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


def all_comparisons() -> Iterator[Comparison]:
    for payload, nbytes in PAYLOADS.items():
        yield _against_reverb(payload, nbytes)
    yield _priorities()
    yield _process()
    yield _against_transferqueue()
    for power in SCALES[1:]:
        yield _scaling(power)
    yield _large_payloads()


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
