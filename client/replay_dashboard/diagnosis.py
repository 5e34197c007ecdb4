"""Finds the present and coming problems of a server, and names their remedies.

diagnosis.toml is the table of all rules, with the sentences and the remedies of each. This module decides which rules
apply, by pure functions of one `ServerInfo`. `replay doctor` prints the findings, and so may any other client. The cost
is linear in the number of tables.

A finding is a warning when a person should look, and a failure when the run loses data or cannot go on. An action that
a person takes on purpose, such as ending a part of the run, is neither. If a rule names several remedies, the first of
them never weakens a bound.
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
"""Seconds that an item of a table of copies (`copy_to`) has waited for its reader: a warning above this value."""
MUCH_STALE = 0.1
"""Share of the generated groups that were dropped as stale and never used: a warning from this value on."""
MOST_STALE = 0.5
"""The same share: a failure above this value."""
LEAST_GENERATED = 8
"""The fewest generated groups with which a value of a tag is reported as starving."""
MUCH_LOST = 0.1
"""Share of the inserts that were evicted before anybody sampled them: a warning above this value."""
NEARLY_FULL = 0.9
"""Used share of a bound on memory: a warning above this value."""
CLOCK_SKEW = 2.0
"""Seconds between the clocks of two machines: a warning above this value."""
FEW_BYTES = 1 << 30
"""Bytes of memory or disk that are free: a warning below this value."""
MUCH_BYTES = 10**9
"""Bytes of all items: from this value on, tables that do not bound their bytes are a warning."""
FEW_REFUSED = 3
"""Requests of agents that a generator refused in ten minutes: a warning from this value on."""
REFUSED = {
    "400": "no valid request",
    "401": "no valid token",
    "404": "no such session or path",
    "413": "too large",
    "422": "its rollout has failed",
    "429": "too many at once",
    "500": "the generator failed",
}
"""The HTTP statuses with which a generator refuses requests of agents, and the reason for each."""
RECENT = 900.0
"""While other clients of its part are connected, a client that is gone is reported for this many seconds. After that
time it is not reported, because another client may have replaced it under a new name."""


class Level(StrEnum):
    """The severity of a finding."""

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
    """The subject of the check: the name of a table, or a word such as `memory`."""
    level: Level
    message: str
    remedy: str = ""
    """The remedy in words; empty if nothing is wrong."""
    headline: str = ""
    """The reason why the run does not go on, in a few words; empty if the finding does not stop the run."""
    stops: str = ""
    """One of STOPS if there is a headline; otherwise empty."""
    rule: str = ""
    """The name of the rule in RULES; empty if nothing is wrong."""


STOPS = ("blocked", "gone", "idle")
"""The reasons why a run stops. In this order they say: requests wait in vain, a part is not connected, or nobody uses
the tables. If several hold, the verdict of `health` names the first of them."""
RULES: Mapping[str, Mapping[str, str]] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
"""The rules by their names. Each has a `level`, a `sentence`, a `remedy`, and perhaps `headline` and `stops`. The texts
have the names of facts in braces, and `found` puts the facts in their place."""


def found(rule: str, check: str, level: Level | None = None, **facts: Any) -> Finding:
    """The finding of a rule, with these facts in its texts. `level` None: the level that the rule has."""
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
    """The finding that nothing is wrong."""
    return Finding(check, Level.OK, message)


def diagnose(
    info: ServerInfo, client_version: str, now: float, max_staleness: float | None = None
) -> Iterator[Finding]:
    """Yields the findings about the server, and then those about each table. `info` must hold all tables.

    `client_version` is the version of the caller's package, and `now` the caller's clock in seconds since the epoch. A
    warning says so if the groups drawn from a table are more than `max_staleness` policy versions old in the mean. If
    `max_staleness` is None, the bound of the table takes its place.
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
    yield from _sampling_masks(info)
    yield from _one_reward(info)
    yield from _failures(info)
    yield from _cut_early(info)
    yield from _refused_agents(info)
    # At the beginning of a run, it is normal that nobody has inserted into a table.
    should_be_fed = info.uptime > YOUNG or any(table.inserts for table in info.tables.values())
    for table in tables:
        problems = list(_table_findings(info, table, should_be_fed))
        # This finding is not among the problems, because it may also say that the age is right.
        yield from _age_of_draws(info, table, max_staleness)
        if problems:
            yield from problems
        else:
            size = counted(table.info.size, "item")
            yield _ok(table.name, f"{size}, {table.info.inserts_per_second:.1f} in/s")


