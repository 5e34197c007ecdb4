"""`replay serve`: the server as a process."""

from __future__ import annotations

import asyncio
import gc
import os
import resource
import signal
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from replay_server.cli.logs import LogFormat, LogFormatOption, log_to_stderr
from replay_server.cli.output import fail, misuse, say
from replay_server.cli.tracing import set_up_tracing

if TYPE_CHECKING:
    from replay_server.server import ReplayServer


def serve(
    config: Annotated[
        Path | None, typer.Option("--config", "-c", help="TOML file with the configuration of the server.")
    ] = None,
    address: Annotated[
        str | None,
        typer.Option("--address", help="host:port to listen on, instead of that of the file. Port 0: any free port."),
    ] = None,
    metrics_address: Annotated[
        str | None,
        typer.Option("--metrics-address", help="host:port of the Prometheus endpoint, instead of that of the file."),
    ] = None,
    restore: Annotated[
        str | None,
        typer.Option(
            "--restore",
            help="Restore this checkpoint at startup, or `latest`. A damaged one gives way to the newest whole one.",
        ),
    ] = None,
    replace: Annotated[
        bool, typer.Option("--replace", help="With --restore: move the contents of data_dir aside instead of failing.")
    ] = False,
    log_level: Annotated[str, typer.Option(help="Log from this level on: debug, info, warning or error.")] = "info",
    log_format: LogFormatOption = LogFormat.TEXT,
) -> None:
    """Run the server until SIGTERM or Ctrl-C. Without --config it has a queue `rollouts` and a pool `replay`."""
    from pydantic import ValidationError

    from replay_protos import event_loop
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
        gc.disable()  # until the server has started: a start with data makes as many objects as there are items
        event_loop.run(_run(server))
    except ValidationError as error:
        fail(explain(error))
    except (ValueError, OSError) as error:
        fail(error)


async def _run(server: ReplayServer) -> None:
    """Serves until SIGTERM or Ctrl-C; then the server drains and saves."""
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, server.request_stop)
    await server.run(partial(_announce, server))


def _announce(server: ReplayServer) -> None:
    """Programs wait for these lines: they mean that the addresses answer."""
    gc.freeze()  # the collector would walk through all that was loaded, three times
    gc.enable()
    say(f"listening on {server.address}")
    if server.metrics_address is not None:
        say(f"metrics at http://{server.metrics_address}/metrics")
