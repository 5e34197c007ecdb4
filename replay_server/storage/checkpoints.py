"""Checkpoints: lists, verifies, opens and prunes the checkpoints in a directory, and writes the seal of each file.

A checkpoint is a file with three parts:

    pages       a whole LMDB file of a server (lmdb.py); LMDB ignores the bytes that follow its pages
    seal        format, checksum of all pages, and a summary; the seal has a checksum of its own
    end         the number of bytes of the seal, and _MARK

`CheckpointDirectory.list` reads only the seals. LMDB may crash on a damaged page. So the server lets LMDB open a
checkpoint only after the checksum has shown that all bytes of the pages are as they were written.
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
"""The folder in which a checkpoint is made has the name of the checkpoint, SUFFIX, and then this suffix."""
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]{0,99}\Z")
_OWN_NAME = re.compile(r"auto-\d{8}T\d{6}\.\d{3}Z\Z")
"""The names that the server chooses itself (`own_name`)."""
_END = struct.Struct("<Q8s")
"""The layout of the end of a checkpoint: the number of bytes of the seal, and a mark."""
_MARK = b"sealed\0\0"
_OLD_MARK = b"complete"
"""The mark in checkpoints of older versions of the server, which were no LMDB files."""
_BLOCK_BYTES = 1 << 20
"""The bytes that `_checksum` reads at once."""


@dataclass(frozen=True)
class Checkpoint:
    """The summary of a checkpoint, from the seal of its file."""

    path: Path
    created: float
    """Seconds since the epoch."""
    size: int = 0
    """Bytes of the pages, which are the LMDB file in the checkpoint."""
    checksum: int = 0
    """The checksum of the pages."""
    items: int = 0
    bytes: int = 0
    """Bytes of all payloads."""
    policy_version: int = 0
    problem: str = ""
    """What is wrong with the checkpoint; "" if the bytes that were read are not damaged."""

    @property
    def name(self) -> str:
        return self.path.name.removesuffix(SUFFIX)


class CheckpointDirectory:
    """The folder with the checkpoints of a server."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def file(self, name: str) -> Path:
        """The path of the checkpoint `name`. Raises Refused if `name` is not a valid name."""
        if not _NAME.match(name):
            raise invalid(
                f"checkpoint name {name[:100]!r}: 1 to 100 letters, digits, '_', '-' and '.', and neither of the last "
                f"two at its beginning"
            )
        return self.path / (name + SUFFIX)

    def check_writable(self) -> None:
        """Makes the folder. Raises ValueError if nothing can be written there, so that a server fails at its start.

        Looks only at permissions, and writes no file as a test, because a server must be able to start on a full disk,
        although its checkpoints then fail.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(f"[checkpoints] dir {self.path} cannot be written: {error.strerror}") from error
        if not os.access(self.path, os.W_OK | os.X_OK):
            raise ValueError(f"[checkpoints] dir {self.path} cannot be written: Permission denied")

    def list(self) -> list[Checkpoint]:
        """Returns all checkpoints, the newest first. Reads only the last bytes of each file."""
        summaries = [_summary_or_problem(path, read=sealed) for path in self.path.glob(f"*{SUFFIX}")]
        checkpoints = [summary for summary in summaries if summary is not None]
        return sorted(checkpoints, key=lambda checkpoint: checkpoint.created, reverse=True)

    def verify(self, name: str) -> Checkpoint | None:
        """Reads every byte of a checkpoint. Returns its summary, with the problem if the checkpoint is damaged.

        Returns None if the checkpoint is gone.
        """
        return _summary_or_problem(self.file(name), read=verified)

    def open(self, name: str) -> Checkpoint:
        """Returns the checkpoint `name` or, if `name` is "latest", the newest checkpoint. Reads every byte of it.

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
        first_problem = ""  # the problem of the first damaged candidate, for the error
        for candidate in candidates:
            checkpoint = self.verify(candidate)
            if checkpoint is None:  # it was removed after `list` had found it
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
        """Removes old checkpoints whose names the server has chosen, and keeps the newest `keep` of them.

        Damaged checkpoints stay, and do not count among the newest. Also removes the folders in which checkpoints with
        such names were begun and never finished.
        """
        for folder in self.path.glob(f"auto-*{SUFFIX}{PARTIAL}"):
            name = folder.name.removesuffix(SUFFIX + PARTIAL)
            if _OWN_NAME.match(name):  # a client may also have chosen a name that begins with auto-
                shutil.rmtree(folder, ignore_errors=True)
        own_whole = [entry for entry in self.list() if _OWN_NAME.match(entry.name) and not entry.problem]
        for entry in own_whole[keep:]:
            self.file(entry.name).unlink(missing_ok=True)
            log.info("removed checkpoint %s: the last %d are kept", entry.name, keep)


