"""The command `replay`: its subcommands, in the order of its help, and its entry point."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import typer

from replay_server.cli.bench import bench
from replay_server.cli.checkpoints import checkpoint, checkpoints
from replay_server.cli.dashboard import dashboard
from replay_server.cli.demo import demo
from replay_server.cli.doctor import doctor
from replay_server.cli.generate import generate
from replay_server.cli.items import delete, items
from replay_server.cli.output import complain
from replay_server.cli.policy import policy
from replay_server.cli.serve import serve
from replay_server.cli.show import show
from replay_server.cli.tables import tables
from replay_server.cli.top import top
from replay_server.cli.train import train
from replay_server.cli.update import reset, update
from replay_server.cli.watch import watch

app = typer.Typer(
    help="A replay server for GRPO: rollout groups in rate-limited priority tables.",
    epilog="Exit status: 0 all is well, 1 it failed, 2 it was used wrongly, 130 interrupted, 143 ended by SIGTERM.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
_UsageError: Any = typer.BadParameter.__bases__[0]
"""Of the click that typer uses, its own or the package: it does not export the class."""
_LOOK: tuple[Callable[..., None], ...] = (serve, tables, top, dashboard, watch, items, show, update, delete, reset)
_KEEP: tuple[Callable[..., None], ...] = (checkpoint, checkpoints)
_RUN: tuple[Callable[..., None], ...] = (doctor, demo, generate, train, bench)
for command in _LOOK:
    app.command()(command)
app.add_typer(policy, name="policy")
for command in (*_KEEP, *_RUN):
    app.command()(command)


def main() -> None:
    """The entry point: one clear line and a non-zero status where something fails."""
    try:
        status = app(prog_name="replay", standalone_mode=False)
    except _UsageError as error:
        message = error.format_message()
        if "\n" in message:  # the help, where a command was called without anything
            print(message, file=sys.stderr)
        else:
            command = "replay" if error.ctx is None else error.ctx.command_path
            message = message.replace("Value error, ", "").rstrip(".")  # pydantic's, of which typer may make use
            complain(f"{message}; see `{command} --help`")
        status = 2
    except typer.Abort:
        complain("nothing was changed")
        status = 1
    except KeyboardInterrupt:
        status = 130
    sys.exit(status)
