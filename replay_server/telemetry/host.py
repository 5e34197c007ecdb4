"""Host: the memory that this process uses, and the memory and disk that are left.

The memory is known on Linux only. On other systems it is 0, which means unknown.

`MemoryGuard` notices when too little memory is left for more items, before the system kills the server.
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
"""Bytes. In version 1 of control groups, a limit above this number means that there is no limit."""


def resident_bytes() -> int:
    """Bytes of the memory of this process that are in RAM; 0: unknown."""
    try:
        numbers = Path("/proc/self/statm").read_text().split()
        pages = int(numbers[1])  # the pages that are in RAM
        return pages * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0


@dataclass(frozen=True)
class Memory:
    """The memory of the machine, or of a control group that this process is in."""

    name: str
    """The subject of sentences about this memory: "the machine", or "control group FOLDER"."""
    limit: int
    """Bytes in all."""
    available: int
    """Bytes left without swapping. The system's cache of files counts as left."""


def memories() -> list[Memory]:
    """The memory of the machine, and of each control group that bounds this process. Empty if none is known."""
    machine = _machine_memory()
    known = [] if machine is None else [machine]
    for folder in _control_groups():
        # A group is of one version. The function of the other version returns an empty list.
        known += _group_of_version_2(folder) or _group_of_version_1(folder)
    return known


def memory_available() -> int:
    """Bytes that this process may still take: the fewest that the machine or a control group has left; 0: unknown."""
    return min((memory.available for memory in memories()), default=0)


def disk_available(folder: Path) -> int:
    """Bytes that an unprivileged process may still write to the disk of `folder`; 0: none, or unknown."""
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return 0


def _machine_memory() -> Memory | None:
    """The memory of the machine; None: unknown, as on other systems than Linux."""
    try:
        kibibytes = _numbers_in(Path("/proc/meminfo"))
        limit = 1024 * kibibytes["MemTotal:"]
        available = 1024 * kibibytes["MemAvailable:"]
        return Memory("the machine", limit, available)
    except (OSError, ValueError, KeyError):
        return None


@cache
def _control_groups() -> tuple[Path, ...]:
    """The folders of the control groups that may bound the memory of this process, of version 2 and of version 1."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return ()
    folders: list[Path] = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers in ("", "memory"):  # version 2 names no controllers
            root = _CGROUP / controllers
            group = root / path.lstrip("/")
            # The limit of a group also holds for all groups inside it, so the parents of a group bound it, too.
            folders += [folder for folder in (group, *group.parents) if folder.is_relative_to(root)]
    return tuple(folders)


def _group_of_version_2(folder: Path) -> list[Memory]:
    """The memory of a control group of version 2; empty: the group has no limit, or the folder is of version 1."""
    try:
        limit = (folder / "memory.max").read_text().strip()
        used = (folder / "memory.current").read_text().strip()
        if limit == "max":
            return []
        statistics = _numbers_in(folder / "memory.stat")
        # `file` includes shared memory, which is subtracted, because the system can drop only its cache of files.
        cached_files = statistics["file"] - statistics["shmem"]
        return [_group_memory(folder, int(limit), int(used), cached_files)]
    except (OSError, ValueError, KeyError):
        return []


def _group_of_version_1(folder: Path) -> list[Memory]:
    """The memory of a control group of version 1; empty: the group has no limit, or the folder is of version 2."""
    try:
        limit = int((folder / "memory.limit_in_bytes").read_text())
        used = int((folder / "memory.usage_in_bytes").read_text())
        if limit > _NO_LIMIT:
            return []
        statistics = _numbers_in(folder / "memory.stat")
        cached_files = statistics["total_cache"] - statistics.get("total_shmem", 0)
        return [_group_memory(folder, limit, used, cached_files)]
    except (OSError, ValueError, KeyError):
        return []


def _group_memory(folder: Path, limit: int, used: int, cached_files: int) -> Memory:
    """The memory of a control group, from numbers of bytes. `used` includes `cached_files`."""
    available = limit - used + max(0, cached_files)
    return Memory(f"control group {folder}", limit, max(0, available))


def _numbers_in(path: Path) -> dict[str, int]:
    """The numbers in a file that has a name and a number on each line, by name."""
    numbers: dict[str, int] = {}
    for line in path.read_text().splitlines():
        name, number, *_ = line.split()
        numbers[name] = int(number)
    return numbers


_MACHINE_RESERVE = 512 << 20
"""The most bytes that the guard keeps free of the machine's memory, whatever the share is."""
_LOOK_EVERY = 0.05
"""Seconds between two looks at the memory."""
_TRIM_EVERY = 1.0
"""Seconds between two attempts to make room, by dropping copies and returning freed memory to the system."""
_SHARE_BETWEEN_LOOKS = 0.25
"""Once the server has received this share of the bytes that were available above the reserve, the guard looks again
before _LOOK_EVERY is over. Otherwise a fast client could fill a small container between two looks."""


