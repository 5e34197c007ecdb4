"""The command `replay`: runs the server and the other processes of a run, and looks into tables.

One noun a file. The one package here that may import the client and the trainer; each command imports what it needs
when it runs.
"""

from replay_server.cli.app import main

__all__ = ["main"]
