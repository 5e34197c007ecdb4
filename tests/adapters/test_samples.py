"""SampleStore: what other programs may have written into a group makes no reader recurse without end."""

from __future__ import annotations

import dataclasses
import enum
from typing import Any

import msgpack
import numpy as np
import pytest

from replay_adapters.samples import PACKED, SampleStore


class Status(enum.Enum):
    """The reason why a sample ended."""

    COMPLETED = "completed"


@dataclasses.dataclass
class Sample:
    """A sample with the fields that SampleStore reads."""

    tokens: list[int]
    response_length: int
    rollout_log_probs: list[float]
    loss_mask: list[int]
    reward: float = 1.0
    remove_sample: bool = False
    status: Status = Status.COMPLETED
    more: Any = None


def nested(levels: int) -> Any:
    """Samples that lie this deep in each other. Each also has a status, which is an object."""
    sample = None
    for _ in range(levels):
        sample = Sample([1], 0, [], [], more=sample)
    return sample


def test_objects_that_lie_too_deep_in_each_other_are_refused() -> None:
    store = SampleStore(Sample)
    assert store.pack("samples", "more", nested(31))
    with pytest.raises(ValueError, match="samples have a more that cannot be stored"):
        store.pack("samples", "more", nested(33))


def test_a_group_with_values_that_lie_too_deep_in_each_other_is_of_another_program() -> None:
    store = SampleStore(Sample)
    group = store.group_of([Sample([1, 2], 1, [0.0], [1])], version=0)
    assert store.read(group) is not None
    value = msgpack.packb([])
    for _ in range(2000):
        value = msgpack.packb(msgpack.ExtType(3, value))
    packed = msgpack.unpackb(group.extras[PACKED].tobytes())
    packed["more"] = value
    deep = dataclasses.replace(group, extras={PACKED: np.frombuffer(msgpack.packb(packed), np.uint8)})
    assert store.read(deep) is None