@dataclass
class _Table:
    """A table, with the facts that the rules derive from its configuration and its neighbours."""

    info: TableInfo
    config: dict[str, Any]
    feeders: list[TableInfo] = field(default_factory=list)
    """The tables that forward to this table (`forward_to`)."""
    copies_of: str | None = None
    """The name of the table that copies its items to this table (`copy_to`); None: no table does."""

    @property
    def name(self) -> str:
        return self.info.name

    @property
    def forwarded_in(self) -> int:
        """Items that feeders forwarded to this table. Each was sampled at its feeder, so each was used."""
        return sum(feeder.forwarded for feeder in self.feeders)

    @property
    def direct_inserts(self) -> int:
        """Items that clients inserted directly into this table."""
        return max(0, self.info.inserts - self.forwarded_in)


def _tables(info: ServerInfo) -> list[_Table]:
    """All tables, with their parsed configurations and the tables that send them items."""
    tables = [_Table(table, json.loads(table.config)) for table in info.tables.values()]
    feeders_by_target = defaultdict(list)
    for table in tables:
        feeders_by_target[table.config["forward_to"]].append(table.info)
    copied_by_target = {table.config["copy_to"]: table.name for table in tables}
    for table in tables:
        table.feeders = feeders_by_target[table.name]
        table.copies_of = copied_by_target.get(table.name)
    return tables


# --------------------------------------------------------------------------------------------------------- the server


def _version(info: ServerInfo, client_version: str) -> Finding:
    """The finding about the versions of server and client."""
    if info.version != client_version:
        return found("version-differs", "version", server=info.version, client=client_version)
    return _ok("version", info.version)


def _clock(info: ServerInfo, now: float) -> Finding:
    """The finding about the difference between the clocks of the server and of this machine."""
    skew = info.time - now
    if abs(skew) > CLOCK_SKEW:
        ahead = "ahead of" if skew > 0 else "behind"
        return found("clock-skew", "clock", skew=duration(abs(skew)), ahead=ahead)
    return _ok("clock", f"{abs(skew):.1f} s apart")


def _memory(info: ServerInfo, tables: Sequence[_Table]) -> Iterator[Finding]:
    """Compares the bytes of all items with their bounds, and the free memory of each machine with what it may need."""
    held = f"{byte_size(info.bytes)} in {counted(info.items, 'item')}"
    retained = sum(table.info.retained_bytes for table in tables)
    if retained:
        held += f", {byte_size(retained)} of them retained for a rollback"
    discarded = sum(table.info.retained_discarded for table in tables)
    if discarded:
        yield found("retained-discarded", "memory", items=counted(discarded, "item"))
    unbounded = [table.name for table in tables if table.config["max_bytes"] is None]
    if not info.max_bytes and unbounded and info.bytes >= MUCH_BYTES:
        yield found("memory-unbounded", "memory", held=held, tables=listed(unbounded))
    elif info.max_bytes and info.bytes > NEARLY_FULL * info.max_bytes:
        share = info.bytes / info.max_bytes
        bound = byte_size(info.max_bytes)
        yield found("memory-nearly-full", "memory", held=held, share=share, bound=bound)
    else:
        yield _ok("memory", held)
    for check, server in _checks_of_servers(info, "memory"):
        room = 0  # the bytes by which the tables may still grow; 0 also if they have no bound
        if server.max_bytes:
            room = server.max_bytes - server.bytes
        is_known = server.memory_available > 0
        if is_known and server.memory_available < max(room, FEW_BYTES):
            growth = f", and its tables may grow by {byte_size(room)}" if room else ""
            yield found("machine-nearly-full", check, left=byte_size(server.memory_available), growth=growth)


def _disk(info: ServerInfo) -> Iterator[Finding]:
    """Reports faults of the server's data directory, and the free space on the disk of each machine."""
    if info.commit_error:
        yield found("disk-fails", "disk", reason=info.commit_error)
    if info.fell_back:
        yield found("fell-back", "disk", reason=info.fell_back)
    if info.damaged:
        yield found("disk-damaged", "disk", items=counted(info.damaged, "item"))
    for check, server in _checks_of_servers(info, "disk"):
        if not server.disk_available:  # unknown
            continue
        left = byte_size(server.disk_available)
        if server.disk_available < max(server.bytes, FEW_BYTES):
            yield found("disk-nearly-full", check, left=left, held=byte_size(server.bytes))
        else:
            yield _ok(check, f"{left} left on the disk of data_dir")


def _checks_of_servers(info: ServerInfo, check: str) -> list[tuple[str, ServerInfo]]:
    """For each server that answers, a pair of the name of the check of its machine, and the server.

    `check` is "memory" or "disk". If there are several servers, the name also says which server is meant.
    """
    shards = [(f"{check} of {name}", shard) for name, shard in shards_of(info) if shard is not None]
    return shards or [(check, info)]  # a single server has no shards


