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

from replay_client.records import ClientInfo, ServerInfo, TableInfo, Waiting, read_described, shards_of
from replay_client.sampling_masks import TRUNCATING, truncates
from replay_dashboard.presence import (
    GENERATOR,
    TRAINER,
    Part,
    State,
    scorers_of,
    supply_of,
    teacher_of,
    trainer_of,
)
from replay_dashboard.tag_counts import TagCounts, tag_counts
from replay_dashboard.units import byte_size, counted, duration, listed, waiting, waits_for

YOUNG = 60.0
"""Seconds after the start of a server in which an empty table is normal."""
UNREAD = 120.0
"""Seconds that a copy waits for its reader: a warning from here on."""
MUCH_STALE = 0.1
"""Share of the generated groups that were dropped as stale and never used: a warning from here on."""
MOST_STALE = 0.5
"""The same share: a failure from here on."""
LEAST_GENERATED = 8
"""Groups of one value of a tag: of fewer nobody says that they starve."""
MUCH_LOST = 0.1
"""Share of the inserts that were evicted before anybody sampled them: a warning from here on."""
NEARLY_FULL = 0.9
"""Share of a bound on memory: a warning from here on."""
CLOCK_SKEW = 2.0
"""Seconds between the clocks of two machines: a warning from here on."""
FEW_BYTES = 1 << 30
"""Less free memory or disk than this is a warning."""
MUCH_BYTES = 10**9
"""Bytes of items: tables without a bound are a warning from here on."""
FEW_REFUSED = 3
"""Requests of agents that were refused in ten minutes: a warning from here on."""
REFUSED = {
    "400": "no valid request",
    "401": "no valid token",
    "404": "no such session or path",
    "413": "too large",
    "422": "its rollout has failed",
    "429": "too many at once",
    "500": "the generator failed",
}
"""The address of the sessions refuses a request with one of these statuses, for this reason."""
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
    stops: str = ""
    """One of STOPS, if there is a headline."""
    rule: str = ""
    """Its name in RULES; empty where nothing is wrong."""


STOPS = ("blocked", "gone", "idle")
"""A run stops because requests wait in vain, because a part is not connected, or because nobody wants anything. The
verdict names the first of these that holds."""
RULES: Mapping[str, Mapping[str, str]] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
"""`level`, `sentence`, `remedy`, and perhaps `headline` and `stops` of each rule, in which names of facts stand in
braces."""


