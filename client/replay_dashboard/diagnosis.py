"""Finds what is wrong with a server, or soon will be, and names the remedy.

diagnosis.toml is the table of all rules: what each says, and the remedy. Here is when: pure functions of one
`ServerInfo`. `replay doctor` prints their findings, and any other client may. The cost is linear in the number of
tables.

A finding is a warning when a person should look, and a failure when the run loses data or cannot go on. What a person
does on purpose, such as ending a part of the run, is neither. The first remedy never weakens a bound.
"""

from __future__ import annotations

import json
import tomllib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from replay_client.kept import TRUNCATING, truncates
from replay_client.records import ClientInfo, ServerInfo, TableInfo, read_described, shards_of
from replay_dashboard.units import byte_size, counted, duration, listed, waiting, waits_for

YOUNG = 60.0
"""Seconds after the start of a server in which an empty table is normal."""
UNREAD = 120.0
"""Seconds that a copy waits for its reader: a warning from here on."""
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
    rule: str = ""
    """Its name in RULES; empty where nothing is wrong."""


RULES: Mapping[str, Mapping[str, str]] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
"""`level`, `sentence`, `remedy` and perhaps `headline` of each rule, in which names of facts stand in braces."""


def found(rule: str, check: str, level: Level | None = None, **facts: Any) -> Finding:
    """The finding of a rule, with these facts in its sentences."""
    texts = {name: text.format(**facts) for name, text in RULES[rule].items()}
    return Finding(
        check, level or Level(texts["level"]), texts["sentence"], texts["remedy"], texts.get("headline", ""), rule
    )


def _ok(check: str, message: str) -> Finding:
    return Finding(check, Level.OK, message)


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
    yield from _one_reward(info)
    fed = info.uptime > YOUNG or any(table.inserts for table in info.tables.values())
    for table in tables:
        troubles = list(_table_findings(info, table, fed))
        yield from _age_of_draws(info, table, max_staleness)
        ok = _ok(table.name, f"{counted(table.info.size, 'item')}, {table.info.inserts_per_second:.1f} in/s")
        yield from troubles or [ok]


@dataclass
class _Table:
    """A table with what the rules derive from its configuration and its neighbours."""

    info: TableInfo
    config: dict[str, Any]
    feeders: list[TableInfo] = field(default_factory=list)
    """The tables that forward to this one."""
    copied: str | None = None
    """The table that copies its items to this one."""

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
    copied = {table.config["copy_to"]: table.name for table in tables}
    for table in tables:
        table.feeders, table.copied = feeders[table.name], copied.get(table.name)
    return tables


# --------------------------------------------------------------------------------------------------------- the server


def _version(info: ServerInfo, client_version: str) -> Finding:
    if info.version != client_version:
        return found("version-differs", "version", server=info.version, client=client_version)
    return _ok("version", info.version)


def _clock(info: ServerInfo, now: float) -> Finding:
    skew = info.time - now
    if abs(skew) > CLOCK_SKEW:
        ahead = "ahead of" if skew > 0 else "behind"
        return found("clock-skew", "clock", skew=duration(abs(skew)), ahead=ahead)
    return _ok("clock", f"{abs(skew):.1f} s apart")


def _memory(info: ServerInfo, tables: Sequence[_Table]) -> Iterator[Finding]:
    held = f"{byte_size(info.bytes)} in {counted(info.items, 'item')}"
    if kept := sum(table.info.kept_bytes for table in tables):
        held += f", {byte_size(kept)} of them kept for a rollback"
    if lost := sum(table.info.kept_dropped for table in tables):
        yield found("kept-dropped", "memory", items=counted(lost, "item"))
    unbounded = [table.name for table in tables if table.config["max_bytes"] is None]
    if not info.max_bytes and unbounded:
        yield found("memory-unbounded", "memory", held=held, tables=listed(unbounded))
    elif info.max_bytes and info.bytes > NEARLY_FULL * info.max_bytes:
        share, bound = info.bytes / info.max_bytes, byte_size(info.max_bytes)
        yield found("memory-nearly-full", "memory", held=held, share=share, bound=bound)
    else:
        yield _ok("memory", held)
    for check, server in _each(info, "memory"):
        room = server.max_bytes - server.bytes if server.max_bytes else 0
        if server.memory_available and server.memory_available < max(room, FEW_BYTES):
            growth = f", and its tables may grow by {byte_size(room)}" if room else ""
            yield found("machine-nearly-full", check, left=byte_size(server.memory_available), growth=growth)


