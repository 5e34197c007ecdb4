"""A binary reward that an untrained model earns about half of the time, with many groups all right or all wrong."""

from collections.abc import Mapping
from typing import Any


def even_start(row: Mapping[str, Any], completion: str) -> float:
    return float(completion[:1] in set("02468acegikmoqsuwy"))
