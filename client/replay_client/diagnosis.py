"""Finds what is wrong with a server, or soon will be, and names the remedy.

The rules are pure functions of one `ServerInfo`. `replay doctor` prints their findings, and any other client may. The
cost is linear in the number of tables.

A finding is a warning when a person should look, and a failure when the run loses data or cannot go on. What a person
does on purpose, such as ending a part of the run, is neither. The first remedy never weakens a bound.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from replay_client.columns.kept import TRUNCATING, truncates
from replay_client.records import ServerInfo, TableInfo, read_described, shards_of
from replay_client.units import byte_size, counted, duration, listed, waiting, waits_for

YOUNG = 60.0
"""Seconds after the start of a server in which an empty table is normal."""
MUCH_STALE = 0.1
"""Share of the generated groups that were dropped as stale and never used: a warning from here on."""
MOST_STALE = 0.5
"""The same share: a failure from here on."""
MUCH_LOST = 0.1
"""Share of the inserts that were evicted before anybody sampled them: a warning from here on."""
NEARLY_FULL = 0.9
"""Share of a bound on memory: a warning from here on."""
CLOCK_SKEW = 2.0
"""Seconds between the clocks of two machines: a warning from here on."""
FEW_BYTES = 1 << 30
"""Less free memory or disk than this is a warning."""
RECENT = 900.0
"""Seconds for which one of several that is gone is named. Its place may have been taken under another name."""


class Level(StrEnum):
    """How bad a finding is."""

    OK = "ok"
    """Nothing is wrong."""
    WARNING = "warning"
    """Somebody should look."""
    FAILURE = "failure"
    """The run loses data, or cannot go on."""


@dataclass(frozen=True)
class Finding:
    """The result of one check."""

    check: str
    """What was checked: a table's name, or a word such as `memory`."""
    level: Level
    message: str
    remedy: str = ""
    """What to do about it; empty where nothing is wrong."""
    headline: str = ""
    """Why the run does not go on, in a few words; empty: it goes on all the same."""


def _ok(check: str, message: str) -> Finding:
    return Finding(check, Level.OK, message)


def _warning(check: str, message: str, remedy: str, headline: str = "") -> Finding:
    return Finding(check, Level.WARNING, message, remedy, headline)


def _failure(check: str, message: str, remedy: str, headline: str = "") -> Finding:
    return Finding(check, Level.FAILURE, message, remedy, headline)


def diagnose(
    info: ServerInfo, client_version: str, now: float, max_staleness: float | None = None
) -> Iterator[Finding]:
    """Yields the findings about the server, then those about each table; `info` must hold all tables.

    `client_version` is the version of the caller's package, `now` the caller's clock in seconds since the epoch.
    `max_staleness`: how many policy versions old fresh groups may be in the mean; None: as their table says.
    """
    yield from _shards(info)
    yield _version(info, client_version)
    yield _clock(info, now)
    tables = _tables(info)
    yield from _memory(info, tables)
    yield from _disk(info)
    yield _policy(info)
    yield from _sides(info)
    yield from _permits(info)
    yield from _batches(info)
    yield from _kept(info)
    fed = info.uptime > YOUNG or any(table.inserts for table in info.tables.values())
    for table in tables:
        found = list(_table_findings(info, table, fed))
        yield from _age_of_draws(info, table, max_staleness)
        ok = _ok(table.name, f"{counted(table.info.size, 'item')}, {table.info.inserts_per_second:.1f} in/s")
        yield from found or [ok]


@dataclass
class _Table:
    """A table with what the rules derive from its configuration and its neighbours."""

    info: TableInfo
    config: dict[str, Any]
    feeders: list[TableInfo] = field(default_factory=list)
    """The tables that forward to this one."""

    @property
    def name(self) -> str:
        return self.info.name

    @property
    def forwarded_in(self) -> int:
        """Items that came out of a feeder: each was sampled there, so each was used at least once."""
        return sum(feeder.forwarded for feeder in self.feeders)

    @property
    def direct_inserts(self) -> int:
        """Items that a client inserted into this table itself."""
        return max(0, self.info.inserts - self.forwarded_in)


def _tables(info: ServerInfo) -> list[_Table]:
    """All tables; each configuration is parsed once."""
    tables = [_Table(table, json.loads(table.config)) for table in info.tables.values()]
    feeders = defaultdict(list)
    for table in tables:
        feeders[table.config["forward_to"]].append(table.info)
    for table in tables:
        table.feeders = feeders[table.name]
    return tables