def found(rule: str, check: str, level: Level | None = None, **facts: Any) -> Finding:
    """The finding of a rule, with these facts in its sentences."""
    texts = {name: text.format(**facts) for name, text in RULES[rule].items()}
    return Finding(
        check=check,
        level=level or Level(texts["level"]),
        message=texts["sentence"],
        remedy=texts["remedy"],
        headline=texts.get("headline", ""),
        stops=texts.get("stops", ""),
        rule=rule,
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
    yield from _roles(info, tables)
    yield from _permits(info)
    yield from _batches(info)
    yield from _kept(info)
    yield from _one_reward(info)
    yield from _failures(info)
    yield from _cut_early(info)
    yield from _refused_agents(info)
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
    if retained := sum(table.info.retained_bytes for table in tables):
        held += f", {byte_size(retained)} of them retained for a rollback"
    if lost := sum(table.info.retained_discarded for table in tables):
        yield found("retained-discarded", "memory", items=counted(lost, "item"))
    unbounded = [table.name for table in tables if table.config["max_bytes"] is None]
    if not info.max_bytes and unbounded and info.bytes >= MUCH_BYTES:
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
    # Generators, and no trainer, sample partial groups.
    permit_tables = () if info.admission is None else info.admission.permit_tables
    sampled = any(table.samples for table in info.tables.values() if table.name not in permit_tables)
    if info.policy.version == 0 and not info.policy.weights and sampled:
        return found("no-version", "policy")
    usual = f"; usually every {duration(info.policy.interval)}" if info.policy.interval else ""
    return _ok("policy", f"version {info.policy.version}, set {duration(info.policy.age)} ago{usual}")


def _shards(info: ServerInfo) -> Iterator[Finding]:
    """The servers of several that do not answer."""
    for name, shard in shards_of(info):
        if shard is None:
            yield found("shard-away", f"shard {name}")


def _roles(info: ServerInfo, tables: Sequence[_Table]) -> Iterator[Finding]:
    """Which part of the run is gone, has ended or was never there; otherwise who is connected."""
    if info.overdue:
        for overdue in info.overdue:
            yield found("client-overdue", overdue.role, reason=overdue.reason, who=_silent(info))
        return
    trainer = trainer_of(info)
    supply = supply_of(info)
    there = [f"{client.name} ({client.role or 'client'})" for client in info.clients if client.open]
    if trainer.is_connected and supply.is_connected:
        if there:
            yield _ok("clients", listed(there))
    elif trainer.is_connected:
        yield _missing(info, supply, "clients", _left(info, tables))
    elif supply.is_connected:
        yield _missing(info, trainer, "clients")
    else:
        yield _nobody(trainer, supply, there)
    for name, scorers in scorers_of(info).items():
        if not scorers.is_connected:
            groups = counted(info.tables[name].size, "group")
            yield _missing(info, scorers, name, f"; {groups} of {name} lack rewards")
    teacher = teacher_of(info)
    if teacher.state is State.ENDED:
        for table in info.tables.values():
            if table.incomplete_items:
                yield _missing(info, teacher, table.name, f"; {table.name} {waits_for(table.missing_columns)}")
    yield from _one_gone(info)


def _one_gone(info: ServerInfo) -> Iterator[Finding]:
    """Clients that went without a word, while others of the same part are there."""
    there: dict[str, list[str]] = defaultdict(list)
    gone = []
    for client in info.clients:
        part = read_described(client.settings).get("part")
        if not isinstance(part, str):  # who does not say it comes and goes
            continue
        if client.open:
            there[part].append(client.name)
        elif not client.ended and info.long_wait <= client.age < RECENT:
            gone.append((part, client))
    for part, client in gone:
        if part in there:
            others = listed(there[part])
            age = duration(client.age)
            yield found("one-gone", "clients", part=part, client=client.name, age=age, others=others)


def _silent(info: ServerInfo) -> str:
    """The headline for the parts that are overdue."""
    roles = sorted({overdue.role for overdue in info.overdue}, reverse=True)
    connected = any(client.open for role in roles for client in info.clients_of(role))
    one = {"trainer": "The trainer is", "generator": "The generators are"}[roles[0]]
    who = one if len(roles) == 1 else "Trainer and generators are"
    return f"{who} {'silent' if connected else 'gone'}"


def _missing(info: ServerInfo, part: Part, check: str, left: str = "") -> Finding:
    """The finding about a part that the run lacks. `left`: what remains without it."""
    # Parts load their models, and after a start of the server all connect anew.
    young = info.uptime <= YOUNG and not part.is_known_to_be_gone
    level = Level.OK if young else None
    return found("part-missing", check, level, why=part.why + left, what=part.remedy, who=part.headline)


def _nobody(trainer: Part, supply: Part, there: Sequence[str]) -> Finding:
    """The finding about a server at which nobody trains, and nobody generates. `there`: who is connected."""
    if trainer.state is State.ENDED and supply.state is State.ENDED:
        ended = f"{trainer.why}, {supply.why}"
        return Finding("clients", Level.OK, ended, headline="The run has ended", stops="idle")
    others = f"; connected: {listed(there)}" if there else ""
    who = "Neither trainer nor generator is connected" if there else "Nobody is connected"
    level = Level.WARNING if State.AWAY in (trainer.state, supply.state) else Level.OK
    return found("nobody-connected", "clients", level, why=f"{trainer.why}; {supply.why}{others}", who=who)


def _left(info: ServerInfo, tables: Sequence[_Table]) -> str:
    """The groups that a trainer can still take without a generator, in words."""
    permit_tables = () if info.admission is None else info.admission.permit_tables
    queues = [
        table
        for table in tables
        if table.config["max_times_sampled"] == 1 and table.copied is None and table.name not in permit_tables
    ]
    return "".join(f"; {table.name} still has {counted(table.info.size, 'group')}" for table in queues)


def _why_nobody(info: ServerInfo, wait: Waiting, role: str, table: str = "") -> dict[str, Any] | None:
    """Why what waits for this side waits in vain, with a remedy and a headline; None: somebody may serve it.

    `table`: into which an insert waits. Who waits for somebody that has said that it ends waits in vain at once.
    """
    if not wait.count:
        return None
    part = _waited_for(info, role, table)
    if not info.is_long(wait) and part.state is not State.ENDED:
        return None
    reasons = [overdue.reason for overdue in info.overdue if overdue.role == part.role]
    if reasons:
        return {"why": reasons[0], "what": RULES["client-overdue"]["remedy"], "blocked": _silent(info)}
    if part.is_known_to_be_gone or (part.state is State.NEVER and info.clients):
        return {"why": part.why, "what": part.remedy, "blocked": part.headline}
    return None


def _waited_for(info: ServerInfo, role: str, table: str) -> Part:
    """Who serves requests that wait for this side. Between generators and the trainer scorers may be missing."""
    scorers = scorers_of(info)
    if role == TRAINER:
        return scorers[table] if table in scorers else trainer_of(info)
    supply = supply_of(info)
    missing = [part for part in scorers.values() if not part.is_connected]
    return missing[0] if supply.is_connected and missing else supply


def _permits(info: ServerInfo) -> Iterator[Finding]:
    if (admission := info.admission) is None:
        return
    if admission.expired:
        yield found("permits-expired", "permits", permits=counted(admission.expired, "permit"))
    unscored = scorers_of(info)
    for name in admission.permit_tables:
        if name not in unscored or unscored[name].is_connected:
            yield from _partial_groups(name, info)
    wait = admission.acquiring
    starved = [table.name for table in info.tables.values() if info.is_long(table.sampling)]
    message = waiting(wait, "permit request")
    nobody = None if starved else _why_nobody(info, wait, TRAINER)
    if nobody is not None:
        yield found("nobody-serves", "permits", wait=message, **nobody)
        return
    if not info.is_long(wait):
        return
    blocked = _blocked("Generators", "no policy version was published", info.policy.age, info)
    if starved:
        tables, version = listed(starved), info.policy.version
        yield found("permits-stuck", "permits", wait=message, blocked=blocked, tables=tables, version=version)
    else:
        yield found("permits-awaited", "permits", wait=message, blocked=blocked)


def _partial_groups(name: str, info: ServerInfo) -> Iterator[Finding]:
    """Partial groups that wait for a generator hold permits, and nobody else can use these."""
    table = info.tables.get(name)
    if table is not None and table.size and table.age.max > info.long_wait and table.sampled.age > info.long_wait:
        groups, age = counted(table.size, "group"), duration(table.age.max)
        last_seen = _last_seen(
            each for each in info.clients if read_described(each.settings).get("source_table") == name
        )
        yield found("partial-groups-idle", name, table=name, groups=groups, age=age, seen=last_seen)


def _last_seen(clients: Iterable[ClientInfo]) -> str:
    names = listed([f"{each.name} ({'ended ' if each.ended else ''}{duration(each.age)} ago)" for each in clients])
    return names and f"; last seen: {names}"


# ------------------------------------------------------------------------------------- what the parts say of themselves


def _batches(info: ServerInfo) -> Iterator[Finding]:
    """Trainers that take another number of groups than is admitted, or from another table than generators fill."""
    for name, settings in info.settings_of("trainer"):
        table = settings.get("rollouts_table")
        fresh = settings.get("fresh_groups_per_step")
        admission = info.admission
        if not isinstance(table, str) or not isinstance(fresh, int):
            continue
        dynamic = settings.get("zero_variance") == "dynamic"  # it takes more, and how many depends on the groups
        if (
            admission is not None
            and admission.table == table
            and not dynamic
            and fresh != admission.fresh_groups_per_step
        ):
            admitted = admission.fresh_groups_per_step
            outcome = "it will wait for ever" if fresh > admitted else "generators run ahead of it"
            facts: dict[str, Any] = {"fresh": fresh, "groups": counted(fresh, "fresh group"), "admitted": admitted}
            yield found("batch-not-admitted", "permits", trainer=name, outcome=outcome, **facts)
        for maker, generator_settings in info.settings_of("generator"):
            if (tables := generator_settings.get("tables")) and table not in (fed := _fed_from(info, tables)):
                yield found("tables-differ", "tables", trainer=name, table=table, generator=maker, filled=listed(fed))


def _kept(info: ServerInfo) -> Iterator[Finding]:
    """Generators that draw from a part of the vocabulary, and whether they say which."""
    for name, settings in info.settings_of("generator"):
        if not truncates(settings):
            continue
        how = listed([f"{each} {settings[each]:g}" for each in TRUNCATING if truncates({each: settings.get(each)})])
        if settings.get("sampling_masks"):
            yield _ok("sampling", f"generator {name} draws with {how}, and stores what that keeps")
        else:
            yield found("no-masks", "sampling", generator=name, how=how)


def _one_reward(info: ServerInfo) -> Iterator[Finding]:
    """Parts that score groups, and gave all rollouts of many groups one reward."""
    for part in ("generator", "scorer"):
        for name, settings in info.settings_of(part):
            one_reward = _said(settings, "one_reward", value=float, groups=int, got=str)
            if one_reward is None:
                continue
            pair = f"the newest answer ends with {one_reward['got']!r:.120}"
            if "expected" in one_reward:
                pair = f"expected {one_reward['expected']!r:.120}, and {pair}"
            groups, value = counted(one_reward["groups"], "group"), one_reward["value"]
            yield found("one-reward", "rewards", part=part, name=name, groups=groups, value=value, pair=pair)


def _failures(info: ServerInfo) -> Iterator[Finding]:
    """Parts of whose last rollouts more than half have failed."""
    for part in ("generator", "scorer"):
        for name, settings in info.settings_of(part):
            facts = _said(settings, "failures", failed=int, rollouts=int, reason=str)
            if facts is not None:
                yield found("rollouts-fail", "failures", part=part, name=name, **facts)


def _cut_early(info: ServerInfo) -> Iterator[Finding]:
    """Generators whose rollouts end for their length long before `max_tokens`."""
    for name, settings in info.settings_of("generator"):
        facts = _said(settings, "cut_early", cut=int, rollouts=int, longest=int, max_tokens=int)
        if facts is not None:
            facts["longest"] = counted(facts["longest"], "token")
            yield found("cut-early", "lengths", name=name, **facts)


def _refused_agents(info: ServerInfo) -> Iterator[Finding]:
    """Generators that have refused several requests of agents lately, by kind."""
    for name, settings in info.settings_of("generator"):
        facts = _said(settings, "sessions", refused=dict, reason=str)
        if facts is None:
            continue
        counts = {status: count for status, count in facts["refused"].items() if isinstance(count, int)}
        if sum(counts.values()) < FEW_REFUSED:
            continue
        kinds = listed([f"{count} with status {_status(status)}" for status, count in counts.items()], len(REFUSED))
        requests = counted(sum(counts.values()), "request")
        yield found("agents-refused", "sessions", name=name, requests=requests, kinds=kinds, reason=facts["reason"])


def _status(status: str) -> str:
    return f"{status} ({REFUSED[status]})" if status in REFUSED else status


def _said(settings: Mapping[str, Any], name: str, **kinds: type) -> dict[str, Any] | None:
    """What a client says under this name, if that has these fields of these types. A client may say anything."""
    facts = settings.get(name)
    if not isinstance(facts, dict):
        return None
    if not all(isinstance(facts.get(field), kind) for field, kind in kinds.items()):
        return None
    return {field: value for field, value in facts.items() if field in kinds or field == "expected"}


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
    yield from _starved(table, info)
    yield from _losses(table)


def _blocked(who: str, cause: str, age: float, info: ServerInfo) -> str:
    """The headline of a long wait. It names the cause if what `who` wait for came last before a long time."""
    return f"{who} are blocked: {cause}" if age >= info.long_wait else f"{who} are blocked"


def _lacking(table: TableInfo, info: ServerInfo) -> Iterator[Finding]:
    """Rows that wait for columns, of which nobody has brought one for a long time."""
    if not table.incomplete_items or table.incomplete_seconds < info.long_wait:
        return
    last_seen = _last_seen(info.clients_of("teacher"))
    rule = "columns-block" if info.is_long(table.sampling) or info.is_long(table.inserting) else "columns-awaited"
    waits, age = waits_for(table.missing_columns), duration(table.incomplete_seconds)
    yield found(rule, table.name, table=table.name, waits=waits, age=age, seen=last_seen)


def _waits(table: TableInfo, info: ServerInfo) -> Iterator[Finding]:
    inserting, sampling = table.inserting, table.sampling
    no_sample = _blocked(f"Inserts into {table.name}", "nobody samples it", table.sampled.age, info)
    no_insert = _blocked(f"Samples of {table.name}", "nobody inserts into it", table.inserted.age, info)
    if info.is_long(inserting) and info.is_long(sampling):
        yield found("both-wait", table.name, blocked=no_sample, inserts=inserting, samples=sampling)
        return
    for_insert = "limiter-waits" if "max_diff" in inserting.reason else "inserts-wait"
    for rule, request, wait, other, blocked in (
        (for_insert, "insert", inserting, TRAINER, no_sample),
        ("samples-wait", "sample request", sampling, GENERATOR, no_insert),
    ):
        message = waiting(wait, request)
        nobody = _why_nobody(info, wait, other, table.name)
        if nobody is not None:
            yield found("nobody-serves", table.name, wait=message, **nobody)
        elif info.is_long(wait):
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
        facts = {"items": counted(admitted, "item"), "admitted": admitted, "max_size": config["max_size"]}
        yield found("admits-too-many", name, limiter=limiter["type"], **facts)
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
        shown_names = listed([name or "items without the tag" for name in names])
        yield found("weights-zero", table.name, tag=tag, names=shown_names)
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


def _starved(table: _Table, info: ServerInfo) -> Iterator[Finding]:
    """Values of a tag that lose far more groups as too old than the others do."""
    if table.copied is not None or table.feeders:
        return
    for counts in tag_counts(info, table.info):
        shares = _shares_lost(counts)
        if not shares:
            continue
        value = max(shares, key=lambda value: shares[value])
        groups = counts.values[value]
        other_groups = counts.generated - groups.generated
        facts: dict[str, Any] = {"tag": f"{counts.tag}={value}", "share": shares[value]}
        facts["groups"] = counted(groups.generated, "group")
        facts["others"] = ""
        if other_groups:
            facts["others"] = f", and {(counts.stale - groups.stale) / other_groups:.0%} of the others"
        if len(shares) > 1:
            facts["others"] += f"; {counted(len(shares) - 1, 'more value')} of {counts.tag} starve too"
        admission = info.admission
        rule = "starved"
        if admission is not None and admission.table == table.name:
            rule = "starved-though-admitted"
            facts["admitted"] = admission.max_staleness
        level = Level.FAILURE if shares[value] > MOST_STALE else None
        yield found(rule, table.name, level, limit=table.config["max_staleness"], **facts)


def _shares_lost(counts: TagCounts) -> dict[str, float]:
    """The share of lost groups of each value that starves: that loses much, and twice as much as all others."""
    starved = {}
    for value, groups in counts.values.items():
        if groups.generated < LEAST_GENERATED:
            continue
        share = groups.stale / groups.generated
        other_groups = counts.generated - groups.generated
        other_share = (counts.stale - groups.stale) / other_groups if other_groups else 0.0
        if share >= MUCH_STALE and share >= 2 * other_share:
            starved[value] = share
    return starved


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
