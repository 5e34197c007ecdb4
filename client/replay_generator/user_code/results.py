"""Results: checks the numbers and names that users' code returns: rewards, metrics and priorities.

A metric becomes a column of its group. The name of the metric is sent to the server, and its numbers are stored in
float32. A result is checked as soon as users' code returns it. Otherwise a bad number would be found only when the
whole group is made.
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
"""The most bytes in UTF-8 of the name of a metric, of a reward function, and of a turn's role. The names of metrics and
functions become names of columns, with a prefix before them. The name of a column may have 256 bytes."""
LARGEST = float(np.finfo(np.float32).max)
"""The largest number of float32."""


def number_of(value: Any) -> float:
    """A number of Python or NumPy, or a tensor with one element, as a float. Raises ValueError for any other value.

    The message begins with the value: the caller puts the words before it, such as "returned".
    """
    # "biufc" are the kinds of NumPy's numbers: bool, int, unsigned int, float and complex. A number of Python and a
    # tensor have no kind: "f" lets them pass this check.
    kind = getattr(getattr(value, "dtype", None), "kind", "f")
    # Arrays and tensors of one element have a method `item`.
    may_be_number = isinstance(value, numbers.Number) or hasattr(value, "item")
    if kind not in "biufc" or not may_be_number:
        raise ValueError(f"{user_code.shown(value)}, which is no number")
    try:
        return float(user_code.call_here(float, value))
    except Exception as error:  # an object of the user may raise anything
        raise ValueError(f"{user_code.shown(value)}: {user_code.in_words(error)}") from error


def number_or_nan(value: Any) -> float:
    """The result of `number_of`, or NaN if the value is no number."""
    try:
        return number_of(value)
    except ValueError:
        return math.nan


def bounded(value: Any, largest: float = LARGEST) -> float:
    """The value as a number from -largest to largest.

    Raises ValueError for any other value. The message has no subject: the caller puts the name of the value before it.
    """
    number = number_or_nan(value)
    is_bounded = abs(number) <= largest  # False for NaN
    if not is_bounded:
        raise ValueError(f"is {user_code.shown(value, 80)}: give a number from {-largest:g} to {largest:g}")
    return number


def check_name(name: Any, what: str) -> None:
    """Raises ValueError for a name that cannot be part of the name of a column. `what`: a description of the name, for
    the message."""
    if not isinstance(name, str):
        raise ValueError(f"{what} must be a text, not {user_code.shown(name, 80)}")
    if not name.isprintable():  # half of a surrogate pair is not printable either, so `encode` below cannot fail
        raise ValueError(f"{what} must have printable characters only, not {name!a:.80}")
    size = len(name.encode())
    if not 0 < size <= MOST_NAME:
        raise ValueError(f"{what} must have 1 to {MOST_NAME} bytes, and {name!r:.80} has {size}")
    if name.endswith(OFFSETS):  # the names of offsets of ragged columns end so
        raise ValueError(f"{what} must not end with {OFFSETS!r}, as {name!r:.80} does")


def numbers_of(reward: Any, metrics: Any) -> tuple[float | None, dict[str, float]]:
    """The reward as a float (None: there is no reward), and the metrics as floats, by name. A metric that is None is
    left out.

    Raises ValueError for a reward or metrics that no group can hold.
    """
    if reward is not None:
        try:
            reward = bounded(reward, MAX_VALUE)  # the largest reward that a group can hold
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
    """The text with each half of a surrogate pair written as an escape, so that the text can be sent and stored."""
    return text.encode(errors="backslashreplace").decode()


def encode_info(info: Mapping[str, Any]) -> bytes:
    """The bytes of the `info` of a rollout. Raises ValueError for an `info` that msgpack cannot hold."""
    plain = info
    if isinstance(info, Mapping):
        plain = dict(info)  # of all mappings, msgpack knows only dict
    try:
        packed: bytes = msgpack.packb(plain)
        return packed
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(
            "Rollout.info is stored until its group is finished, and holds what msgpack cannot (it can None, "
            f"bool, int, float, str, bytes, list and dict): {error}"
        ) from error
