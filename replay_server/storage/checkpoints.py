"""Checkpoints: a directory of checkpoints (list, verify, open, prune), and the seal at the end of each file.

A checkpoint is the LMDB file of a server (lmdb.py) with a seal behind its pages:

    pages       of LMDB, which reads as many as their roots say
    seal        format, checksum of all pages, and a summary; with a checksum of its own
    end         bytes of the seal, MARK

`list` reads only the seals. Before LMDB opens a file, the checksum shows that all bytes of the pages are as they were
written. So LMDB, which may crash on a damaged page, never meets one.
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
_OLD_MARK = b"complete"
"""The mark of versions whose checkpoints were no LMDB files."""
_BLOCK = 1 << 20


@dataclass(frozen=True)
class Checkpoint:
    """The summary of a checkpoint, from the seal of its file."""

    path: Path
    created: float
    """Seconds since the epoch."""
    size: int = 0
    """Bytes of the LMDB file in it."""
    checksum: int = 0
    """The checksum of the bytes of the LMDB file."""
    items: int = 0
    bytes: int = 0
    """Bytes of all payloads."""
    policy_version: int = 0
    problem: str = ""
    """The reason why the checkpoint is not whole; "" if no damage was found in the bytes that were read."""

    @property
    def name(self) -> str:
        return self.path.name.removesuffix(SUFFIX)


class CheckpointDirectory:
    def __init__(self, path: Path) -> None:
        self.path = path

    def file(self, name: str) -> Path:
        """The path of the checkpoint `name`. Raises Refused if this is not a valid name."""
        if not _NAME.match(name):
            raise invalid(
                f"checkpoint name {name[:100]!r}: 1 to 100 letters, digits, '_', '-' and '.', and neither of the last "
                f"two at its beginning"
            )
        return self.path / (name + SUFFIX)

    def check_writable(self) -> None:
        """Makes the folder. Raises ValueError if nothing can be written there, so that a server fails at its start."""
        # Writes no file as a test: on a full disk a server must start all the same, although its checkpoints then fail.
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(f"[checkpoints] dir {self.path} cannot be written: {error.strerror}") from error
        if not os.access(self.path, os.W_OK | os.X_OK):
            raise ValueError(f"[checkpoints] dir {self.path} cannot be written: Permission denied")

    def list(self) -> list[Checkpoint]:
        """All checkpoints, the newest first. Reads only their last bytes."""
        found = [_look(path, sealed) for path in self.path.glob(f"*{SUFFIX}")]
        entries = [entry for entry in found if entry is not None]
        return sorted(entries, key=lambda entry: entry.created, reverse=True)

    def verify(self, name: str) -> Checkpoint | None:
        """Reads every byte of a checkpoint. Returns None if it is gone."""
        return _look(self.file(name), verified)

    def open(self, name: str) -> Checkpoint:
        """The checkpoint `name`; for the name "latest", the newest checkpoint.

        If that checkpoint is damaged: the newest whole checkpoint. Raises ValueError if there is none, or if there is
        no checkpoint `name`.
        """
        candidates = [entry.name for entry in self.list()]
        if name != "latest":
            if name not in candidates:
                known = ", ".join(candidates) or "none"
                raise ValueError(f"no checkpoint {name!r} in {self.path}; there are: {known}")
            candidates.remove(name)
            candidates.insert(0, name)
        first_problem = ""
        for candidate in candidates:
            checkpoint = self.verify(candidate)
            if checkpoint is None:
                continue
            if not checkpoint.problem:
                if candidate != candidates[0]:
                    log.warning("falling back to checkpoint %s, the newest that is whole", candidate)
                return checkpoint
            log.error("checkpoint %s cannot be restored: %s", checkpoint.path, checkpoint.problem)
            if not first_problem:
                first_problem = f": {candidate} {checkpoint.problem}"
        raise ValueError(f"no checkpoint that can be restored in {self.path}{first_problem}")

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
    seconds = time.strftime("auto-%Y%m%dT%H%M%S", time.gmtime(now))
    milliseconds = int(now * 1000) % 1000
    return f"{seconds}.{milliseconds:03}Z"


SEAL_BYTES = 4096
"""The most bytes that the seal takes at the end of a checkpoint."""


class DamagedCheckpoint(ValueError):
    """A file that is not a whole checkpoint of this version, with the reason."""


def seal(partial: Path, path: Path, created: float) -> Checkpoint:
    """Adds the seal to a file that this process wrote, syncs the file to the disk, and renames it to `path`."""
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
    """The summary of a checkpoint. Reads only its last bytes. Raises DamagedCheckpoint."""
    size = path.stat().st_size
    with path.open("rb") as file:
        file.seek(max(0, size - SEAL_BYTES))
        return sealed_by(file.read(), size, path)


def sealed_by(end: bytes, size: int, path: Path) -> Checkpoint:
    """The summary of a checkpoint of `size` bytes. `end` is its last SEAL_BYTES, or the whole of a smaller file.

    `path` is the present or future path of the file. Raises DamagedCheckpoint.
    """
    if len(end) < _END.size:
        raise DamagedCheckpoint("its end is missing")
    length, mark = _END.unpack(end[-_END.size :])
    if mark == _OLD_MARK:
        raise DamagedCheckpoint(of_another_version("a format of before 2026-11-25"))
    if mark != _MARK:
        raise DamagedCheckpoint("its end is missing")
    seal_end = len(end) - _END.size
    if length > seal_end:
        raise DamagedCheckpoint("its end is missing")
    try:
        version, pages, checksum, *rest = unpack(end[seal_end - length : seal_end])
    except Damaged:
        raise DamagedCheckpoint("its end is damaged") from None
    if version != FORMAT:
        raise DamagedCheckpoint(of_another_version(f"format {version}"))
    if pages != size - _END.size - length:
        raise DamagedCheckpoint("its bytes are not what was written")
    created, *totals = rest
    return Checkpoint(path, created, pages, checksum, *totals)


def verified(path: Path) -> Checkpoint:
    """The summary of a checkpoint after every byte was checked. Raises DamagedCheckpoint."""
    checkpoint = sealed(path)
    if _checksum(path, checkpoint.size) != checkpoint.checksum:
        raise DamagedCheckpoint("its bytes are not what was written")
    return checkpoint


def _look(path: Path, read: Callable[[Path], Checkpoint]) -> Checkpoint | None:
    """The summary of the checkpoint at `path`, with its problem if it is damaged.

    None if the checkpoint is gone, or if this is not a file of ours.
    """
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
    """The checksum of the first `size` bytes of a file, or of all bytes of a shorter file."""
    checksum = xxh3_64()
    with path.open("rb") as file:
        while block := file.read(min(size, _BLOCK)):
            checksum.update(block)
            size -= len(block)
    return checksum.intdigest()
