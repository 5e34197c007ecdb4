"""Checkpoints: a directory of them (list, verify, open, prune), and how their files end.

A checkpoint is the LMDB file of a server (lmdb.py) with a seal behind its pages:

    pages       of LMDB, which reads as many as their roots say
    seal        format, checksum of all pages, and a summary; with a checksum of its own
    end         bytes of the seal, MARK

A list reads seals alone. LMDB opens a file only after all bytes of its pages were found as they were written. Then it
cannot meet a damaged page, and no child process has to try.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import stat
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from xxhash import xxh3_64

from replay_server.errors import invalid
from replay_server.storage.data_dir import sync_directory
from replay_server.storage.lmdb import LmdbFile
from replay_server.storage.records import FORMAT, Damaged, of_another_version, pack, unpack

log = logging.getLogger("replay_server")

SUFFIX = ".checkpoint"
PARTIAL = ".partial"
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]{0,99}\Z")
_OWN_NAME = re.compile(r"auto-\d{8}T\d{6}\.\d{3}Z\Z")
_END = struct.Struct("<Q8s")
_MARK = b"sealed\0\0"
_MARK_OF_BEFORE = b"complete"
"""Of versions whose checkpoints were no LMDB files."""
_BLOCK = 1 << 20


@dataclass(frozen=True)
class Checkpoint:
    """What the seal of a file says."""

    path: Path
    created: float
    """Seconds since the epoch."""
    size: int = 0
    """Bytes of its LMDB file."""
    checksum: int = 0
    """Of those bytes."""
    items: int = 0
    bytes: int = 0
    """Of all payloads."""
    policy_version: int = 0
    problem: str = ""
    """Why it is not whole; "": it is, as far as was read."""

    @property
    def name(self) -> str:
        return self.path.name.removesuffix(SUFFIX)


class CheckpointDirectory:
    def __init__(self, path: Path) -> None:
        self.path = path

    def file(self, name: str) -> Path:
        """Raises Refused for what is not the name of a checkpoint."""
        if not _NAME.match(name):
            raise invalid(
                f"checkpoint name {name[:100]!r}: 1 to 100 letters, digits, '_', '-' and '.', and neither of the last "
                f"two at its beginning"
            )
        return self.path / (name + SUFFIX)

    def check_writable(self) -> None:
        """Makes the folder. Raises ValueError if nothing can be written there: a server says so at its start."""
        # It writes no file to try: on a full disk a server must still start, and say so when it is asked for one.
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(f"[checkpoints] dir {self.path} cannot be written: {error.strerror}") from error
        if not os.access(self.path, os.W_OK | os.X_OK):
            raise ValueError(f"[checkpoints] dir {self.path} cannot be written: Permission denied")

    def list(self) -> list[Checkpoint]:
        """All checkpoints, the newest first. Reads only their last bytes."""
        found = [_look(path, sealed) for path in self.path.glob(f"*{SUFFIX}")]
        return sorted(filter(None, found), key=lambda entry: entry.created, reverse=True)

    def verify(self, name: str) -> Checkpoint | None:
        """Reads every byte of a checkpoint; None: it is gone."""
        return _look(self.file(name), verified)

    def open(self, name: str) -> Checkpoint:
        """The checkpoint `name`, or "latest", or the newest whole one if that is damaged. Raises ValueError."""
        order = [entry.name for entry in self.list()]
        if name != "latest":
            if name not in order:
                raise ValueError(f"no checkpoint {name!r} in {self.path}; there are: {', '.join(order) or 'none'}")
            order = [name, *(other for other in order if other != name)]
        problem = ""
        for other in order:
            if (found := self.verify(other)) is None:
                continue
            if not found.problem:
                if other != order[0]:
                    log.warning("falling back to checkpoint %s, the newest that is whole", other)
                return found
            log.error("checkpoint %s cannot be restored: %s", found.path, found.problem)
            problem = problem or f": {other} {found.problem}"
        raise ValueError(f"no checkpoint that can be restored in {self.path}{problem}")

    def prune(self, keep: int) -> None:
        """Removes all but the newest `keep` of the checkpoints that a server named, and their unfinished files."""
        for partial in self.path.glob(f"auto-*{SUFFIX}{PARTIAL}"):
            if _OWN_NAME.match(partial.name.removesuffix(SUFFIX + PARTIAL)):
                shutil.rmtree(partial, ignore_errors=True)
        own = [entry for entry in self.list() if _OWN_NAME.match(entry.name) and not entry.problem]
        for entry in own[keep:]:
            self.file(entry.name).unlink(missing_ok=True)
            log.info("removed checkpoint %s: the last %d are kept", entry.name, keep)


def own_name(now: float) -> str:
    """The name that the server gives a checkpoint made at `now` (seconds since the epoch)."""
    return time.strftime("auto-%Y%m%dT%H%M%S", time.gmtime(now)) + f".{int(now * 1000) % 1000:03}Z"


SEAL_BYTES = 4096
"""Bytes at the end of a checkpoint that its seal fits into."""


class DamagedCheckpoint(ValueError):
    """A file that is not a whole checkpoint of this version, with the reason."""


def seal(partial: Path, path: Path, created: float) -> Checkpoint:
    """Completes a file that this process wrote, syncs it to the disk, and gives it its name."""
    file = LmdbFile(partial, subdir=False, readonly=True, lock=False)
    totals = file.totals()
    file.close()
    size = partial.stat().st_size
    checksum = _checksum(partial, size)
    record = pack([FORMAT, size, checksum, created, *totals])
    with partial.open("ab") as end:
        end.write(record + _END.pack(len(record), _MARK))
        end.flush()
        os.fsync(end.fileno())
    partial.rename(path)
    sync_directory(path.parent)
    return Checkpoint(path, created, size, checksum, *totals)


def sealed(path: Path) -> Checkpoint:
    """What a checkpoint holds, by its last bytes only. Raises DamagedCheckpoint."""
    size = path.stat().st_size
    with path.open("rb") as file:
        file.seek(max(0, size - SEAL_BYTES))
        return sealed_by(file.read(), size, path)


def sealed_by(end: bytes, size: int, path: Path) -> Checkpoint:
    """What a checkpoint of `size` bytes holds, by the last SEAL_BYTES of them, or all. `path`: where it is, or will be.

    Raises DamagedCheckpoint.
    """
    tail = end[-_END.size :]
    length, mark = _END.unpack(tail) if len(tail) == _END.size else (0, b"")
    if mark == _MARK_OF_BEFORE:
        raise DamagedCheckpoint(of_another_version("a format of before 2026-11-25"))
    if mark != _MARK or length > len(end) - _END.size:
        raise DamagedCheckpoint("its end is missing")
    try:
        version, pages, checksum, *rest = unpack(end[len(end) - _END.size - length : len(end) - _END.size])
    except Damaged:
        raise DamagedCheckpoint("its end is damaged") from None
    if version != FORMAT:
        raise DamagedCheckpoint(of_another_version(f"format {version}"))
    if pages != size - _END.size - length:
        raise DamagedCheckpoint("its bytes are not what was written")
    created, *totals = rest
    return Checkpoint(path, created, pages, checksum, *totals)


def verified(path: Path) -> Checkpoint:
    """A checkpoint of which every byte was read. Raises DamagedCheckpoint."""
    checkpoint = sealed(path)
    if _checksum(path, checkpoint.size) != checkpoint.checksum:
        raise DamagedCheckpoint("its bytes are not what was written")
    return checkpoint


def _look(path: Path, read: Callable[[Path], Checkpoint]) -> Checkpoint | None:
    """None: it is gone, or no file of ours."""
    try:
        status = path.stat()
        if not _NAME.match(path.name.removesuffix(SUFFIX)) or not stat.S_ISREG(status.st_mode):
            return None
        return read(path)
    except FileNotFoundError:
        return None
    except (DamagedCheckpoint, OSError) as error:
        return Checkpoint(path, status.st_mtime, problem=str(error))


def _checksum(path: Path, size: int) -> int:
    """Of the first `size` bytes of a file."""
    checksum = xxh3_64()
    with path.open("rb") as file:
        while size and (block := file.read(min(size, _BLOCK))):
            checksum.update(block)
            size -= len(block)
    return checksum.intdigest()
