"""FileWatch: notices that files of tokens or certificates have changed."""

from __future__ import annotations

import time
from pathlib import Path

SECONDS_PER_LOOK = 1.0
"""Seconds between two looks at the files."""


class FileWatch:
    def __init__(self, *files: Path | None) -> None:
        """Files that are None are left out."""
        self._files = [path for path in files if path is not None]
        self._times = self._modified()
        self._looked = float("-inf")

    def has_changed(self) -> bool:
        """Whether a file has changed since the last call that returned True. Looks at most once a second."""
        now = time.monotonic()
        if now - self._looked < SECONDS_PER_LOOK:
            return False
        self._looked = now
        before, self._times = self._times, self._modified()
        return self._times != before

    def _modified(self) -> list[int]:
        try:
            return [path.stat().st_mtime_ns for path in self._files]
        except OSError:
            return []  # a file is missing while it is being replaced