def _disk(info: ServerInfo) -> Iterator[Finding]:
    if info.commit_error:
        yield found("disk-fails", "disk", reason=info.commit_error)
    if info.fell_back:
        yield found("fell-back", "disk", reason=info.fell_back)
    if info.damaged:
        yield found("disk-damaged", "disk", items=counted(info.damaged, "item"))
    for check, server in _each(info, "disk"):
        left = byte_size(server.disk_available)
        if server.disk_available and server.disk_available < max(server.bytes, FEW_BYTES):
            yield found("disk-nearly-full", check, left=left, held=byte_size(server.bytes))
        elif server.disk_available:
            yield _ok(check, f"{left} left on the disk of data_dir")


def _each(info: ServerInfo, check: str) -> list[tuple[str, ServerInfo]]:
    """Each server that answers, and what to call a check of it: one has to live with what its own machine has left."""
    shards = [(f"{check} of {name}", shard) for name, shard in shards_of(info) if shard is not None]
    return shards or [(check, info)]


def _policy(info: ServerInfo) -> Finding:
    # Generators, and no trainer, sample groups under construction.
    building = () if info.admission is None else info.admission.building_tables
    sampled = any(table.samples for table in info.tables.values() if table.name not in building)
    if info.policy.version == 0 and not info.policy.weights and sampled:
        return found("no-version", "policy")
    usual = f"; usual: every {duration(info.policy.usual)}" if info.policy.usual else ""
    return _ok("policy", f"version {info.policy.version}, set {duration(info.policy.age)} ago{usual}")


def _shards(info: ServerInfo) -> Iterator[Finding]:
    """The servers of several that do not answer."""
    for name, shard in shards_of(info):
        if shard is None:
            yield found("shard-away", f"shard {name}")


def _sides(info: ServerInfo) -> Iterator[Finding]:
    """Who is gone, as the server says; otherwise who is there, and who of several is not, or that the run has ended."""
    there = [client for client in info.clients if client.open]
    if sides := sorted({silence.side for silence in info.silences}):
        connected = any(client.open for side in sides for client in info.clients_of(side.removesuffix("s")))
        one = {"trainer": "The trainer is", "generators": "The generators are"}[sides[0]]
        silent = f"{one if len(sides) == 1 else 'Trainer and generators are'} {'silent' if connected else 'gone'}"
        for silence in info.silences:
            yield found("side-gone", silence.side, reason=silence.reason, who=silent)
        return
    if there:
        yield _ok("clients", listed([f"{client.name} ({client.role or 'client'})" for client in there]))
    elif all(ended := [info.ended(role) for role in ("trainer", "generator")]):
        yield Finding("clients", Level.OK, f"{' and '.join(ended)} have ended", headline="The run has ended")
    for client in info.clients:
        part = read_described(client.settings).get("part")  # others come and go
        others = [each.name for each in info.clients if each.open and read_described(each.settings).get("part") == part]
        if part and others and not client.open and not client.ended and info.long_wait <= client.age < RECENT:
            age = duration(client.age)
            yield found("one-gone", "clients", part=part, client=client.name, age=age, others=listed(others))


def _why_nobody(info: ServerInfo, role: str) -> dict[str, Any] | None:
    """Why what waits for this side waits in vain, with a remedy and a headline; None: somebody may serve it."""
    if who := info.ended(role):
        other = "generators" if role == "trainer" else "the trainer"
        end = f"end {other} too, or start a {role}"
        return {"why": f"{who} has ended", "what": end, "blocked": f"The {role} has ended"}
    came = any(table.inserts if role == "generator" else table.samples for table in info.tables.values())
    if info.clients and not came and not info.clients_of(role):
        return {"why": f"no {role} has come yet", "what": f"start a {role}", "blocked": f"No {role} has come yet"}
    return None


def _permits(info: ServerInfo) -> Iterator[Finding]:
    if (admission := info.admission) is None:
        return
    if admission.expired:
        yield found("permits-expired", "permits", permits=counted(admission.expired, "permit"))
    for name in admission.building_tables:
        yield from _building(name, info)
    wait = admission.acquiring
    if not info.is_long(wait):
        return
    starved = [table.name for table in info.tables.values() if info.is_long(table.sampling)]
    message = waiting(wait, "permit request")
    if not starved and (nobody := _why_nobody(info, "trainer")):
        yield found("nobody-serves", "permits", wait=message, **nobody)
        return
    blocked = _blocked("Generators", "no policy version was published", info.policy.age, info)
    if starved:
        tables, version = listed(starved), info.policy.version
        yield found("permits-stuck", "permits", wait=message, blocked=blocked, tables=tables, version=version)
    else:
        yield found("permits-awaited", "permits", wait=message, blocked=blocked)


