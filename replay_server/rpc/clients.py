"""Clients: who inserts, extends, samples and publishes, by name, and when each was last seen.

* A client names itself in its user agent. Nothing depends on the name but what people read.
* Only calls that need a read-write token leave a trace here. A read-only client cannot.
* A name is the connection's that uses it: only that one can describe and end the client. Another connection gets the
  name by its own calls, while the one before has none open.
* The most MAX_CLIENTS names seen last are kept, each with at most MAX_NAME characters. Of their settings those are kept
  that were seen last and have MAX_DESCRIPTIONS bytes together: each look at the server sends them.
"""

from __future__ import annotations

import json
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from typing import Any, TypeAlias

import grpc

from replay_server.config import MAX_CLIENTS, MAX_DESCRIPTION, MAX_DESCRIPTIONS, MAX_NAME
from replay_server.errors import invalid

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
"""A call, as gRPC describes it."""

_PREFIX = "replay/"


class ClientRole(StrEnum):
    """What a client does here."""

    GENERATOR = "generator"
    """It inserts, or asks for permits to generate."""
    TRAINER = "trainer"
    """It samples, or publishes policy versions."""
    TEACHER = "teacher"
    """It extends items with later columns."""
    ARCHIVER = "archiver"
    """It draws from copies (`copy_to`)."""
    SCORER = "scorer"
    """It says that it gives groups their rewards. Whatever else it does, it is that."""
    STAGE = "stage"
    """It says that it passes items on. Whatever else it does, it is that."""


_PASSING = (ClientRole.SCORER, ClientRole.STAGE)


@dataclass
class Client:
    """One name. Several clients with the same name are one."""

    name: str
    connection: str
    """The one whose name it is."""
    roles: set[ClientRole] = field(default_factory=set)
    last_seen_at: float = 0.0
    """When it sent its last request, or its last call ended, by the clock of the buffer."""
    calls: Counter[str] = field(default_factory=Counter)
    """Calls and streams that are open, by connection."""
    ended: bool = False
    """It said that it ends, and has sent nothing since."""
    began: float = 0.0
    """When it opened a call and had no other one open."""
    left: float = 0.0
    """When its last open call ended."""
    settings: str = "{}"
    """What it said of its settings, by name, as JSON."""

    @property
    def taken(self) -> bool:
        """Whether no other connection can have the name."""
        return self.calls[self.connection] > 0

    def vanished(self, since: float, seconds: float) -> bool:
        """Whether it had calls open for so many seconds without a break, and has had none since then."""
        return not self.calls and self.left <= since and self.left - self.began >= seconds


OnMessage: TypeAlias = Callable[[ClientRole | None], object]
"""Notes a sign of life of one client, a message on its open stream, and perhaps what it does."""


class Clients:
    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._by_name: OrderedDict[str, Client] = OrderedDict()
        """The one that was seen last stands last."""
        self.prompt_tables: set[str] = set()
        """The tables from which generators say that they draw their prompts."""

    def __iter__(self) -> Iterator[Client]:
        """The one that was seen last comes first."""
        return reversed(self._by_name.values())

    @contextmanager
    def calling(self, context: Context, role: ClientRole | None) -> Iterator[OnMessage]:
        """Counts a call of a client as open, and as its sign of life. So is each call of the result.

        `role` None: only its messages tell what the client does.
        """
        if not (name := name_of(context)):
            yield lambda role: None
            return
        connection = context.peer()
        client = self._record_sign_of_life(name, connection, role)
        if not client.taken:
            client.connection = connection
        if not client.calls:
            client.began = self._clock()
        client.calls[connection] += 1

        try:
            yield partial(self._record_sign_of_life, name, connection)
        finally:
            assert client.calls[connection] > 0, (client.name, connection)
            client.calls -= Counter([connection])
            client.left = self._clock()
            self._see(client)  # a client that waits sends nothing: the end of its connection is its last sign

    def describe(self, context: Context, settings: dict[str, str]) -> None:
        """The client says what it is set to, instead of what it said before. Raises Refused."""
        if not (name := name_of(context)):
            return
        if len(text := json.dumps(settings)) > MAX_DESCRIPTION:
            raise invalid(f"settings of {len(text)} bytes, as JSON: at most {MAX_DESCRIPTION}; say less")
        connection, before = context.peer(), self._by_name.get(name)
        if before is not None and before.taken and before.connection != connection:
            raise invalid(f"{name!r} is the name of another connection, which is open: give this client another name")
        client = self._record_sign_of_life(name, connection, None)
        client.settings = text
        left = MAX_DESCRIPTIONS
        for each in self:
            if (left := left - len(each.settings)) < 0:
                each.settings = "{}"
        if table := settings.get("prompts_table"):
            self.prompt_tables.add(table.strip('"'))  # it is JSON
            client.roles.discard(ClientRole.TRAINER)  # it may have drawn prompts before it said so
        if (part := settings.get("part", "").strip('"')) in (ClientRole.TRAINER, ClientRole.GENERATOR):
            client.roles.add(ClientRole(part))  # it may load its model for minutes, before it does anything
        elif part in _PASSING:
            client.roles = {ClientRole(part)}

    def leave(self, context: Context) -> None:
        """The client says that it ends. It counts for nothing under the name of another connection."""
        client = self._by_name.get(name_of(context))
        if client is not None and client.connection == context.peer():
            client.ended = True
            client.last_seen_at = self._clock()

    def missed(self, role: ClientRole) -> Sequence[Client]:
        """Those of whom something is expected: all that have not ended. Nobody if the one seen last has.

        One that was killed long ago, and replaced, is not waited for after its successor has ended.
        """
        known = [client for client in self if role in client.roles]
        return [] if known and known[0].ended else [client for client in known if not client.ended]

    def _record_sign_of_life(self, name: str, connection: str, role: ClientRole | None) -> Client:
        client = self._by_name.get(name)
        if client is None:
            client = self._by_name[name] = Client(name, connection)
            if len(self._by_name) > MAX_CLIENTS:
                self._by_name.popitem(last=False)
            assert len(self._by_name) <= MAX_CLIENTS, len(self._by_name)
        self._see(client)
        client.ended = False
        if role is not None and client.roles.isdisjoint(_PASSING):
            client.roles.add(role)
        return client

    def _see(self, client: Client) -> None:
        """Note a sign of life of a client."""
        client.last_seen_at = self._clock()
        if client.name in self._by_name:  # it may have been forgotten, for there are many
            self._by_name.move_to_end(client.name)


def name_of(context: Context) -> str:
    """The name of the client that calls; empty: it has none."""
    for key, value in context.invocation_metadata() or ():
        if key == "user-agent" and isinstance(value, str) and value.startswith(_PREFIX):
            return value[len(_PREFIX) : len(_PREFIX) + MAX_NAME + 1].partition(" ")[0][:MAX_NAME]
    return ""
