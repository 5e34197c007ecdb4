"""`replay archive`: writes the copies of a table into files, and shows what is in them. Reading needs no server."""

from __future__ import annotations

from replay_cli.archive.look import export_archive, list_groups, show_step
from replay_cli.archive.run import run_archiver
from replay_cli.options import Commands

archive = Commands(
    "Keep every group that passed, and see what became of it.\n\n"
    "Example: replay archive list runs/archive --outcome trained"
)
archive.add(list_groups, name="list")
archive.add(show_step, name="step")
archive.add(export_archive, name="export")
archive.add(run_archiver, name="run")

__all__ = ["archive"]
