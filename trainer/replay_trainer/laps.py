"""Laps: how long each part of a step takes."""

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
        """Count the time since the last lap as time of `name`."""
        now = time.perf_counter()
        self._seconds[name] = self._seconds.get(name, 0.0) + now - self._last
        self._last = now

    def timed(self, name: str, items: Iterator[Any]) -> Iterator[Any]:
        """Yield `items`, and count the wait for each as time of `name`."""
        for item in items:
            self.lap(name)
            yield item

    def take(self) -> dict[str, float]:
        """All laps and their sum, "step"; then start again at zero."""
        seconds, self._seconds = self._seconds, {}
        return {**seconds, "step": sum(seconds.values())}
