"""The command `replay`: runs the server and the other processes of a run, and looks into tables.

The one module here that may import the client, the trainer and the demo; each command imports what it needs when it runs.
"""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

if TYPE_CHECKING:
    from replay_client import ReplayClient

app = typer.Typer(
    help="A replay server for GRPO: rollout groups in rate-limited priority tables.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

Address = Annotated[str, typer.Option("--address", envvar="REPLAY_ADDRESS", help="host:port of the server.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]
Timeout = Annotated[float, typer.Option("--timeout", help="Seconds to wait for the server.")]


def main() -> None:
    """The entry point: one clear line and a non-zero status where something fails."""
    try:
        app()
    except KeyboardInterrupt:
        sys.exit(130)


def fail(message: object) -> NoReturn:
    print(f"replay: {message}", file=sys.stderr)
    raise typer.Exit(1)


# ---------------------------------------------------------------------------------------------------- server


@app.command()
def serve(
    config: Annotated[Path | None, typer.Option("--config", "-c", help="TOML file; see docs.")] = None,
    address: Annotated[str | None, typer.Option("--address", help="host:port; overrides the file. Port 0: a free one.")] = None,
    log_level: Annotated[str, typer.Option(help="debug, info, warning or error.")] = "info",
) -> None:
    """Run the server until SIGTERM or Ctrl-C. Without --config: tables `rollouts` (a queue) and `replay` (its pool)."""
    from replay_server.config import DEFAULT_TABLES, Config, ServerSection
    from replay_server.server import ReplayServer

    logging.basicConfig(level=log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        loaded = Config(tables=DEFAULT_TABLES) if config is None else Config.load(config)
        if address is not None:
            section = ServerSection.model_validate(loaded.server.model_dump() | {"address": address})
            loaded = loaded.model_copy(update={"server": section})
        server = ReplayServer.from_config(loaded)

        async def run() -> None:
            loop = asyncio.get_running_loop()
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.add_signal_handler(number, server.request_stop)
            await server.run(lambda: print(f"listening on {server.address}", flush=True))

        asyncio.run(run())
    except (ValueError, OSError) as error:
        fail(error)


# ---------------------------------------------------------------------------------------------------- looking


@app.command()
def tables(address: Address = "127.0.0.1:7400", as_json: AsJson = False, timeout: Timeout = 5.0) -> None:
    """All tables at a glance: size, rates, staleness, and who waits for what."""
    from google.protobuf.json_format import MessageToDict

    with connect(address, timeout) as client:
        info = ask(client.server_info)
    if as_json:
        print_json(
            {
                "address": address,
                "version": info.version,
                "uptime": info.uptime,
                "policy": {"version": info.policy.version, "weights": info.policy.weights},
                "items": info.items,
                "bytes": info.bytes,
                "tables": {
                    name: MessageToDict(
                        table, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
                    )
                    | {"config": json.loads(table.config)}
                    for name, table in info.tables.items()
                },
            }
        )
        return
    from rich.console import Console
    from rich.filesize import decimal
    from rich.table import Table

    view = Table(box=None, header_style="bold", pad_edge=False)
    for column in ("table", "size", "bytes", "in/s", "out/s", "staleness", "evicted", "stale", "waiting"):
        view.add_column(column, justify="left" if column in ("table", "waiting") else "right", overflow="fold")
    for name, table in info.tables.items():
        waits = [
            f"{wait.count} {verb} for {wait.seconds:.0f} s: {wait.reason}"
            for verb, wait in (("inserting", table.inserting), ("sampling", table.sampling))
            if wait.count
        ]
        lost = f" ({table.evicted_unsampled} unsampled)" if table.evicted_unsampled else ""
        view.add_row(
            name,
            f"{table.size} / {json.loads(table.config)['max_size']}",
            decimal(table.bytes),
            f"{table.inserts_per_second:.1f}",
            f"{table.samples_per_second:.1f}",
            f"{table.staleness.p50:.0f} (max {table.staleness.max:.0f})" if table.size else "-",
            f"{table.evicted}{lost}",
            str(table.stale + table.stale_refused),
            "\n".join(waits) or "-",
        )
    console = Console()
    console.print(
        f"{address}  version {info.version}  up {info.uptime:.0f} s  policy version {info.policy.version}  "
        f"{info.items} items, {decimal(info.bytes)}",
        highlight=False,
    )
    console.print(view)


def connect(address: str, timeout: float) -> ReplayClient:
    from replay_client import ReplayClient

    try:
        return ReplayClient(address, timeout)
    except ValueError as error:
        fail(error)


def ask(question: Any) -> Any:
    """The answer of the server, or its error as a line."""
    from replay_client.errors import ReplayError

    try:
        return question()
    except ReplayError as error:
        fail(error)


def print_json(value: object) -> None:
    print(json.dumps(value, indent=2))


if __name__ == "__main__":
    main()
