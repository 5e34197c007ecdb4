"""Clients: who inserts, extends, samples and publishes, by name, and when each was last seen.

* A client names itself in its user agent. Nothing depends on the name but what people read.
* Only calls that need a read-write token leave a trace here. A read-only client cannot.
* The most MAX_CLIENTS names seen last are kept, each with at most MAX_NAME characters.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol, TypeAlias

import grpc

from replay_server.config import MAX_CLIENTS, MAX_NAME

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
"""A call, as gRPC describes it."""

_PREFIX = "replay/"
_MOST_PROMPT_TABLES = 64


class Side(StrEnum):
    """What a client does here."""

    GENERATOR = "generator"
    """It inserts, or asks for permits to generate."""
    TRAINER = "trainer"
    """It samples, or publishes policy versions."""
    TEACHER = "teacher"
    """It extends items with later columns."""
    ARCHIVER = "archiver"
    """It draws from the table `archive`."""


@dataclass
class Client:
    """One name. Several clients with the same name are one."""

    name: str
    roles: set[Side] = field(default_factory=set)
    seen: float = 0.0
    """When it sent its last request, by the clock of the buffer."""
    open: int = 0
    """Calls and streams that are open."""
    ended: bool = False
    """It said that it ends, and has sent nothing since."""
    settings: dict[str, str] = field(default_factory=dict)
    """What it said of its settings, by name."""


class Seen(Protocol):
    def __call__(self, role: Side | None = None) -> None:
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
    def calling(self, context: Context, role: Side | None) -> Iterator[Seen]:
        """Counts a call of a client as open, and as its sign of life. So is each call of the result.

        `role` None: only its messages tell what the client does.
        """
        if not (name := name_of(context)):
            yield _nobody
            return
        client = self._see(name, role)
        client.open += 1

        def seen(role: Side | None = None) -> None:
            self._see(name, role)

        try:
            yield seen
        finally:
            client.open -= 1

    def describe(self, context: Context, settings: dict[str, str]) -> None:
        """The client says what it is set to, instead of what it said before."""
        if name := name_of(context):
            client = self._see(name, None)
            client.settings = settings
            if (table := settings.get("prompts_table")) and len(self.prompt_tables) < _MOST_PROMPT_TABLES:
                self.prompt_tables.add(table.strip('"'))  # it is JSON
                client.roles.discard(Side.TRAINER)  # it may have drawn prompts before it said so

    def leave(self, context: Context) -> None:
        """The client says that it ends."""
        if (client := self._by_name.get(name_of(context))) is not None:
            client.ended = True

    def of(self, role: Side) -> Sequence[Client]:
        """The clients with this role, the one seen last first."""
        return [client for client in self if role in client.roles]

    def missed(self, role: Side) -> Sequence[Client]:
        """Those of whom something is expected: all that have not ended. Nobody if the one seen last has.

        One that was killed long ago, and replaced, is not waited for after its successor has ended.
        """
        known = self.of(role)
        return [] if known and known[0].ended else [client for client in known if not client.ended]

    def _see(self, name: str, role: Side | None) -> Client:
        client = self._by_name.get(name)
        if client is None:
            client = self._by_name[name] = Client(name)
            if len(self._by_name) > MAX_CLIENTS:
                self._by_name.popitem(last=False)
        else:
            self._by_name.move_to_end(name)
        client.seen, client.ended = self._clock(), False
        if role is not None:
            client.roles.add(role)
        return client


def name_of(context: Context) -> str:
    """The name of the client that calls; empty: it has none."""
    for key, value in context.invocation_metadata() or ():
        if key == "user-agent" and isinstance(value, str) and value.startswith(_PREFIX):
            return value[len(_PREFIX) : len(_PREFIX) + MAX_NAME + 1].partition(" ")[0][:MAX_NAME]
    return ""


def _nobody(role: Side | None = None) -> None:
    """The sign of life of a client without a name."""
