"""Checkpoints: a directory of them: list, verify, open, prune."""

from __future__ import annotations

import logging
import os
import re
import stat
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from replay_server.errors import invalid
from replay_server.storage.checkpoint_file import (
    Contents,
    DamagedCheckpoint,
    Summary,
    read_contents,
    read_payloads,
    summary_of,
)
from replay_server.storage.restore import no_garbage_collection, restore
from replay_server.tables.buffer import ReplayBuffer

log = logging.getLogger("replay_server")

SUFFIX = ".checkpoint"
PARTIAL = ".partial"
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]{0,99}\Z")
_OWN_NAME = re.compile(r"auto-\d{8}T\d{6}\.\d{3}Z\Z")


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
    """A checkpoint that has been verified."""

    path: Path
    contents: Contents

    def load(self, buffer: ReplayBuffer, write: Callable[[], None] = lambda: None) -> None:
        """Fills a new buffer; calls `write` after each portion of payloads."""
        with no_garbage_collection():
            for keys, payloads in read_payloads(self.path, self.contents.places):
                buffer.storage.put(keys, payloads)
                write()
            restore(buffer, self.contents.state)
        log.info("restored %d items from checkpoint %s", len(buffer.items), self.path)


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
        """All checkpoints, the newest first. Reads only their first and last bytes."""
        found = [self._look(path, summary_of) for path in self.path.glob(f"*{SUFFIX}")]
        return sorted(filter(None, found), key=lambda entry: entry.created, reverse=True)

    def verify(self, name: str) -> Listed | None:
        """Reads every byte of a checkpoint; None: it is gone."""
        return self._look(self.file(name), lambda path: read_contents(path).summary)

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
        for other in order:
            path = self.path / (other + SUFFIX)
            try:
                contents = read_contents(path)
            except (DamagedCheckpoint, OSError) as error:
                log.error("checkpoint %s is damaged: %s", path, error)
                continue
            if other != order[0]:
                log.warning("falling back to checkpoint %s, the newest that is whole", other)
            return OpenCheckpoint(path, contents)
        raise ValueError(f"no whole checkpoint in {self.path}")

    def prune(self, keep: int) -> None:
        """Removes all but the newest `keep` of the checkpoints that a server named, and their unfinished files."""
        for partial in self.path.glob(f"auto-*{SUFFIX}{PARTIAL}"):
            if _OWN_NAME.match(partial.name.removesuffix(SUFFIX + PARTIAL)):
                partial.unlink(missing_ok=True)
        own = [entry for entry in self.list() if _OWN_NAME.match(entry.name) and entry.summary is not None]
        for entry in own[keep:]:
            self.file(entry.name).unlink(missing_ok=True)
            log.info("removed checkpoint %s: the last %d are kept", entry.name, keep)


def own_name(now: float) -> str:
    """The name that the server gives a checkpoint made at `now` (seconds since the epoch)."""
    return time.strftime("auto-%Y%m%dT%H%M%S", time.gmtime(now)) + f".{int(now * 1000) % 1000:03}Z"
