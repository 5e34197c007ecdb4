"""Values of rows: converts the values of users' rows to values that JSON, msgpack and reward functions all accept.

Rows come from JSON, Arrow, pandas and Python. After the conversion, code that reads a row need not know from where it
came. Numbers and arrays of NumPy become numbers and lists of Python. Sets become lists. NaN and infinities, which JSON
cannot write, become None. Some values without a JSON type become texts: dates, times, decimals, UUIDs and paths.
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
"""The most levels of lists and objects inside one another. Because of this limit, other code may walk through a row by
recursion."""
_NULLS = ("NAType", "NaTType")
"""The names of the types of missing values in pandas."""
_TEXTS = (Decimal, Fraction, UUID, PurePath, timedelta)
"""Values of these types become texts, by `str`."""
_LISTS = (list, tuple, AbstractSet, deque, range)
"""Values of these types become lists. The list of a set is sorted by the `repr` of its values."""
_SIMPLE = frozenset([str, int, float, bool, type(None)])
"""Types whose values hold no other values. Most values have one of these types."""


class HalfSurrogateError(ValueError):
    """A text holds half of a surrogate pair."""


def plain_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """Converts a row to values of JSON types. NaN and infinities become None. Values of unknown types stay as they are.

    Raises ValueError, which names the field, for a text with half of a surrogate pair, and for values that are nested
    more than MOST_DEPTH deep.
    """
    try:
        plain: dict[str, Any] = _rebuilt(row, _plain)
        return plain
    except ValueError:
        # The error does not name the field. So convert the fields one by one, to find the field that fails.
        for name, value in row.items():
            try:
                _rebuilt({name: value}, _plain)
            except ValueError as error:
                raise ValueError(f"field {str(name)!r:.80} {error}") from error
        raise  # no field fails by itself


def plain_value(value: Any) -> Any:
    """Converts one value as `plain_row` does. Raises ValueError for the same values, without the name of a field."""
    return _rebuilt(value, _plain)


def without_nulls(value: Any) -> Any:
    """A copy of a value of Arrow without the fields that are null, at any depth.

    In Arrow, an object has all fields that it has in any row. A field that the source of this object lacks is null. A
    null in a list stays, because the source of the list had it.
    """
    return _rebuilt(value, lambda unchanged: unchanged, drop_nulls=True)


def _rebuilt(value: Any, change: Callable[[Any], Any], *, drop_nulls: bool = False, most: int = MOST_DEPTH) -> Any:
    """A copy of the value in which `change` was applied to each value and each name of a field, at any depth.

    `drop_nulls`: leaves out the fields that are None after the change. `most`: the largest depth; raises ValueError for
    a deeper value.

    This is a loop and no recursion, because a value may be too deep for the recursion limit of Python.
    """
    top = [change(value)]
    # The values whose inner values must still be changed. An entry (holder, key, depth) stands for `holder[key]`.
    todo: list[tuple[Any, Any, int]] = [(top, 0, 0)]
    while todo:
        holder, key, depth = todo.pop()
        inner = holder[key]
        if isinstance(inner, np.ndarray):  # only for `without_nulls`: its `change` leaves arrays as they are
            inner = inner.tolist()
        if depth > most and _holds_others(inner):
            raise ValueError(f"is nested more than {MOST_DEPTH} deep")
        keys: list[Any] = []  # the names or indices in `inner` of the values that hold other values
        if isinstance(inner, Mapping):
            inner = {change(name): change(field) for name, field in inner.items()}
            if drop_nulls:
                inner = {name: field for name, field in inner.items() if field is not None}
            keys = [name for name, field in inner.items() if _holds_others(field)]
        elif isinstance(inner, _LISTS):
            if isinstance(inner, AbstractSet):
                inner = sorted(inner, key=repr)  # by `repr`, because not all values can be compared with each other
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
    """Converts a value to a JSON type, but not the values inside of it: lists and objects stay as they are.

    An array becomes a list. Values of unknown types stay as they are, too. Raises HalfSurrogateError for a text with
    half of a surrogate pair.
    """
    if type(value) is str:
        return _without_half_surrogates(value)
    if value is None or type(value) in (bool, int, dict, list):
        return value
    if isinstance(value, np.datetime64 | np.timedelta64):
        return None if np.isnat(value) else str(value)
    if isinstance(value, np.ndarray) and value.dtype.kind in "mM":  # an array of timedelta64 or datetime64
        # `tolist` would make plain numbers of some of these times. So they stay in their type here, and `_rebuilt` then
        # calls this function for each of them.
        return list(value)
    if isinstance(value, np.ndarray | np.generic):
        value = value.tolist()  # a list, or a single value of Python, which the next lines convert
    if type(value).__name__ in _NULLS:
        return None
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, str):
        # The value is of a subclass of str, whose own __str__ may return another text.
        return _without_half_surrogates(str.__str__(value))
    if isinstance(value, date | time):
        return value.isoformat()
    if isinstance(value, _TEXTS):
        return str(value)
    return value


def _without_half_surrogates(text: str) -> str:
    """Returns the text unchanged. Raises HalfSurrogateError if it holds half of a surrogate pair."""
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
    """The value of a field of a row. `path`: the name of the field, or names with dots between them, such as
    `reward_model.ground_truth`, for a field inside of other fields.

    If the row has a field whose name is the whole path, returns that field. For an element of a list, the name is its
    index. If there is no such field, raises KeyError, whose text names the fields that exist.
    """
    if path in row:
        return row[path]
    value: Any = row
    path_so_far = ""  # the path of `value`; "": `value` is the row
    for name in path.split("."):
        if isinstance(value, list) and name.isdecimal() and int(name) < len(value):
            value = value[int(name)]
        elif isinstance(value, Mapping) and name in value:
            value = value[name]
        else:
            raise KeyError(f"{path_so_far or 'this one'} has {_names(value)}")
        path_so_far = f"{path_so_far}.{name}".lstrip(".")
    return value


def _names(value: Any) -> str:
    """The names of the fields of a value, for the text of an error."""
    if isinstance(value, Mapping):
        return ", ".join(map(str, value)) or "none"
    return f"{value!r:.80}, which has no fields"


def json_of(value: Any) -> str:
    """The JSON of a value. It is the same for equal values from any source, because names are sorted, and fields that
    are null are left out.

    `value`: a result of `plain_row` or `plain_value`, or an object of such results. Bytes become their hexadecimal
    digits, and other values without a JSON type become null.
    """
    # A result of `plain_row` may be MOST_DEPTH deep. An object of such results is deeper.
    rebuilt = _rebuilt(value, _json_value, drop_nulls=True, most=MOST_DEPTH + 2)
    try:
        return json.dumps(rebuilt, sort_keys=True, skipkeys=True)
    except TypeError:  # some names are texts and others are numbers, which cannot be sorted together
        return json.dumps(rebuilt, skipkeys=True)


def _json_value(value: Any) -> Any:
    """Converts one value for `json_of`. Bytes become their hexadecimal digits, and values of unknown types None.

    A float without a fraction becomes an int: 1.0 becomes 1. Otherwise the JSON would depend on the source of a row,
    because in a column of Arrow, all numbers are floats if any of them has a fraction.
    """
    value = _plain(value)
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value).hex()
    if type(value) in _SIMPLE or isinstance(value, (int, Mapping, *_LISTS)):
        return value
    return None
