"""Ends a command at SIGTERM as at Ctrl-C: what it holds is given back, and its exit status tells which it was.

`serve` and `generate` handle both signals themselves: they finish their work and end with status 0.
"""

from __future__ import annotations

import signal
import sys
import threading
from types import FrameType
from typing import Any

INTERRUPTED = 128 + signal.SIGINT
TERMINATED = 128 + signal.SIGTERM


_LATER = 0.05
"""Seconds until a signal is sent anew."""


class Interrupts:
    """Turns SIGTERM into a KeyboardInterrupt, and remembers which of the two signals ended the command."""

    def __init__(self) -> None:
        self.status = INTERRUPTED
        signal.signal(signal.SIGTERM, self._raise)
        sys.unraisablehook = self._raise_again

    def _raise(self, number: int, frame: FrameType | None) -> None:
        # click and typer keep no cause of an interrupt, so the status is remembered here.
        self.status = TERMINATED
        raise KeyboardInterrupt

    def _raise_again(self, unraisable: Any) -> None:
        """Sends a signal anew whose interrupt came in a destructor or a weak reference's callback.

        Python drops an exception there, and the command would go on as if there had been no signal.
        """
        if unraisable.exc_type is not KeyboardInterrupt:
            sys.__unraisablehook__(unraisable)
            return
        number = signal.SIGTERM if self.status == TERMINATED else signal.SIGINT
        main = threading.main_thread().ident
        # Later and from elsewhere: here Python would drop it again.
        again = threading.Timer(_LATER, lambda: signal.pthread_kill(main, number) if main is not None else None)
        again.daemon = True
        again.start()

    def ignore(self) -> None:
        """For the last moments of the process, in which an exception could only become a traceback."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
