"""The command `replay`: its subcommands in the order of its help, and how it ends."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.metadata import version
from typing import Annotated, Any, NoReturn

import typer

from replay_server.cli.bench import bench
from replay_server.cli.checkpoints import checkpoint, checkpoints
from replay_server.cli.dashboard import dashboard
from replay_server.cli.demo import demo
from replay_server.cli.doctor import doctor
from replay_server.cli.export import export, import_items
from replay_server.cli.generate import generate
from replay_server.cli.items import delete, items
from replay_server.cli.output import complain, say
from replay_server.cli.policy import policy
from replay_server.cli.serve import serve
from replay_server.cli.shards import app as shards
from replay_server.cli.show import show
from replay_server.cli.signals import INTERRUPTED, Interrupts
from replay_server.cli.tables import tables, top
from replay_server.cli.train import train
from replay_server.cli.update import reset, update
from replay_server.cli.watch import watch

app = typer.Typer(
    help="A replay server for GRPO: rollout groups in rate-limited priority tables.",
    epilog="Exit status: 0 all is well, 1 it failed, 2 invalid usage, 130 Ctrl-C, 143 SIGTERM. After either signal "
    "`serve` and `generate` finish their work and end with 0.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
_UsageError: Any = typer.BadParameter.__bases__[0]
"""The class of the click that typer uses: its own, or the package's. typer does not export it."""
_LOOK: tuple[Callable[..., None], ...] = (serve, tables, top, dashboard, watch, items, show, update, delete, reset)
_KEEP: tuple[Callable[..., None], ...] = (checkpoint, checkpoints, export)
_RUN: tuple[Callable[..., None], ...] = (doctor, demo, generate, train, bench)
for command in _LOOK:
    app.command()(command)
app.add_typer(policy, name="policy")
app.add_typer(shards, name="shards")
app.command("import")(import_items)
for command in (*_KEEP, *_RUN):
    app.command()(command)


def _print_version(wanted: bool) -> None:
    if wanted:
        say(version("replay-server"))
        raise typer.Exit


@app.callback()
def options(
    show_version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


def run() -> NoReturn:
    """Runs the command of the command line, and exits with its status."""
    interrupts = Interrupts()
    try:
        status = app(prog_name="replay", standalone_mode=False)
    except _UsageError as error:
        _complain_of_usage(error)
        status = 2
    except typer.Abort as error:
        # click makes an Abort of a question that was answered with no, and of some interrupts.
        if isinstance(error.__cause__ or error.__context__, KeyboardInterrupt):
            status = INTERRUPTED
        else:
            complain("nothing was changed")
            status = 1
    except KeyboardInterrupt:
        status = INTERRUPTED
    interrupts.ignore()
    sys.exit(interrupts.status if status == INTERRUPTED else status)


def _complain_of_usage(error: Any) -> None:
    message = error.format_message()
    if "\n" in message:  # the help, because a command was called without anything
        print(message, file=sys.stderr)
        return
    name = "replay" if error.ctx is None else error.ctx.command_path
    message = message.replace("Value error, ", "").rstrip(".")  # the first words are pydantic's, which typer may use
    complain(f"{message}; see `{name} --help`")
