"""Writes counts in texts for people. Every package writes its counts with `counted`."""

from __future__ import annotations


def counted(count: int, noun: str) -> str:
    """The count with its noun: `1 item`, `12 items`, `1 batch`, `2 batches`, `2 entries`."""
    return f"{count} {noun if count == 1 else _plural(noun)}"


def _plural(noun: str) -> str:
    """The plural of a regular English noun."""
    if noun.endswith(("s", "x", "ch", "sh")):
        return f"{noun}es"
    if noun.endswith("y") and noun[-2] not in "aeiou":
        return f"{noun[:-1]}ies"
    return f"{noun}s"
