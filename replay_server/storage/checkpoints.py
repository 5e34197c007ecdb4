"""Checkpoints: a directory of checkpoints (list, verify, open, prune), and the seal at the end of each file.

A checkpoint is the LMDB file of a server (lmdb.py) with a seal behind its pages:

    pages       LMDB reads as many as its roots say, and ignores the bytes behind them
    seal        format, checksum of all pages, and a summary; with a checksum of its own
    end         the number of bytes of the seal, and _MARK

`list` reads only the seals. LMDB may crash on a damaged page. Therefore LMDB opens a file only after the checksum has
shown that all bytes of the pages are as they were written.
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
"""The suffix of the folder in which a checkpoint is made, after SUFFIX."""
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]{0,99}\Z")
_OWN_NAME = re.compile(r"auto-\d{8}T\d{6}\.\d{3}Z\Z")
"""The names that the server chooses itself (`own_name`)."""
_END = struct.Struct("<Q8s")
"""The layout of the end of a file: the number of bytes of the seal, and a mark."""
_MARK = b"sealed\0\0"
_OLD_MARK = b"complete"
"""The mark of versions whose checkpoints were no LMDB files."""
_BLOCK = 1 << 20
"""Bytes that are read at once."""


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
    """The folder with the checkpoints of a server."""

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
        """Makes the folder. Raises ValueError if nothing can be written there, so that a server fails at its start.

        Looks only at permissions, and writes no file as a test. On a full disk a server must be able to start, although
        its checkpoints then fail.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(f"[checkpoints] dir {self.path} cannot be written: {error.strerror}") from error
        if not os.access(self.path, os.W_OK | os.X_OK):
            raise ValueError(f"[checkpoints] dir {self.path} cannot be written: Permission denied")

    def list(self) -> list[Checkpoint]:
        """All checkpoints, the newest first. Reads only their last bytes."""
        summaries = [_look(path, sealed) for path in self.path.glob(f"*{SUFFIX}")]
        checkpoints = [summary for summary in summaries if summary is not None]
        return sorted(checkpoints, key=lambda checkpoint: checkpoint.created, reverse=True)

    def verify(self, name: str) -> Checkpoint | None:
        """Reads every byte of a checkpoint. Returns None if it is gone."""
        return _look(self.file(name), verified)

    def open(self, name: str) -> Checkpoint:
        """The checkpoint `name`; for the name "latest", the newest checkpoint. Reads every byte of it.

        If that checkpoint is damaged, returns the newest whole checkpoint. Raises ValueError if no checkpoint is whole,
        or if there is no checkpoint `name`.
        """
        candidates = [entry.name for entry in self.list()]  # in the order in which to try them
        if name != "latest":
            if name not in candidates:
                known = ", ".join(candidates) or "none"
                raise ValueError(f"no checkpoint {name!r} in {self.path}; there are: {known}")
            candidates.remove(name)
            candidates.insert(0, name)
        first_problem = ""  # of the first damaged candidate, for the error
        for candidate in candidates:
            checkpoint = self.verify(candidate)
            if checkpoint is None:  # removed meanwhile
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
        """Removes old checkpoints, among those that the server named: all whole ones except the newest `keep`.

        Also removes the folders of such checkpoints that were begun and never finished. Damaged checkpoints stay.
        """
        for partial in self.path.glob(f"auto-*{SUFFIX}{PARTIAL}"):  # a client may have chosen a name with auto-, too
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
    """Adds the seal to a new LMDB file, `partial`, syncs the file to the disk, and renames it to `path`."""
    # `subdir=False`: the path is of the file itself, and not of a directory. `lock=False`: nobody else has the file.
    file = LmdbFile(partial, subdir=False, readonly=True, lock=False)
    totals = file.totals()  # items, bytes and policy version, the last fields of Checkpoint
    file.close()
    size = partial.stat().st_size
    checksum = _checksum(partial, size)
    record = pack([FORMAT, size, checksum, created, *totals])  # the seal
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
    """The summary in the seal of a checkpoint of `size` bytes.

    `end` has the last SEAL_BYTES of the file, or all bytes of a smaller file. The file need not exist yet: `path` only
    goes into the summary. Raises DamagedCheckpoint.
    """
    if len(end) < _END.size:
        raise DamagedCheckpoint("its end is missing")
    length, mark = _END.unpack(end[-_END.size :])  # `length`: the number of bytes of the seal
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
    if pages != size - _END.size - length:  # the seal and the end follow the bytes of the pages at once
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
    """The summary of the checkpoint at `path`, which `read` reads, or a summary with the problem if it is damaged.

    None if the checkpoint is gone, or if `path` is no regular file with the name of a checkpoint.
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
        while block := file.read(min(size, _BLOCK)):  # empty at the end of the file, or when `size` is 0
            checksum.update(block)
            size -= len(block)
    return checksum.intdigest()
