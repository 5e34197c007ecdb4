"""Notices: what a generator says once in its log, whichever of its thousands of rollouts it happens in."""

from __future__ import annotations

import logging

logger = logging.getLogger(__name__)

MOST = 1000
"""Notices of one process. Some have words of a client, which may be without end."""
_given: set[str] = set()


def say_once(text: str, kind: str | None = None) -> None:
    """Writes a warning, unless it was written before, or another one of its kind."""
    kind = text if kind is None else kind
    if kind not in _given and len(_given) < MOST:
        _given.add(kind)
        logger.warning("%s", text)


def forget() -> None:
    """Writes all of them once more, as a new process would."""
    _given.clear()
