"""Reads single keys from the terminal, without waiting for the end of a line."""

from __future__ import annotations

import os
import select
import sys
import termios
import tty
from types import TracebackType
from typing import Self


class Keyboard:
    """Keys as they are pressed. The end of the block restores the terminal, however the command ends."""

    def __enter__(self) -> Self:
        self._file = sys.stdin.fileno()
        self._before = termios.tcgetattr(self._file)
        tty.setcbreak(self._file)
        return self

    def read(self, seconds: float) -> str | list[str]:
        """Waits up to `seconds` for keys. Returns `[""]` if the terminal is gone."""
        ready, _, _ = select.select([self._file], [], [], seconds)
        if not ready:
            return ""
        try:
            return os.read(self._file, 64).decode(errors="replace") or [""]
        except OSError:
            return [""]

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        termios.tcsetattr(self._file, termios.TCSADRAIN, self._before)
