"""Presence: which parts of a run are connected to its server, and since when one that is needed is not.

A run goes on only while a trainer and a generator are connected. In the place of the generator a scorer or another
stage counts, as long as it has groups to hand on. Who is what:

* A client that says so (`describe`) is a trainer, a generator, a scorer or a stage.
* Any other client is what it does: a trainer if it samples or publishes, and a generator if it inserts or asks for
  permits. One that only draws items and extends them is a teacher.
* A client without a name is in no list of the server. So if no named client of a part was seen lately, the traffic of
  the tables decides: somebody samples or inserts, waits to do it, or has done it within the last `long_wait` seconds.
  What a named client of another part has done, or may have done, does not count.

A client that says that it ends (`leave`) is not connected from that moment on. Any other one is connected while it has
a call open, and for `long_wait` seconds after its last request: in the middle of a step a trainer may have none open.
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
_SAID = (TRAINER, GENERATOR, SCORER, STAGE)
"""Parts that say what they are."""
_JUST_STARTED = 1.0
"""Seconds: what happened last so shortly after the start of a server happened before it, or never."""
_OTHERS = {TRAINER: "generators", GENERATOR: "trainer"}
_DOING = {TRAINER: "sampled", GENERATOR: "inserted"}
_AGAIN = "see why it ended, and start it again; a program that ends on purpose says so with client.leave()"


class State(StrEnum):
    """Whether a part of a run is connected."""

    CONNECTED = "connected"
    ENDED = "ended"
    """Its last client said that it ends."""
    AWAY = "away"
    """It was there, and said nothing when it went."""
    NEVER = "never"
    """It has not been there since the server started."""


@dataclass(frozen=True)
class Part:
    """A part of a run, as the server sees it."""

    role: str
    state: State
    age: float
    """Seconds since its last sign; of a part that was never there, since the server started."""
    name: str = ""
    """The name of the client that was seen last; empty: it has none."""
    table: str = ""
    """Of scorers the table of groups that lack rewards."""

    @property
    def is_connected(self) -> bool:
        return self.state is State.CONNECTED

    @property
    def is_known_to_be_gone(self) -> bool:
        """Whether a client that has a name went. Traffic without names, or none at all, may just rest."""
        return bool(self.name) and not self.is_connected

    @property
    def why(self) -> str:
        """Why it is not connected, in words."""
        ago = duration(self.age)
        if self.state is State.ENDED:
            return f"{self.role} {self.name} ended {ago} ago"
        if self.state is State.NEVER:
            return f"no {self.role} has connected since the server started, {ago} ago"
        if self.name:
            return f"{self.role} {self.name} is not connected, last seen {ago} ago"
        return f"nobody has {_DOING[self.role]} for {ago}"

    @property
    def headline(self) -> str:
        """The same in a few words."""
        if self.state is State.ENDED:
            return f"The {self.role} has ended"
        if self.state is State.NEVER:
            return f"No {self.role} has connected yet"
        return f"The {self.role} is not connected"

    @property
    def remedy(self) -> str:
        """What to do about it."""
        command = f": `replay score --source-table {self.table}` with --table and --reward" if self.table else ""
        if self.state is State.AWAY:
            return _AGAIN + command
        start = f"start a {self.role}{command}"
        if self.state is State.ENDED and self.role in _OTHERS:
            return f"stop the {_OTHERS[self.role]} too, or {start}"
        return start


def parts_of(client: ClientInfo) -> set[str]:
    """The parts of a run that a client plays: what it says, or otherwise what it does."""
    said = read_described(client.settings).get("part")
    if said in _SAID:
        return {said}
    roles = set(client.role.split(", "))
    if roles == {TEACHER, TRAINER}:
        return {TEACHER}
    return roles


def trainer_of(info: ServerInfo) -> Part:
    """The trainers of a run."""
    copies = {config.get("copy_to") for config in _configs(info).values()}
    of_generators = _permit_tables(info) | _settings(info.clients, "prompts_table")
    of_stages = _settings(info.clients, "source_table")
    others = copies | of_generators | of_stages
    tables = [table for name, table in info.tables.items() if name not in others]
    ages = [_age(table.samples, table.sampled.age, table.sampling.count, info) for table in tables]
    unexplained = [age for age in ages if age is not None and not _other_parts_may_have_sampled(info, age)]
    return _part(info, TRAINER, _playing(info, TRAINER), unexplained)


def supply_of(info: ServerInfo) -> Part:
    """The generators of a run, or in their place scorers and stages that have groups to hand on."""
    passing = [client for client in info.clients if parts_of(client) & {SCORER, STAGE}]
    for client in passing:
        source = read_described(client.settings).get("source_table")
        table = info.tables.get(source) if isinstance(source, str) else None
        if info.is_connected(client) and (table is None or table.size or table.reserved):
            return Part(role=GENERATOR, state=State.CONNECTED, age=client.age, name=client.name)
    handed_on = _filled_by(passing, info)
    tables = [table for table in _fed_directly(info) if table.name not in handed_on]
    ages = [_age(table.inserts, table.inserted.age, table.inserting.count, info) for table in tables]
    if info.admission is not None and info.admission.acquiring.count:
        ages.append(0.0)
    return _part(info, GENERATOR, _playing(info, GENERATOR), ages)


def scorers_of(info: ServerInfo) -> dict[str, Part]:
    """The scorers of each table of groups that lack rewards, by the name of the table.

    Scorers and connected generators say which tables these are.
    """
    scorers = _playing(info, SCORER)
    generators = [client for client in _playing(info, GENERATOR) if info.is_connected(client)]
    fed = _settings(generators, "unscored_table")
    found = {}
    for name in sorted(fed | _settings(scorers, "source_table")):
        table = info.tables.get(name)
        if table is not None and (table.size or name in fed):
            of_table = [each for each in scorers if read_described(each.settings).get("source_table") == name]
            found[name] = replace(_part(info, SCORER, of_table, ()), table=name)
    return found


def teacher_of(info: ServerInfo) -> Part:
    """Those who extend the items of a run."""
    return _part(info, TEACHER, _playing(info, TEACHER), ())


def _part(info: ServerInfo, role: str, clients: Sequence[ClientInfo], ages: Iterable[float | None]) -> Part:
    """A part by its named clients, and by the seconds since others did its work, where that is known."""
    connected = [client for client in clients if info.is_connected(client)]
    if connected:
        return Part(role=role, state=State.CONNECTED, age=connected[0].age, name=connected[0].name)
    last = min(clients, key=lambda client: client.age, default=None)
    if last is not None and last.ended:
        return Part(role=role, state=State.ENDED, age=last.age, name=last.name)
    worked = min((age for age in ages if age is not None), default=None)
    if worked is not None and worked < info.long_wait:
        return Part(role=role, state=State.CONNECTED, age=worked)
    if last is not None:
        return Part(role=role, state=State.AWAY, age=last.age, name=last.name)
    if worked is not None:
        return Part(role=role, state=State.AWAY, age=worked)
    return Part(role=role, state=State.NEVER, age=info.uptime)


def _age(count: int, age: float, waiting: int, info: ServerInfo) -> float | None:
    """Seconds since somebody did what was done `count` times, 0 if one waits for it; None: not since the start."""
    if waiting:
        return 0.0
    if not count or age > info.uptime - _JUST_STARTED:
        return None
    return age


def _other_parts_may_have_sampled(info: ServerInfo, age: float) -> bool:
    """Whether named clients that sample, and are no trainers, were there when somebody sampled `age` seconds ago.

    Teachers draw what they extend, and they do not say from which table.
    """
    for client in info.clients:
        samples = TRAINER in client.role.split(", ")
        if samples and TRAINER not in parts_of(client) and (client.open or client.age <= age):
            return True
    return False


def _filled_by(passing: Iterable[ClientInfo], info: ServerInfo) -> set[str]:
    """The tables into which scorers and stages insert. What they insert is not new."""
    names: set[str] = set()
    for client in passing:
        said = read_described(client.settings).get("tables")
        names |= set(info.tables if said is None else said)  # one that does not say it may fill any table
    return names


def _playing(info: ServerInfo, role: str) -> list[ClientInfo]:
    return [client for client in info.clients if role in parts_of(client)]


def _settings(clients: Iterable[ClientInfo], name: str) -> set[str]:
    """The texts that clients say for a setting."""
    said = (read_described(client.settings).get(name) for client in clients)
    return {value for value in said if isinstance(value, str)}


def _configs(info: ServerInfo) -> dict[str, dict[str, object]]:
    return {name: json.loads(table.config or "{}") for name, table in info.tables.items()}


def _permit_tables(info: ServerInfo) -> set[str]:
    return set() if info.admission is None else set(info.admission.permit_tables)


def _fed_directly(info: ServerInfo) -> list[TableInfo]:
    """The tables into which clients insert: no other table forwards or copies to them."""
    targets = {config.get(name) for config in _configs(info).values() for name in ("forward_to", "copy_to")}
    return [table for name, table in info.tables.items() if name not in targets]
