"""Quiets libraries that write to standard error, because their lines only repeat our own error messages."""

from __future__ import annotations

import os
import sys

QUIETED: set[str] = set()
"""The environment variables that were not set until `quiet_libraries` set them. The parts of a run do not inherit
them."""


def quiet_libraries() -> None:
    """Sets environment variables that libraries read at their import. A variable that is set already keeps its value.

    The command `serve` does not quiet gRPC, because only gRPC reports a failed connection of a client to the server.
    Progress bars are shown only if standard error is a terminal.
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
