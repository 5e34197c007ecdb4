"""Connects commands to the server. Declares the options of the connection, reads keys and tags, and reports errors.

The options of the connection stand before or behind the command (`replay --address X tables`). Environment variables
or a file may give the same settings, as replay_client.access describes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from replay_cli.options import in_flags, option, pairs, typed
from replay_cli.output import fail, misuse

if TYPE_CHECKING:
    from replay_client import ReplayClient

R = TypeVar("R")

_REACH = 5.0
"""Seconds in which the server must answer a short request before a command sends it a long one (`reach`)."""
ByShard = Annotated[bool, typer.Option("--by-shard", help="Also show each server, if there are several.")]

_connection_option = partial(option, rich_help_panel="Connection")
"""Makes an option that the help shows in the group "Connection"."""
CONNECTION = (
    _connection_option(
        "address",
        "Address of the server, or of several, separated by commas. [env: REPLAY_ADDRESS; default: 127.0.0.1:7400]",
        metavar="HOST:PORT",
    ),
    _connection_option(
        "token_file", "File that holds the token. [env: REPLAY_TOKEN_FILE, REPLAY_TOKEN]", metavar="FILE"
    ),
    _connection_option("tls", "Use TLS, and trust the public authorities. [env: REPLAY_TLS]", bool),
    _connection_option(
        "tls_ca", "Use TLS, and trust the authorities in this PEM file. [env: REPLAY_TLS_CA]", metavar="FILE"
    ),
    _connection_option("tls_cert", "PEM file with this client's certificate. [env: REPLAY_TLS_CERT]", metavar="FILE"),
    _connection_option(
        "tls_key", "PEM file with the private key of that certificate. [env: REPLAY_TLS_KEY]", metavar="FILE"
    ),
    _connection_option("tls_server_name", "Name in the server's certificate. [env: REPLAY_TLS_SERVER_NAME]"),
    _connection_option("allow_insecure_token", "Send the token without TLS. [env: REPLAY_ALLOW_INSECURE_TOKEN]", bool),
    _connection_option("name", "Name of a generator, trainer or archiver. [env: REPLAY_NAME; default: host:pid]"),
    _connection_option(
        "client_config", "TOML file with the settings above. [env: REPLAY_CLIENT_CONFIG]", metavar="FILE"
    ),
)
"""Options that say how to reach the server. No option has the token itself, because other users can read command
lines."""
ROOT = (
    *CONNECTION,
    _connection_option("timeout", "Seconds to wait for the server. [default: as the command needs]", float, min=0),
)
"""Options of `replay` itself. They may stand before a subcommand, or behind it."""


def access_of(context: typer.Context) -> dict[str, Any]:
    """The options of the connection, as arguments of `ReplayClient.from_env`. An option that is not given is None."""
    options = context.find_root().params
    return {parameter.name: options.get(parameter.name) for parameter in CONNECTION}


def timeout_of(context: typer.Context, usual: float | None) -> float | None:
    """Seconds to wait for the server: --timeout, or else `usual`. None: without end."""
    timeout: float | None = context.find_root().params.get("timeout")
    return usual if timeout is None else timeout


def connect(context: typer.Context, usual: float = 5.0, *, named: bool = False) -> ReplayClient:
    """Returns a client that waits for the server for --timeout or else `usual` seconds.

    Ends the command if a setting of the connection is wrong.

    `named`: True if the client works for the run, as an archiver does. Such a client has a name, and the server reports
    it as overdue if it goes away. Other clients have no name.
    """
    from replay_client import ReplayClient

    access = access_of(context)
    arguments = dict(access)
    if not named:
        arguments["name"] = ""
    try:
        return ReplayClient.from_env(timeout_of(context, usual), **arguments)
    except ValueError as error:
        # If the wrong setting was given as an option, the message names the option.
        given_options = typed(access)
        misuse(in_flags(str(error), given_options))


def reach(client: ReplayClient, context: typer.Context) -> None:
    """Ends the command if the server does not answer a short request. Call this before a request that takes long."""
    timeout = timeout_of(context, _REACH)
    assert timeout is not None  # `timeout_of` returns None only if its `usual` is None
    seconds = min(timeout, _REACH)
    ask(lambda: client.policy(timeout=seconds))  # every server answers this request at once


def ask(question: Callable[[], R]) -> R:
    """Returns the answer to `question`, which asks a server or reads a file. An error ends the command in one line."""
    from replay_client.errors import ReplayError

    try:
        return question()
    except (ReplayError, ValueError, OSError) as error:
        fail(error)


def parse_key(text: str) -> int:
    """The key of an item. Raises BadParameter unless it is a whole number of 64 bits."""
    try:
        key = int(text, 0)  # base 0: also 0x... in hexadecimal
    except ValueError:
        key = -1  # this is no key, so the next lines refuse it
    if not 0 <= key < 1 << 64:
        raise typer.BadParameter(
            f"{text!r} is not a key: a whole number from 0 to 2^64 - 1, as `replay items` shows it"
        )
    return key


def parse_tags(texts: Sequence[str] | None) -> dict[str, str]:
    """Name of each tag -> its value, from texts NAME=VALUE.

    A text of another form, or a name that comes twice, ends the command.
    """
    return pairs("--tag", texts)


def complete_table(context: typer.Context, incomplete: str) -> list[str]:
    """The tables whose names begin with `incomplete`, for completion in a shell.

    The list is empty if the server does not answer within a second.
    """
    from replay_client import ReplayClient

    # Suppress errors, because a message would appear in the middle of the line that the person types.
    with suppress(Exception), ReplayClient.from_env(1.0, **access_of(context)) as client:
        return [name for name in client.server_info().tables if name.startswith(incomplete)]
    return []


TableName = Annotated[str, typer.Argument(metavar="TABLE", help="A table.", autocompletion=complete_table)]
Key = Annotated[int, typer.Argument(metavar="KEY", parser=parse_key, help="Key of an item.")]
TagTexts = Annotated[
    list[str] | None,
    typer.Option("--tag", metavar="NAME=VALUE", help="Only items with this tag; repeat it for items with all tags."),
]
MaybeKeys = Annotated[list[int] | None, typer.Argument(metavar="KEY", parser=parse_key, help="Keys of items.")]
