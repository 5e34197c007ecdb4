"""FolderLock: lets only one process at a time work in a folder."""

from __future__ import annotations

import fcntl
import os
import socket
from pathlib import Path
from typing import IO

_NAME = ".lock"
"""The name of the locked file in the folder."""


class FolderLock:
    """Locks a folder for this process, until `release` or the end of the process. A killed process leaves no lock."""

    def __init__(self, folder: Path, holder: str = "training run") -> None:
        """`holder`: the kind of program that works in the folder, for the message that the folder is in use."""
        self.folder = folder
        self._holder = holder
        self._file: IO[str] | None = None
        """The open file, while this process has the lock. The lock ends when the file is closed."""

    def acquire(self) -> str:
        """Makes the folder if it is missing, and locks it. Returns "" if this process has the lock now.

        If another process has the lock, returns the text of an error that names this process.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        file = (self.folder / _NAME).open("a+")  # "w" would erase the text of the process that has the lock
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:  # another process has the lock, and has written its id and host into the file
            file.seek(0)
            owner = file.read().strip() or "another process"
            file.close()
            return f"{self.folder} is in use by another {self._holder} ({owner}): stop it, or choose another folder"
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        file.flush()
        self._file = file
        return ""

    def release(self) -> None:
        """Ends the lock, if this process has it. The file stays, so that the next process can lock it."""
        if self._file is not None:
            self._file.close()
            self._file = None
