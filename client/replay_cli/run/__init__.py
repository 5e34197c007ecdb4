"""`replay run`: server, generators and trainer of one file, as processes of this machine."""

from replay_cli.run.command import run

__all__ = ["run"]