def _policy(info: ServerInfo) -> Finding:
    """The finding about the published policy version. It is a warning if a trainer samples and publishes no version."""
    # Generators and scorers, not trainers, sample the permit tables.
    permit_tables = () if info.admission is None else info.admission.permit_tables
    is_sampled = any(table.samples for table in info.tables.values() if table.name not in permit_tables)
    never_published = info.policy.version == 0 and not info.policy.weights
    if never_published and is_sampled:
        return found("no-version", "policy")
    message = f"version {info.policy.version}, set {duration(info.policy.age)} ago"
    if info.policy.interval:
        message += f"; usually every {duration(info.policy.interval)}"
    return _ok("policy", message)


def _shards(info: ServerInfo) -> Iterator[Finding]:
    """Reports each server that does not answer, if there are several servers."""
    for name, shard in shards_of(info):
        if shard is None:
            yield found("shard-away", f"shard {name}")


def _roles(info: ServerInfo, tables: Sequence[_Table]) -> Iterator[Finding]:
    """Reports the parts of the run that are overdue, gone, ended or were never connected. If trainer and generator are
    connected, reports the connected clients."""
    if info.overdue:
        for overdue in info.overdue:
            yield found("client-overdue", overdue.role, reason=overdue.reason, who=_overdue_headline(info))
        return  # a part that is overdue may also be gone, and must be reported only once
    trainer = trainer_of(info)
    supply = supply_of(info)
    connected = [f"{client.name} ({client.role or 'client'})" for client in info.clients if client.open]
    if trainer.is_connected and supply.is_connected:
        if connected:
            yield _ok("clients", listed(connected))
    elif trainer.is_connected:
        yield _missing(info, supply, "clients", _groups_left(info, tables))
    elif supply.is_connected:
        yield _missing(info, trainer, "clients")
    else:
        yield _nobody(trainer, supply, connected)
    for name, scorers in scorers_of(info).items():
        if not scorers.is_connected:
            groups = counted(info.tables[name].size, "group")
            yield _missing(info, scorers, name, f"; {groups} of {name} lack rewards")
    teacher = teacher_of(info)
    # If the teacher has ended, nobody adds the columns that items wait for. If it is away but did not say that it ends,
    # `_awaited_columns` reports these columns after a long wait.
    if teacher.state is State.ENDED:
        for table in info.tables.values():
            if table.incomplete_items:
                yield _missing(info, teacher, table.name, f"; {table.name} {waits_for(table.missing_columns)}")
    yield from _one_gone(info)


def _one_gone(info: ServerInfo) -> Iterator[Finding]:
    """Reports clients that are gone and did not say that they end, while others of the same part are connected."""
    connected: dict[str, list[str]] = defaultdict(list)  # the names of clients, by their part
    gone = []  # pairs of a part and a client of it
    for client in info.clients:
        part = read_described(client.settings).get("part")
        if not isinstance(part, str):  # a client that does not describe its part may come and go
            continue
        if client.open:
            connected[part].append(client.name)
        # Until `long_wait` seconds have passed, the client may only be busy. After RECENT it may have been replaced.
        elif not client.ended and info.long_wait <= client.age < RECENT:
            gone.append((part, client))
    for part, client in gone:
        if part in connected:
            others = listed(connected[part])
            age = duration(client.age)
            yield found("one-gone", "clients", part=part, client=client.name, age=age, others=others)


def _overdue_headline(info: ServerInfo) -> str:
    """The headline for the parts that are overdue. They are "silent" if one of their clients is connected, or else
    "gone"."""
    roles = sorted({overdue.role for overdue in info.overdue}, reverse=True)  # the trainer before the generator
    clients = [client for role in roles for client in info.clients_of(role)]
    state = "silent" if any(client.open for client in clients) else "gone"
    if len(roles) > 1:
        return f"Trainer and generators are {state}"
    subject = {"trainer": "The trainer is", "generator": "The generators are"}[roles[0]]
    return f"{subject} {state}"


def _missing(info: ServerInfo, part: Part, check: str, addition: str = "") -> Finding:
    """The finding about a part that the run lacks. `addition`: a text that follows the reason why the part is missing,
    for example about the groups that the run can still use."""
    # Soon after the start of the server, a part may still load its model or connect again, so this is no warning yet.
    may_still_come = info.uptime <= YOUNG and not part.is_known_to_be_gone
    level = Level.OK if may_still_come else None  # None: the level of the rule
    return found("part-missing", check, level, why=part.why + addition, what=part.remedy, who=part.headline)