# --------------------------------------------------------------------------------------------------------- the server


def _version(info: ServerInfo, client_version: str) -> Finding:
    if info.version != client_version:
        return _warning(
            "version",
            f"the server is {info.version}, this client is {client_version}",
            "install the same version on both sides",
        )
    return _ok("version", info.version)


def _clock(info: ServerInfo, now: float) -> Finding:
    skew = info.time - now
    if abs(skew) > CLOCK_SKEW:
        ahead = "ahead of" if skew > 0 else "behind"
        return _warning(
            "clock",
            f"the server's clock is {duration(abs(skew))} {ahead} this machine's",
            "synchronise both (NTP), or logs and certificates disagree; ages and staleness do not depend on it",
        )
    return _ok("clock", f"{abs(skew):.1f} s apart")


def _memory(info: ServerInfo, tables: Sequence[_Table]) -> Iterator[Finding]:
    held = f"{byte_size(info.bytes)} in {counted(info.items, 'item')}"
    if kept := sum(table.info.kept_bytes for table in tables):
        held += f", {byte_size(kept)} of them kept for a rollback"
    if lost := sum(table.info.kept_dropped for table in tables):
        yield _warning(
            "memory",
            f"{counted(lost, 'item')} kept for a rollback made room for others: no rollback brings them back",
            "lower keep_consumed of the table, or raise [server] max_bytes",
        )
    unbounded = [table.name for table in tables if table.config["max_bytes"] is None]
    if not info.max_bytes and unbounded:
        yield _warning(
            "memory",
            f"{held}, and nothing bounds the bytes of {listed(unbounded)}",
            "set [server] max_bytes, or max_bytes of each table: large groups would take all memory",
        )
    elif info.max_bytes and info.bytes > NEARLY_FULL * info.max_bytes:
        yield _warning(
            "memory",
            f"{held}, {info.bytes / info.max_bytes:.0%} of max_bytes {byte_size(info.max_bytes)}",
            "lower max_size of a table, or raise [server] max_bytes: beyond it items are evicted or inserts wait",
        )
    else:
        yield _ok("memory", held)
    if not info.memory_available:
        return
    room = info.max_bytes - info.bytes if info.max_bytes else 0
    if info.memory_available < max(room, FEW_BYTES):
        yield _warning(
            "memory",
            f"the server's machine has {byte_size(info.memory_available)} left"
            + (f", and its tables may grow by {byte_size(room)}" if room else ""),
            "lower [server] max_bytes, or give the machine (or container) more memory",
        )


def _disk(info: ServerInfo) -> Iterator[Finding]:
    if info.commit_error:
        yield _failure(
            "disk",
            f"the server cannot write to data_dir and refuses inserts: {info.commit_error}",
            "make room on that disk, or repair it; the server goes on by itself",
        )
    if info.fell_back:
        yield _failure(
            "disk",
            info.fell_back,
            "compare the items and the policy version with what the run expects; this is said until the next start; "
            'fsync = "always" keeps every commit through a crash of the machine, and checkpoints bound what is lost',
        )
    if info.damaged:
        yield _warning(
            "disk",
            f"{counted(info.damaged, 'item')} lost, because bytes on disk are damaged",
            "check the disk, and move data_dir away from it",
        )
    if not info.disk_available:
        return
    if info.disk_available < max(info.bytes, FEW_BYTES):
        yield _warning(
            "disk",
            f"{byte_size(info.disk_available)} left on the disk of data_dir, with {byte_size(info.bytes)} of items",
            "make room there, or move data_dir: the server refuses inserts when the disk is full",
        )
    else:
        yield _ok("disk", f"{byte_size(info.disk_available)} left on the disk of data_dir")


def _policy(info: ServerInfo) -> Finding:
    # Generators, and no trainer, sample groups under construction.
    building = "" if info.admission is None else info.admission.building_table
    sampled = any(table.samples for table in info.tables.values() if table.name != building)
    if info.policy.version == 0 and not info.policy.weights and sampled:
        return _warning(
            "policy",
            "items are sampled, yet no policy version was ever published: staleness stays 0",
            "let the trainer call set_policy_version after each update (`replay train` does)",
        )
    usual = f"; usual: every {duration(info.policy.usual)}" if info.policy.usual else ""
    return _ok("policy", f"version {info.policy.version}, set {duration(info.policy.age)} ago{usual}")


