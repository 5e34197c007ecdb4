"""Host: the memory and disk that this process uses and has left. Linux only; elsewhere 0, which means unknown."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from functools import cache
from pathlib import Path

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
