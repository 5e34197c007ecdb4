"""Requests: checks a caller's values, builds messages from them, and gives new items and requests their keys."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Iterator, Mapping
from operator import index
from typing import Any, SupportsIndex, TypeVar, cast

import numpy as np
import numpy.typing as npt
from google.protobuf.message import Message

from replay_client.errors import InvalidRequestError
from replay_protos import replay_pb2 as pb
from replay_protos.labels import TagValue, labels_of

M = TypeVar("M", bound=Message)

MOST_KEYS = 1_000_000
"""Keys in one request."""
FIRST_KEY, LAST_KEY = 1 << 62, (1 << 63) - 1
"""The smallest and the largest key of a KeySequence."""
_LONGEST = 80
"""The most characters of a value that an error shows."""


class KeySequence:
    """Keys that no other client chooses: 38 random bits and a counter of 24 bits. Not safe across a fork."""

    def __init__(self) -> None:
        self._keys: Iterator[int] = iter(())

    def __next__(self) -> int:
        key = next(self._keys, None)
        if key is None:
            start = FIRST_KEY | secrets.randbits(38) << 24
            self._keys = iter(range(start, start + (1 << 24)))
            key = next(self._keys)
        return key


def priorities_message(
    table: str, keys: npt.NDArray[np.uint64], priorities: npt.NDArray[np.float64]
) -> pb.UpdatePrioritiesRequest:
    """Both arrays of shape (K,). Raises InvalidRequestError for too many keys, and for keys that are no integers."""
    if len(keys) > MOST_KEYS:
        raise InvalidRequestError(f"{len(keys)} keys in one request: send at most {MOST_KEYS} at a time")
    if (kind := np.asarray(keys).dtype).kind not in "ui":
        raise InvalidRequestError(f"keys of type {kind}: keys are integers, which {kind} would not keep exactly")
    return pb.UpdatePrioritiesRequest(
        table=table,
        keys=np.ascontiguousarray(keys, dtype="<u8").tobytes(),
        priorities=np.ascontiguousarray(priorities, dtype="<f8").tobytes(),
    )


def once(request: M) -> M:
    """Give the request an id. The server then answers a retry as it answered the first time, and changes nothing."""
    cast("Any", request).request = secrets.randbits(63) | 1
    return request


def tag_filters(tags: Mapping[str, TagValue] | None) -> list[pb.TagFilter]:
    """The tags that items must have. Raises InvalidRequestError for what no item can have."""
    try:
        return [pb.TagFilter(name=name, value=str(value)) for name, value in labels_of((), tags).pairs]
    except ValueError as error:
        raise InvalidRequestError(str(error)) from None


def message_of(kind: type[M], **fields: Any) -> M:
    """A message. Raises InvalidRequestError for a value of the wrong type or out of the range of its field."""
    try:
        return kind(**fields)
    except (TypeError, ValueError) as error:
        raise InvalidRequestError(_explain(kind, fields, error)) from error


def _explain(kind: type[Message], fields: Mapping[str, Any], error: Exception) -> str:
    for name, value in fields.items():
        try:
            kind(**{name: value})
        except (TypeError, ValueError) as its_own:
            return f"{name} {shortened(value)}: {its_own}"
    return str(error)


def column(name: str, values: Iterable[Any], dtype: type[np.generic]) -> npt.NDArray[Any]:
    """The values as an array (K,). Raises InvalidRequestError if one of them is no number of this type."""
    given = list(values)
    try:
        return np.fromiter(given, dtype=dtype, count=len(given))
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidRequestError(f"{name} {shortened(given)}: {error}") from error


def whole_number(name: str, value: SupportsIndex, bits: int) -> int:
    """The value as an int. Raises InvalidRequestError unless it is one from 0 to 2**bits - 1."""
    try:
        number = index(value)
    except TypeError:
        number = -1
    if not 0 <= number < 1 << bits:
        raise InvalidRequestError(f"{name} must be a whole number from 0 to 2**{bits} - 1, not {shortened(value)}")
    return number


def shortened(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