def _shards(info: ServerInfo) -> Iterator[Finding]:
    """The servers of several that do not answer."""
    for name, shard in shards_of(info):
        if shard is None:
            yield _failure(
                f"shard {name}",
                "does not answer",
                "see whether its process is stopped, and start it again, or see with `replay shards status` whether "
                "Ray does; the others go on meanwhile",
            )


def _sides(info: ServerInfo) -> Iterator[Finding]:
    """Who is gone, as the server says; otherwise who is there, and who of several is not, or that the run has ended."""
    there = [client for client in info.clients if client.open]
    sides = {silence.side for silence in info.silences}
    who = (
        "Trainer and generators are"
        if len(sides) > 1
        else "The trainer is"
        if "trainer" in sides
        else "The generators are"
    )
    connected = any(client.open for side in sides for client in info.clients_of(side.removesuffix("s")))
    for silence in info.silences:
        yield _failure(
            silence.side,
            silence.reason,
            "see why it ended or hangs, and start it again: the run goes on where it stopped; a program that ends on "
            "purpose says so with client.leave()",
            f"{who} {'silent' if connected else 'gone'}",
        )
    if info.silences:
        return
    if there:
        yield _ok("clients", listed([f"{client.name} ({client.role or 'client'})" for client in there]))
    elif all(ended := [info.ended(role) for role in ("trainer", "generator")]):
        yield Finding("clients", Level.OK, f"{' and '.join(ended)} have ended", headline="The run has ended")
    for client in info.clients:
        part = read_described(client.settings).get("part")  # others come and go
        others = [each.name for each in info.clients_of(str(part)) if each.open]
        if others and not client.open and not client.ended and info.long_wait <= client.age < RECENT:
            yield _warning(
                "clients",
                f"{part} {client.name} is not connected, seen {duration(client.age)} ago; others: {listed(others)}",
                "see why it ended, and start it again; a program that ends on purpose says so with client.leave()",
            )


def _why_nobody(info: ServerInfo, role: str) -> tuple[str, str, str] | None:
    """Why what waits for this side waits in vain, with a remedy and a headline; None: somebody may serve it."""
    if who := info.ended(role):
        other = "generators" if role == "trainer" else "the trainer"
        return f"{who} has ended", f"end {other} too, or start a {role}", f"The {role} has ended"
    came = any(table.inserts if role == "generator" else table.samples for table in info.tables.values())
    if info.clients and not came and not info.clients_of(role):
        return f"no {role} has come yet", f"start a {role}", f"No {role} has come yet"
    return None


def _permits(info: ServerInfo) -> Iterator[Finding]:
    if (admission := info.admission) is None:
        return
    if admission.expired:
        yield _warning(
            "permits",
            f"{counted(admission.expired, 'permit')} expired unused",
            "see whether generators die; if they live, raise [admission] permit_ttl above the time a group takes",
        )
    yield from _building(admission.building_table, info)
    wait = admission.acquiring
    if not info.is_long(wait):
        return
    starved = [table.name for table in info.tables.values() if info.is_long(table.sampling)]
    message = f"{waiting(wait.count, 'permit request', wait.seconds)}: {wait.reason}"
    if not starved and (nobody := _why_nobody(info, "trainer")):
        why, remedy, headline = nobody
        yield _warning("permits", f"{message}; {why}", remedy, headline)
        return
    headline = _blocked("Generators", "no policy version was published", info.policy.age, info)
    if starved:
        yield _failure(
            "permits",
            f"{message}; and a trainer waits for groups of {listed(starved)}: neither can move",
            "insert what is trained on with permits, and nothing else; "
            f"`replay policy set {info.policy.version} --rollback` counts permits anew",
            headline,
        )
    else:
        yield _warning(
            "permits",
            message,
            "see whether the trainer goes on and publishes versions",
            headline,
        )


def _building(name: str, info: ServerInfo) -> Iterator[Finding]:
    """Groups under construction that wait for a generator hold permits, and nobody else can use these."""
    table = info.tables.get(name)
    if table is not None and table.size and table.age.max > info.long_wait and table.sampled.age > info.long_wait:
        yield _warning(
            name,
            f"{counted(table.size, 'group')} under construction, the oldest for {duration(table.age.max)}, and no "
            f"generator takes them: each holds a permit",
            f"start a generator with building = {name!r} (--building {name}), or delete them",
        )


# ------------------------------------------------------------------------------------- what the parts say of themselves


