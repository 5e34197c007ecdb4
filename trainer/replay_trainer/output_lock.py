"""OutputLock: one training run at a time in an output_dir."""

from __future__ import annotations

import fcntl
import os
import socket
from pathlib import Path
from typing import IO

NAME = ".lock"


class OutputLock:
    """Holds a folder for this process, until `release` or the end of the process, however it ends."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._file: IO[str] | None = None

    def acquire(self) -> str:
        """Locks the folder, and makes it if it is missing. Returns why it is not free; empty: it is locked now."""
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / NAME
        while True:
            file = path.open("a+")
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                file.seek(0)
                holder = file.read().strip() or "another process"
                file.close()
                return (
                    f"{self.folder} is in use by another training run ({holder}): stop that one, or choose another "
                    f"output_dir"
                )
            # The run before may have removed the file between our open and our lock: then we hold nothing.
            if path.exists() and os.path.samestat(os.fstat(file.fileno()), path.stat()):
                break
            file.close()
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        file.flush()
        self._file = file
        return ""

    def release(self) -> None:
        if self._file is not None:
            (self.folder / NAME).unlink(missing_ok=True)
            self._file.close()
            self._file = None
