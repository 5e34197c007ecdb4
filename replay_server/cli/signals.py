"""Ends a command at SIGTERM as at Ctrl-C: what it holds is given back, and its exit status tells which it was.

`serve` and `generate` handle both signals themselves: they finish their work and end with status 0.
"""

from __future__ import annotations

import signal
from types import FrameType

INTERRUPTED = 128 + signal.SIGINT
TERMINATED = 128 + signal.SIGTERM


class Terminated(KeyboardInterrupt):
    """SIGTERM. A KeyboardInterrupt, so that everything that cleans up after Ctrl-C cleans up after it too."""


def raise_on_sigterm() -> None:
    signal.signal(signal.SIGTERM, _raise)


def ignore_signals() -> None:
    """For the last moments of the process, in which an exception could only become a traceback."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)


def status_of(interrupt: BaseException | None) -> int:
    return TERMINATED if isinstance(interrupt, Terminated) else INTERRUPTED


def _raise(number: int, frame: FrameType | None) -> None:
    raise Terminated
