"""How commands reach the server: their common options, and the server's answers and errors."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, Any, Concatenate, ParamSpec, TypeVar

import typer

from replay_server.cli.output import fail

if TYPE_CHECKING:
    from replay_client import ReplayClient

P = ParamSpec("P")
R = TypeVar("R")

_REACH = 5.0
"""Seconds in which a server must answer before a command lets it work for long."""
ByShard = Annotated[bool, typer.Option("--shards", help="With each server of several beside the whole.")]
Timeout = Annotated[float, typer.Option("--timeout", min=0, help="Seconds to wait for an answer of the server.")]


def with_access(command: Callable[Concatenate[dict[str, Any], P], R], *, named: bool = False) -> Callable[..., R]:
    """Decorator that adds the options for reaching the server. The command gets them as its first argument.

    `named`: with --name, for a command whose client the server lists.
    Settings that are not given come from the environment or a file (replay_client.access). There is no option for a
    token, because other users of a machine can read command lines.
    """

    def option(flag: str, text: str, kind: Any = str) -> inspect.Parameter:
        name = flag.removeprefix("--").replace("-", "_")
        annotation = Annotated[kind | None, typer.Option(flag, help=text)]
        return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)

    options = [
        option("--address", "host:port of the server. [env: REPLAY_ADDRESS; 127.0.0.1:7400]"),
        option("--token-file", "File that holds the token. [env: REPLAY_TOKEN_FILE, or REPLAY_TOKEN]"),
        option("--tls", "Use TLS, and trust the public authorities. [env: REPLAY_TLS]", bool),
        option("--tls-ca", "Use TLS, and trust the authorities in this PEM file. [env: REPLAY_TLS_CA]"),
        option("--tls-cert", "PEM file with this client's certificate. [env: REPLAY_TLS_CERT]"),
        option("--tls-key", "PEM file with its private key. [env: REPLAY_TLS_KEY]"),
        option(
            "--tls-server-name",
            "Name in the server's certificate, if the address has another. [env: REPLAY_TLS_SERVER_NAME]",
        ),
        option(
            "--allow-insecure-token",
            "Send the token to other machines without TLS. [env: REPLAY_ALLOW_INSECURE_TOKEN]",
            bool,
        ),
        option("--client-config", "TOML file with the settings above. [env: REPLAY_CLIENT_CONFIG]"),
    ]
    if named:
        options.append(option("--name", "Name under which the server lists this process. [env: REPLAY_NAME; host:pid]"))

    @functools.wraps(command)
    def run(**given: Any) -> R:
        access = {parameter.name: given.pop(parameter.name) for parameter in options}
        return command(access, **given)  # type: ignore[call-arg]

    own = list(inspect.signature(command, eval_str=True).parameters.values())[1:]
    parameters = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in own]
    run.__signature__ = inspect.Signature([*parameters, *options])  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in [*parameters, *options]}
    return run


as_worker = functools.partial(with_access, named=True)
"""The same for a command that generates or trains: nobody misses any other after its end."""


def connect(access: dict[str, Any], timeout: float) -> ReplayClient:
    """A client without a name, for a command that comes and goes."""
    from replay_client import ReplayClient

    try:
        return ReplayClient.from_env(timeout, **access | {"name": ""})
    except ValueError as error:
        fail(in_flags(str(error), access))


def reach(client: ReplayClient, timeout: float) -> None:
    """Ends the command soon if no server answers. For commands whose own timeout is for long work of the server."""
    ask(lambda: client.policy(timeout=min(timeout, _REACH)))


def in_flags(message: str, access: dict[str, Any]) -> str:
    """`message`, with the settings that came as flags named as the person typed them: `--tls-ca`, not `tls_ca`."""
    for name, value in access.items():
        if value is not None and message.startswith(f"{name} "):
            return f"--{name.replace('_', '-')}{message.removeprefix(name)}"
    return message


def ask(question: Callable[[], R]) -> R:
    """Returns the server's answer. An error ends the command with one line."""
    from replay_client.errors import ReplayError

    try:
        return question()
    except (ReplayError, ValueError) as error:
        fail(error)


def complete_table(context: typer.Context, incomplete: str) -> list[str]:
    """For the shell: the tables whose names begin with `incomplete`. None if the server does not answer at once."""
    from replay_client import ReplayClient
    from replay_client.access import SETTINGS

    access = {name: context.params.get(name) for name in (*SETTINGS, "client_config") if name != "token"}
    with suppress(Exception), ReplayClient.from_env(1.0, **access) as client:
        return [name for name in client.server_info().tables if name.startswith(incomplete)]
    return []


def parse_key(text: str) -> int:
    try:
        key = int(text, 0)
    except ValueError:
        key = -1
    if not 0 <= key < 1 << 64:
        raise typer.BadParameter(
            f"{text!r} is not a key: a whole number from 0 to 2^64 - 1, as `replay items` shows it"
        )
    return key


TableName = Annotated[str, typer.Argument(metavar="TABLE", help="A table.", autocompletion=complete_table)]
Key = Annotated[int, typer.Argument(metavar="KEY", parser=parse_key, help="Key of an item.")]
Keys = Annotated[list[int], typer.Argument(metavar="KEY...", parser=parse_key, help="Keys of items.")]
