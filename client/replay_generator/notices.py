"""Notices: warnings that a generator writes once in its log, whichever of its thousands of rollouts they are about.

Watch: the base of classes that notice things that the server is told.
"""

from __future__ import annotations

import json
import logging
from abc import ABC, abstractmethod

logger = logging.getLogger(__name__)

MOST = 1000
"""The most notices of one process. Some repeat words of a client, which may send new ones without end."""
_written_kinds: set[str] = set()


def say_once(text: str, kind: str | None = None) -> None:
    """Writes a warning, unless one of its kind was written before. `kind` None: the text itself."""
    if kind is None:
        kind = text
    if kind not in _written_kinds and len(_written_kinds) < MOST:
        _written_kinds.add(kind)
        logger.warning("%s", text)


def forget() -> None:
    """Forgets the notices that were written, so that all are written once more, as in a new process."""
    _written_kinds.clear()


def beginning_of(text: str, most: int) -> str:
    """The beginning of a text whose JSON has at most `most` characters. The server counts the characters of JSON."""
    quotes = len(json.dumps(""))
    size = quotes
    for index, character in enumerate(text):
        size += len(json.dumps(character)) - quotes
        if size > most:
            return text[:index]
    return text


class Watch(ABC):
    """Notices things that the server is told.

    Watch is a base class, and no protocol: the rollout hook of a user may have a `description` of another kind.
    """

    @property
    @abstractmethod
    def description(self) -> dict[str, str]:
        """The facts for the server, as JSON by name; empty: there are none."""
