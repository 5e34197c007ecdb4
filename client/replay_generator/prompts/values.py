"""Values of rows: what people's rows hold, as what JSON, msgpack and reward functions all take.

Rows come from JSON, Arrow, pandas and Python. Whoever reads a row knows nothing of that: numbers and arrays of numpy
are those of Python, sets are lists, a number that JSON cannot write is null, and what JSON has no type for is its text:
dates, times, decimals, UUIDs, paths.
"""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from datetime import date, time, timedelta
from decimal import Decimal
from fractions import Fraction
from pathlib import PurePath
from typing import Any
from uuid import UUID

import numpy as np

MOST_DEPTH = 64
"""Lists and objects inside one another. Whoever walks through a row may do so by recursion."""
_NULLS = ("NAType", "NaTType")
"""Types of pandas for what is missing."""
_TEXTS = (Decimal, Fraction, UUID, PurePath, timedelta)
"""Types whose values are told by their texts."""
_LISTS = (list, tuple, AbstractSet, deque, range)
"""Types of values that hold others in a row. Sets come in the order of their texts."""
_SIMPLE = frozenset([str, int, float, bool, type(None)])
"""Types that hold no others: most values have one of them."""


class HalfSurrogateError(ValueError):
    """A text holds half of a surrogate pair."""


def plain_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """The row with values that JSON has too. NaN and infinities become None; objects of other kinds stay as they are.

    Raises ValueError that names the field, for a text with half a surrogate, and for what is nested too deeply.
    """
    try:
        plain: dict[str, Any] = _rebuilt(row, _plain)
        return plain
    except ValueError:
        for name, value in row.items():
            try:
                _rebuilt({name: value}, _plain)
            except ValueError as error:
                raise ValueError(f"field {str(name)!r:.80} {error}") from error
        raise


def plain_value(value: Any) -> Any:
    """A value as `plain_row` has it. Raises ValueError, as that does."""
    return _rebuilt(value, _plain)


def without_nulls(value: Any) -> Any:
    """A value of Arrow without the fields that are null, at any depth. Arrow has all fields of all rows in each object.

    Null in a list stays: it is nobody's missing field.
    """
    return _rebuilt(value, lambda each: each, drop_nulls=True)


def _rebuilt(value: Any, change: Callable[[Any], Any], *, drop_nulls: bool = False, most: int = MOST_DEPTH) -> Any:
    """The value with all its objects and lists made anew, and each value in them, at any depth, changed.

    `most`: the depth from which on it raises ValueError.
    """
    top = [change(value)]
    todo: list[tuple[Any, Any, int]] = [(top, 0, 0)]
    while todo:
        holder, key, depth = todo.pop()
        inner = holder[key]
        if isinstance(inner, np.ndarray):
            inner = inner.tolist()
        if depth > most and _holds_others(inner):
            raise ValueError(f"is nested more than {MOST_DEPTH} deep")
        keys: list[Any] = []
        if isinstance(inner, Mapping):
            inner = {change(name): change(each) for name, each in inner.items()}
            if drop_nulls:
                inner = {name: each for name, each in inner.items() if each is not None}
            keys = [name for name, each in inner.items() if _holds_others(each)]
        elif isinstance(inner, _LISTS):
            if isinstance(inner, AbstractSet):
                inner = sorted(inner, key=repr)
            inner = [change(each) for each in inner]
            keys = [index for index, each in enumerate(inner) if _holds_others(each)]
        holder[key] = inner
        for each in keys:
            todo.append((inner, each, depth + 1))
    return top[0]


def _holds_others(value: Any) -> bool:
    if type(value) in _SIMPLE:
        return False
    return isinstance(value, (Mapping, np.ndarray, *_LISTS))


def _plain(value: Any) -> Any:
    """A value as JSON and msgpack have it, if it is none that holds others. Raises ValueError for half a surrogate."""
    if type(value) is str:
        return _whole(value)
    if value is None or type(value) in (bool, int, dict, list):
        return value
    if isinstance(value, np.datetime64 | np.timedelta64):
        return None if np.isnat(value) else str(value)
    if isinstance(value, np.ndarray) and value.dtype.kind in "mM":
        return list(value)
    if isinstance(value, np.ndarray | np.generic):
        value = value.tolist()
    if type(value).__name__ in _NULLS:
        return None
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, str):
        return _whole(str.__str__(value))
    if isinstance(value, date | time):
        return value.isoformat()
    return str(value) if isinstance(value, _TEXTS) else value


def _whole(text: str) -> str:
    """The text. Raises ValueError for half a surrogate."""
    if text.isascii():
        return text
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = text[error.start]
        raise HalfSurrogateError(
            f"holds half of a surrogate pair, {half!a}, which no text in UTF-8 has: mend it"
        ) from None
    return text


# ------------------------------------------------------------------------------------------------ fields by path


def field_of(row: Mapping[str, Any], path: str) -> Any:
    """The value of a field. `path` names it, or those around it too: `reward_model.ground_truth`.

    A field whose own name is the whole path comes first. Raises KeyError in words that name what is there instead.
    """
    if path in row:
        return row[path]
    value: Any = row
    before = ""
    for name in path.split("."):
        if isinstance(value, list) and name.isdecimal() and int(name) < len(value):
            value = value[int(name)]
        elif isinstance(value, Mapping) and name in value:
            value = value[name]
        else:
            raise KeyError(f"{before or 'this one'} has {_names(value)}")
        before = f"{before}.{name}".lstrip(".")
    return value


def _names(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(map(str, value)) or "none"
    return f"{value!r:.80}, which has no fields"


def json_of(value: Any) -> str:
    """JSON that is the same for equal values wherever they come from: sorted, and without null fields.

    `value`: as `plain_row` and `plain_value` make it, or an object of such values. What JSON has no type for counts as
    null.
    """
    rebuilt = _rebuilt(value, _json_value, drop_nulls=True, most=MOST_DEPTH + 2)
    try:
        return json.dumps(rebuilt, sort_keys=True, skipkeys=True)
    except TypeError:  # names of several types, which have no order
        return json.dumps(rebuilt, skipkeys=True)


def _json_value(value: Any) -> Any:
    """Arrow makes all numbers of a column with fractions floats, so 1.0 is 1."""
    value = _plain(value)
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value).hex()
    if type(value) in _SIMPLE or isinstance(value, (int, Mapping, *_LISTS)):
        return value
    return None
