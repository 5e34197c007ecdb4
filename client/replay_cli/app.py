"""The command `replay`: lists its subcommands in the order in which its help shows them, and sets its exit status."""

from __future__ import annotations

import re
import signal
import sys
from importlib.metadata import version
from types import FrameType
from typing import Annotated, Any, NoReturn

import typer

from replay_cli.archive import archive
from replay_cli.change import policy, reset, update
from replay_cli.connection import ROOT
from replay_cli.copying import copy
from replay_cli.doctor import doctor
from replay_cli.generate import generate, score
from replay_cli.items import delete, items, show
from replay_cli.options import Commands, taking
from replay_cli.output import complain, ignore_stdout, say
from replay_cli.run import run as run_command
from replay_cli.saving import checkpoint, export, import_items
from replay_cli.servers import serve, shards, weights
from replay_cli.tables import dashboard, tables, top
from replay_cli.train import train
from replay_client.waits import stop_signals
from replay_protos.settings import about, in_our_words

app = Commands(
    "A replay server for GRPO: rollout groups in rate-limited priority tables.",
    epilog="\b\nExample: replay run run.toml\n\n"
    "Exit status: 0 all is well, 1 it failed, 2 invalid usage, 130 Ctrl-C, 143 SIGTERM, 129 SIGHUP, 138 SIGUSR1. "
    "After these signals `serve`, `generate`, `score` and `copy` finish their work and end with 0. "
    "`train` and `run` finish their step and write a training checkpoint: 0 if that was the last step, else as above.",
    pretty_exceptions_enable=False,
)
_INTERRUPTED = 128 + signal.SIGINT
"""The exit status after Ctrl-C."""
_UsageError: Any = typer.BadParameter.__bases__[0]
"""The class `UsageError` of click. It is not imported, because some versions of typer have their own copy of click."""
table = Commands("Change a table, or its items.\n\nExample: replay table update replay max_size=8192")
table.add(update, delete, reset, export)
table.add(import_items, name="import")
app.add(serve, tables, top, dashboard, items, show, doctor)
for name, group in {"policy": policy, "table": table, "checkpoint": checkpoint}.items():
    app.add_typer(group, name=name)
app.add(run_command, generate, score, train)
app.add(copy)
for name, group in {"archive": archive, "weights": weights, "shards": shards}.items():
    app.add_typer(group, name=name)


def _print_version(wanted: bool) -> None:
    if wanted:
        say(version("replay-server"))
        raise typer.Exit


@app.callback()
@taking(ROOT)
def options(
    _: dict[str, Any],  # the options of ROOT, which the commands read from the context (see `access_of`)
    show_version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """The options of the connection say how a command reaches the server (`access_of`)."""


class _Stopped(KeyboardInterrupt):
    """A stop signal other than SIGINT ends the command.

    It has a class of its own, because CPython notes a KeyboardInterrupt, and no subclass of it, that leaves
    `exec("text")`, which dataclasses use during imports. A process that was started with `python -m` then ends by
    SIGINT, whatever status it asks for, even if the exception was caught.
    """


def run() -> NoReturn:
    """Runs the command of the command line, and exits with its status.

    SIGTERM, SIGHUP and SIGUSR1 end a command as Ctrl-C does, and the items that the command holds are requeued.
    `serve`, `generate`, `score`, `copy` and `archive run` handle these signals themselves: they finish their work and
    end with status 0. `train` and `run` finish their step.
    """
    status_of_signal = _INTERRUPTED
    signals = stop_signals()

    def terminate(number: int, frame: FrameType | None) -> None:
        # typer returns the status of Ctrl-C for every KeyboardInterrupt, so the status of the signal is noted here.
        nonlocal status_of_signal
        status_of_signal = 128 + number
        raise _Stopped

    for number in signals:
        if number != signal.SIGINT:  # Python itself raises KeyboardInterrupt at SIGINT
            signal.signal(number, terminate)
    try:
        # The status is that of typer.Exit, or None, which `sys.exit` takes as 0. Without `standalone_mode`, typer does
        # not print errors of usage, but raises them.
        status = app(prog_name="replay", standalone_mode=False)
    except _UsageError as error:
        _complain_of_usage(error)
        status = 2
    except typer.Abort as error:
        # click raises Abort if a question gets no answer, and after some interrupts.
        cause = error.__cause__ or error.__context__
        if isinstance(cause, KeyboardInterrupt):
            status = _INTERRUPTED
        else:
            status = 1
            complain("nothing was changed")
    except KeyboardInterrupt:
        status = _INTERRUPTED
    except BrokenPipeError:  # the reader of the output has ended, such as `head`
        ignore_stdout()
        status = 1
    for number in signals:  # ignored, because from here on a signal could only cause a traceback
        signal.signal(number, signal.SIG_IGN)
    if status == _INTERRUPTED:
        status = status_of_signal
    sys.exit(status)


def _complain_of_usage(error: Any) -> None:
    """Prints one line about a wrong command line. If the command was called without arguments, prints its help."""
    message = error.format_message()
    if "\n" in message:  # `message` is the help, because the command was called without arguments
        print(message, file=sys.stderr)
        return
    name = "replay" if error.ctx is None else error.ctx.command_path
    complain(f"{_mistake(error)}; see `{name} --help`")


_NO_COMMAND = re.compile(r"^No such command (.*?)\.(?= Did|$)")
"""Matches the sentence of click about an unknown command. Group 1 is the command in quotes."""


def _mistake(error: Any) -> str:
    """Describes the mistake in a command line in one sentence, such as `--limit must be at least 1`."""
    # Only click's NoSuchOption has both attributes. `possibilities` are the options with similar names. The
    # NoSuchCommand of click 8.4 has `possibilities` too, but typer has put these into its message already.
    is_unknown_option = hasattr(error, "option_name") and hasattr(error, "possibilities")
    if is_unknown_option:
        hint = ""
        if error.possibilities:
            hint = f"; did you mean {' or '.join(error.possibilities)}?"
        return f"there is no option {error.option_name}{hint}"
    parameter = getattr(error, "param", None)
    if parameter is None:  # the error is about the command line as a whole
        # `format_message` would add words: "Invalid value: " to a BadParameter, and the commands with similar names, a
        # second time, to a NoSuchCommand.
        message = str(error.message)
        message = _NO_COMMAND.sub(r"there is no command \1.", message)
        return message.replace(". Did", "; did").rstrip(".")  # one sentence: `...; did you mean ...?`
    name = parameter.metavar if parameter.param_type_name == "argument" else parameter.opts[0]
    if not error.message:  # click's error about a missing value has no message
        return f"{name} is needed"
    return about(name, in_our_words(error.message).rstrip("."))
