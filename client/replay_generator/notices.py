"""Notices: what a generator says once in its log, whichever of its thousands of rollouts it happens in.

Watch: the base of whatever notices things that the server is told.
"""

from __future__ import annotations

import json
import logging
from abc import ABC, abstractmethod

logger = logging.getLogger(__name__)

MOST = 1000
"""Notices of one process. Some have words of a client, which may be without end."""
_written_kinds: set[str] = set()


def say_once(text: str, kind: str | None = None) -> None:
    """Writes a warning, unless it was written before, or another one of its kind."""
    kind = text if kind is None else kind
    if kind not in _written_kinds and len(_written_kinds) < MOST:
        _written_kinds.add(kind)
        logger.warning("%s", text)


def forget() -> None:
    """Writes all of them once more, as a new process would."""
    _written_kinds.clear()


def beginning_of(text: str, most: int) -> str:
    """The beginning of a text whose JSON has at most `most` characters. The server counts those."""
    size = len(json.dumps(""))
    for place, character in enumerate(text):
        size += len(json.dumps(character)) - len(json.dumps(""))
        if size > most:
            return text[:place]
    return text


class Watch(ABC):
    """Notices things that the server is to be told.

    It is a base, and no protocol: the rollout hook of a user may have a `description` of another kind.
    """

    @property
    @abstractmethod
    def description(self) -> dict[str, str]:
        """JSON by name; empty: there is nothing to be told."""
