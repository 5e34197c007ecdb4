"""Clients: who inserts, extends, samples and publishes, by name, and when each was last seen.

* A client names itself in its user agent. The name is only for people to read.
* Only calls that need a read-write token are noted here. A read-only client stays unknown.
* A name belongs to one connection. Only this connection can describe and end the client. Another connection that calls
  under the name gets the name, unless the first connection has an open call.
* The MAX_CLIENTS names seen last are remembered, each with at most MAX_NAME characters. Each ServerInfo contains the
  settings of these clients. To bound its size, the server remembers at most MAX_DESCRIPTIONS bytes of settings in all,
  those of the clients seen last.
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
"""The beginning of the user agent of a client with a name. The name follows."""


class ClientRole(StrEnum):
    """The part of a client in a run, as the server sees it."""

    GENERATOR = "generator"
    """The client inserts, or asks for permits to generate."""
    TRAINER = "trainer"
    """The client samples, or publishes policy versions."""
    TEACHER = "teacher"
    """The client appends columns to items that are on the server."""
    ARCHIVER = "archiver"
    """The client draws from copies (`copy_to`)."""
    SCORER = "scorer"
    """The client has described itself as one that gives groups their rewards. Such a client has no other role."""
    STAGE = "stage"
    """The client has described itself as one that takes items out of a table, changes them, and inserts them into
    another table. Such a client has no other role."""


_PASSING = (ClientRole.SCORER, ClientRole.STAGE)
"""The roles of clients that pass items on. They insert and sample, but are neither generators nor trainers."""


@dataclass
class Client:
    """The client of one name. Several clients with the same name count as one."""

    name: str
    connection: str
    """The connection to which the name belongs."""
    roles: set[ClientRole] = field(default_factory=set)
    last_seen_at: float = 0.0
    """The time of its last request, or of the end of its last call, by the clock of the buffer."""
    calls: Counter[str] = field(default_factory=Counter)
    """The number of open calls and streams of each connection."""
    ended: bool = False
    """True if the client said that it ends, and has sent nothing since."""
    began: float = 0.0
    """The last time at which the client opened a call while it had no other open call."""
    left: float = 0.0
    """The time at which its last open call ended."""
    settings: str = "{}"
    """The settings that the client described, by name, as JSON."""

    @property
    def taken(self) -> bool:
        """True while the connection that has the name has open calls. Then no other connection can get the name."""
        return self.calls[self.connection] > 0

    def vanished(self, since: float, seconds: float) -> bool:
        """True if the client has had no open call since the time `since`, but before that had open calls without a
        break for at least `seconds`."""
        return not self.calls and self.left <= since and self.left - self.began >= seconds


OnMessage: TypeAlias = Callable[[ClientRole | None], object]
"""A function that notes a message on the open stream of a client, and the role that the message shows, if any."""


class Clients:
    """The named clients of a server."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._by_name: OrderedDict[str, Client] = OrderedDict()
        """The clients, in the order in which they were last seen: the client seen last is the last entry."""
        self.prompt_tables: set[str] = set()
        """The tables from which generators draw their prompts, as the generators' settings say."""

    def __iter__(self) -> Iterator[Client]:
        """The clients. The client that was seen last comes first."""
        return reversed(self._by_name.values())

    @contextmanager
    def calling(self, context: Context, role: ClientRole | None) -> Iterator[OnMessage]:
        """Counts a call of a client as open until the block ends, and notes that the client was seen.

        Yields a function to call with the role of the client at each message of the call. `role` is None if only the
        messages show the role.
        """
        name = name_of(context)
        if not name:
            yield _ignore_message
            return
        connection = context.peer()
        client = self._record_sign_of_life(name, connection, role)
        if not client.taken:  # if it is taken, the name stays with its connection
            client.connection = connection
        if not client.calls:
            client.began = self._clock()
        client.calls[connection] += 1

        try:
            yield partial(self._record_sign_of_life, name, connection)
        finally:
            assert client.calls[connection] > 0, (client.name, connection)
            # This also removes the entry of a connection without open calls, so `calls` is empty if no call is open.
            client.calls -= Counter([connection])
            client.left = self._clock()
            # A client that waits in a call sends nothing, so the end of the call is the time at which it is last seen.
            self._touch(client)

    def describe(self, context: Context, settings: dict[str, str]) -> None:
        """Replaces the settings of a client by `settings`, and notes the role that the settings show.

        Raises Refused if the settings are too long, or if the client's name belongs to another connection that has an
        open call. Does nothing for a client without a name.
        """
        name = name_of(context)
        if not name:
            return
        text = json.dumps(settings)
        if len(text) > MAX_DESCRIPTION:
            raise invalid(f"settings of {len(text)} bytes, as JSON: at most {MAX_DESCRIPTION}; say less")
        connection = context.peer()
        known_client = self._by_name.get(name)
        if known_client is not None and known_client.taken and known_client.connection != connection:
            raise invalid(f"{name!r} is the name of another connection, which is open: give this client another name")
        client = self._record_sign_of_life(name, connection, role=None)
        client.settings = text
        self._forget_old_settings()
        # The values of settings are JSON, so quotes are stripped from strings.
        prompts_table = settings.get("prompts_table")
        if prompts_table:
            self.prompt_tables.add(prompts_table.strip('"'))
            # The client draws prompts, so it is a generator. If it has drawn any before this call, it was taken for a
            # trainer.
            client.roles.discard(ClientRole.TRAINER)
        part = settings.get("part", "").strip('"')
        if part in (ClientRole.TRAINER, ClientRole.GENERATOR):
            # Note the role now, because the client may load its model for minutes before its calls show the role.
            client.roles.add(ClientRole(part))
        elif part in _PASSING:  # such a client has no other role, so drop the roles that its calls have shown so far
            client.roles = {ClientRole(part)}

    def _forget_old_settings(self) -> None:
        """Forgets the settings of the clients seen longest ago, so that all settings together have at most
        MAX_DESCRIPTIONS bytes."""
        bytes_left = MAX_DESCRIPTIONS
        for client in self:  # the client seen last comes first
            bytes_left -= len(client.settings)
            if bytes_left < 0:  # then it also is for all clients after this one
                client.settings = "{}"

    def leave(self, context: Context) -> None:
        """Notes that the client ends. Does nothing if the client's name belongs to another connection."""
        client = self._by_name.get(name_of(context))
        if client is not None and client.connection == context.peer():
            client.ended = True
            client.last_seen_at = self._clock()

    def missed(self, role: ClientRole) -> Sequence[Client]:
        """The clients of a role that are expected to go on, because they have not said that they end.

        The client seen last comes first. The result is empty if the client of this role that was seen last has said
        that it ends. Otherwise a client that was killed long ago would still be expected, although its successor has
        ended.
        """
        clients = [client for client in self if role in client.roles]
        if clients and clients[0].ended:
            return []
        return [client for client in clients if not client.ended]

    def _record_sign_of_life(self, name: str, connection: str, role: ClientRole | None) -> Client:
        """Notes that the client of this name was seen, and its role if `role` is not None. Returns the client.

        If the name is new, adds a client for it.
        """
        client = self._by_name.get(name)
        if client is None:
            client = Client(name, connection)
            self._by_name[name] = client
            if len(self._by_name) > MAX_CLIENTS:  # forgets the client that was seen longest ago
                self._by_name.popitem(last=False)
            assert len(self._by_name) <= MAX_CLIENTS, len(self._by_name)
        self._touch(client)
        client.ended = False
        may_have_more_roles = client.roles.isdisjoint(_PASSING)
        if role is not None and may_have_more_roles:
            client.roles.add(role)
        return client

    def _touch(self, client: Client) -> None:
        """Makes a client the one that was seen last."""
        client.last_seen_at = self._clock()
        if client.name in self._by_name:  # False if the name was forgotten, because MAX_CLIENTS others were seen since
            self._by_name.move_to_end(client.name)


def _ignore_message(role: ClientRole | None) -> None:
    """The OnMessage of a client without a name."""


def name_of(context: Context) -> str:
    """The name of the client that calls; "" if it has none."""
    for key, value in context.invocation_metadata() or ():
        if key == "user-agent" and isinstance(value, str) and value.startswith(_PREFIX):
            # The name ends at the first space. Search only as many characters as a name may have, because a user agent
            # may be very long.
            beginning = value[len(_PREFIX) : len(_PREFIX) + MAX_NAME + 1]
            name, _, _ = beginning.partition(" ")
            return name[:MAX_NAME]
    return ""