def _nobody(trainer: Part, supply: Part, connected: Sequence[str]) -> Finding:
    """The finding about a server without trainers and generators. `connected`: the clients that are connected."""
    if trainer.state is State.ENDED and supply.state is State.ENDED:  # both ended on purpose
        ended = f"{trainer.why}, {supply.why}"
        return Finding("clients", Level.OK, ended, headline="The run has ended", stops="idle")
    why = f"{trainer.why}; {supply.why}"
    who = "Nobody is connected"
    if connected:
        why += f"; connected: {listed(connected)}"
        who = "Neither trainer nor generator is connected"
    is_one_lost = State.AWAY in (trainer.state, supply.state)
    level = Level.WARNING if is_one_lost else Level.OK
    return found("nobody-connected", "clients", level, why=why, who=who)


def _groups_left(info: ServerInfo, tables: Sequence[_Table]) -> str:
    """The groups that a trainer can still take without a generator, in words."""
    permit_tables = () if info.admission is None else info.admission.permit_tables
    text = ""
    for table in tables:
        # A table of copies is drawn by an archive, not by a trainer.
        is_queue = table.config["max_times_sampled"] == 1 and table.copies_of is None
        if is_queue and table.name not in permit_tables:
            text += f"; {table.name} still has {counted(table.info.size, 'group')}"
    return text


def _why_nobody(info: ServerInfo, wait: Waiting, role: str, table: str = "") -> dict[str, Any] | None:
    """The facts `why`, `what` (the remedy) and `blocked` (the headline) if requests wait in vain for a role.

    None: no request waits, or the role may still serve them. `role` is TRAINER or GENERATOR. `table` is the table whose
    inserts or samples wait; empty: permit requests wait. Requests wait in vain only after a long wait, or as soon as
    the part that serves them has said that it ends.
    """
    if not wait.count:
        return None
    part = _waited_for(info, role, table)
    if not info.is_long(wait) and part.state is not State.ENDED:
        return None
    reasons = [overdue.reason for overdue in info.overdue if overdue.role == part.role]
    if reasons:
        return {"why": reasons[0], "what": RULES["client-overdue"]["remedy"], "blocked": _overdue_headline(info)}
    if part.is_known_to_be_gone or (part.state is State.NEVER and info.clients):
        return {"why": part.why, "what": part.remedy, "blocked": part.headline}
    return None


def _waited_for(info: ServerInfo, role: str, table: str) -> Part:
    """The part that has to act so that requests which wait for a role are served.

    Usually this is the trainer or the generators. At a table of groups that lack rewards, scorers take the place of the
    trainer. Scorers also take the place of the generators if the generators are connected and the scorers are missing,
    because the scorers pass on the groups of the generators.
    """
    scorers = scorers_of(info)
    if role == TRAINER:
        if table in scorers:
            return scorers[table]
        return trainer_of(info)
    supply = supply_of(info)
    missing_scorers = [part for part in scorers.values() if not part.is_connected]
    if supply.is_connected and missing_scorers:
        return missing_scorers[0]
    return supply


def _permits(info: ServerInfo) -> Iterator[Finding]:
    """Reports permits that expired, that are held by partial groups which nobody continues, or that generators wait
    for."""
    admission = info.admission
    if admission is None:
        return
    if admission.expired:
        yield found("permits-expired", "permits", permits=counted(admission.expired, "permit"))
    scorers = scorers_of(info)
    for name in admission.permit_tables:
        lacks_scorer = name in scorers and not scorers[name].is_connected
        if not lacks_scorer:  # `_roles` reports a missing scorer
            yield from _partial_groups(name, info)
    wait = admission.acquiring
    message = waiting(wait, "permit request")
    # The tables whose sample requests have waited long.
    starved = [table.name for table in info.tables.values() if info.is_long(table.sampling)]
    nobody = None
    if not starved:  # if sample requests wait, the trainer is there
        nobody = _why_nobody(info, wait, TRAINER)
    if nobody is not None:
        yield found("nobody-serves", "permits", wait=message, **nobody)
        return
    if not info.is_long(wait):
        return
    blocked = _blocked("Generators", "no policy version was published", info.policy.age, info)
    if starved:  # the trainer waits for groups, and generators for the trainer's next version
        yield found(
            "permits-stuck",
            "permits",
            wait=message,
            blocked=blocked,
            tables=listed(starved),
            version=info.policy.version,
        )
    else:
        yield found("permits-awaited", "permits", wait=message, blocked=blocked)


