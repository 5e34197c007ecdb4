"""Host: the memory and disk that this process uses and has left. Linux only; elsewhere 0, which means unknown."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")


def resident_bytes() -> int:
    """Memory of this process that is in RAM."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0


def memory_available() -> int:
    """Bytes that the machine has left without swapping; of a container's control group (v2), if that is less."""
    amounts = [amount for amount in (_machine_available(), _cgroup_available()) if amount is not None]
    return min(amounts, default=0)


def disk_available(folder: Path) -> int:
    """Bytes that an unprivileged process may still write to the disk of `folder`."""
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return 0


def _machine_available() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    except (OSError, ValueError, StopIteration):
        return None


def _cgroup_available() -> int | None:
    try:
        most, used = ((_CGROUP / name).read_text().strip() for name in ("memory.max", "memory.current"))
        return None if most == "max" else max(0, int(most) - int(used))
    except (OSError, ValueError):
        return None
