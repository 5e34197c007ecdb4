"""Values of rows: what people's rows hold, as what JSON, msgpack and reward functions all take.

Rows come from JSON, Arrow, pandas and Python. Whoever reads a row knows nothing of that: numbers and arrays of numpy
are those of Python, and a number that JSON cannot write is null.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from decimal import Decimal
from typing import Any

import numpy as np

MOST_DEPTH = 64
"""Lists and objects inside one another. Whoever walks through a row may do so by recursion."""
_NULLS = ("NAType", "NaTType")
"""Types of pandas for what is missing."""


def plain_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """The row with values of Python. NaN and infinities become None; objects of other kinds stay as they are.

    Raises ValueError that names the field, for a text with half a surrogate, and for what is nested too deeply.
    """
    plain: dict[str, Any] = {}
    for name, value in row.items():
        try:
            plain[_plain(name)] = _rebuilt(value, _plain)
        except ValueError as error:
            raise ValueError(f"field {str(name)!r:.80} {error}") from error
    return plain


def without_nulls(value: Any) -> Any:
    """A value of Arrow without the fields that are null, at any depth. Arrow has all fields of all rows in each object.

    Null in a list stays: it is nobody's missing field.
    """
    return _rebuilt(value, lambda each: each, drop_nulls=True)


def _rebuilt(value: Any, change: Callable[[Any], Any], *, drop_nulls: bool = False) -> Any:
    """The value with all its objects and lists made anew, and each value in them, at any depth, changed."""
    top = [change(value)]
    todo: list[tuple[Any, Any, int]] = [(top, 0, 0)]
    while todo:
        holder, key, depth = todo.pop()
        inner = holder[key]
        if isinstance(inner, np.ndarray):
            inner = inner.tolist()
        if isinstance(inner, Mapping):
            inner = {change(name): change(each) for name, each in inner.items()}
            if drop_nulls:
                inner = {name: each for name, each in inner.items() if each is not None}
            todo.extend((inner, name, depth + 1) for name in inner)
        elif isinstance(inner, list | tuple):
            inner = [change(each) for each in inner]
            todo.extend((inner, index, depth + 1) for index in range(len(inner)))
        if depth > MOST_DEPTH:
            raise ValueError(f"is nested more than {MOST_DEPTH} deep")
        holder[key] = inner
    return top[0]


def _plain(value: Any) -> Any:
    """A value as JSON and msgpack have it, if it is none that holds others. Raises ValueError for half a surrogate."""
    if isinstance(value, np.ndarray | np.generic):
        value = value.tolist()
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError as error:
            half = value[error.start]
            raise ValueError(f"holds half of a surrogate pair, {half!a}, which no text in UTF-8 has: mend it") from None
        return str(value)
    return None if type(value).__name__ in _NULLS else value


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

    What is neither text, number, list, object, decimal, bytes nor a date counts as null.
    """
    told = _rebuilt(value, _told, drop_nulls=True)
    try:
        return json.dumps(told, sort_keys=True, skipkeys=True)
    except TypeError:  # names of several types, which have no order
        return json.dumps(told, skipkeys=True)


def _told(value: Any) -> Any:
    value = _plain(value)
    if value is None or isinstance(value, str | int | float | Mapping | list | tuple):
        return value
    if isinstance(value, bytes | bytearray):
        return bytes(value).hex()
    if isinstance(value, Decimal):
        return str(value)
    return value.isoformat() if hasattr(value, "isoformat") else None