def own_name(now: float) -> str:
    """The name that the server gives a checkpoint made at `now` (seconds since the epoch)."""
    seconds = time.strftime("auto-%Y%m%dT%H%M%S", time.gmtime(now))
    milliseconds = int(now * 1000) % 1000
    return f"{seconds}.{milliseconds:03}Z"


SEAL_BYTES = 4096
"""The most bytes that the seal and the end of a checkpoint take together."""


class DamagedCheckpoint(ValueError):
    """Raised for a file that is not a whole checkpoint of this version. The message says what is wrong with it."""


def seal(partial: Path, path: Path, created: float) -> Checkpoint:
    """Appends the seal and the end to `partial`, a new LMDB file, syncs the file to the disk, and renames it to `path`.

    Returns the summary of this new checkpoint. `created`: seconds since the epoch.
    """
    # `subdir=False`: the path names the file itself, not its folder. `lock=False`: no other process uses the file.
    lmdb_file = LmdbFile(partial, subdir=False, readonly=True, lock=False)
    totals = lmdb_file.totals()  # items, bytes and policy version, in the order of the fields of Checkpoint
    lmdb_file.close()
    size = partial.stat().st_size
    checksum = _checksum(partial, size)
    packed_seal = pack([FORMAT, size, checksum, created, *totals])
    with partial.open("ab") as file:
        file.write(packed_seal + _END.pack(len(packed_seal), _MARK))
        file.flush()
        os.fsync(file.fileno())
    partial.rename(path)
    sync_directory(path.parent)
    return Checkpoint(path, created, size, checksum, *totals)


def sealed(path: Path) -> Checkpoint:
    """Returns the summary in the seal of a checkpoint. Reads only the last bytes of the file, not the pages.

    Raises DamagedCheckpoint if there is no whole seal of this version.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        file.seek(max(0, size - SEAL_BYTES))
        return sealed_by(file.read(), size, path)


def sealed_by(end: bytes, size: int, path: Path) -> Checkpoint:
    """Returns the summary in the seal of a checkpoint, whose file has `size` bytes.

    `end` has the last SEAL_BYTES of the file, or all bytes of a smaller file. The file need not exist yet, because
    `path` is not read: it only goes into the summary. Raises DamagedCheckpoint if there is no whole seal of this
    version.
    """
    if len(end) < _END.size:
        raise DamagedCheckpoint("its end is missing")
    seal_size, mark = _END.unpack(end[-_END.size :])
    if mark == _OLD_MARK:
        raise DamagedCheckpoint(of_another_version("a format of before 2026-11-25"))
    if mark != _MARK:
        raise DamagedCheckpoint("its end is missing")
    seal_end = len(end) - _END.size
    seal_start = seal_end - seal_size
    if seal_start < 0:
        raise DamagedCheckpoint("its end is missing")
    try:
        version, pages_size, checksum, *rest = unpack(end[seal_start:seal_end])
    except Damaged:
        raise DamagedCheckpoint("its end is damaged") from None
    if version != FORMAT:
        raise DamagedCheckpoint(of_another_version(f"format {version}"))
    if pages_size + seal_size + _END.size != size:  # the three parts of a checkpoint are the whole file
        raise DamagedCheckpoint("its bytes are not what was written")
    created, *totals = rest
    return Checkpoint(path, created, pages_size, checksum, *totals)


def verified(path: Path) -> Checkpoint:
    """Checks every byte of a checkpoint, and returns its summary. Raises DamagedCheckpoint."""
    checkpoint = sealed(path)
    if _checksum(path, checkpoint.size) != checkpoint.checksum:
        raise DamagedCheckpoint("its bytes are not what was written")
    return checkpoint


def _summary_or_problem(path: Path, read: Callable[[Path], Checkpoint]) -> Checkpoint | None:
    """Returns the summary that `read` finds in the file at `path`. `read` is `sealed` or `verified`.

    If the checkpoint is damaged or cannot be read, returns a summary that says only when the file was written, and what
    the problem is. Returns None if the file is gone, if it has no name of a checkpoint, or if it is no regular file.
    """
    if not _NAME.match(path.name.removesuffix(SUFFIX)):
        return None
    written_at = 0.0  # unknown: the file cannot be looked at
    try:
        status = path.stat()
        written_at = status.st_mtime
        if not stat.S_ISREG(status.st_mode):
            return None
        return read(path)
    except FileNotFoundError:
        return None
    except (DamagedCheckpoint, OSError) as error:
        return Checkpoint(path, written_at, problem=str(error))


def _checksum(path: Path, size: int) -> int:
    """The checksum of the first `size` bytes of a file, or of all bytes of a shorter file."""
    checksum = xxh3_64()
    remaining = size
    with path.open("rb") as file:
        # `block` is empty when nothing remains to be read, and at the end of the file.
        while block := file.read(min(remaining, _BLOCK_BYTES)):
            checksum.update(block)
            remaining -= len(block)
    return checksum.intdigest()
