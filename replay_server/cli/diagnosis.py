"""Diagnosis: what is wrong with a server, or soon will be, with the remedy. Rules over its ServerInfo, for `doctor`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from rich.filesize import decimal

from replay_server.cli.documents import Document, config_of
from replay_server.cli.output import duration

if TYPE_CHECKING:
    from replay_client.records import ServerInfo, TableInfo

LONG_WAIT = 10.0
"""Seconds of waiting that are worth a warning."""
YOUNG = 60.0
"""Seconds after its start in which a server need not have been fed."""
MUCH_STALE = 0.1
MOST_STALE = 0.5
"""Shares of what was offered that were dropped as stale: worth a warning; a failure."""
MUCH_LOST = 0.1
"""Share of inserts that were evicted without ever having been sampled: worth a warning."""
NEARLY_FULL = 0.9
CLOCK_SKEW = 2.0
"""Seconds between the clocks of two machines that are worth a warning."""
FEW_BYTES = 1 << 30
"""Less memory or disk than this is worth a warning."""


class Level(StrEnum):
    OK = "ok"
    WARNING = "warning"
    FAILURE = "failure"


@dataclass(frozen=True)
class Finding:
    check: str
    """What was looked at."""
    level: Level
    message: str
    remedy: str = ""


def server_findings(info: ServerInfo, client_version: str, now: float) -> Iterator[Finding]:
    """What holds for the server as a whole; `now` is this machine's clock, in seconds since the epoch."""
    yield _version(info, client_version)
    yield _clock(info, now)
    yield from _memory(info)
    yield from _disk(info)
    yield _policy(info)
    yield from _admission(info)


def table_findings(info: ServerInfo, table: TableInfo) -> Iterator[Finding]:
    """What is wrong with one table; nothing if nothing is."""
    config = config_of(table)
    feeders = [other for other in info.tables.values() if config_of(other)["forward_to"] == table.name]
    yield from _waiting(table)
    yield from _limiter(table, config)
    yield from _feeding(info, table, feeders)
    yield from _staleness(table, config)
    yield from _losses(table, config)


def _version(info: ServerInfo, client_version: str) -> Finding:
    if info.version != client_version:
        return Finding(
            "version",
            Level.WARNING,
            f"the server is {info.version}, this command {client_version}",
            "install the same version on both sides",
        )
    return Finding("version", Level.OK, info.version)


def _clock(info: ServerInfo, now: float) -> Finding:
    skew = info.time - now
    if abs(skew) > CLOCK_SKEW:
        ahead = "ahead of" if skew > 0 else "behind"
        return Finding(
            "clock",
            Level.WARNING,
            f"the server's clock is {duration(abs(skew))} {ahead} this machine's",
            "synchronise both (NTP), or logs and certificates disagree; ages and staleness do not depend on it",
        )
    return Finding("clock", Level.OK, f"{abs(skew):.1f} s apart")


def _memory(info: ServerInfo) -> Iterator[Finding]:
    held = f"{decimal(info.bytes)} in {info.items} items"
    unbounded = [name for name, table in info.tables.items() if config_of(table)["max_bytes"] is None]
    if not info.max_bytes and unbounded:
        yield Finding(
            "memory",
            Level.WARNING,
            f"{held}, and nothing bounds the bytes of {', '.join(unbounded)}",
            "set [server] max_bytes, or max_bytes of each table: large groups would take all memory",
        )
    elif info.max_bytes and info.bytes > NEARLY_FULL * info.max_bytes:
        yield Finding(
            "memory",
            Level.WARNING,
            f"{held}, {info.bytes / info.max_bytes:.0%} of max_bytes {decimal(info.max_bytes)}",
            "raise [server] max_bytes, or lower max_size of a table: beyond it items are evicted or inserts wait",
        )
    else:
        yield Finding("memory", Level.OK, held)
    if not info.memory_available:
        return
    room = info.max_bytes - info.bytes if info.max_bytes else 0
    if info.memory_available < max(room, FEW_BYTES):
        yield Finding(
            "memory",
            Level.WARNING,
            f"the server's machine has {decimal(info.memory_available)} left"
            + (f", and its tables may grow by {decimal(room)}" if room else ""),
            "lower [server] max_bytes, or give the machine (or container) more memory",
        )


def _disk(info: ServerInfo) -> Iterator[Finding]:
    if not info.disk_available:
        return
    if info.disk_available < max(info.bytes, FEW_BYTES):
        yield Finding(
            "disk",
            Level.WARNING,
            f"{decimal(info.disk_available)} left where data_dir lies, with {decimal(info.bytes)} of items",
            "make room there, or move data_dir: without room nothing can be stored",
        )
    else:
        yield Finding("disk", Level.OK, f"{decimal(info.disk_available)} left where data_dir lies")


def _policy(info: ServerInfo) -> Finding:
    if info.policy.version == 0 and not info.policy.weights and any(table.samples for table in info.tables.values()):
        return Finding(
            "policy",
            Level.WARNING,
            "items are sampled, yet no policy version was ever published: staleness stays 0",
            "let the trainer call set_policy_version after each update (`replay train` does)",
        )
    return Finding("policy", Level.OK, f"version {info.policy.version}, set {duration(info.policy.age)} ago")


