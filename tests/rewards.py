"""Binary rewards that an untrained model earns, with many groups all right or all wrong; one about half of the time."""

from collections.abc import Mapping
from typing import Any


def even_start(row: Mapping[str, Any], completion: str) -> float:
    return float(completion[:1] in set("02468acegikmoqsuwy"))


def is_long(row: Mapping[str, Any], completion: str) -> float:
    return float(len(completion) > 3)
