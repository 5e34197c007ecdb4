"""Presence: tells which parts of a run are connected to its server, and for how long a part has been missing.

A run goes on only while a trainer and a generator are connected. A scorer or another stage can replace the generator,
as long as it has groups to pass on. These rules say which part of the run a client plays:

* A client that describes itself (`describe`) as a trainer, a generator, a scorer or a stage plays that part.
* The part of any other named client follows from its calls. It is a trainer if it samples or publishes, and a generator
  if it inserts or asks for permits. It is a teacher if it only draws items and extends them.
* The server does not list clients without a name. The traffic of the tables shows whether such a client is the trainer.
  The traffic is used only if no named trainer is connected, and if the named trainer that was seen last did not say
  that it ends. The trainer then counts as connected if a client waits for a sample, or has sampled within the last
  `long_wait` seconds. The rule for the generator is the same, with inserts and permit requests instead of samples.
  Samples and inserts do not count if a named client of another part made them, or may have made them.

A client that says that it ends (`leave`) is not connected from that moment on. Any other client is connected while it
has a call open, and for `long_wait` seconds after its last request, since a trainer may have no call open in the middle
of a step.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from replay_client.records import ClientInfo, ServerInfo, TableInfo, read_described
from replay_dashboard.units import duration

TRAINER = "trainer"
GENERATOR = "generator"
SCORER = "scorer"
STAGE = "stage"
TEACHER = "teacher"
_DESCRIBED_PARTS = (TRAINER, GENERATOR, SCORER, STAGE)
"""The parts that a client can describe as its own."""
_JUST_STARTED = 1.0
"""If an event has not happened since the server started, the server reports its own uptime as the age of the event. An
age that is less than this many seconds below the uptime counts as the uptime."""
_OTHER_SIDE = {TRAINER: "generators", GENERATOR: "trainer"}
"""Part -> the other side of the run, which is of no use without this part."""
_WORK_DONE = {TRAINER: "sampled", GENERATOR: "inserted"}
"""Part -> the work that shows that the part is there, as a past participle for `Part.why`."""
_AWAY_REMEDY = "see why it ended, and start it again; a program that ends on purpose says so with client.leave()"
"""The remedy for a part that is away."""


class State(StrEnum):
    """The connection of a part of a run to the server."""

    CONNECTED = "connected"
    ENDED = "ended"
    """The last client of the part said that it ends."""
    AWAY = "away"
    """The part was connected, and did not say that it ends."""
    NEVER = "never"
    """The part has not been connected since the server started."""


@dataclass(frozen=True)
class Part:
    """A part of a run, as the server sees it."""

    role: str
    """TRAINER, GENERATOR, SCORER or TEACHER."""
    state: State
    age: float
    """Seconds since the part was last active. If it was never connected: seconds since the server started."""
    name: str = ""
    """The name of the client that was seen last; empty if it has none."""
    table: str = ""
    """The table from which the scorer takes groups that lack rewards; empty if the part is not a scorer."""

    @property
    def is_connected(self) -> bool:
        return self.state is State.CONNECTED

    @property
    def is_known_to_be_gone(self) -> bool:
        """True if the part is not connected, but a named client of this part was connected before.

        False for a client without a name, because it may only pause.
        """
        return bool(self.name) and not self.is_connected

    @property
    def why(self) -> str:
        """The reason why the part is not connected, in words."""
        age = duration(self.age)
        if self.state is State.ENDED:
            return f"{self.role} {self.name} ended {age} ago"
        if self.state is State.NEVER:
            return f"no {self.role} has connected since the server started, {age} ago"
        if self.name:
            return f"{self.role} {self.name} is not connected, last seen {age} ago"
        return f"nobody has {_WORK_DONE[self.role]} for {age}"

    @property
    def headline(self) -> str:
        """The reason why the part is not connected, in a few words."""
        if self.state is State.ENDED:
            return f"The {self.role} has ended"
        if self.state is State.NEVER:
            return f"No {self.role} has connected yet"
        return f"The {self.role} is not connected"

    @property
    def remedy(self) -> str:
        """The remedy if the part is not connected, in words."""
        command = ""
        if self.table:
            command = f": `replay score --source-table {self.table}` with --table and --reward"
        if self.state is State.AWAY:
            return _AWAY_REMEDY + command
        start = f"start a {self.role}{command}"
        if self.state is State.ENDED and self.role in _OTHER_SIDE:
            return f"stop the {_OTHER_SIDE[self.role]} too, or {start}"
        return start


def parts_of(client: ClientInfo) -> set[str]:
    """The parts that a client plays in a run.

    If the client describes its part, this is the only one. Otherwise these are the parts that its calls show.
    """
    described = read_described(client.settings).get("part")
    if described in _DESCRIBED_PARTS:
        return {described}
    roles = set(client.role.split(", "))
    if roles == {TEACHER, TRAINER}:  # a teacher draws the items that it extends, so it looks like a trainer, too
        return {TEACHER}
    return roles


def trainer_of(info: ServerInfo) -> Part:
    """The trainers of a run, as one part."""
    sampled_by_archives = {config.get("copy_to") for config in _configs(info).values()}
    sampled_by_generators = _permit_tables(info) | _described_texts(info.clients, "prompts_table")
    sampled_by_stages = _described_texts(info.clients, "source_table")
    not_sampled_by_trainers = sampled_by_archives | sampled_by_generators | sampled_by_stages
    tables = [table for name, table in info.tables.items() if name not in not_sampled_by_trainers]
    trainer_ages = []  # the seconds since the last sample of each table, if only a trainer can have made it
    for table in tables:
        age = _traffic_age(table.samples, table.sampled.age, table.sampling.count, info)
        if age is not None and not _other_parts_may_have_sampled(info, age):
            trainer_ages.append(age)
    return _part(info, TRAINER, _playing(info, TRAINER), trainer_ages)


def supply_of(info: ServerInfo) -> Part:
    """The generators of a run, as one part.

    A connected scorer or stage that has groups to pass on counts as a generator.
    """
    stages = [client for client in info.clients if parts_of(client) & {SCORER, STAGE}]
    for client in stages:
        if info.is_connected(client) and _may_have_groups(client, info):
            return Part(role=GENERATOR, state=State.CONNECTED, age=client.age, name=client.name)
    filled_by_stages = _filled_by(stages, info)
    tables = [table for table in _fed_directly(info) if table.name not in filled_by_stages]
    ages = [_traffic_age(table.inserts, table.inserted.age, table.inserting.count, info) for table in tables]
    if info.admission is not None and info.admission.acquiring.count:
        ages.append(0.0)  # only generators ask for permits, and one waits now
    return _part(info, GENERATOR, _playing(info, GENERATOR), ages)


def _may_have_groups(client: ClientInfo, info: ServerInfo) -> bool:
    """True if a scorer or stage has groups to pass on, or if its source table is unknown."""
    source = read_described(client.settings).get("source_table")
    table = info.tables.get(source) if isinstance(source, str) else None
    return table is None or table.size > 0 or table.reserved > 0


def scorers_of(info: ServerInfo) -> dict[str, Part]:
    """One part for each table of groups that lack rewards, by the name of the table: the scorers of the table.

    The names of these tables are in the settings with which scorers and connected generators describe themselves. An
    empty table that no connected generator fills needs no scorer, so it is left out.
    """
    scorers = _playing(info, SCORER)
    generators = [client for client in _playing(info, GENERATOR) if info.is_connected(client)]
    filled = _described_texts(generators, "unscored_table")
    parts = {}
    for name in sorted(filled | _described_texts(scorers, "source_table")):
        table = info.tables.get(name)
        if table is not None and (table.size or name in filled):
            clients = [client for client in scorers if read_described(client.settings).get("source_table") == name]
            parts[name] = replace(_part(info, SCORER, clients, ()), table=name)
    return parts


def teacher_of(info: ServerInfo) -> Part:
    """The teachers of a run, which extend its items, as one part."""
    return _part(info, TEACHER, _playing(info, TEACHER), ())


def _part(info: ServerInfo, role: str, clients: Sequence[ClientInfo], ages: Iterable[float | None]) -> Part:
    """Finds the state of a part, from the named `clients` that play it, and from the traffic of its tables.

    `ages` has the seconds since the last traffic of each table; None: no traffic. Clients without names may have caused
    this traffic.
    """
    connected = [client for client in clients if info.is_connected(client)]
    if connected:
        return Part(role=role, state=State.CONNECTED, age=connected[0].age, name=connected[0].name)
    last_client = min(clients, key=lambda client: client.age, default=None)
    if last_client is not None and last_client.ended:
        return Part(role=role, state=State.ENDED, age=last_client.age, name=last_client.name)
    traffic_age = min((age for age in ages if age is not None), default=None)
    if traffic_age is not None and traffic_age < info.long_wait:
        return Part(role=role, state=State.CONNECTED, age=traffic_age)
    if last_client is not None:
        return Part(role=role, state=State.AWAY, age=last_client.age, name=last_client.name)
    if traffic_age is not None:
        return Part(role=role, state=State.AWAY, age=traffic_age)
    return Part(role=role, state=State.NEVER, age=info.uptime)


def _traffic_age(count: int, age: float, waiting: int, info: ServerInfo) -> float | None:
    """The seconds since the last sample from a table, or since the last insert into it. 0 if a request waits now.

    None: there was none since the server started. `count` is the number of samples (or inserts) that the server has
    counted. `age` is the seconds since the last one, as the server reports it. `waiting` is the number of requests that
    wait.
    """
    if waiting:
        return 0.0
    # If there was no sample since the server started, `age` is the uptime, and all counted samples are older.
    none_since_start = age > info.uptime - _JUST_STARTED
    if not count or none_since_start:
        return None
    return age


def _other_parts_may_have_sampled(info: ServerInfo, age: float) -> bool:
    """True if a named client that samples but is not a trainer may have made the sample of `age` seconds ago.

    Teachers are such clients: they draw the items that they extend, and do not describe the table that they draw from.
    """
    for client in info.clients:
        # The server gives the role "trainer" to a client that samples, even if the client is no trainer.
        samples = TRAINER in client.role.split(", ")
        is_trainer = TRAINER in parts_of(client)
        was_active_since = client.open or client.age <= age
        if samples and not is_trainer and was_active_since:
            return True
    return False


def _filled_by(stages: Iterable[ClientInfo], info: ServerInfo) -> set[str]:
    """The tables into which these scorers and stages insert. Inserts into these tables show no generator."""
    names: set[str] = set()
    for client in stages:
        described = read_described(client.settings).get("tables")
        if described is None:  # the client may fill any table
            names.update(info.tables)
        else:
            names.update(described)
    return names


def _playing(info: ServerInfo, role: str) -> list[ClientInfo]:
    """The named clients that play this part of the run."""
    return [client for client in info.clients if role in parts_of(client)]


def _described_texts(clients: Iterable[ClientInfo], name: str) -> set[str]:
    """The values that these clients describe for the setting `name`. Values that are not strings are left out."""
    values = [read_described(client.settings).get(name) for client in clients]
    return {value for value in values if isinstance(value, str)}


def _configs(info: ServerInfo) -> dict[str, dict[str, object]]:
    """The configuration of each table, by the name of the table."""
    return {name: json.loads(table.config or "{}") for name, table in info.tables.items()}


def _permit_tables(info: ServerInfo) -> set[str]:
    """The tables whose items keep their permits, such as a table of partial groups."""
    return set() if info.admission is None else set(info.admission.permit_tables)


def _fed_directly(info: ServerInfo) -> list[TableInfo]:
    """The tables that only clients fill, because no other table forwards or copies items to them."""
    configs = _configs(info).values()
    targets = {config.get("forward_to") for config in configs}
    targets |= {config.get("copy_to") for config in configs}
    return [table for name, table in info.tables.items() if name not in targets]
