"""Writes durations, counts, waits, byte counts and lists of names as people read them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from replay_protos.replay_pb2 import MissingColumn, ValueInfo, Waiting
from replay_protos.words import counted

__all__ = ["byte_size", "counted", "duration", "listed", "shares", "waiting", "waits_for"]

MINUTE, HOUR, DAY = 60, 3600, 86400
UNITS = ("kB", "MB", "GB", "TB", "PB")


def duration(seconds: float) -> str:
    """A duration in at most two units: `0.4 s`, `12 s`, `3 min 20 s`, `2 h 5 min`, `3 d 4 h`."""
    # Rounded before each comparison, because 9.96 s are 10 s, and 59.7 s are a minute.
    tenths = round(seconds, 1)
    if tenths < 10:
        return f"{tenths:.1f} s"
    whole = round(seconds)
    if whole < MINUTE:
        return f"{whole} s"
    if whole < HOUR:
        return _two_units(whole, MINUTE, "min", 1, "s")
    if whole < DAY:
        return _two_units(whole, HOUR, "h", MINUTE, "min")
    return _two_units(whole, DAY, "d", HOUR, "h")


def waiting(wait: Waiting, request: str) -> str:
    """Requests that wait: `1 insert waits, none was served for 40 s: REASON`. `request` names one, such as "insert"."""
    verb = "waits" if wait.count == 1 else "wait"
    return f"{counted(wait.count, request)} {verb}, none was served for {duration(wait.seconds)}: {wait.reason}"


def waits_for(lacking: Iterable[MissingColumn]) -> str:
    """The columns that items of a table wait for: `waits for teacher_logprobs: 14 items`."""
    return "waits for " + ", ".join(f"{column.name}: {counted(column.items, 'item')}" for column in lacking)


def shares(values: Iterable[ValueInfo]) -> str:
    """The share of a table's draws that the balance gives to each value: `math 67 % (34 items), code 33 % (2 items)`.

    The largest share comes first. Values without items are left out. An empty name stands for items without the tag.
    """
    with_items = [value for value in values if value.items]
    total = sum(value.weight for value in with_items) or 1.0
    parts = []
    for value in sorted(with_items, key=lambda value: -value.weight):
        name = value.name or "without the tag"
        percent = 100 * value.weight / total
        parts.append(f"{name} {percent:.0f} % ({counted(value.items, 'item')})")
    return ", ".join(parts)


def byte_size(count: int) -> str:
    """Bytes in powers of 1000, as disks and networks count: `1 byte`, `980 bytes`, `4.2 kB`, `1.0 GB`."""
    if count < 1000:
        return "1 byte" if count == 1 else f"{count} bytes"
    power = min(len(UNITS), (len(str(count)) - 1) // 3)  # the largest power of 1000 that is not above `count`
    if power < len(UNITS) and round(count / 1000**power, 1) >= 1000:  # 999,960 bytes are 1.0 MB, not 1,000.0 kB
        power += 1
    return f"{count / 1000**power:,.1f} {UNITS[power - 1]}"


def listed(names: Sequence[str], most: int = 5) -> str:
    """The first `most` names, and the number of the other names: `a, b, c`, or `a, b and 3 more`."""
    if len(names) <= most:
        return ", ".join(names)
    return f"{', '.join(names[:most])} and {len(names) - most} more"


def _two_units(seconds: int, large: int, large_name: str, small: int, small_name: str) -> str:
    """Writes `seconds` as a number of large units and a number of small units, without the small units if they are 0.

    `large` and `small` are the seconds of one unit.
    """
    larges, rest = divmod(seconds, large)
    smalls = rest // small
    text = f"{larges} {large_name}"
    if smalls:
        text += f" {smalls} {small_name}"
    return text