def _batches(info: ServerInfo) -> Iterator[Finding]:
    """Trainers that take another number of groups than is admitted, or from another table than generators fill."""
    for name, said in info.said("trainer"):
        table, fresh, admission = said.get("rollouts_table"), said.get("fresh_groups_per_step"), info.admission
        if not isinstance(table, str) or not isinstance(fresh, int):
            continue
        dynamic = said.get("zero_variance") == "dynamic"  # it takes more, and how many depends on the groups
        if admission is not None and admission.table == table and not dynamic and fresh != admission.groups_per_step:
            outcome = "it will wait for ever" if fresh > admission.groups_per_step else "generators run ahead of it"
            yield _warning(
                "permits",
                f"trainer {name} takes {fresh} fresh groups a step, and [admission] lets {admission.groups_per_step} "
                f"be generated: {outcome}",
                f"set [admission] groups_per_step = {fresh}, or groups_per_step and replay_share of the trainer",
            )
        for generator, told in info.said("generator"):
            if (tables := told.get("tables")) and table not in (filled := _fed_from(info, tables)):
                yield _warning(
                    "tables",
                    f"trainer {name} takes fresh groups from {table}, and generator {generator} inserts into "
                    f"{listed(filled)}",
                    f"start the generator with --table {table}, or set rollouts_table of the trainer",
                )


def _kept(info: ServerInfo) -> Iterator[Finding]:
    """Generators that draw from a part of the vocabulary, and whether they say which."""
    for name, said in info.said("generator"):
        if not truncates(said):
            continue
        how = listed([f"{each} {said[each]:g}" for each in TRUNCATING if truncates({each: said.get(each)})])
        if said.get("sampling_masks"):
            yield _ok("sampling", f"generator {name} draws with {how}, and stores what that keeps")
        else:
            yield _warning(
                "sampling",
                f"generator {name} draws with {how}, and stores no sampling masks: its log-probabilities are relative "
                f"to the kept tokens, and those of the trainer to all, which is a bias at every staleness",
                "let it store them (sampling_masks), or draw from all tokens: top_p 1, top_k 0 and min_p 0",
            )


def _fed_from(info: ServerInfo, names: Sequence[str]) -> list[str]:
    """These tables, and those that get their items from them."""
    found = list(names)
    for name in found:
        if name in info.tables and (target := json.loads(info.tables[name].config)["forward_to"]) not in (None, *found):
            found.append(target)
    return found


# ---------------------------------------------------------------------------------------------------------- one table


def _table_findings(info: ServerInfo, table: _Table, fed: bool) -> Iterator[Finding]:
    """What is wrong with one table. `fed`: the server runs long enough, or was fed, so that empty tables are odd."""
    lacking = list(_lacking(table.info, info))
    # Who waits for a row that waits for a column is told of the column.
    yield from lacking or _waits(table.info, info)
    yield from _limiter(table)
    yield from _balance(table)
    if fed and not table.info.inserts:
        yield _never_fed(table)
    yield from _staleness(table, info)
    yield from _losses(table)


def _blocked(who: str, cause: str, age: float, info: ServerInfo) -> str:
    """The headline of a long wait. It names the cause if what `who` wait for came last before a long time."""
    return f"{who} are blocked: {cause}" if age >= info.long_wait else f"{who} are blocked"


def _lacking(table: TableInfo, info: ServerInfo) -> Iterator[Finding]:
    """Rows that wait for columns, of which nobody has brought one for a long time."""
    if not table.waiting_rows or table.waiting_seconds < info.long_wait:
        return
    teachers = [f"{each.name} ({duration(each.age)} ago)" for each in info.clients if "teacher" in each.role]
    seen = f"; last seen: {listed(teachers)}" if teachers else ""
    message = f"{waits_for(table.lacking)}; nobody has extended one for {duration(table.waiting_seconds)}{seen}"
    remedy = (
        "see whether the process that extends these items is alive, and start it again: what it had drawn comes back "
        "when its lease ends; or take the column out of requires (`replay table update`)"
    )
    if info.is_long(table.sampling) or info.is_long(table.inserting):
        yield _failure(table.name, message, remedy, f"{table.name} is blocked: nobody extends its items")
    else:
        yield _warning(table.name, message, remedy)


