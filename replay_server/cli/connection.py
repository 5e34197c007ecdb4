"""How commands reach the server, and what they take from it: its answers, errors, tables and keys."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from replay_server.cli.options import in_flags, typed
from replay_server.cli.output import fail, misuse

if TYPE_CHECKING:
    from replay_client import ReplayClient

R = TypeVar("R")

_REACH = 5.0
"""Seconds in which a server must answer before a command lets it work for long."""
ByShard = Annotated[bool, typer.Option("--shards", help="With each server of several beside the whole.")]
Timeout = Annotated[float, typer.Option("--timeout", min=0, help="Seconds to wait for an answer of the server.")]


def connect(access: dict[str, Any], timeout: float) -> ReplayClient:
    """A client without a name, for a command that comes and goes."""
    from replay_client import ReplayClient

    try:
        return ReplayClient.from_env(timeout, **access | {"name": ""})
    except ValueError as error:
        fail(in_flags(str(error), typed(access)))


def reach(client: ReplayClient, timeout: float) -> None:
    """Ends the command soon if no server answers. For commands whose own timeout is for long work of the server."""
    ask(lambda: client.policy(timeout=min(timeout, _REACH)))


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


def parse_tags(texts: Sequence[str] | None) -> dict[str, str]:
    """Tags by name. Ends the command with one line for what is not NAME=VALUE, or a name that comes twice."""
    tags: dict[str, str] = {}
    for text in texts or ():
        name, equals, value = text.partition("=")
        if not name or not equals:
            misuse(f"--tag {text!r} is not NAME=VALUE, for example --tag environment=math")
        if name in tags:
            misuse(f"--tag names {name!r} twice: an item has one value of each tag")
        tags[name] = value
    return tags


TableName = Annotated[str, typer.Argument(metavar="TABLE", help="A table.", autocompletion=complete_table)]
Key = Annotated[int, typer.Argument(metavar="KEY", parser=parse_key, help="Key of an item.")]
TagTexts = Annotated[
    list[str] | None,
    typer.Option("--tag", metavar="NAME=VALUE", help="Only items with this tag; several: with all of them."),
]
MaybeKeys = Annotated[list[int] | None, typer.Argument(metavar="[KEY]...", parser=parse_key, help="Keys of items.")]
