"""MemoryGuard: says when too little memory is left for more items, before the system kills the server.

It looks at the machine and at the control groups of the process. What is there is kept. Inserts are refused until
items have left, or others have freed memory.
"""

from __future__ import annotations

import ctypes
import logging
import sys
import time
from collections.abc import Callable, Sequence

from replay_server.telemetry.host import Memory, memories

log = logging.getLogger("replay_server")

_MACHINE_RESERVE = 512 << 20
"""Bytes of the machine that stay free at most. Others use the machine too."""
_LOOK_EVERY = 0.05
_TRIM_EVERY = 1.0
"""Seconds between two looks, and between two requests to give freed memory back to the system."""


class MemoryGuard:
    def __init__(self, share: float, look: Callable[[], Sequence[Memory]] = memories) -> None:
        """`share` of each memory may be in use; 1: all of it."""
        self._share = share
        self._look = look
        self._why: str | None = None
        self._looked_at = self._trimmed_at = -_TRIM_EVERY

    def why_full(self) -> str | None:
        """Why no more items can be kept; None: they can. What has been received counts already."""
        now = time.monotonic()
        if self._share < 1 and now - self._looked_at >= _LOOK_EVERY:
            self._looked_at, before = now, self._why
            self._why = self._find()
            if self._why and now - self._trimmed_at >= _TRIM_EVERY:
                self._trimmed_at = now
                give_back_freed()
                self._why = self._find()
            if bool(before) != bool(self._why):
                log.warning("%s", self._why or "there is memory again: inserts are accepted")
        return self._why

    def _find(self) -> str | None:
        for memory in self._look():
            reserve = int(memory.limit * (1 - self._share))
            if memory.name == "the machine":
                reserve = min(reserve, _MACHINE_RESERVE)
            if memory.available < reserve:
                return (
                    f"{memory.name} has {memory.available} of {memory.limit} bytes of memory left, and {reserve} stay "
                    f"free ([limits] memory_share): give it more memory, or let tables evict with a lower max_bytes"
                )
        return None


def give_back_freed() -> None:
    """Without this the C library keeps the memory of items that have left, and the guard would stay as it is."""
    if sys.platform == "linux":
        try:
            ctypes.CDLL(None).malloc_trim(0)
        except (OSError, AttributeError):  # not the GNU C library
            return
