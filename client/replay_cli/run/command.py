"""The command `replay run`: reads the run file, checks it, and runs it."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from replay_cli.connection import access_of
from replay_cli.options import ABOUT_RECIPE, RECIPE_CHOICES
from replay_cli.output import AsJson, complain, fail, misuse, need, print_json, say
from replay_cli.train import sum_up
from replay_client.folder_lock import FolderLock
from replay_client.waits import StopSignals


def run(
    context: typer.Context,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The run file: run.toml.")],
    more: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="NAME=VALUE", help="A setting, like train.max_steps=100; repeatable."),
    ] = None,
    recipe: Annotated[str | None, typer.Option(metavar=RECIPE_CHOICES, help=ABOUT_RECIPE)] = None,
    check: Annotated[bool, typer.Option("--check", help="Check everything, print what would run, and end.")] = False,
    as_json: AsJson = False,
) -> None:
    """Train with one file: start the server, generators and trainer, restart what dies, stop all in order.

    The same command goes on with a run. Ctrl-C stops it after the trainer's step; a second Ctrl-C hurries.

    Example: replay run run.toml --set train.max_steps=100
    """
    need("replay run", "trainer", "torch", "transformers", "safetensors")
    from replay_cli.run.display import Display
    from replay_cli.run.plan import check_deeply, read_run
    from replay_cli.run.runner import RunError, Runner, RunStopped

    if access_of(context)["address"] is not None:
        misuse("a run starts a server of its own: [serve.server] listen in its file says where")
    try:
        plan = read_run(file, more or [], recipe, os.environ)
    except ValueError as error:
        misuse(error)
    try:
        lock = FolderLock(plan.output_dir, "run")
        # If the folder exists, acquire the lock before the checks. If the run is under way already, the lock then says
        # so, while the checks would only say that the port is in use. If there is no folder yet, acquire the lock after
        # the checks, because the lock creates the folder, and a run whose checks fail must create none.
        locks_before_checks = not check and plan.output_dir.exists()
        if locks_before_checks:
            _hold(lock)
        check_deeply(plan)
        if check:
            for line in plan.describe():
                say(line)
            return
        if not locks_before_checks:
            _hold(lock)
    except (ValueError, OSError) as error:
        fail(error)
    display = Display(as_json)
    signals = StopSignals()
    runner = Runner(plan, os.environ, display.show, signals=signals)
    try:
        with signals, display:
            reason = runner.run()
    except (RunError, OSError) as error:
        fail(error)
    except RunStopped:
        is_complete = runner.trainer.status == 0  # the trainer made its last step before the stop
        if not is_complete:
            step = runner.status.step
            where = f"after step {step}" if step else "before its first step"
            with suppress(OSError):  # the terminal was closed
                complain(f"stopped {where}; the same command goes on with the run")
            raise typer.Exit(128 + signals.first) from None
        reason = ""  # the run is complete, for which `Runner.run` returns "" too
    if as_json:
        result = runner.status.document() | {"ended": reason or "the last step is made"}
        print_json(result, indent=None)
        return
    if reason:
        say(f"{reason}: ended after step {runner.status.step} of {plan.max_steps}")
    sum_up(plan.train_dir)


def _hold(lock: FolderLock) -> None:
    """Acquires the lock of the run's folder. Ends the command if another process holds the lock."""
    reason = lock.acquire()
    if reason:
        fail(reason)
