"""`replay serve`, `replay weights serve`, `replay shards`: a server, weights for generators, several servers in Ray."""

from __future__ import annotations

import asyncio
import gc
import os
import resource
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from replay_cli.checks import Check, check_folder, check_listen
from replay_cli.connection import access_of, ask
from replay_cli.copying import fetch
from replay_cli.options import ABOUT_RECIPE, RECIPE_CHOICES, Commands, in_flags, option, taking
from replay_cli.output import AsJson, Yes, complain, confirm, console, fail, misuse, plain_table, print_json, say
from replay_cli.process import LogFormat, LogLevel, log_to_stderr, set_up_tracing
from replay_cli.recipes import recipe_of, show_recipe

if TYPE_CHECKING:
    from replay_server import ReplayServer
    from replay_server.config import Config
    from replay_server.shards import ShardStatus

ConfigFile = Annotated[
    Path | None,
    typer.Option("--config", "-c", metavar="FILE", help="TOML file with the configuration of a server."),
]

Insecure = Annotated[
    bool, typer.Option("--insecure", help="Listen where other machines reach it, although no token is needed.")
]


def serve(
    context: typer.Context,
    config: ConfigFile = None,
    recipe: Annotated[str | None, typer.Option(metavar=RECIPE_CHOICES, help=ABOUT_RECIPE)] = None,
    listen: Annotated[
        str | None,
        typer.Option(
            "--listen",
            metavar="HOST:PORT",
            help="Listen here, instead of where the file says. Port 0: any free port.",
        ),
    ] = None,
    metrics_listen: Annotated[
        str | None,
        typer.Option(
            "--metrics-listen",
            metavar="HOST:PORT",
            help="The Prometheus endpoint, instead of that of the file.",
        ),
    ] = None,
    restore: Annotated[
        str | None,
        typer.Option(
            "--restore",
            metavar="NAME",
            help="Restore this checkpoint at startup, or `latest`; of an address of `replay copy`, the newest there. A "
            "damaged one gives way to the newest whole one.",
        ),
    ] = None,
    replace: Annotated[
        bool, typer.Option("--replace", help="With --restore: move the contents of data_dir aside instead of failing.")
    ] = False,
    insecure: Insecure = False,
    check: Check = False,
    log_level: LogLevel = "info",
    log_format: LogFormat = "text",
) -> None:
    """Run the server until SIGTERM or Ctrl-C. Unless its file has [[tables]], it has a queue and a pool.

    Example: replay serve --config replay.toml
    """
    from replay_protos import event_loop
    from replay_server import ReplayServer

    if access_of(context)["address"] is not None:
        misuse("a server listens on --listen: `replay serve --listen HOST:PORT`")
    log_to_stderr(log_level, log_format)
    set_up_tracing("replay-server")
    try:
        recipe_settings = None if recipe is None else recipe_of(recipe)["serve"]
        loaded = _load(config, recipe_settings)
        loaded = _listening(loaded, {"listen": listen, "metrics_listen": metrics_listen})
    except ValueError as error:
        misuse(error)
    try:
        if recipe is not None:
            show_recipe(recipe, "serve", loaded.model_dump(mode="json"))
        if insecure:
            loaded = _insecure(loaded)
        server = ReplayServer.from_config(loaded, os.environ)  # the environment may have the token
        if check:
            _check(loaded)
            return
        if restore is not None:
            is_address = "://" in restore or os.sep in restore
            if is_address:
                if loaded.checkpoint_dir is None:
                    fail(f"--restore {restore} needs data_dir, or dir in [checkpoints]: a folder for the checkpoint")
                restore = fetch(restore, loaded.checkpoint_dir)
            server.restore(restore, replace=replace)  # only notes the checkpoint: the start below restores it
        elif replace:
            misuse("--replace goes with --restore")
        # Each connection takes a file descriptor, so raise the soft limit, which is often 1024, to the hard limit.
        _, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard_limit, hard_limit))
        # The garbage collector is off until the server has started, and `_announce` turns it on. A start with data
        # makes at least one object for each item, and the collector would look at all these objects again and again.
        gc.disable()
        event_loop.run(_run(server))
    except (ValueError, OSError) as error:
        fail(error)


def _check(config: Config) -> None:
    """Checks the ports and folders of a server for `--check`, and prints its address and tables.

    Raises ValueError for a port that is in use, and for a folder that cannot be written.
    """
    server = config.server
    for name in ("listen", "metrics_listen"):
        address = getattr(server, name)
        if address is not None:
            check_listen(f"[server] {name}", address)
    if server.data_dir is not None:
        check_folder("[server] data_dir", server.data_dir)
    if config.checkpoint_dir is not None:
        check_folder("[checkpoints] dir", config.checkpoint_dir)
    say(f"{server.listen}: tables {', '.join(table.name for table in config.tables)}")


