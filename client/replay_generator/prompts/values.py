"""Values of rows: converts the values of users' rows to values that JSON, msgpack and reward functions all accept.

Rows come from JSON, Arrow, pandas and Python. After the conversion, a reader of a row need not know its source. Numbers
and arrays of numpy become numbers and lists of Python. Sets become lists. A number that JSON cannot write becomes None.
Some values without a JSON type become texts: dates, times, decimals, UUIDs, paths.
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
"""The most lists and objects inside one another. With this limit, other code may walk through a row by recursion."""
_NULLS = ("NAType", "NaTType")
"""The names of the types that pandas has for missing values."""
_TEXTS = (Decimal, Fraction, UUID, PurePath, timedelta)
"""Types whose values become their texts."""
_LISTS = (list, tuple, AbstractSet, deque, range)
"""Types of values that hold a list of other values. Sets are sorted by the texts of their values."""
_SIMPLE = frozenset([str, int, float, bool, type(None)])
"""Types that hold no other values. Most values have one of them."""


class HalfSurrogateError(ValueError):
    """A text holds half of a surrogate pair."""


def plain_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """The row with values of JSON. NaN and infinities become None. Objects of unknown types stay as they are.

    Raises ValueError, which names the field, for a text with half of a surrogate pair, and for values that are nested
    too deeply.
    """
    try:
        plain: dict[str, Any] = _rebuilt(row, _plain)
        return plain
    except ValueError:  # convert the fields one by one, to name the field that fails
        for name, value in row.items():
            try:
                _rebuilt({name: value}, _plain)
            except ValueError as error:
                raise ValueError(f"field {str(name)!r:.80} {error}") from error
        raise  # no field fails by itself


def plain_value(value: Any) -> Any:
    """A value as `plain_row` converts it. Raises ValueError, as `plain_row` does."""
    return _rebuilt(value, _plain)


def without_nulls(value: Any) -> Any:
    """A value of Arrow without null fields, at any depth. In Arrow, each object has the fields of all rows.

    A null in a list stays, because the source of the list had it.
    """
    return _rebuilt(value, lambda unchanged: unchanged, drop_nulls=True)


def _rebuilt(value: Any, change: Callable[[Any], Any], *, drop_nulls: bool = False, most: int = MOST_DEPTH) -> Any:
    """A copy of the value in which `change` was applied to each value and each name, at any depth.

    `most`: the largest depth. Raises ValueError for a deeper value. The loop takes the place of recursion, for which a
    value may be too deep.
    """
    top = [change(value)]
    todo: list[tuple[Any, Any, int]] = [(top, 0, 0)]
    """Values whose inner values must still be changed. Each is `holder[key]`; an entry is holder, key and depth."""
    while todo:
        holder, key, depth = todo.pop()
        inner = holder[key]
        if isinstance(inner, np.ndarray):  # `without_nulls` changes no array, but there may be nulls inside
            inner = inner.tolist()
        if depth > most and _holds_others(inner):
            raise ValueError(f"is nested more than {MOST_DEPTH} deep")
        keys: list[Any] = []  # the names or indices of those values in `inner` that hold other values in turn
        if isinstance(inner, Mapping):
            inner = {change(name): change(field) for name, field in inner.items()}
            if drop_nulls:
                inner = {name: field for name, field in inner.items() if field is not None}
            keys = [name for name, field in inner.items() if _holds_others(field)]
        elif isinstance(inner, _LISTS):
            if isinstance(inner, AbstractSet):
                inner = sorted(inner, key=repr)  # its values may have no order of their own
            inner = [change(element) for element in inner]
            keys = [index for index, element in enumerate(inner) if _holds_others(element)]
        holder[key] = inner
        for inner_key in keys:
            todo.append((inner, inner_key, depth + 1))
    return top[0]


def _holds_others(value: Any) -> bool:
    """True if the value is a list, an object or an array."""
    if type(value) in _SIMPLE:
        return False
    return isinstance(value, (Mapping, np.ndarray, *_LISTS))


def _plain(value: Any) -> Any:
    """The value in a type of JSON. Lists, objects and values of unknown types stay as they are.

    Raises ValueError for half a surrogate.
    """
    if type(value) is str:
        return _whole(value)
    if value is None or type(value) in (bool, int, dict, list):
        return value
    if isinstance(value, np.datetime64 | np.timedelta64):
        return None if np.isnat(value) else str(value)
    if isinstance(value, np.ndarray) and value.dtype.kind in "mM":  # times: `tolist` would make numbers of some
        return list(value)  # of datetime64 or timedelta64, each of which `_rebuilt` converts next
    if isinstance(value, np.ndarray | np.generic):
        value = value.tolist()  # a list, or a value of Python that is checked below
    if type(value).__name__ in _NULLS:
        return None
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, str):  # of a subclass, whose own __str__ may return another text
        return _whole(str.__str__(value))
    if isinstance(value, date | time):
        return value.isoformat()
    if isinstance(value, _TEXTS):
        return str(value)
    return value


def _whole(text: str) -> str:
    """The text, unchanged. Raises HalfSurrogateError if it holds half of a surrogate pair."""
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
    """The value of a field. `path`: its name, or a path of names, such as `reward_model.ground_truth`.

    If a field of the row has the whole path as its name, that field counts. In a list, a name is an index. Raises
    KeyError, whose text names the fields that exist.
    """
    if path in row:
        return row[path]
    value: Any = row
    before = ""  # the path to `value`
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
    """The fields of a value, for the text of an error."""
    if isinstance(value, Mapping):
        return ", ".join(map(str, value)) or "none"
    return f"{value!r:.80}, which has no fields"


def json_of(value: Any) -> str:
    """JSON that is the same for equal values from any source: with sorted names, and without null fields.

    `value`: a result of `plain_row` or `plain_value`, or an object of such values. Values without a JSON type become
    null.
    """
    # A result of `plain_row` may be MOST_DEPTH deep already. `value` may hold such results, and is then deeper.
    rebuilt = _rebuilt(value, _json_value, drop_nulls=True, most=MOST_DEPTH + 2)
    try:
        return json.dumps(rebuilt, sort_keys=True, skipkeys=True)
    except TypeError:  # names of several types, which have no order
        return json.dumps(rebuilt, skipkeys=True)


def _json_value(value: Any) -> Any:
    """A value for `json_of`. 1.0 becomes 1: in Arrow, all numbers of a column are floats if one has a fraction.

    Bytes become their hexadecimal digits, and values of unknown types None.
    """
    value = _plain(value)
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value).hex()
    if type(value) in _SIMPLE or isinstance(value, (int, Mapping, *_LISTS)):
        return value
    return None