def _partial_groups(name: str, info: ServerInfo) -> Iterator[Finding]:
    """Reports partial groups that no generator continues. Each of them holds a permit that nobody else can use."""
    table = info.tables.get(name)
    if table is None or not table.size:
        return
    waits_long = table.age.max > info.long_wait
    was_drawn_lately = table.sampled.age <= info.long_wait
    if not waits_long or was_drawn_lately:
        return
    readers = [client for client in info.clients if read_described(client.settings).get("source_table") == name]
    yield found(
        "partial-groups-idle",
        name,
        table=name,
        groups=counted(table.size, "group"),
        age=duration(table.age.max),
        seen=_last_seen(readers),
    )


def _last_seen(clients: Iterable[ClientInfo]) -> str:
    """The name of each client and the time since it was seen, as a part of a sentence; empty without clients."""
    names = []
    for client in clients:
        ended = "ended " if client.ended else ""
        names.append(f"{client.name} ({ended}{duration(client.age)} ago)")
    return f"; last seen: {listed(names)}" if names else ""


# ------------------------------------------------------------------------------------- the settings that parts describe


def _batches(info: ServerInfo) -> Iterator[Finding]:
    """Reports trainers that take more or fewer groups a step than [admission] says, or take them from a table that a
    generator does not fill."""
    for name, settings in info.settings_of("trainer"):
        table = settings.get("rollouts_table")
        fresh = settings.get("fresh_groups_per_step")
        if not isinstance(table, str) or not isinstance(fresh, int):  # a client may describe anything
            continue
        is_dynamic = settings.get("zero_variance") == "dynamic"  # such a trainer takes as many groups as it needs
        admission = info.admission
        if admission is not None and admission.table == table and not is_dynamic:
            admitted = admission.fresh_groups_per_step
            if fresh != admitted:
                yield found(
                    "batch-not-admitted",
                    "permits",
                    trainer=name,
                    outcome="it will wait for ever" if fresh > admitted else "generators run ahead of it",
                    fresh=fresh,
                    groups=counted(fresh, "fresh group"),
                    admitted=admitted,
                )
        for generator, generator_settings in info.settings_of("generator"):
            tables = generator_settings.get("tables")
            filled = _filled_tables(info, tables) if tables else []
            if filled and table not in filled:
                yield found(
                    "tables-differ",
                    "tables",
                    trainer=name,
                    table=table,
                    generator=generator,
                    filled=listed(filled),
                )


def _sampling_masks(info: ServerInfo) -> Iterator[Finding]:
    """Reports generators that draw tokens from a part of the vocabulary. They should store this part for each token, as
    a sampling mask."""
    for name, settings in info.settings_of("generator"):
        if not truncates(settings):
            continue
        # Ask for each option alone, to name only the options that truncate.
        truncating = [option for option in TRUNCATING if truncates({option: settings.get(option)})]
        how = listed([f"{option} {settings[option]:g}" for option in truncating])
        if settings.get("sampling_masks"):
            yield _ok("sampling", f"generator {name} draws with {how}, and stores what that keeps")
        else:
            yield found("no-masks", "sampling", generator=name, how=how)


def _one_reward(info: ServerInfo) -> Iterator[Finding]:
    """Reports generators and scorers that gave the same reward to all rollouts of many groups in a row.

    A client describes this in its setting `one_reward`.
    """
    for part in ("generator", "scorer"):
        for name, settings in info.settings_of(part):
            one_reward = _described_facts(settings, "one_reward", value=float, groups=int, got=str)
            if one_reward is None:
                continue
            # The newest answer, with the expected answer before it if there is one.
            pair = f"the newest answer ends with {one_reward['got']!r:.120}"
            if "expected" in one_reward:
                pair = f"expected {one_reward['expected']!r:.120}, and {pair}"
            yield found(
                "one-reward",
                "rewards",
                part=part,
                name=name,
                groups=counted(one_reward["groups"], "group"),
                value=one_reward["value"],
                pair=pair,
            )


def _failures(info: ServerInfo) -> Iterator[Finding]:
    """Reports generators and scorers in which more than half of the last rollouts have failed.

    A client describes this in its setting `failures`.
    """
    for part in ("generator", "scorer"):
        for name, settings in info.settings_of(part):
            facts = _described_facts(settings, "failures", failed=int, rollouts=int, reason=str)
            if facts is not None:
                yield found("rollouts-fail", "failures", part=part, name=name, **facts)


def _cut_early(info: ServerInfo) -> Iterator[Finding]:
    """Reports generators whose rollouts end with finish reason `length` long before `max_tokens`.

    A client describes this in its setting `cut_early`.
    """
    for name, settings in info.settings_of("generator"):
        facts = _described_facts(settings, "cut_early", cut=int, rollouts=int, longest=int, max_tokens=int)
        if facts is not None:
            facts["longest"] = counted(facts["longest"], "token")
            yield found("cut-early", "lengths", name=name, **facts)