def _load(path: Path | None, recipe: Mapping[str, Any] | None = None) -> Config:
    """Reads the configuration of a server from a file. Settings that the file lacks come from `recipe`.

    Without file and recipe, the configuration has the two usual tables. Raises ValueError for settings that a server
    cannot have.
    """
    from replay_server.config import USUAL, Config

    if path is None:
        return Config.model_validate(recipe or USUAL)
    return Config.load(path, recipe)


def _listening(config: Config, addresses: Mapping[str, str | None]) -> Config:
    """A copy of the configuration with the addresses that the command line gives.

    `addresses`: the addresses by their names in [server]; None: the command line does not give it, so the address in
    `config` stays. Raises ValueError that names the option of a wrong address.
    """
    from pydantic import ValidationError

    from replay_protos.settings import explain
    from replay_server.config import ServerConfig

    changes = {name: address for name, address in addresses.items() if address is not None}
    try:
        section = ServerConfig.model_validate(config.server.model_dump() | changes)
    except ValidationError as error:
        message = in_flags(explain(error), changes)  # has `--listen` instead of `listen`
        raise ValueError(message) from error
    return config.model_copy(update={"server": section})


def _insecure(config: Config) -> Config:
    """A copy of the configuration with `insecure = true` in [security]."""
    security = config.security.model_copy(update={"insecure": True})
    return config.model_copy(update={"security": security})


async def _run(server: ReplayServer) -> None:
    """Serves until SIGTERM, Ctrl-C or another stop signal. Then the server drains and saves."""
    from replay_client.waits import stop_signals

    for number in stop_signals():
        asyncio.get_running_loop().add_signal_handler(number, server.request_stop)
    await server.run(partial(_announce, server))


def _announce(server: ReplayServer) -> None:
    """Turns the garbage collector on, and prints the addresses of the server. Programs wait for these lines.

    The server calls this function as soon as it answers requests.
    """
    # The collector never looks at frozen objects. Freeze the objects that the start has made, because they stay.
    gc.freeze()
    gc.enable()
    say(f"listening on {server.address}")
    if server.metrics_address is not None:
        say(f"metrics at http://{server.metrics_address}/metrics")


# ------------------------------------------------------------------------------------------------ weights

weights = Commands(
    "Give weights to generators that do not see their folder.\n\nExample: replay weights serve runs/mine"
)


def serve_weights(
    context: typer.Context,
    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="weights_dir of the trainer, whose weights_url leads here.")
    ],
    listen: Annotated[str, typer.Option(metavar="HOST:PORT", help="Listen here.")] = "127.0.0.1:7410",
) -> None:
    """Serve the versions in a folder over HTTP, until SIGTERM or Ctrl-C.

    The options --token-file, --tls-cert and --tls-key, or their environment variables, secure this address.

    Example: replay weights serve runs/mine --listen 0.0.0.0:7410
    """
    from replay_client.access import ListenAddress
    from replay_generator.policy.remote import WeightsServer

    log_to_stderr("warning")
    options = access_of(context)
    names = ("token_file", "tls_cert", "tls_key")
    token_file, cert, key = [options[name] or os.environ.get(f"REPLAY_{name.upper()}") for name in names]
    if folder.exists() and not folder.is_dir():
        misuse(f"{folder} is no folder: name weights_dir of the trainer")
    try:
        server = WeightsServer(folder, ListenAddress("--listen", listen, token_file, cert, key))
    except ValueError as error:
        misuse(error)
    except OSError as error:
        fail(f"{listen}: {error}")
    if not folder.exists():
        complain(f"there is no folder {folder} yet: its weights are served when the trainer has made it")
    say(f"weights of {folder} at {listen}")
    server.serve_forever()


weights.add(serve_weights, name="serve")


# ------------------------------------------------------------------------------------------------ shards

shards = Commands(
    "Run several servers in a Ray cluster, as one service.\n\nExample: replay shards up --shards 4 --config replay.toml"
)
_RAY = (
    option("name", "The shards are NAME-0, NAME-1, ...", default="replay"),
    option("namespace", "Ray's namespace of the shards.", default="replay"),
    option("ray_address", "The cluster; else the local one.", envvar="RAY_ADDRESS", metavar="HOST:PORT"),
)
"""The options of the group `shards`, which say which shards a command is about."""


@shards.callback()
@taking(_RAY)
def _name_shards(_: dict[str, Any]) -> None:
    """Run several servers in a Ray cluster, as one service."""


def _ray_of(context: typer.Context) -> dict[str, Any]:
    """The values of the options _RAY by name. `context` is that of a command in the group `shards`."""
    assert context.parent is not None  # a command of a group has the group as its parent
    return context.parent.params


