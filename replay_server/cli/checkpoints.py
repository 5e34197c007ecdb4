"""`replay checkpoint` and `replay checkpoints`: write a copy of the whole server, and list the copies."""

from __future__ import annotations

import time
from typing import Annotated, Any

import typer

from replay_protos.state import document
from replay_server.cli.connection import Timeout, ask, connect, reach, with_access
from replay_server.cli.output import AsJson, console, print_json, say


@with_access
def checkpoint(
    access: dict[str, Any],
    name: Annotated[
        str, typer.Argument(help="Its name. Checkpoints without one are removed after some newer ones.")
    ] = "",
    as_json: AsJson = False,
    timeout: Timeout = 600.0,
) -> None:
    """Write a checkpoint of all tables as of one moment, and print its name. The server goes on meanwhile."""
    with connect(access, timeout) as client:
        reach(client, timeout)
        written = ask(lambda: client.checkpoint(name))
    if as_json:
        print_json({"name": written})
    else:
        say(written)


@with_access
def checkpoints(
    access: dict[str, Any],
    verify: Annotated[bool, typer.Option("--verify", help="Read and check every byte.")] = False,
    as_json: AsJson = False,
    timeout: Timeout = 600.0,
) -> None:
    """List the server's checkpoints, the newest first. Status 1 if one is damaged."""
    with connect(access, timeout) as client:
        reach(client, timeout)
        found = ask(lambda: client.checkpoints(verify=verify))
    if as_json:
        print_json([document(entry) for entry in found])
    else:
        from rich.table import Table

        from replay_client.units import byte_size

        view = Table(box=None, header_style="bold", pad_edge=False)
        for column in ("checkpoint", "made", "items", "bytes", "policy", "state"):
            view.add_column(column, justify="right" if column in ("items", "bytes", "policy") else "left", no_wrap=True)
        for entry in found:
            made = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(entry.created))
            facts = (
                (str(entry.items), byte_size(entry.bytes), str(entry.policy_version)) if entry.intact else ("-",) * 3
            )
            state = ("verified" if verify else "complete") if entry.intact else f"damaged: {entry.problem}"
            view.add_row(entry.name, made, *facts, state)
        console().print(view)
    if not all(entry.intact for entry in found):
        raise typer.Exit(1)
