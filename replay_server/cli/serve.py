"""`replay serve`: the server as a process."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
from pathlib import Path
from typing import Annotated

import typer

from replay_server.cli.logs import LogFormat, LogFormatOption, log_to_stderr
from replay_server.cli.output import fail, misuse
from replay_server.cli.tracing import set_up_tracing


def serve(
    config: Annotated[Path | None, typer.Option("--config", "-c", help="TOML file; see docs.")] = None,
    address: Annotated[
        str | None, typer.Option("--address", help="host:port; overrides the file. Port 0: a free one.")
    ] = None,
    metrics_address: Annotated[
        str | None, typer.Option("--metrics-address", help="host:port of the Prometheus endpoint; overrides the file.")
    ] = None,
    restore: Annotated[
        str | None,
        typer.Option(
            "--restore", help="Begin with this checkpoint, or `latest`; with the newest whole one if it is not."
        ),
    ] = None,
    replace: Annotated[
        bool, typer.Option("--replace", help="With --restore: put aside what data_dir holds, instead of failing.")
    ] = False,
    log_level: Annotated[str, typer.Option(help="debug, info, warning or error.")] = "info",
    log_format: LogFormatOption = LogFormat.TEXT,
) -> None:
    """Run the server until SIGTERM or Ctrl-C. Without --config: tables `rollouts` (a queue) and `replay` (its pool)."""
    from pydantic import ValidationError

    from replay_server.config import DEFAULT_TABLES, Config, ServerSection
    from replay_server.server import ReplayServer
    from replay_server.tables.config import explain

    log_to_stderr(log_level, log_format)
    set_up_tracing("replay-server")
    try:
        loaded = Config(tables=DEFAULT_TABLES) if config is None else Config.load(config)
        given = {"address": address, "metrics_address": metrics_address}
        if given := {name: value for name, value in given.items() if value is not None}:
            section = ServerSection.model_validate(loaded.server.model_dump() | given)
            loaded = loaded.model_copy(update={"server": section})
        server = ReplayServer.from_config(loaded, os.environ)
        if restore is not None:
            server.restore(restore, replace=replace)
        elif replace:
            misuse("--replace goes with --restore")
        # Each connection takes a file descriptor; the soft limit is often 1024.
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))

        def tell() -> None:
            print(f"listening on {server.address}", flush=True)
            if server.metrics_address is not None:
                print(f"metrics at http://{server.metrics_address}/metrics", flush=True)

        async def run() -> None:
            loop = asyncio.get_running_loop()
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.add_signal_handler(number, server.request_stop)
            await server.run(tell)

        asyncio.run(run())
    except ValidationError as error:
        fail(explain(error))
    except (ValueError, OSError) as error:
        fail(error)
