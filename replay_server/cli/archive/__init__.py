"""`replay archive`: writes what passes through a server into files, and looks into them. Reading needs no server."""

from __future__ import annotations

import typer

from replay_server.cli.archive.look import export_archive, list_groups, show_step
from replay_server.cli.archive.run import run_archiver

archive = typer.Typer(
    help="Keep every group that passed, and see what became of it.", no_args_is_help=True, rich_markup_mode=None
)
archive.command("list")(list_groups)
archive.command("step")(show_step)
archive.command("export")(export_archive)
archive.command("run")(run_archiver)

__all__ = ["archive"]
