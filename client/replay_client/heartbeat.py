"""Heartbeat: a file whose age says when a trainer or generator last made progress or waited on purpose.

Health checks of containers look at it. The environment variable REPLAY_HEARTBEAT names the file; without it, `beat`
does nothing. Who hangs does not beat, so `beat` belongs where work was completed, and not on a timer.
"""

from __future__ import annotations

import os
from pathlib import Path

VARIABLE = "REPLAY_HEARTBEAT"


def beat() -> None:
    """Give the file a new time of change. Raises ValueError if that is impossible."""
    if not (path := os.environ.get(VARIABLE)):
        return
    try:
        Path(path).touch()
    except OSError as error:
        raise ValueError(
            f"{VARIABLE}: cannot write {path}: {error.strerror}; name a file in a folder that is there"
        ) from error