_PER_SHARD = (
    option("data_dir", "Folder that all nodes share; each shard has its own folder in it.", Path, metavar="FOLDER"),
    option("port", "Shard i listens on this port + i; 0: any free port.", int, 0, min=0, max=65535),
    option("timeout", "Seconds in which all shards must serve.", float, 120.0, min=0),
)
"""Options of `up` and `resize`, which `replay_server.shards` takes as they are."""


@taking(_PER_SHARD)
def _up_or_resize(
    per_shard: dict[str, Any],
    context: typer.Context,
    shards: Annotated[int, typer.Option("--shards", "-n", min=1, help="How many servers.")],
    config: ConfigFile = None,
    pin: Annotated[
        bool,
        typer.Option("--pin", help="--data-dir is a folder of each node: a shard stays on its node while that lives."),
    ] = False,
    memory: Annotated[
        str | None,
        typer.Option(help='What Ray reserves for each shard, like "32GiB"; else a quarter above max_bytes.'),
    ] = None,
    insecure: Insecure = False,
    as_json: AsJson = False,
) -> None:
    """Runs the command `up` or `resize`. Both commands have the same options."""
    from replay_server.tables.config import parse_bytes

    ray = _ray_of(context)
    loaded = ask(lambda: _load(config))
    reserved = ask(lambda: parse_bytes(memory))
    if insecure:
        loaded = _insecure(loaded)
    command = str(context.info_name)  # up or resize
    statuses = _call_service(command, shards, loaded, pin=pin, memory=reserved, **per_shard, **ray)
    _show(statuses, ray, as_json)


def status(context: typer.Context, as_json: AsJson = False) -> None:
    """Show where each shard is and what it holds. Status 1 if one is away, or there is none.

    Example: replay shards status
    """
    ray = _ray_of(context)
    statuses = _call_service("status", **ray)
    _show(statuses, ray, as_json)
    if not statuses:
        fail(
            f"there are no shards {ray['name']}-0, ... in namespace {ray['namespace']}: start them with "
            "`replay shards up`"
        )
    if not all(shard.is_up for shard in statuses):
        raise typer.Exit(1)


def down(context: typer.Context, yes: Yes = False) -> None:
    """Stop all shards for good. What they hold in memory is lost; a --data-dir stays.

    Example: replay shards down --yes
    """
    ray = _ray_of(context)
    confirm(f"Stop all shards of {ray['namespace']}/{ray['name']}?", yes)
    stopped = _call_service("down", **ray)
    say(f"stopped {', '.join(stopped)}" if stopped else "there were no shards")


_UP = (
    "Start the shards that do not run yet, and wait until all serve. They outlive this command.\n\n"
    "Example: replay shards up --shards 4 --config replay.toml"
)
_RESIZE = (
    "Add shards, or empty the last ones and take them away. Status 1 and why while that is unsafe.\n\n"
    "Example: replay shards resize --shards 8"
)
shards.add(_up_or_resize, name="up", text=_UP)
shards.add(status, down)
shards.add(_up_or_resize, name="resize", text=_RESIZE)


def _call_service(command: str, *arguments: Any, **named: Any) -> Any:
    """Calls the function of `replay_server.shards` that has the name of the command, and returns its result.

    A ShardError ends the command with one line.
    """
    from replay_server import shards as service

    function = getattr(service, command)
    try:
        return function(*arguments, **named)
    except service.ShardError as error:
        fail(error)


def _show(statuses: list[ShardStatus], ray: dict[str, Any], as_json: bool) -> None:
    """Prints the state of the shards. `ray`: the values of the options _RAY, by name."""
    address = f"ray://{ray['namespace']}/{ray['name']}"
    if as_json:
        document: dict[str, Any] = {"address": address, "shards": [vars(shard) for shard in statuses]}
        print_json(document)
        return
    rows = []
    for shard in statuses:
        if shard.is_up:
            node = shard.node[:12]  # the beginning of Ray's long id
            rows.append((shard.name, shard.address, node, str(shard.pid), str(shard.items), _state(shard)))
        else:
            rows.append((shard.name, "-", "-", "-", "-", "away"))
    columns = ("shard", "address", "node", "pid", "items", "state")
    out = console()
    out.print(plain_table(columns, rows, left=("shard", "address", "node", "state")))
    addresses = [shard.address for shard in statuses if shard.is_up]
    out.print(f"clients: {address}, or {','.join(addresses)}", soft_wrap=True)


def _state(shard: ShardStatus) -> str:
    """The state of a shard that is up."""
    if shard.draining:
        return "draining"
    if shard.restarted:
        return "restarted"
    return "up"
