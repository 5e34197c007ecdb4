"""Ends a command at SIGTERM as at Ctrl-C: what it holds is given back, and its exit status tells which it was.

`serve` and `generate` handle both signals themselves: they finish their work and end with status 0.
"""

from __future__ import annotations

import signal
from types import FrameType

INTERRUPTED = 128 + signal.SIGINT
TERMINATED = 128 + signal.SIGTERM


class Interrupts:
    """Turns SIGTERM into a KeyboardInterrupt, and remembers which of the two signals ended the command."""

    def __init__(self) -> None:
        self.status = INTERRUPTED
        signal.signal(signal.SIGTERM, self._raise)

    def _raise(self, number: int, frame: FrameType | None) -> None:
        # click and typer keep no cause of an interrupt, so the status is remembered here.
        self.status = TERMINATED
        raise KeyboardInterrupt

    def ignore(self) -> None:
        """For the last moments of the process, in which an exception could only become a traceback."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
