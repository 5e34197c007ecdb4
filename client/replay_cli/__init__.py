"""The command `replay`: runs the server and the other processes of a run, and looks into tables.

Each topic of subcommands has a module or a package, which may import any part of the project except the adapters. A
command imports what it needs only when it runs.
"""

import os
import signal
from typing import Any

from replay_cli.quiet import quiet_libraries


def main() -> None:
    """The entry point. Never returns: it exits with the status of the command."""
    # Ctrl-C while the modules load must end the process with a status, and without a traceback. Python's handler would
    # raise KeyboardInterrupt, which an import may turn into another exception. So `_leave` ends the process at once,
    # which is possible because there is nothing to clean up yet.
    # A background job of a shell starts with SIGINT ignored, and must go on ignoring it while the modules load.
    has_default_handler = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if has_default_handler:
        signal.signal(signal.SIGINT, _leave)
    quiet_libraries()
    from replay_cli.app import run

    if has_default_handler:  # from here on, `run` handles the KeyboardInterrupt of Ctrl-C
        signal.signal(signal.SIGINT, signal.default_int_handler)
    run()


def _leave(*_: Any) -> None:
    """Ends the process at once with the status of Ctrl-C."""
    os.write(2, b"replay: interrupted\n")  # 2 is stderr
    os._exit(128 + signal.SIGINT)


__all__ = ["main"]