def _building(name: str, info: ServerInfo) -> Iterator[Finding]:
    """Groups under construction that wait for a generator hold permits, and nobody else can use these."""
    table = info.tables.get(name)
    if table is not None and table.size and table.age.max > info.long_wait and table.sampled.age > info.long_wait:
        groups, age = counted(table.size, "group"), duration(table.age.max)
        seen = _last_seen(each for each in info.clients if read_described(each.settings).get("source") == name)
        yield found("construction-idle", name, table=name, groups=groups, age=age, seen=seen)


def _last_seen(clients: Iterable[ClientInfo]) -> str:
    seen = listed([f"{each.name} ({duration(each.age)} ago)" for each in clients])
    return seen and f"; last seen: {seen}"


# ------------------------------------------------------------------------------------- what the parts say of themselves


def _batches(info: ServerInfo) -> Iterator[Finding]:
    """Trainers that take another number of groups than is admitted, or from another table than generators fill."""
    for name, said in info.said("trainer"):
        table, fresh, admission = said.get("rollouts_table"), said.get("fresh_groups_per_step"), info.admission
        if not isinstance(table, str) or not isinstance(fresh, int):
            continue
        dynamic = said.get("zero_variance") == "dynamic"  # it takes more, and how many depends on the groups
        if admission is not None and admission.table == table and not dynamic and fresh != admission.groups_per_step:
            admitted = admission.groups_per_step
            outcome = "it will wait for ever" if fresh > admitted else "generators run ahead of it"
            yield found("batch-not-admitted", "permits", trainer=name, fresh=fresh, admitted=admitted, outcome=outcome)
        for maker, told in info.said("generator"):
            if (tables := told.get("tables")) and table not in (fed := _fed_from(info, tables)):
                yield found("tables-differ", "tables", trainer=name, table=table, generator=maker, filled=listed(fed))


def _kept(info: ServerInfo) -> Iterator[Finding]:
    """Generators that draw from a part of the vocabulary, and whether they say which."""
    for name, said in info.said("generator"):
        if not truncates(said):
            continue
        how = listed([f"{each} {said[each]:g}" for each in TRUNCATING if truncates({each: said.get(each)})])
        if said.get("sampling_masks"):
            yield _ok("sampling", f"generator {name} draws with {how}, and stores what that keeps")
        else:
            yield found("no-masks", "sampling", generator=name, how=how)


def _one_reward(info: ServerInfo) -> Iterator[Finding]:
    """Parts that score groups, and gave all rollouts of many groups one reward."""
    for part in ("generator", "scorer"):
        for name, told in info.said(part):
            said = told.get("one_reward")
            if not isinstance(said, dict) or not isinstance(said.get("value"), float):
                continue
            pair = f"the newest answer ends with {said.get('got', '')!r:.120}"
            if "expected" in said:
                pair = f"expected {said['expected']!r:.120}, and {pair}"
            groups = said.get("groups")
            yield found("one-reward", "rewards", part=part, name=name, groups=groups, value=said["value"], pair=pair)


def _fed_from(info: ServerInfo, names: Sequence[str]) -> list[str]:
    """These tables, and those that get their items from them."""
    tables = list(names)
    for name in tables:
        target = json.loads(info.tables[name].config)["forward_to"] if name in info.tables else None
        tables += [str(target)] if target not in (None, *tables) else []
    return tables


# ---------------------------------------------------------------------------------------------------------- one table


def _table_findings(info: ServerInfo, table: _Table, fed: bool) -> Iterator[Finding]:
    """What is wrong with one table. `fed`: the server runs long enough, or was fed, so that empty tables are odd."""
    lacking = list(_lacking(table.info, info))
    # Who waits for a row that waits for a column is told of the column.
    yield from lacking or _waits(table.info, info)
    yield from _limiter(table)
    yield from _balance(table)
    if fed and not table.info.inserts and table.copied is None:
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
    seen = _last_seen(info.clients_of("teacher"))
    rule = "columns-block" if info.is_long(table.sampling) or info.is_long(table.inserting) else "columns-awaited"
    waits, age = waits_for(table.lacking), duration(table.waiting_seconds)
    yield found(rule, table.name, table=table.name, waits=waits, age=age, seen=seen)


def _waits(table: TableInfo, info: ServerInfo) -> Iterator[Finding]:
    inserting, sampling = table.inserting, table.sampling
    no_sample = _blocked(f"Inserts into {table.name}", "nobody samples it", table.sampled.age, info)
    no_insert = _blocked(f"Samples of {table.name}", "nobody inserts into it", table.inserted.age, info)
    if info.is_long(inserting) and info.is_long(sampling):
        yield found("both-wait", table.name, blocked=no_sample, inserts=inserting, samples=sampling)
        return
    for_insert = "limiter-waits" if "max_diff" in inserting.reason else "inserts-wait"
    for rule, request, wait, other, blocked in (
        (for_insert, "insert", inserting, "trainer", no_sample),
        ("samples-wait", "sample request", sampling, "generator", no_insert),
    ):
        if not info.is_long(wait):
            continue
        message = waiting(wait, request)
        if nobody := _why_nobody(info, other):
            yield found("nobody-serves", table.name, wait=message, **nobody)
        else:
            yield found(rule, table.name, wait=message, blocked=blocked)


