"""The command `replay`: runs the server and the other processes of a run, and looks into tables.

One subcommand a file. This is the one package that may import the server, the client and the trainer. Each command
imports what it needs when it runs.
"""


def main() -> None:
    """The entry point. Never returns: it exits with the status of the command."""
    # Ctrl-C while the modules load must end with a status too, and not with a traceback.
    try:
        from replay_server.cli.app import run
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    run()


__all__ = ["main"]
