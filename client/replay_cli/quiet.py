"""Quiets libraries: they write lines to standard error that repeat the reason of an error of ours."""

from __future__ import annotations

import os
import sys

QUIETED: set[str] = set()
"""The variables that this process has set, and not the person. The parts of a run do not inherit them."""


def quiet_libraries() -> None:
    """Sets variables that the libraries read when they are imported. A variable that the person has set wins.

    `serve` does not quiet gRPC, because only gRPC reports failed connections to a server. Progress bars are for
    terminals.
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