def _limiter(table: _Table) -> Iterator[Finding]:
    """Combinations of settings that block for ever, or lose items, whatever clients do."""
    info, config, name = table.info, table.config, table.name
    limiter, uses, evicts = config["rate_limiter"], config["max_times_sampled"], config["when_full"] == "evict"
    ratio, min_size, admitted = limiter["samples_per_insert"], limiter["min_size"], limiter["max_size"]
    if ratio is not None and uses and uses < ratio:
        yield found("ratio-above-uses", name, ratio=ratio, uses=uses, needed=-(-ratio // 1))
    mean, bound = info.bytes / info.size if info.size else 0.0, config["max_bytes"]
    if bound is not None and mean * min_size > bound:
        yield found("min-size-never", name, min_size=min_size, mean=byte_size(int(mean)), bound=byte_size(bound))
    if config["when_full"] == "block" and not uses and config["max_staleness"] is None:
        yield found("fills-once", name)
    if admitted is not None and admitted > config["max_size"] and evicts:
        yield found("admits-too-many", name, limiter=limiter["type"], admitted=admitted, max_size=config["max_size"])
    if config["requires"] and bound is not None and evicts:
        yield found("no-room-for-columns", name, columns=listed(config["requires"]))
    if info.size and not info.priority.max and config["sampler"]["type"] == "prioritized":
        yield found("priorities-zero", name)


def _balance(table: _Table) -> Iterator[Finding]:
    """A balance that changes nothing, or lets nothing be drawn."""
    if (balance := table.config["balance"]) is None or not table.info.values:
        return
    names, tag = [value.name for value in table.info.values], balance["tag"]
    if not any(value.weight for value in table.info.values):
        given = listed([name or "items without the tag" for name in names])
        yield found("weights-zero", table.name, tag=tag, names=given)
    elif names == [""]:
        yield found("tag-unknown", table.name, tag=tag)


def _never_fed(table: _Table) -> Finding:
    if not table.feeders:
        return found("never-fed", table.name, table=table.name)
    sampled = any(feeder.samples for feeder in table.feeders)
    names = listed([feeder.name for feeder in table.feeders])
    return found("nothing-forwarded" if sampled else "feeder-not-sampled", table.name, feeders=names)


def _age_of_draws(info: ServerInfo, table: _Table, max_staleness: float | None) -> Iterator[Finding]:
    """How old groups are when they are drawn from a table that gives each once."""
    flow, admission = table.info.flow, info.admission
    if not flow.versions:
        return
    admitted = admission.max_staleness if admission is not None and admission.table == table.name else None
    limits = [table.config["max_staleness"], admitted] if max_staleness is None else [max_staleness]
    bound = min((limit for limit in limits if limit is not None), default=None)
    if bound is None or flow.staleness <= bound:
        yield _ok(table.name, f"drawn {flow.staleness:.1f} versions old in the mean")
    else:
        yield found("draws-old", table.name, staleness=flow.staleness, bound=bound)


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
    limit, admission = table.config["max_staleness"], info.admission
    rule = "stale" if admission is None else "stale-though-admitted"
    if admission is not None and limit is not None and admission.max_staleness > limit:
        rule = "stale-by-admission"
    facts: dict[str, Any] = {"share": lost / offered, "limit": limit, "admitted": admission and admission.max_staleness}
    yield found(rule, table.name, Level.FAILURE if lost > MOST_STALE * offered else None, **facts)


def _losses(table: _Table) -> Iterator[Finding]:
    counts, config = table.info, table.config
    if table.copied is not None:
        if counts.evicted_unsampled or counts.age.max > UNREAD:
            facts: dict[str, Any] = {"table": table.copied, "share": counts.evicted_unsampled / max(1, counts.inserts)}
            facts |= {"waits": counted(counts.size, "item"), "age": duration(counts.age.max)}
            yield found("not-archived", table.name, lost=counted(counts.evicted_unsampled, "item"), **facts)
        return
    # A forwarded item was sampled where it came from; it may leave the pool without being sampled again.
    lost = max(0, counts.evicted_unsampled - table.forwarded_in)
    if lost > MUCH_LOST * table.direct_inserts:
        share = lost / max(1, table.direct_inserts)
        yield found("evicted-unsampled", table.name, items=counted(lost, "item"), share=share)
    if counts.forward_refused:
        refused = counted(counts.forward_refused, "item")
        yield found("forward-refused", table.name, items=refused, target=config["forward_to"])