def _waits(table: TableInfo, info: ServerInfo) -> Iterator[Finding]:
    inserting, sampling = table.inserting, table.sampling
    no_sample = _blocked(f"Inserts into {table.name}", "nobody samples it", table.sampled.age, info)
    no_insert = _blocked(f"Samples of {table.name}", "nobody inserts into it", table.inserted.age, info)
    if info.is_long(inserting) and info.is_long(sampling):
        yield _failure(
            table.name,
            f"inserts ({inserting.count}) and sample requests ({sampling.count}) wait for each other: "
            f"{inserting.reason}; {sampling.reason}",
            "ask for fewer samples at a time, or widen the rate limiter (`replay table update`)",
            no_sample,
        )
        return
    for request, wait, other, headline in (
        ("insert", inserting, "trainer", no_sample),
        ("sample request", sampling, "generator", no_insert),
    ):
        if info.is_long(wait):
            message = f"{waiting(wait.count, request, wait.seconds)}: {wait.reason}"
            remedy = _remedy_for_wait(request, wait.reason)
            if nobody := _why_nobody(info, other):
                message, remedy, headline = f"{message}; {nobody[0]}", *nobody[1:]
            yield _warning(table.name, message, remedy, headline)


def _remedy_for_wait(request: str, reason: str) -> str:
    if request == "sample request":
        return "see whether a generator runs and inserts into this table; or lower min_size, or ask for fewer samples"
    if "max_diff" in reason:
        return "see whether a trainer runs and samples this table; or widen the rate limiter (`replay table update`)"
    return "sample or delete items, or raise the bound (`replay table update`), or set when_full = 'evict'"


def _limiter(table: _Table) -> Iterator[Finding]:
    """Combinations of settings that block for ever, or lose items, whatever clients do."""
    info, config = table.info, table.config
    limiter, uses = config["rate_limiter"], config["max_times_sampled"]
    ratio = limiter["samples_per_insert"]
    if ratio is not None and uses and uses < ratio:
        yield _failure(
            table.name,
            f"samples_per_insert {ratio:g} wants each item sampled {ratio:g} times, and max_times_sampled {uses} "
            f"takes it away before: inserting will block for ever",
            f"set max_times_sampled to 0 or at least {-(-ratio // 1):.0f}",
        )
    mean = info.bytes / info.size if info.size else 0.0
    if config["max_bytes"] is not None and mean * limiter["min_size"] > config["max_bytes"]:
        yield _failure(
            table.name,
            f"min_size {limiter['min_size']} items of {byte_size(int(mean))} never fit into max_bytes "
            f"{byte_size(config['max_bytes'])}: sampling will block for ever",
            "lower min_size or raise max_bytes",
        )
    if config["when_full"] == "block" and not uses and config["max_staleness"] is None:
        yield _warning(
            table.name,
            "when_full = 'block', and nothing ever leaves this table by itself: full, it blocks inserting for ever",
            "set max_times_sampled or max_staleness, or when_full = 'evict'",
        )
    if limiter["max_size"] is not None and limiter["max_size"] > config["max_size"] and config["when_full"] == "evict":
        yield _warning(
            table.name,
            f"the {limiter['type']} admits {limiter['max_size']} items, and the table evicts beyond max_size "
            f"{config['max_size']}: items are lost before anybody samples them",
            f"set max_size to at least {limiter['max_size']}",
        )
    if config["requires"] and config["max_bytes"] is not None and config["when_full"] == "evict":
        yield _warning(
            table.name,
            f"it requires {listed(config['requires'])} and evicts beyond max_bytes: while it is full, what its items "
            f"wait for is refused, and they are evicted",
            "bound it by max_size or by a queue instead of max_bytes",
        )
    if info.size and not info.priority.max and config["sampler"]["type"] == "prioritized":
        yield _warning(
            table.name,
            "every item has priority 0, which `prioritized` never samples",
            "insert with priorities above 0, or use another sampler",
        )


def _balance(table: _Table) -> Iterator[Finding]:
    """A balance that changes nothing, or lets nothing be drawn."""
    if (balance := table.config["balance"]) is None or not table.info.values:
        return
    names, tag = [value.name for value in table.info.values], balance["tag"]
    if not any(value.weight for value in table.info.values):
        yield _warning(
            table.name,
            f"balance gives weight 0 to every value of {tag!r} that its items have: nothing is ever drawn",
            f"give {listed([name or 'items without the tag' for name in names])} a weight above 0 "
            "(`replay table update`)",
        )
    elif names == [""]:
        yield _warning(
            table.name,
            f"it balances {tag!r}, and no item has this tag: its draws are as without balance",
            "insert with this tag (`tags`, `replay generate --tag`), or correct its name (`replay table update`)",
        )


