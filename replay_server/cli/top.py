"""`replay top`: shows all tables, live."""

from __future__ import annotations

import sys
import time
from typing import Annotated, Any

import typer

from replay_server.cli.connection import ByShard, connect
from replay_server.cli.options import with_access
from replay_server.cli.output import console, misuse

_ANSWER_SECONDS = 1.0
"""The server must answer within this time. Keys are read only afterwards."""


@with_access
def top(
    access: dict[str, Any],
    interval: Annotated[float, typer.Option(min=0.1, help="Seconds between updates.")] = 1.0,
    by_shard: ByShard = False,
) -> None:
    """Show all tables, live. Keys sort and pause. Needs a terminal; `replay tables` and `replay watch` do not."""
    from rich.live import Live

    from replay_client.errors import ReplayError
    from replay_server.cli.keyboard import Keyboard
    from replay_server.cli.screen import Screen

    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        misuse("top needs a terminal; use `replay tables`, with --json for programs, or `replay watch`")
    with (
        connect(access, _ANSWER_SECONDS) as client,
        Keyboard() as keyboard,
        Live(console=console(), screen=True, auto_refresh=False) as live,
    ):
        screen = Screen(client.address, by_shard=by_shard)
        look_at = time.monotonic()
        while not screen.ended:
            if not screen.paused and time.monotonic() >= look_at:
                look_at = time.monotonic() + interval
                try:
                    screen.see(client.server_info(), time.monotonic())
                except ReplayError as error:
                    screen.problem = str(error)
            live.update(screen.render(live.console.height), refresh=True)
            wait = interval if screen.paused else max(0.0, look_at - time.monotonic())
            for key in keyboard.read(wait):
                screen.press(key)
