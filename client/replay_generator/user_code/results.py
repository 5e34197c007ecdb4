"""Results: checks the numbers and names that users' code returns: rewards, metrics and priorities.

A metric becomes a column of its group. The name of the metric is sent to the server, and the numbers of the metric are
stored in float32. A result is checked as soon as users' code returns it. Otherwise a bad number would be found only
when the whole group is made.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping
from typing import Any

import msgpack
import numpy as np

from replay_client.columns import OFFSETS
from replay_client.rollout import MAX_VALUE
from replay_generator.user_code import calls as user_code

MOST_METRICS = 256
"""The most metrics of one rollout. A group has room for about a thousand columns, and other values need columns too."""
MOST_NAME = 200
"""The most bytes in UTF-8 of a name: the name of a metric, the name of a reward function, or the role of a turn. The
names of metrics and functions get a prefix and become names of columns, and the name of a column may have 256 bytes."""
LARGEST = float(np.finfo(np.float32).max)
"""The largest number of float32."""


def number_of(value: Any) -> float:
    """Converts a number of Python or NumPy, or a tensor with one element, to a float. Raises ValueError for any other
    value.

    The message begins with the value: the caller puts words such as "returned" before it.
    """
    # "biufc" are the kinds of NumPy's numbers: bool, int, unsigned int, float and complex. A number of Python and a
    # tensor have no kind. They get the kind "f", so that they pass the check of the kind.
    dtype = getattr(value, "dtype", None)
    kind = getattr(dtype, "kind", "f")
    # A number of NumPy and a tensor have a method `item`.
    may_be_number = isinstance(value, numbers.Number) or hasattr(value, "item")
    if kind not in "biufc" or not may_be_number:
        raise ValueError(f"{user_code.shown(value)}, which is no number")
    try:
        return float(user_code.call_here(float, value))
    except Exception as error:  # an object of the user may raise anything
        raise ValueError(f"{user_code.shown(value)}: {user_code.in_words(error)}") from error


def number_or_nan(value: Any) -> float:
    """Converts the value as `number_of` does. Returns NaN if the value is no number."""
    try:
        return number_of(value)
    except ValueError:
        return math.nan


def bounded(value: Any, largest: float = LARGEST) -> float:
    """Converts the value to a float from -largest to largest.

    Raises ValueError if that is impossible. The message has no subject: the caller puts the name of the value before
    it.
    """
    number = number_or_nan(value)
    is_bounded = abs(number) <= largest  # False for NaN
    if not is_bounded:
        raise ValueError(f"is {user_code.shown(value, 80)}: give a number from {-largest:g} to {largest:g}")
    return number


def check_name(name: Any, what: str) -> None:
    """Raises ValueError if the name cannot be part of the name of a column. `what`: a description of the name, for the
    message, such as "the name of a metric"."""
    if not isinstance(name, str):
        raise ValueError(f"{what} must be a text, not {user_code.shown(name, 80)}")
    # `isprintable` is False for a lone half of a surrogate pair, too. So `encode` below cannot fail.
    if not name.isprintable():
        raise ValueError(f"{what} must have printable characters only, not {name!a:.80}")
    size = len(name.encode())
    if not 0 < size <= MOST_NAME:
        raise ValueError(f"{what} must have 1 to {MOST_NAME} bytes, and {name!r:.80} has {size}")
    if name.endswith(OFFSETS):  # the suffix of columns that hold the offsets of ragged columns
        raise ValueError(f"{what} must not end with {OFFSETS!r}, as {name!r:.80} does")


def numbers_of(reward: Any, metrics: Any) -> tuple[float | None, dict[str, float]]:
    """Converts the reward and the metrics to floats. Returns the reward, and the metrics by name.

    A reward that is None stays None. A metric that is None is left out. Raises ValueError for a reward or metrics that
    no group can hold.
    """
    if reward is not None:
        try:
            reward = bounded(reward, largest=MAX_VALUE)  # MAX_VALUE: the largest reward that a group can hold
        except ValueError as error:
            raise ValueError(f"the reward {error}") from None
    if not isinstance(metrics, Mapping):
        raise ValueError(f"metrics must be numbers by name, not {user_code.shown(metrics, 80)}")
    if len(metrics) > MOST_METRICS:
        raise ValueError(f"there are {len(metrics)} metrics: give at most {MOST_METRICS}")
    numbers_by_name = {}
    for name, value in metrics.items():
        check_name(name, "the name of a metric")
        if value is None:
            continue
        try:
            numbers_by_name[name] = bounded(value)
        except ValueError as error:
            raise ValueError(f"the metric {name!r} {error}") from None
    return reward, numbers_by_name


def utf8(text: str) -> str:
    """Replaces each lone half of a surrogate pair in the text by an escape such as `\\ud800`. The text can then be sent
    and stored in UTF-8, which cannot hold such a half."""
    return text.encode(errors="backslashreplace").decode()


def encode_info(info: Mapping[str, Any]) -> bytes:
    """Encodes the `info` of a rollout with msgpack. Raises ValueError for an `info` that msgpack cannot hold."""
    plain = info
    if isinstance(info, Mapping):
        plain = dict(info)  # dict is the only mapping that msgpack can encode
    try:
        packed: bytes = msgpack.packb(plain)
        return packed
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(
            "Rollout.info is stored until its group is finished, and holds what msgpack cannot (it can None, "
            f"bool, int, float, str, bytes, list and dict): {error}"
        ) from error