def _refused_agents(info: ServerInfo) -> Iterator[Finding]:
    """Finds the generators that have refused FEW_REFUSED or more requests of agents in the last ten minutes.

    Each finding says how many requests were refused with each HTTP status, and why the last one was refused. A
    generator reports these facts to the server in its setting `sessions`.
    """
    for name, settings in info.settings_of("generator"):
        facts = _described_facts(settings, "sessions", refused=dict, reason=str)
        if facts is None:
            continue
        refused_by_status = {status: count for status, count in facts["refused"].items() if isinstance(count, int)}
        total = sum(refused_by_status.values())
        if total < FEW_REFUSED:
            continue
        kinds = [f"{count} with status {_status(status)}" for status, count in refused_by_status.items()]
        yield found(
            "agents-refused",
            "sessions",
            name=name,
            requests=counted(total, "request"),
            kinds=listed(kinds, len(REFUSED)),
            reason=facts["reason"],
        )


def _status(status: str) -> str:
    """An HTTP status, with its reason if REFUSED has it."""
    if status in REFUSED:
        return f"{status} ({REFUSED[status]})"
    return status


def _described_facts(settings: Mapping[str, Any], name: str, **kinds: type) -> dict[str, Any] | None:
    """The facts in a client's setting `name`; None: the client has no such setting, or not in the right form.

    The right form is a dict with a field for each of `kinds`, which gives the type of the field. A client may describe
    anything, so all of this is checked. Of the other fields, only `expected` is returned.
    """
    facts = settings.get(name)
    if not isinstance(facts, dict):
        return None
    for key, kind in kinds.items():
        if not isinstance(facts.get(key), kind):
            return None
    return {key: value for key, value in facts.items() if key in kinds or key == "expected"}


def _filled_tables(info: ServerInfo, names: Sequence[str]) -> list[str]:
    """The tables `names`, and all tables that get items of these by `forward_to`, directly or through other tables."""
    tables = list(names)
    for name in tables:  # the list grows in the loop
        if name not in info.tables:
            continue
        target = json.loads(info.tables[name].config)["forward_to"]
        if target is not None and target not in tables:
            tables.append(str(target))
    return tables


# ---------------------------------------------------------------------------------------------------------- one table


def _table_findings(info: ServerInfo, table: _Table, should_be_fed: bool) -> Iterator[Finding]:
    """The problems of one table.

    `should_be_fed` is True if it is a problem that nobody has inserted into this table. That is so if clients have
    inserted into some table, or if the server has run long enough.
    """
    # Requests may wait because items lack a column. Then only the missing column is reported, and not the waits.
    awaited_columns = list(_awaited_columns(table.info, info))
    yield from awaited_columns or _waits(table.info, info)
    yield from _limiter(table)
    yield from _balance(table)
    if should_be_fed and not table.info.inserts and table.copies_of is None:
        yield _never_fed(table)
    yield from _staleness(table, info)
    yield from _starved(table, info)
    yield from _losses(table)


def _blocked(who: str, cause: str, age: float, info: ServerInfo) -> str:
    """The headline of a long wait of `who`.

    `cause` says in words that an event does not happen. `age`: seconds since the last such event. The headline names
    the cause only if this event has not happened for a long time. After a recent event, something else blocks `who`.
    """
    return f"{who} are blocked: {cause}" if age >= info.long_wait else f"{who} are blocked"


def _awaited_columns(table: TableInfo, info: ServerInfo) -> Iterator[Finding]:
    """Reports items that wait for columns, if nobody has added such a column for a long time."""
    if not table.incomplete_items or table.incomplete_seconds < info.long_wait:
        return
    is_blocking = info.is_long(table.sampling) or info.is_long(table.inserting)
    yield found(
        "columns-block" if is_blocking else "columns-awaited",
        table.name,
        table=table.name,
        waits=waits_for(table.missing_columns),
        age=duration(table.incomplete_seconds),
        seen=_last_seen(info.clients_of("teacher")),
    )


