"""Host: the memory and disk that this process uses and has left. Linux only; elsewhere 0, which means unknown.

`MemoryGuard` says when too little memory is left for more items, before the system kills the server.
"""

from __future__ import annotations

import ctypes
import logging
import os
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from replay_protos.memory import give_back_idle

log = logging.getLogger("replay_server")

_CGROUP = Path("/sys/fs/cgroup")
_NO_LIMIT = 1 << 60
"""Version 1 of control groups gives a number above this if there is no limit."""


def resident_bytes() -> int:
    """Memory of this process that is in RAM."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0


@dataclass(frozen=True)
class Memory:
    """The memory of the machine, or of a control group that this process is in."""

    name: str
    limit: int
    available: int
    """Bytes left without swapping. The system's cache of files counts as left."""


def memories() -> list[Memory]:
    """Everything that bounds the memory of this process."""
    machine = _machine()
    found = [] if machine is None else [machine]
    for folder in _control_groups():
        found += _version_2(folder) or _version_1(folder)
    return found


def memory_available() -> int:
    """Bytes that the machine has left; of a container's control group, if that is less."""
    return min((memory.available for memory in memories()), default=0)


def disk_available(folder: Path) -> int:
    """Bytes that an unprivileged process may still write to the disk of `folder`."""
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return 0


def _machine() -> Memory | None:
    try:
        facts = _facts(Path("/proc/meminfo"))
        return Memory("the machine", 1024 * facts["MemTotal:"], 1024 * facts["MemAvailable:"])
    except (OSError, ValueError, KeyError):
        return None


@cache
def _control_groups() -> tuple[Path, ...]:
    """The folders of the control groups of this process that may bound its memory, versions 2 and 1."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return ()
    found: list[Path] = []
    for _, controllers, path in (line.split(":", 2) for line in lines):
        if controllers in ("", "memory"):
            root = _CGROUP / controllers
            folder = root / path.lstrip("/")
            found += [each for each in (folder, *folder.parents) if each.is_relative_to(root)]
    return tuple(found)


def _version_2(folder: Path) -> list[Memory]:
    try:
        limit, used = ((folder / name).read_text().strip() for name in ("memory.max", "memory.current"))
        if limit == "max":
            return []
        facts = _facts(folder / "memory.stat")
        return [_memory(folder, int(limit), int(used), facts["file"] - facts["shmem"])]
    except (OSError, ValueError, KeyError):
        return []


def _version_1(folder: Path) -> list[Memory]:
    try:
        limit, used = (int((folder / f"memory.{name}_in_bytes").read_text()) for name in ("limit", "usage"))
        if limit > _NO_LIMIT:
            return []
        facts = _facts(folder / "memory.stat")
        return [_memory(folder, limit, used, facts["total_cache"] - facts.get("total_shmem", 0))]
    except (OSError, ValueError, KeyError):
        return []


def _memory(folder: Path, limit: int, used: int, files: int) -> Memory:
    return Memory(f"control group {folder}", limit, max(0, limit - used + max(0, files)))


def _facts(path: Path) -> dict[str, int]:
    """A file with a name and a number on each line."""
    return {name: int(number) for name, number, *_ in (line.split() for line in path.read_text().splitlines())}


_MACHINE_RESERVE = 512 << 20
"""Bytes of the machine that stay free at most. Others use the machine too."""
_LOOK_EVERY = 0.05
_TRIM_EVERY = 1.0
"""Seconds between two looks, and between two requests to give freed memory back to the system."""
_SHARE_BETWEEN_LOOKS = 0.25
"""The guard looks again once the server has received this share of the room above the reserve. A fast client fills the
reserve of a small container within _LOOK_EVERY."""


class MemoryGuard:
    """Looks at the machine and at the control groups of the process. What is there is kept.

    Inserts are refused until items have left, or others have freed memory.
    """

    def __init__(
        self,
        share: float,
        release_copies: Callable[[], object] = lambda: None,
        look: Callable[[], Sequence[Memory]] = memories,
    ) -> None:
        """`share` of each memory may be in use; 1: all of it. `release_copies` drops what only copies hold."""
        self._share = share
        self._release_copies = release_copies
        self._look = look
        self._why: str | None = None
        self._looked_at = self._trimmed_at = -_TRIM_EVERY
        self._until_next_look = 0.0
        """Bytes that may still be received before the next look."""

    def why_full(self, received: int) -> str | None:
        """Why no more items can be kept; None: they can. `received`: bytes that have come into memory
        since the last question. If a caller names the same bytes twice, the guard only looks sooner."""
        now = time.monotonic()
        self._until_next_look -= received
        due = now - self._looked_at >= _LOOK_EVERY or (self._until_next_look < 0 and self._why is None)
        if self._share < 1 and due:
            self._looked_at, before = now, self._why
            self._why = self._find()
            if self._why and now - self._trimmed_at >= _TRIM_EVERY:
                self._trimmed_at = now
                self._release_copies()
                return_freed_memory()
                self._why = self._find()
            if bool(before) != bool(self._why):
                log.warning("%s", self._why or "there is memory again: inserts are accepted")
        return self._why

    def _find(self) -> str | None:
        self._until_next_look = float("inf")
        for memory in self._look():
            reserve = int(memory.limit * (1 - self._share))
            if memory.name == "the machine":
                reserve = min(reserve, _MACHINE_RESERVE)
            if memory.available < reserve:
                return (
                    f"{memory.name} has {memory.available} of {memory.limit} bytes of memory left, and {reserve} stay "
                    f"free ([limits] memory_share): give it more memory, or let tables evict with a lower max_bytes"
                )
            self._until_next_look = min(self._until_next_look, _SHARE_BETWEEN_LOOKS * (memory.available - reserve))
        return None


def return_freed_memory() -> None:
    """Without this the memory of items that have left waits for others, and the guard would stay as it is."""
    give_back_idle()
    if sys.platform == "linux":
        try:
            ctypes.CDLL(None).malloc_trim(0)
        except (OSError, AttributeError):  # not the GNU C library
            return
