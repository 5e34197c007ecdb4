"""`replay table update`, `table reset` and `policy`: change a server while it runs."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

from replay_cli.connection import TableName, ask, complete_table, connect
from replay_cli.options import Commands, json_or_word, pairs
from replay_cli.output import AsJson, Yes, confirm, misuse, print_result
from replay_protos import replay_pb2 as pb
from replay_protos.state import Document, document
from replay_protos.words import counted

if TYPE_CHECKING:
    from replay_client.records import Policy, TableInfo

policy = Commands(
    "Show or set the trainer's current policy version.\n\nExample: replay policy --json", no_args_is_help=False
)


def update(
    context: typer.Context,
    table: TableName,
    changes: Annotated[
        list[str],
        typer.Argument(metavar="FIELD=VALUE", help="Fields of the table, as in the file: max_size=8192, sampler=fifo."),
    ],
    yes: Yes = False,
    as_json: AsJson = False,
) -> None:
    """Change the configuration of a table until the server ends. Items and counters stay.

    A value is JSON or a word: max_staleness=null, max_bytes=2GiB, 'rate_limiter={"type": "min_size", "min_size": 8}'.
    Asks before a change that takes items out of the table.

    Example: replay table update replay max_size=8192 sampler=prioritized
    """
    from replay_server import TableConfig

    texts = pairs("update", changes, TableConfig.model_fields)
    wanted = {name: json_or_word(text) for name, text in texts.items()}
    with connect(context) as client:
        info_before = ask(lambda: client.server_info(tables=[table]).tables[table])
        excess = ask(lambda: _excess(info_before, wanted))
        if excess:
            confirm(f"{table} {excess}: items may be dropped. Go on?", yes)
        info_after = ask(lambda: client.update_table(table, **wanted))
    old = json.loads(info_before.config)
    new = json.loads(info_after.config)
    lines = []
    for name in new:
        if old[name] != new[name]:
            lines.append(f"{table}.{name}: {json.dumps(old[name])} -> {json.dumps(new[name])}")
    if not lines:
        lines.append(f"{table}: nothing changed")
    print_result(as_json, document(info_after), *lines)


def reset(
    context: typer.Context,
    table: Annotated[str, typer.Argument(metavar="TABLE", help="A table.", autocompletion=complete_table)] = "",
    all_tables: Annotated[bool, typer.Option("--all", help="Empty all tables.")] = False,
    yes: Yes = False,
    as_json: AsJson = False,
) -> None:
    """Empty a table, or all tables, and set the counters to 0.

    Example: replay table reset rollouts
    """
    if bool(table) == all_tables:  # neither is given, or both are
        misuse("name the table to empty, or say --all")
    target = table or "all tables"
    confirm(f"Remove every item of {target}?", yes)
    with connect(context) as client:
        removed = ask(lambda: client.reset(table))
    print_result(as_json, {"removed": removed}, f"{counted(removed, 'item')} removed from {target}")


def _excess(info: TableInfo, wanted: Document) -> str:
    """Describes the first new limit that the table exceeds, or may exceed; empty: there is no such limit.

    The text is to follow the table's name. `wanted`: the new values of fields of the table, by name. Raises ValueError
    for a text that is no size.
    """
    from replay_server.tables.config import parse_bytes

    staleness = info.staleness.max if info.size else 0  # an empty table has no staleness
    amounts = {
        "max_size": (info.size, "items"),
        "max_bytes": (info.bytes, "bytes"),
        "max_staleness": (staleness, "versions of staleness"),
    }
    for name, (amount, unit) in amounts.items():
        limit = parse_bytes(wanted.get(name))  # parses a text such as "2GiB"; returns a number or None as it is
        # A limit that is negative or no number is skipped here, because the server refuses it.
        if isinstance(limit, int | float) and 0 <= limit < amount:
            return f"holds {amount:.0f} {unit}, more than {name} {limit:.0f}"
    max_uses = wanted.get("max_times_sampled")  # 0: there is no limit
    max_uses_before = json.loads(info.config)["max_times_sampled"]
    # A new or lower limit removes the items that were sampled that often. This command does not know if there are any.
    if isinstance(max_uses, int) and max_uses and info.size:
        had_no_limit = not max_uses_before
        if had_no_limit or max_uses < max_uses_before:
            return f"may hold items that were sampled {counted(max_uses, 'time')}"
    return ""


@policy.callback(invoke_without_command=True)
def _show_policy(context: typer.Context, as_json: AsJson = False) -> None:
    """Show the current version, the location of its weights and its age, or set it."""
    if context.invoked_subcommand is None:
        with connect(context) as client:
            current = ask(client.policy)
            _print(current, as_json)


def _set_policy(
    context: typer.Context,
    version: Annotated[int, typer.Argument(metavar="VERSION", min=0, help="Number of finished updates.")],
    weights: Annotated[str, typer.Option(help="Location of the weights; generators load them from there.")] = "",
    rollback: Annotated[
        bool, typer.Option("--rollback", help="Allow a lower version, and count permits anew.")
    ] = False,
    state: Annotated[
        str,
        typer.Option(
            help="Id of the training checkpoint of this version. With --rollback, what was consumed after it returns."
        ),
    ] = "",
    yes: Yes = False,
    as_json: AsJson = False,
) -> None:
    """Set the policy version, as the trainer does after each update.

    Generators load its weights, and items that are too stale for it are dropped.

    Example: replay policy set 0 --rollback
    """
    if rollback:
        question = f"Go back to version {version}, "
        if state:
            question += f"bring back what was consumed after state {state!r}, drop items of later versions, "
        question += "and count permits anew?"
        confirm(question, yes)
    with connect(context) as client:
        current = ask(lambda: client.set_policy_version(version, weights, rollback=rollback, state=state))
        _print(current, as_json)


policy.add(_set_policy, name="set")


def _print(current: Policy, as_json: bool) -> None:
    """Prints the current policy version, the location of its weights, its age and its state."""
    from replay_dashboard.units import duration

    weights = current.weights or "no weights published"
    state = f", state {current.state!r}" if current.state else ""
    words = f"version {current.version}, {weights}, set {duration(current.age)} ago{state}"
    print_result(as_json, document(current, pb.Policy.DESCRIPTOR), words)