def _waits(table: TableInfo, info: ServerInfo) -> Iterator[Finding]:
    """Reports inserts and sample requests that wait long, or in vain."""
    inserting = table.inserting
    sampling = table.sampling
    no_sample = _blocked(f"Inserts into {table.name}", "nobody samples it", table.sampled.age, info)
    no_insert = _blocked(f"Samples of {table.name}", "nobody inserts into it", table.inserted.age, info)
    if info.is_long(inserting) and info.is_long(sampling):
        yield found("both-wait", table.name, blocked=no_sample, inserts=inserting, samples=sampling)
        return
    # If the rate limiter makes the inserts wait, the server's reason for the wait names `max_diff`.
    yield from _waiting_request(
        info,
        table,
        wait=inserting,
        message=waiting(inserting, "insert"),
        rule="limiter-waits" if "max_diff" in inserting.reason else "inserts-wait",
        role=TRAINER,
        blocked=no_sample,
    )
    yield from _waiting_request(
        info,
        table,
        wait=sampling,
        message=waiting(sampling, "sample request"),
        rule="samples-wait",
        role=GENERATOR,
        blocked=no_insert,
    )


def _waiting_request(
    info: ServerInfo, table: TableInfo, wait: Waiting, message: str, rule: str, role: str, blocked: str
) -> Iterator[Finding]:
    """Reports requests of one kind that wait long, or in vain, for a client of `role`.

    `message`: the wait in words. If requests wait long but not in vain, the finding is that of `rule`, and `blocked` is
    its headline.
    """
    nobody = _why_nobody(info, wait, role, table.name)
    if nobody is not None:
        yield found("nobody-serves", table.name, wait=message, **nobody)
    elif info.is_long(wait):
        yield found(rule, table.name, wait=message, blocked=blocked)


