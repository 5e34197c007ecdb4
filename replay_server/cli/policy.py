"""`replay policy`: shows or sets the policy version and the location of its weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from replay_protos import replay_pb2 as pb
from replay_protos.state import document
from replay_server.cli.connection import Timeout, ask, connect, with_access
from replay_server.cli.output import AsJson, Yes, confirm, print_json, say

if TYPE_CHECKING:
    from replay_client.records import Policy

policy = typer.Typer(help="Show or set the trainer's current policy version.", rich_markup_mode=None)


@policy.callback(invoke_without_command=True)
@with_access
def show_by_default(
    access: dict[str, Any], context: typer.Context, as_json: AsJson = False, timeout: Timeout = 5.0
) -> None:
    if context.invoked_subcommand is None:
        _show(access, as_json, timeout)


@policy.command()
@with_access
def show(access: dict[str, Any], as_json: AsJson = False, timeout: Timeout = 5.0) -> None:
    """Show the current version, the location of its weights, and its age."""
    _show(access, as_json, timeout)


@policy.command("set")
@with_access
def set_version(
    access: dict[str, Any],
    version: Annotated[int, typer.Argument(min=0, help="Number of finished updates.")],
    weights: Annotated[str, typer.Option(help="Location of the weights; generators load them from there.")] = "",
    rollback: Annotated[
        bool, typer.Option("--rollback", help="Allow a lower version, and count permits anew.")
    ] = False,
    yes: Yes = False,
    as_json: AsJson = False,
    timeout: Timeout = 5.0,
) -> None:
    """Set the policy version, as the trainer does after each update. Drops items that are too stale for it."""
    if rollback:
        confirm(f"Go back to version {version}, and count permits anew?", yes)
    with connect(access, timeout) as client:
        _print(ask(lambda: client.set_policy_version(version, weights, rollback=rollback)), as_json)


def _show(access: dict[str, Any], as_json: bool, timeout: float) -> None:
    with connect(access, timeout) as client:
        _print(ask(client.policy), as_json)


def _print(current: Policy, as_json: bool) -> None:
    if as_json:
        print_json(document(current, pb.Policy.DESCRIPTOR))
        return
    from replay_client.units import duration

    weights = current.weights or "no weights published"
    say(f"version {current.version}, {weights}, set {duration(current.age)} ago")
