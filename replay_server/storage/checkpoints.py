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
from dataclasses import astuple, dataclass
from pathlib import Path

from xxhash import xxh3_64

from replay_server.errors import invalid
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
class Listed:
    """One file of the directory."""

    name: str
    created: float
    summary: Summary | None
    """None: the file is not a whole checkpoint."""
    problem: str = ""


@dataclass(frozen=True)
class OpenCheckpoint:
    """A checkpoint that has been verified as a whole."""

    path: Path
    summary: Summary
    size: int
    """Bytes of its LMDB file."""


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

    def list(self) -> list[Listed]:
        """All checkpoints, the newest first. Reads only their last bytes."""
        found = [self._look(path, summary_of) for path in self.path.glob(f"*{SUFFIX}")]
        return sorted(filter(None, found), key=lambda entry: entry.created, reverse=True)

    def verify(self, name: str) -> Listed | None:
        """Reads every byte of a checkpoint; None: it is gone."""
        return self._look(self.file(name), lambda path: verified(path).summary)

    def _look(self, path: Path, read: Callable[[Path], Summary]) -> Listed | None:
        name = path.name.removesuffix(SUFFIX)
        try:
            status = path.stat()
            if not _NAME.match(name) or not stat.S_ISREG(status.st_mode):
                return None
            summary = read(path)
        except FileNotFoundError:
            return None  # removed meanwhile
        except (DamagedCheckpoint, OSError) as error:
            return Listed(name, status.st_mtime, None, str(error))
        return Listed(name, summary.created, summary)

    def open(self, name: str) -> OpenCheckpoint:
        """The checkpoint `name`, or "latest", or the newest whole one if that is damaged. Raises ValueError."""
        order = [entry.name for entry in self.list()]
        if name != "latest":
            if not _NAME.match(name) or name not in order:
                raise ValueError(f"no checkpoint {name!r} in {self.path}; there are: {', '.join(order) or 'none'}")
            order = [name, *(other for other in order if other != name)]
        problem = ""
        for other in order:
            path = self.path / (other + SUFFIX)
            try:
                checkpoint = verified(path)
            except (DamagedCheckpoint, OSError) as error:
                log.error("checkpoint %s cannot be restored: %s", path, error)
                problem = problem or f": {other} {error}"
                continue
            if other != order[0]:
                log.warning("falling back to checkpoint %s, the newest that is whole", other)
            return checkpoint
        raise ValueError(f"no checkpoint that can be restored in {self.path}{problem}")

    def prune(self, keep: int) -> None:
        """Removes all but the newest `keep` of the checkpoints that a server named, and their unfinished files."""
        for partial in self.path.glob(f"auto-*{SUFFIX}{PARTIAL}"):
            if _OWN_NAME.match(partial.name.removesuffix(SUFFIX + PARTIAL)):
                shutil.rmtree(partial, ignore_errors=True)
        own = [entry for entry in self.list() if _OWN_NAME.match(entry.name) and entry.summary is not None]
        for entry in own[keep:]:
            self.file(entry.name).unlink(missing_ok=True)
            log.info("removed checkpoint %s: the last %d are kept", entry.name, keep)


def own_name(now: float) -> str:
    """The name that the server gives a checkpoint made at `now` (seconds since the epoch)."""
    return time.strftime("auto-%Y%m%dT%H%M%S", time.gmtime(now)) + f".{int(now * 1000) % 1000:03}Z"


class DamagedCheckpoint(ValueError):
    """A file that is not a whole checkpoint of this version, with the reason."""


@dataclass(frozen=True)
class Summary:
    """What the seal says of the contents."""

    name: str
    created: float
    """Seconds since the epoch."""
    items: int
    bytes: int
    """Of all payloads."""
    policy_version: int


def seal(path: Path, name: str, created: float) -> Summary:
    """Completes a file that this process wrote, and syncs it to the disk."""
    file = LmdbFile(path, subdir=False, readonly=True, lock=False)
    summary = Summary(name, created, *file.totals())
    file.close()
    size = path.stat().st_size
    record = pack([FORMAT, size, _checksum(path, size), *astuple(summary)])
    with path.open("ab") as end:
        end.write(record + _END.pack(len(record), _MARK))
        end.flush()
        os.fsync(end.fileno())
    return summary


def summary_of(path: Path) -> Summary:
    """What a checkpoint holds, by its last bytes only. Raises DamagedCheckpoint."""
    return _opened(path)[0].summary


def verified(path: Path) -> OpenCheckpoint:
    """A checkpoint of which every byte was read. Raises DamagedCheckpoint."""
    checkpoint, expected = _opened(path)
    if _checksum(path, checkpoint.size) != expected:
        raise DamagedCheckpoint("its bytes are not what was written")
    return checkpoint


def _opened(path: Path) -> tuple[OpenCheckpoint, int]:
    """A checkpoint of which only the seal was read, and the checksum of its pages."""
    size = path.stat().st_size
    with path.open("rb") as file:
        file.seek(max(0, size - _END.size))
        tail = file.read()
        length, mark = _END.unpack(tail) if len(tail) == _END.size else (0, b"")
        if mark == _MARK_OF_BEFORE:
            raise DamagedCheckpoint(of_another_version("of before 2026-11-25"))
        if mark != _MARK or length > size - _END.size:
            raise DamagedCheckpoint("its end is missing")
        file.seek(size - _END.size - length)
        try:
            version, pages, checksum, *summary = unpack(file.read(length))
        except Damaged:
            raise DamagedCheckpoint("its end is damaged") from None
    if version != FORMAT:
        raise DamagedCheckpoint(of_another_version(f"with format {version}"))
    if pages != size - _END.size - length:
        raise DamagedCheckpoint("its bytes are not what was written")
    return OpenCheckpoint(path, Summary(*summary), pages), checksum


def _checksum(path: Path, size: int) -> int:
    """Of the first `size` bytes of a file."""
    checksum = xxh3_64()
    with path.open("rb") as file:
        while size and (block := file.read(min(size, _BLOCK))):
            checksum.update(block)
            size -= len(block)
    return checksum.intdigest()
