"""The command `replay`: runs the server and the other processes of a run, and looks into tables.

One subcommand a file. This is the one package that may import the server, the client and the trainer. Each command
imports what it needs when it runs.
"""

import os
import signal
from typing import Any

from replay_cli.quiet import quiet_libraries


def main() -> None:
    """The entry point. Never returns: it exits with the status of the command."""
    # Ctrl-C while the modules load must end with a status too, and not with a traceback. Nothing is there to clean up,
    # and an exception in the middle of an import could become another one.
    handled = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # not if a shell ignores it for a job
    if handled:
        signal.signal(signal.SIGINT, _leave)
    quiet_libraries()
    from replay_cli.app import run

    if handled:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    run()


def _leave(*_: Any) -> None:
    os.write(2, b"replay: interrupted\n")
    os._exit(128 + signal.SIGINT)


__all__ = ["main"]
