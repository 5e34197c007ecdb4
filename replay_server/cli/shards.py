"""`replay shards`: several servers in a Ray cluster, as one service."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from replay_server.cli.output import AsJson, Yes, confirm, console, fail, print_json, say

if TYPE_CHECKING:
    from replay_server.config import Config
    from replay_server.shards import ShardStatus

app = typer.Typer(
    help="Run several servers in a Ray cluster, as one service.", no_args_is_help=True, rich_markup_mode=None
)

Count = Annotated[int, typer.Option("--shards", "-n", min=1, help="How many servers.")]
ConfigFile = Annotated[
    Path | None, typer.Option("--config", "-c", help="TOML file, as for `replay serve`; groups_per_step is divided.")
]
DataDir = Annotated[
    Path | None, typer.Option("--data-dir", help="Folder that all nodes share; each shard has its own folder in it.")
]
Pin = Annotated[
    bool, typer.Option("--pin", help="--data-dir is a folder of each node: a shard stays on its node while that lives.")
]
Port = Annotated[int, typer.Option(help="Shard i listens on this port + i; 0: any free port.", min=0, max=65535)]
Memory = Annotated[
    str | None, typer.Option(help='What Ray reserves for each shard, like "32GiB"; else a quarter above max_bytes.')
]
Name = Annotated[str, typer.Option(help="The shards are NAME-0, NAME-1, ...")]
Namespace = Annotated[str, typer.Option(help="Ray's namespace of the shards.")]
RayAddress = Annotated[
    str | None,
    typer.Option("--ray-address", envvar="RAY_ADDRESS", help="host:port of the cluster; else the local one."),
]
Timeout = Annotated[float, typer.Option(help="Seconds in which all shards must serve.", min=0)]


@app.command()
def up(
    shards: Count,
    config: ConfigFile = None,
    data_dir: DataDir = None,
    pin: Pin = False,
    port: Port = 0,
    memory: Memory = None,
    name: Name = "replay",
    namespace: Namespace = "replay",
    ray_address: RayAddress = None,
    timeout: Timeout = 120.0,
    as_json: AsJson = False,
) -> None:
    """Start the shards that do not run yet, and wait until all serve. They outlive this command."""
    from replay_server import shards as service

    try:
        found = service.up(
            shards,
            _load(config),
            data_dir=data_dir,
            pin=pin,
            port=port,
            memory=_bytes(memory),
            name=name,
            namespace=namespace,
            ray_address=ray_address,
            timeout=timeout,
        )
    except service.ShardError as error:
        fail(error)
    _show(found, name, namespace, as_json)


@app.command()
def status(
    name: Name = "replay",
    namespace: Namespace = "replay",
    ray_address: RayAddress = None,
    as_json: AsJson = False,
) -> None:
    """Where each shard is and what it holds. Status 1 if one is away, or there is none."""
    from replay_server import shards as service

    try:
        found = service.status(name, namespace, ray_address)
    except service.ShardError as error:
        fail(error)
    _show(found, name, namespace, as_json)
    if not found:
        fail(f"there are no shards {name}-0, ... in namespace {namespace}: start them with `replay shards up`")
    if not all(shard.is_up for shard in found):
        raise typer.Exit(1)


@app.command()
def down(
    name: Name = "replay",
    namespace: Namespace = "replay",
    ray_address: RayAddress = None,
    yes: Yes = False,
) -> None:
    """Stop all shards for good. What they hold in memory is lost; a --data-dir stays."""
    from replay_server import shards as service

    confirm(f"Stop all shards of {namespace}/{name}?", yes)
    try:
        stopped = service.down(name, namespace, ray_address)
    except service.ShardError as error:
        fail(error)
    say(f"stopped {', '.join(stopped)}" if stopped else "there were no shards")


@app.command()
def resize(
    shards: Count,
    config: ConfigFile = None,
    data_dir: DataDir = None,
    pin: Pin = False,
    port: Port = 0,
    memory: Memory = None,
    name: Name = "replay",
    namespace: Namespace = "replay",
    ray_address: RayAddress = None,
    timeout: Timeout = 120.0,
    as_json: AsJson = False,
) -> None:
    """Add shards, or empty the last ones and take them away. Status 1 with the reason while that is not safe."""
    from replay_server import shards as service

    try:
        found = service.resize(
            shards,
            _load(config),
            data_dir=data_dir,
            pin=pin,
            port=port,
            memory=_bytes(memory),
            name=name,
            namespace=namespace,
            ray_address=ray_address,
            timeout=timeout,
        )
    except service.ShardError as error:
        fail(error)
    _show(found, name, namespace, as_json)


def _load(path: Path | None) -> Config:
    from replay_server.config import DEFAULT_TABLES, Config

    try:
        return Config(tables=DEFAULT_TABLES) if path is None else Config.load(path)
    except ValueError as error:
        fail(error)


def _bytes(text: str | None) -> int | None:
    from replay_server.tables.config import parse_bytes

    if text is None:
        return None
    try:
        return int(parse_bytes(text))
    except ValueError as error:
        fail(f"--memory: {error}")


def _show(found: list[ShardStatus], name: str, namespace: str, as_json: bool) -> None:
    address = f"ray://{namespace}/{name}"
    if as_json:
        document: dict[str, Any] = {"address": address, "shards": [vars(shard) for shard in found]}
        print_json(document)
        return
    from rich.table import Table

    view = Table(box=None, header_style="bold", pad_edge=False)
    for column in ("shard", "address", "node", "pid", "items", "state"):
        view.add_column(column, justify="right" if column in ("pid", "items") else "left", no_wrap=True)
    for shard in found:
        state = "draining" if shard.draining else "restarted" if shard.restarted else "up"
        cells = (shard.address, shard.node[:12], str(shard.pid), str(shard.items), state)
        view.add_row(shard.name, *(cells if shard.is_up else ("-", "-", "-", "-", "away")))
    out = console()
    out.print(view)
    out.print(f"clients: {address}, or {','.join(shard.address for shard in found if shard.is_up)}", soft_wrap=True)