def _limiter(table: _Table) -> Iterator[Finding]:
    """Reports combinations of settings that block for ever, or lose items, whatever clients do. Also reports a table
    whose priorities are all 0."""
    counts = table.info
    config = table.config
    name = table.name
    limiter = config["rate_limiter"]
    uses = config["max_times_sampled"]  # 0: no limit
    evicts = config["when_full"] == "evict"
    ratio = limiter["samples_per_insert"]
    min_size = limiter["min_size"]
    admitted = limiter["max_size"]  # the items that the limiter lets in; None: no limit
    if ratio is not None and uses and uses < ratio:
        rounded_up = -(-ratio // 1)
        yield found("ratio-above-uses", name, ratio=ratio, uses=uses, needed=rounded_up)
    max_bytes = config["max_bytes"]
    mean_bytes = counts.bytes / counts.size if counts.size else 0.0
    if max_bytes is not None and mean_bytes * min_size > max_bytes:
        mean = byte_size(int(mean_bytes))
        yield found("min-size-never", name, min_size=min_size, mean=mean, bound=byte_size(max_bytes))
    keeps_items_for_ever = not uses and config["max_staleness"] is None
    if config["when_full"] == "block" and keeps_items_for_ever:
        yield found("fills-once", name)
    if admitted is not None and admitted > config["max_size"] and evicts:
        yield found(
            "admits-too-many",
            name,
            limiter=limiter["type"],
            items=counted(admitted, "item"),
            admitted=admitted,
            max_size=config["max_size"],
        )
    # A column that arrives makes its item larger. So a table that has reached its `max_bytes` refuses the column.
    if config["requires"] and max_bytes is not None and evicts:
        yield found("no-room-for-columns", name, columns=listed(config["requires"]))
    all_priorities_are_zero = counts.size > 0 and not counts.priority.max
    if all_priorities_are_zero and config["sampler"]["type"] == "prioritized":
        yield found("priorities-zero", name)


def _balance(table: _Table) -> Iterator[Finding]:
    """Reports a balance that changes nothing, or that allows no draw at all."""
    balance = table.config["balance"]
    values = table.info.values
    if balance is None or not values:
        return
    names = [value.name for value in values]
    if not any(value.weight for value in values):
        shown_names = listed([name or "items without the tag" for name in names])
        yield found("weights-zero", table.name, tag=balance["tag"], names=shown_names)
    elif names == [""]:  # no item has the tag
        yield found("tag-unknown", table.name, tag=balance["tag"])


def _never_fed(table: _Table) -> Finding:
    """The finding about a table into which nothing was ever inserted."""
    if not table.feeders:
        return found("never-fed", table.name, table=table.name)
    is_feeder_sampled = any(feeder.samples for feeder in table.feeders)
    rule = "nothing-forwarded" if is_feeder_sampled else "feeder-not-sampled"
    return found(rule, table.name, feeders=listed([feeder.name for feeder in table.feeders]))


def _age_of_draws(info: ServerInfo, table: _Table, max_staleness: float | None) -> Iterator[Finding]:
    """The finding about the mean staleness of groups when they are drawn. Only a table with `max_times_sampled = 1`
    measures it."""
    flow = table.info.flow
    if not flow.versions:  # not measured
        return
    bound = _allowed_staleness(info, table) if max_staleness is None else max_staleness
    if bound is None or flow.staleness <= bound:
        yield _ok(table.name, f"drawn {flow.staleness:.1f} versions old in the mean")
    else:
        yield found("draws-old", table.name, staleness=flow.staleness, bound=bound)


def _allowed_staleness(info: ServerInfo, table: _Table) -> float | None:
    """The lower one of two bounds on staleness, of the table and of [admission]; None: neither has a bound."""
    limits = [table.config["max_staleness"]]
    if info.admission is not None and info.admission.table == table.name:
        limits.append(info.admission.max_staleness)
    return min((limit for limit in limits if limit is not None), default=None)


def _staleness(table: _Table, info: ServerInfo) -> Iterator[Finding]:
    """Reports groups that went stale before anybody used them.

    In a pool, every group goes stale in the end, and only a group that nobody ever used is lost work. The counter
    `stale` includes groups that were used. So this function computes the fewest groups that can have been lost: the
    stale groups minus the most groups that can have been used. Each sample used at most one group of this table, and
    each forwarded group was used in the table that it came from.
    """
    counts = table.info
    used = table.forwarded_in
    # A draw removes a group from a queue, so nobody has drawn the stale groups of a queue.
    if table.config["max_times_sampled"] != 1:
        used += counts.samples
    # If this table refused a forwarded item as stale, that is no loss, because the item was used before.
    refused = max(0, counts.stale_refused - sum(feeder.forward_refused for feeder in table.feeders))
    lost = max(0, counts.stale - used) + refused
    generated = table.direct_inserts + refused
    if not generated or lost < MUCH_STALE * generated:
        return
    limit = table.config["max_staleness"]
    admission = info.admission
    admitted = None if admission is None else admission.max_staleness
    if admitted is None:
        rule = "stale"
    elif limit is not None and admitted > limit:  # [admission] permits groups that this table drops
        rule = "stale-by-admission"
    else:
        rule = "stale-though-admitted"
    level = Level.FAILURE if lost > MOST_STALE * generated else None
    yield found(rule, table.name, level, share=lost / generated, limit=limit, admitted=admitted)


def _starved(table: _Table, info: ServerInfo) -> Iterator[Finding]:
    """Reports, for each tag with values that starve, the value that loses the largest share of its groups as too old.

    `_shares_lost` says when a value starves.
    """
    if table.copies_of is not None or table.feeders:  # generators do not insert into this table
        return
    for counts in tag_counts(info, table.info):
        shares = _shares_lost(counts)
        if not shares:
            continue
        value = max(shares, key=lambda value: shares[value])
        groups = counts.values[value]
        other_groups = counts.generated - groups.generated
        others = ""
        if other_groups:
            others += f", and {(counts.stale - groups.stale) / other_groups:.0%} of the others"
        if len(shares) > 1:
            others += f"; {counted(len(shares) - 1, 'more value')} of {counts.tag} starve too"
        rule = "starved"
        admitted = None
        if info.admission is not None and info.admission.table == table.name:
            rule = "starved-though-admitted"
            admitted = info.admission.max_staleness
        yield found(
            rule,
            table.name,
            level=Level.FAILURE if shares[value] > MOST_STALE else None,
            tag=f"{counts.tag}={value}",
            share=shares[value],
            groups=counted(groups.generated, "group"),
            others=others,
            admitted=admitted,
            limit=table.config["max_staleness"],
        )


def _shares_lost(counts: TagCounts) -> dict[str, float]:
    """The values of a tag that starve, each with the share of its groups that were lost as too old.

    A value starves if this share is at least MUCH_STALE, and at least twice the share of all other values together.
    """
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
    """Reports items that were evicted before anybody sampled them, and items that could not be forwarded."""
    counts = table.info
    if table.copies_of is not None:  # the table holds copies for an archive, which draws each of them
        if counts.evicted_unsampled or counts.age.max > UNREAD:
            yield found(
                "not-archived",
                table.name,
                lost=counted(counts.evicted_unsampled, "item"),
                table=table.copies_of,
                share=counts.evicted_unsampled / max(1, counts.inserts),
                waits=counted(counts.size, "item"),
                age=duration(counts.age.max),
            )
        return
    # A forwarded item was sampled in the table that it came from. It may leave this table without being sampled again.
    lost = max(0, counts.evicted_unsampled - table.forwarded_in)
    if lost > MUCH_LOST * table.direct_inserts:
        share = lost / max(1, table.direct_inserts)
        yield found("evicted-unsampled", table.name, items=counted(lost, "item"), share=share)
    if counts.forward_refused:
        refused = counted(counts.forward_refused, "item")
        yield found("forward-refused", table.name, items=refused, target=table.config["forward_to"])
