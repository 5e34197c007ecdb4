"""Writes durations, counts, waits, byte counts and lists of names as people read them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from replay_protos.replay_pb2 import MissingColumn, ValueInfo, Waiting
from replay_protos.words import counted

__all__ = ["byte_size", "counted", "duration", "listed", "shares", "waiting", "waits_for"]

MINUTE, HOUR, DAY = 60, 3600, 86400
UNITS = ("kB", "MB", "GB", "TB", "PB")


def duration(seconds: float) -> str:
    """`0.4 s`, `12 s`, `3 min 20 s`, `2 h 5 min`, `3 d 4 h`."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < MINUTE:
        return f"{seconds:.0f} s"
    whole = round(seconds)
    if whole < HOUR:
        return _two_units(whole, MINUTE, "min", 1, "s")
    if whole < DAY:
        return _two_units(whole, HOUR, "h", MINUTE, "min")
    return _two_units(whole, DAY, "d", HOUR, "h")


def waiting(wait: Waiting, request: str) -> str:
    """`1 insert waits, none was served for 40 s: REASON`, or `2 inserts wait, none was served for 3 min: REASON`."""
    verb = "waits" if wait.count == 1 else "wait"
    return f"{counted(wait.count, request)} {verb}, none was served for {duration(wait.seconds)}: {wait.reason}"


def waits_for(lacking: Iterable[MissingColumn]) -> str:
    """`waits for teacher_logprobs: 14 items`: what the items of a table wait for."""
    return "waits for " + ", ".join(f"{column.name}: {counted(column.items, 'item')}" for column in lacking)


def shares(values: Iterable[ValueInfo]) -> str:
    """`math 67 % (34 items), code 33 % (2 items)`: how a table balances the draws among its values."""
    known = [value for value in values if value.items]
    total = sum(value.weight for value in known) or 1.0
    parts = []
    for value in sorted(known, key=lambda value: -value.weight):
        name = value.name or "without the tag"
        percent = 100 * value.weight / total
        parts.append(f"{name} {percent:.0f} % ({counted(value.items, 'item')})")
    return ", ".join(parts)


def byte_size(count: int) -> str:
    """`1 byte`, `980 bytes`, `4.2 kB`, `1.0 GB`: powers of 1000, as disks and networks count."""
    if count < 1000:
        return "1 byte" if count == 1 else f"{count} bytes"
    power = min(len(UNITS), (len(str(count)) - 1) // 3)
    return f"{count / 1000**power:,.1f} {UNITS[power - 1]}"


def listed(names: Sequence[str], most: int = 5) -> str:
    """`a, b, c`; of more than `most` names only the first ones and how many more there are."""
    if len(names) <= most:
        return ", ".join(names)
    return f"{', '.join(names[:most])} and {len(names) - most} more"


def _two_units(seconds: int, large: int, large_name: str, small: int, small_name: str) -> str:
    """`seconds` in whole units of `large`, with the rest in units of `small` unless it is 0."""
    text = f"{seconds // large} {large_name}"
    rest = seconds % large // small
    if rest:
        text += f" {rest} {small_name}"
    return text
