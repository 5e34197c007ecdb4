"""The timed loops that client processes run. They are the same for every system.

A loop is a generator. It prepares and warms up before its first `yield`, and measures after it. The second value that
it yields is its result. So all clients of a cell can prepare, and then start at once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.systems import Session, at_once

_WARM_UP = 0.2
"""The seconds of the warm-up, as a share of those of the measurement."""


@dataclass(frozen=True)
class Task:
    """The task of a client process."""

    operation: str
    """A name in LOOPS."""
    table: str
    nbytes: int = 400
    """Size of each payload."""
    seconds: float = 1.0
    """The seconds for which the loop runs at least."""
    items: int = 0
    """The number of items to insert, or of a request."""
    seed: int = 0


Result = dict[str, Any]
Loop = Iterator[Result | None]


def _payloads(session: Session, task: Task, most: int = 64) -> list[Any]:
    """Different random payloads, which cannot be compressed."""
    rng = np.random.default_rng([task.seed, task.nbytes])
    number = at_once(task.nbytes, budget=32 << 20, most=most)
    return [session.native(rng.integers(0, 256, task.nbytes, dtype=np.uint8)) for _ in range(number)]


BYTES_A_TOKEN = 9
"""Bytes for each token in the arrays of a group that grow with its tokens."""


def group_arrays(tokens: int, seed: Sequence[int]) -> dict[str, Any]:
    """A rollout group: 8 completions of equal length with `tokens` tokens in all. The names are RolloutGroup's."""
    rng = np.random.default_rng(seed)
    return {
        "prompt_ids": rng.integers(0, 150_000, 256, dtype=np.int32),
        "completion_ids": rng.integers(0, 150_000, tokens, dtype=np.int32),
        "completion_lengths": np.full(8, tokens // 8, np.int32),
        "rollout_logprobs": -rng.random(tokens, dtype=np.float32),
        "loss_mask": rng.random(tokens) < 0.9,
        "rewards": rng.random(8, dtype=np.float32),
        "advantages": rng.random(8, dtype=np.float32),
    }


def _repeat(seconds: float, step: Callable[[], int]) -> tuple[int, float]:
    """Calls `step` until the time is up, and at least once. Returns the sum of its results, and the seconds."""
    begin = time.perf_counter()
    done = step()
    while (passed := time.perf_counter() - begin) < seconds:
        done += step()
    return done, passed


def fill(session: Session, task: Task) -> Loop:
    """Inserts `items` items with random priorities."""
    payloads = _payloads(session, task)
    priorities = np.random.default_rng(task.seed).uniform(0.1, 1.0, task.items).tolist()
    yield None
    with session.inserter(task.table, task.nbytes) as inserter:
        for row, priority in enumerate(priorities):
            inserter.insert(payloads[row % len(payloads)], priority)
        inserter.flush()
    yield {}


def insert(session: Session, task: Task) -> Loop:
    """Pipelined inserts; the time ends when all of them are acknowledged."""
    payloads = _payloads(session, task)
    priorities = np.random.default_rng(task.seed).uniform(0.1, 1.0, len(payloads)).tolist()
    rows = list(zip(payloads, priorities, strict=True))
    with session.inserter(task.table, task.nbytes) as inserter:

        def some() -> int:
            for payload, priority in rows:
                inserter.insert(payload, priority)
            return len(rows)

        def all_acknowledged(seconds: float) -> Result:
            begin = time.perf_counter()
            items, _ = _repeat(seconds, some)
            inserter.flush()
            return {"items": items, "seconds": time.perf_counter() - begin, "nbytes": task.nbytes}

        all_acknowledged(_WARM_UP * task.seconds)
        yield None
        yield all_acknowledged(task.seconds)


def sample(session: Session, task: Task) -> Loop:
    """A reader that takes samples as fast as they come."""
    with session.reader(task.table, task.nbytes) as batches:
        _repeat(_WARM_UP * task.seconds, lambda: next(batches))
        yield None
        # What was prefetched while this reader waited for the others to get ready must not count.
        _repeat(_WARM_UP * task.seconds, lambda: next(batches))
        items, seconds = _repeat(task.seconds, lambda: next(batches))
        yield {"items": items, "seconds": seconds, "nbytes": task.nbytes}


def latency(session: Session, task: Task) -> Loop:
    """One insert at a time, from handing it over to its acknowledgement."""
    payload = _payloads(session, task)[0]
    with session.inserter(task.table, task.nbytes) as inserter:

        def one() -> float:
            begin = time.perf_counter()
            inserter.insert(payload, 1.0)
            inserter.flush()
            return time.perf_counter() - begin

        _repeat(_WARM_UP * task.seconds, lambda: bool(one()))
        yield None
        times: list[float] = []
        _repeat(task.seconds, lambda: times.append(one()) or 1)
        p50, p99 = np.percentile(times, [50, 99])
        yield {"p50": 1e3 * p50, "p99": 1e3 * p99, "items": len(times)}


def write_groups(session: Session, task: Task) -> Loop:
    """Inserts `items` rollout groups of `nbytes`, beside a reader of the same table."""
    tokens = task.nbytes // BYTES_A_TOKEN
    groups = [session.native_group(group_arrays(tokens, [task.seed, row])) for row in range(4)]
    yield None
    with session.inserter(task.table, task.nbytes) as inserter:
        for row in range(task.items):
            inserter.insert(groups[row % len(groups)], 1.0)
        inserter.flush()
    yield {}


def read_groups(session: Session, task: Task) -> Loop:
    """Samples and decodes `items` such groups, from the start of their writers to the last token."""
    yield None
    begin = time.perf_counter()
    with session.group_reader(task.table, task.items, task.nbytes) as groups:
        tokens = sum(groups)
        seconds = time.perf_counter() - begin
    assert tokens == task.items * (task.nbytes // BYTES_A_TOKEN), f"{tokens} tokens came"
    yield {"items": tokens, "seconds": seconds}


def update(session: Session, task: Task) -> Loop:
    """New priorities for `items` items of a table, in one request after the other."""
    keys = session.keys(task.table, task.items)
    priorities = np.random.default_rng(task.seed).uniform(0.1, 1.0, (16, task.items))
    turn = iter(range(1 << 62))

    def one() -> int:
        session.update(task.table, keys, priorities[next(turn) % 16])
        return task.items

    _repeat(_WARM_UP * task.seconds, one)
    yield None
    items, seconds = _repeat(task.seconds, one)
    yield {"items": items, "seconds": seconds}


def request(session: Session, task: Task) -> Loop:
    """Requests for `items` samples, one after the other."""

    def one() -> int:
        session.sample(task.table, task.items)
        return task.items

    _repeat(_WARM_UP * task.seconds, one)
    yield None
    items, seconds = _repeat(task.seconds, one)
    yield {"items": items, "seconds": seconds}


def put_and_get(session: Session, task: Task) -> Loop:
    """Batches stored, fetched by their keys and freed (which is not timed)."""
    payloads = _payloads(session, task)
    batch = payloads[: at_once(task.nbytes, budget=8 << 20, most=64)]
    spent = {"put": 0.0, "get": 0.0}

    def one() -> int:
        begin = time.perf_counter()
        handle = session.put(batch)
        spent["put"] += time.perf_counter() - begin
        begin = time.perf_counter()
        session.get(handle)
        spent["get"] += time.perf_counter() - begin
        session.drop(handle)
        return len(batch)

    _repeat(_WARM_UP * task.seconds, one)
    yield None
    spent.update(put=0.0, get=0.0)
    items, _ = _repeat(task.seconds, one)
    yield {name: items / seconds for name, seconds in spent.items()}


def fields(session: Session, task: Task) -> Loop:
    """A dict of `nbytes` in 32 arrays: stored, then fetched and decoded, and read once a page."""
    size = task.nbytes // 32 // 8 // 4
    noise = np.random.default_rng(task.seed).standard_normal((8, size), dtype=np.float32)
    arrays = {f"field_{number:02}": noise + number for number in range(32)}
    nbytes = sum(array.nbytes for array in arrays.values())
    spent = {"put": 0.0, "get": 0.0}

    def one() -> int:
        begin = time.perf_counter()
        handle = session.put_fields(arrays)
        spent["put"] += time.perf_counter() - begin
        begin = time.perf_counter()
        found = session.get_fields(handle)
        for name, array in arrays.items():
            pages = slice(None, None, 1024)
            assert np.array_equal(found[name].reshape(-1)[pages], array.reshape(-1)[pages]), f"{name} is another one"
        spent["get"] += time.perf_counter() - begin
        del found
        session.drop(handle)
        return 1

    _repeat(_WARM_UP * task.seconds, one)
    yield None
    spent.update(put=0.0, get=0.0)
    rounds, _ = _repeat(task.seconds, one)
    gigabytes = rounds * nbytes / 1e9
    yield {"put": gigabytes / spent["put"], "get": gigabytes / spent["get"], "both": gigabytes / sum(spent.values())}


def size(session: Session, task: Task) -> Loop:
    """Reads the number of items of the table."""
    yield None
    yield {"items": session.size(task.table)}


def checkpoint(session: Session, task: Task) -> Loop:
    """Writes all tables to the disk, where inserts do not."""
    yield None
    begin = time.perf_counter()
    session.checkpoint()
    yield {"seconds": time.perf_counter() - begin}


LOOPS: dict[str, Callable[[Session, Task], Loop]] = {
    loop.__name__: loop
    for loop in (
        fill,
        insert,
        sample,
        latency,
        write_groups,
        read_groups,
        update,
        request,
        put_and_get,
        fields,
        size,
        checkpoint,
    )
}
