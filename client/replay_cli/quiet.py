"""Quiet: keeps lines of libraries off standard error that stand in front of one of ours with the same reason."""

from __future__ import annotations

import os
import sys

QUIETED: set[str] = set()
"""The variables that this process has set, and not the person: other processes do not inherit them."""


def quiet_libraries() -> None:
    """Set variables that the libraries read when they are imported. A variable that the person has set wins.

    Of connections that fail at a server only gRPC tells, so `serve` lets it. A progress bar is for a terminal.
    """
    quiet = {"HF_HUB_VERBOSITY": "error"}
    if "serve" not in sys.argv:
        quiet["GRPC_VERBOSITY"] = "NONE"
    if not sys.stderr.isatty():
        quiet["TQDM_DISABLE"] = "1"
    for name, value in quiet.items():
        if name not in os.environ:
            os.environ[name] = value
            QUIETED.add(name)