def _never_fed(table: _Table) -> Finding:
    names = listed([feeder.name for feeder in table.feeders])
    if not table.feeders:
        return _warning(
            table.name,
            "no client has ever inserted into it",
            f"name it in insert's priorities (`replay generate --table {table.name}`), or take it out of the "
            f"configuration",
        )
    if any(feeder.samples for feeder in table.feeders):
        return _warning(
            table.name,
            f"empty: {names} was sampled and has forwarded nothing",
            f"insert into {names} with priorities above 0 (group_priority): items of priority 0 are not forwarded",
        )
    return _warning(table.name, f"empty: nobody has sampled {names}, which feeds it", "start the trainer")


def _age_of_draws(info: ServerInfo, table: _Table, max_staleness: float | None) -> Iterator[Finding]:
    """How old groups are when they are drawn from a table that gives each once."""
    flow, admission = table.info.flow, info.admission
    if not flow.versions:
        return
    admitted = admission.max_staleness if admission is not None and admission.table == table.name else None
    limits = [table.config["max_staleness"], admitted] if max_staleness is None else [max_staleness]
    bound = min((limit for limit in limits if limit is not None), default=None)
    message = f"drawn {flow.staleness:.1f} versions old in the mean"
    if bound is None or flow.staleness <= bound:
        yield _ok(table.name, message)
    else:
        yield _warning(
            table.name,
            f"{message}, and {bound:g} is the bound",
            "make fewer groups at a time (max_concurrent_groups), shorten the queue (rate_limiter max_size), train on "
            "more fresh groups a step, or let [admission] max_staleness pace generators",
        )


def _staleness(table: _Table, info: ServerInfo) -> Iterator[Finding]:
    """Groups that went stale before anybody used them.

    Every group in a pool goes stale at last. Only those that no reader ever got are lost work: `stale` counts both, so
    this is the least that was lost. A sample uses at most one item, and each forwarded item was used where it came
    from.
    """
    counts, once = table.info, table.config["max_times_sampled"] == 1
    used = 0 if once else counts.samples + table.forwarded_in
    refused = max(0, counts.stale_refused - sum(feeder.forward_refused for feeder in table.feeders))
    lost, offered = max(0, counts.stale - used) + refused, table.direct_inserts + refused
    if not offered or lost < MUCH_STALE * offered:
        return
    limit = table.config["max_staleness"]
    if info.admission is not None and limit is not None and info.admission.max_staleness > limit:
        remedy = (
            f"set [admission] max_staleness ({info.admission.max_staleness}) to at most that of this table ({limit})"
        )
    elif info.admission is not None:
        remedy = "see whether every generator asks for permits, or raise max_staleness of this table"
    else:
        remedy = (
            "hold fewer groups ahead (a smaller queue), use [admission], which starts fewer, or raise max_staleness"
        )
    told = _failure if lost > MOST_STALE * offered else _warning
    yield told(
        table.name,
        f"{lost / offered:.0%} of what was generated was dropped unused: it was older than max_staleness {limit}",
        remedy,
    )


def _losses(table: _Table) -> Iterator[Finding]:
    counts, config = table.info, table.config
    if counts.archive_of:
        if counts.evicted_unsampled:
            yield _warning(
                table.name,
                f"{counted(counts.evicted_unsampled, 'item')} of {counts.archive_of} "
                f"({counts.evicted_unsampled / max(1, counts.inserts):.0%} of all) were not archived: they were let go "
                f"before the archiver took them",
                "see in the log whether `replay archive run` runs; give it a faster disk, or raise max_size and "
                "max_bytes of [archive]",
            )
        return
    # A forwarded item was sampled where it came from; it may leave the pool without being sampled again.
    lost = max(0, counts.evicted_unsampled - table.forwarded_in)
    if lost > MUCH_LOST * table.direct_inserts:
        yield _warning(
            table.name,
            f"{counted(lost, 'item')} ({lost / max(1, table.direct_inserts):.0%} of all) evicted before anybody sampled"
            " them",
            "make inserts wait (rate_limiter 'queue' or when_full = 'block'), sample faster, or raise max_size",
        )
    if counts.forward_refused:
        yield _warning(
            table.name,
            f"{counted(counts.forward_refused, 'item')} could not join {config['forward_to']}",
            f"set when_full = 'evict' for {config['forward_to']}, or raise its max_size or max_staleness",
        )