def _admission(info: ServerInfo) -> Iterator[Finding]:
    if (admission := info.admission) is None:
        return
    if admission.expired:
        yield Finding(
            "permits",
            Level.WARNING,
            f"{admission.expired} permits expired unused",
            "raise [admission] permit_ttl above the time a group takes, and see whether generators die",
        )
    wait = admission.acquiring
    if wait.count and wait.seconds > LONG_WAIT:
        yield Finding(
            "permits",
            Level.WARNING,
            f"{wait.count} generators wait for {duration(wait.seconds)}: {wait.reason}",
            "see whether the trainer runs and publishes versions; or raise [admission] max_staleness",
        )


def _waiting(table: TableInfo) -> Iterator[Finding]:
    for verb, wait in (("inserting", table.inserting), ("sampling", table.sampling)):
        if not wait.count or wait.seconds < LONG_WAIT:
            continue
        if verb == "sampling":
            remedy = (
                "see whether a generator runs and inserts into this table; or lower min_size, or ask for fewer samples"
            )
        elif "max_diff" in wait.reason:
            remedy = "see whether a trainer runs and samples this table; or widen the rate limiter (`replay update`)"
        else:
            remedy = "sample or delete items, or raise the bound (`replay update`), or set when_full = 'evict'"
        yield Finding(
            table.name,
            Level.WARNING,
            f"{wait.count} {verb}, the first for {duration(wait.seconds)}: {wait.reason}",
            remedy,
        )


def _limiter(table: TableInfo, config: Document) -> Iterator[Finding]:
    """What makes a limiter block for ever, whatever clients do."""
    limiter, uses = config["rate_limiter"], config["max_times_sampled"]
    ratio = limiter["samples_per_insert"]
    if ratio is not None and uses and uses < ratio:
        yield Finding(
            table.name,
            Level.FAILURE,
            f"samples_per_insert {ratio:g} wants each item sampled {ratio:g} times, and max_times_sampled {uses} "
            f"takes it away before: inserting will block for ever",
            f"set max_times_sampled to 0 or at least {-(-ratio // 1):.0f}",
        )
    mean = table.bytes / table.size if table.size else 0.0
    if config["max_bytes"] is not None and mean * limiter["min_size"] > config["max_bytes"]:
        yield Finding(
            table.name,
            Level.FAILURE,
            f"min_size {limiter['min_size']} items of {decimal(int(mean))} never fit into max_bytes "
            f"{decimal(config['max_bytes'])}: sampling will block for ever",
            "raise max_bytes or lower min_size",
        )
    if config["when_full"] == "block" and not uses and config["max_staleness"] is None:
        yield Finding(
            table.name,
            Level.WARNING,
            "when_full = 'block', and nothing ever leaves this table by itself: full, it blocks inserting for ever",
            "set max_times_sampled or max_staleness, or when_full = 'evict'",
        )
    if limiter["max_size"] is not None and limiter["max_size"] > config["max_size"] and config["when_full"] == "evict":
        yield Finding(
            table.name,
            Level.WARNING,
            f"the {limiter['type']} admits {limiter['max_size']} items, and the table evicts beyond max_size "
            f"{config['max_size']}: items are lost that nobody has sampled",
            f"set max_size to at least {limiter['max_size']}",
        )
    if table.size and not table.priority.max and config["sampler"]["type"] == "prioritized":
        yield Finding(
            table.name,
            Level.WARNING,
            "every item has priority 0, which `prioritized` never samples",
            "insert with priorities above 0, or use another sampler",
        )


def _feeding(info: ServerInfo, table: TableInfo, feeders: list[TableInfo]) -> Iterator[Finding]:
    if table.inserts or (info.uptime < YOUNG and not any(other.inserts for other in info.tables.values())):
        return
    if feeders:
        names = " and ".join(feeder.name for feeder in feeders)
        if any(feeder.samples for feeder in feeders):
            yield Finding(
                table.name,
                Level.WARNING,
                f"empty: {names} was sampled and has forwarded nothing",
                f"insert into {names} with priorities above 0 (group_priority): items of priority 0 are not forwarded",
            )
        else:
            yield Finding(
                table.name, Level.WARNING, f"empty: nobody has sampled {names}, which feeds it", "start the trainer"
            )
        return
    yield Finding(
        table.name,
        Level.WARNING,
        "nobody has ever inserted into it",
        f"name it in insert's priorities (`replay generate --table {table.name}`), or take it out of the configuration",
    )


def _staleness(table: TableInfo, config: Document) -> Iterator[Finding]:
    dropped, offered = table.stale + table.stale_refused, table.inserts + table.stale_refused
    if not offered or dropped < MUCH_STALE * offered:
        return
    yield Finding(
        table.name,
        Level.FAILURE if dropped > MOST_STALE * offered else Level.WARNING,
        f"{dropped / offered:.0%} of what was generated was dropped, older than max_staleness "
        f"{config['max_staleness']} allows",
        "raise max_staleness, hold fewer groups ahead (a smaller queue), or use [admission], which starts fewer",
    )


def _losses(table: TableInfo, config: Document) -> Iterator[Finding]:
    if table.evicted_unsampled > MUCH_LOST * table.inserts:
        yield Finding(
            table.name,
            Level.WARNING,
            f"{table.evicted_unsampled} items ({table.evicted_unsampled / table.inserts:.0%} of all) were evicted "
            f"before anyone had sampled them",
            "raise max_size, sample faster, or make inserts wait: rate_limiter 'queue' or when_full = 'block'",
        )
    if table.forward_refused:
        yield Finding(
            table.name,
            Level.WARNING,
            f"{table.forward_refused} items could not join {config['forward_to']}",
            f"set when_full = 'evict' for {config['forward_to']}, or raise its max_size or max_staleness",
        )
