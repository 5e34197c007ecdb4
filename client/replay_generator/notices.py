"""Notices: warnings that a generator writes to its log only once, even if thousands of its rollouts cause them.

`Watch` is the base of classes whose findings are reported to the server.
"""

from __future__ import annotations

import json
import logging
from abc import ABC, abstractmethod

logger = logging.getLogger(__name__)

MOST = 1000
"""The most notices that one process writes. There must be a limit, because some notices quote words of a client, and a
client may send new words without end."""
_written_kinds: set[str] = set()


def say_once(text: str, kind: str | None = None) -> None:
    """Writes a warning, unless a warning of the same kind, or MOST warnings in all, were written before.

    `kind`: any text that names the kind, for warnings that differ only in details; None: `text` itself is the kind.
    """
    if kind is None:
        kind = text
    if kind not in _written_kinds and len(_written_kinds) < MOST:
        _written_kinds.add(kind)
        logger.warning("%s", text)


def forget() -> None:
    """Forgets which notices were written, so that each may be written again, as in a new process."""
    _written_kinds.clear()


def beginning_of(text: str, most: int) -> str:
    """The longest beginning of `text` whose JSON has at most `most` characters.

    Texts that are sent to the server are cut off this way, because the server limits the length of their JSON.
    """
    quotes = len(json.dumps(""))  # the number of quotes around each JSON text
    size = quotes  # the length of the JSON of the characters so far, with its quotes
    for index, character in enumerate(text):
        size += len(json.dumps(character)) - quotes  # JSON has several characters for some, such as \n for a newline
        if size > most:
            return text[:index]
    return text


class Watch(ABC):
    """Collects facts that are reported to the server.

    A user's rollout hook may be a Watch, too; the generator then reports its facts. Watch is a base class, and not a
    protocol, because a hook that is no Watch may have a `description` with another meaning.
    """

    @property
    @abstractmethod
    def description(self) -> dict[str, str]:
        """The facts for the server, each as JSON, by the name of the fact. Empty: there is nothing to report."""
