"""`replay archive run`: runs the archiver as a process beside a server."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from replay_cli.connection import ask, connect
from replay_cli.options import option, taking
from replay_cli.output import need, say
from replay_cli.process import LogFormat, LogLevel, log_to_stderr

_SETTINGS = (
    option("segment_bytes", "Finish a file after so many bytes of payloads.", int, 64 << 20, min=1),
    option("segment_seconds", "Finish a file after so many seconds.", float, 60.0, min=0.1),
    option("lease", "Seconds after which the items of a killed archiver come back.", float, 60.0, min=1.0),
    option("table", "Table of the copies, if the server has several.", default=""),
)


@taking(_SETTINGS)
def run_archiver(
    settings: dict[str, Any],
    context: typer.Context,
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Folder of the files. It is made if need be.")],
    log_level: LogLevel = "info",
    log_format: LogFormat = "text",
) -> None:
    """Write what a table copies (copy_to) into Parquet files, until SIGTERM or Ctrl-C.

    It has a low priority among the processes of its machine. Several may run.

    Example: replay archive run runs/archive --table archive
    """
    need("an archive", "parquet", "pyarrow")
    from replay_cli.archive.archiver import Archiver
    from replay_client.waits import StopSignals

    log_to_stderr(log_level, log_format)
    os.nice(19)  # every other process of the machine goes first
    signals = StopSignals()
    signals.begin()
    with connect(context, usual=30.0, named=True) as client:
        archiver = ask(lambda: Archiver(client, folder, say, **settings))
        say(f"archiving {client.address} into {folder}")
        ask(lambda: archiver.run(lambda: signals.count > 0))
        client.leave()
