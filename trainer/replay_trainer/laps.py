"""Laps: where the time of a step goes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any


class Laps:
    """Seconds spent in each part of a step, by name."""

    def __init__(self) -> None:
        self._last = time.perf_counter()
        self._seconds: dict[str, float] = {}

    def lap(self, name: str) -> None:
        """What passed since the last lap was spent on `name`."""
        now = time.perf_counter()
        self._seconds[name] = self._seconds.get(name, 0.0) + now - self._last
        self._last = now

    def timed(self, name: str, items: Iterator[Any]) -> Iterator[Any]:
        """`items`; a lap ends with each that came."""
        for item in items:
            self.lap(name)
            yield item

    def take(self) -> dict[str, float]:
        """All laps and their sum, "step"; and start afresh."""
        seconds, self._seconds = self._seconds, {}
        return {**seconds, "step": sum(seconds.values())}