class MemoryGuard:
    """Watches the memory of the machine and of the control groups of this process.

    If too little is left, the guard refuses inserts until items have left, or other processes have freed memory. It
    removes no items itself.
    """

    def __init__(
        self,
        share: float,
        release_copies: Callable[[], object] = lambda: None,
        look: Callable[[], Sequence[Memory]] = memories,
    ) -> None:
        """`share` of each memory may be in use; 1: the guard does nothing.

        `release_copies` drops the items that only tables of copies hold. `look` measures the memories.
        """
        self._share = share
        self._release_copies = release_copies
        self._look = look
        self._why: str | None = None
        """The reason why no more items fit into memory, as of the last look."""
        self._looked_at = -_TRIM_EVERY
        """The time of the last look, by `time.monotonic`. The initial value makes the first call look at once."""
        self._trimmed_at = -_TRIM_EVERY
        """The time of the last attempt to make room."""
        self._until_next_look = 0.0
        """Bytes that may still be received before the next look."""

    def why_full(self, received: int) -> str | None:
        """The reason why no more items fit into memory; None if they fit.

        `received`: the number of bytes that have come into memory since the last call. To count the same bytes twice is
        harmless, because the guard only looks sooner.
        """
        now = time.monotonic()
        self._until_next_look -= received
        # While inserts are refused anyway, the guard looks only at its usual times.
        too_much_received = self._until_next_look < 0 and self._why is None
        is_due = now - self._looked_at >= _LOOK_EVERY or too_much_received
        if self._share < 1 and is_due:
            self._looked_at = now
            self._look_again(now)
        return self._why

    def _look_again(self, now: float) -> None:
        """Measures the memories, and sets the reason anew. If memory is short, makes room and measures once more.

        Logs the beginning and the end of a shortage.
        """
        before = self._why
        self._why = self._find_reason()
        if self._why is not None and now - self._trimmed_at >= _TRIM_EVERY:
            self._trimmed_at = now
            self._release_copies()
            return_freed_memory()
            self._why = self._find_reason()
        if before is None and self._why is not None:
            log.warning("%s", self._why)
        elif before is not None and self._why is None:
            log.warning("there is memory again: inserts are accepted")

    def _find_reason(self) -> str | None:
        """Measures the memories. Returns the reason why one of them is too full for more items; None: there is room.

        Also sets the number of bytes that may be received before the next look.
        """
        self._until_next_look = float("inf")  # no bound if no memory is known
        for memory in self._look():
            reserve = int(memory.limit * (1 - self._share))
            if memory.name == "the machine":  # a share of a large machine would be more than is needed
                reserve = min(reserve, _MACHINE_RESERVE)
            if memory.available < reserve:
                return (
                    f"{memory.name} has {memory.available} of {memory.limit} bytes of memory left, and {reserve} stay "
                    f"free ([limits] memory_share): give it more memory, or let tables evict with a lower max_bytes"
                )
            room = memory.available - reserve
            self._until_next_look = min(self._until_next_look, _SHARE_BETWEEN_LOOKS * room)
        return None


def return_freed_memory() -> None:
    """Returns to the system the memory that the process has freed.

    Otherwise malloc would keep the memory of removed items for later use, and the guard would see this memory as used.
    """
    give_back_idle()  # large blocks that `large_buffer` would reuse
    if sys.platform == "linux":
        try:
            ctypes.CDLL(None).malloc_trim(0)
        except (OSError, AttributeError):  # not the GNU C library
            return
