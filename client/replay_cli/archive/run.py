"""`replay archive run`: a reader, as a process beside a server, that writes the archive."""

from __future__ import annotations

import signal
import threading
from pathlib import Path
from typing import Annotated

import typer

from replay_cli.connection import ask, connect
from replay_cli.output import fail, need, say
from replay_cli.process import LogFormat, LogFormatOption, log_to_stderr


def run_archiver(
    context: typer.Context,
    folder: Annotated[Path, typer.Option("--dir", help="Folder of the files. It is made if need be.")],
    segment_bytes: Annotated[int, typer.Option(min=1, help="Finish a file after so many bytes of payloads.")] = 64
    << 20,
    segment_seconds: Annotated[float, typer.Option(min=0.1, help="Finish a file after so many seconds.")] = 60.0,
    lease: Annotated[
        float, typer.Option(min=1.0, help="Seconds after which the items of a killed archiver come back.")
    ] = 60.0,
    table: Annotated[str, typer.Option(help="Table of the copies, if the server has several.")] = "",
    log_level: Annotated[str, typer.Option(help="Log from this level on: debug, info, warning or error.")] = "info",
    log_format: LogFormatOption = LogFormat.TEXT,
) -> None:
    """Write what a table copies (copy_to) into Parquet files, until SIGTERM or Ctrl-C.

    It has a low priority among the processes of its machine. Several may run.
    """
    need("an archive", "parquet", "pyarrow")
    from replay_cli.archive.archiver import Archiver, ArchiverConfig, be_modest

    log_to_stderr(log_level, log_format)
    be_modest()
    ended = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ended.set())
    config = ArchiverConfig(segment_bytes, segment_seconds, lease)
    with connect(context, 30.0, named=True) as client:
        archiver = ask(lambda: Archiver(client, folder, config, say, table))
        say(f"archiving {client.address} into {folder}")
        try:
            ask(lambda: archiver.run(ended.is_set))
            client.leave()
        except OSError as error:
            fail(error)
