"""`replay tables` and `replay top`: show all tables, once or live."""

from __future__ import annotations

import os
import select
import sys
import termios
import time
import tty
from types import TracebackType
from typing import Annotated, Any, Self

import typer

from replay_protos import replay_pb2 as pb
from replay_protos.state import Document, document
from replay_server.cli.connection import ByShard, Timeout, ask, connect
from replay_server.cli.options import with_access
from replay_server.cli.output import AsJson, console, misuse, print_json

_ANSWER_SECONDS = 1.0
"""The server must answer `top` within this time. Keys are read only afterwards."""


@with_access
def tables(access: dict[str, Any], by_shard: ByShard = False, as_json: AsJson = False, timeout: Timeout = 5.0) -> None:
    """Show all tables: size, bytes, rates, staleness, and which requests wait for what."""
    with connect(access, timeout) as client:
        info, address = ask(client.server_info), client.address
    if as_json:
        from replay_client.shards.merging import shards_of

        found: Document = {"address": address} | document(info, pb.ServerInfo.DESCRIPTOR)
        if by_shard:
            found["shards"] = {
                name: None if shard is None else {"address": name} | document(shard, pb.ServerInfo.DESCRIPTOR)
                for name, shard in shards_of(info)
            }
        print_json(found)
        return
    from rich.text import Text

    from replay_server.cli.screen import everything

    out = console()
    for part in everything(address, info, by_shard):
        out.print(part, soft_wrap=isinstance(part, Text))


@with_access
def top(
    access: dict[str, Any],
    interval: Annotated[float, typer.Option(min=0.1, help="Seconds between updates.")] = 1.0,
    by_shard: ByShard = False,
) -> None:
    """Show all tables, live. Keys sort and pause. Needs a terminal; `replay tables` and `replay watch` do not."""
    from rich.live import Live

    from replay_client.errors import ReplayError
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


class Keyboard:
    """Keys as they are pressed. The end of the block restores the terminal, however the command ends."""

    def __enter__(self) -> Self:
        self._file = sys.stdin.fileno()
        self._before = termios.tcgetattr(self._file)
        tty.setcbreak(self._file)
        return self

    def read(self, seconds: float) -> str | list[str]:
        """Waits up to `seconds` for keys. Returns `[""]` if the terminal is gone."""
        ready, _, _ = select.select([self._file], [], [], seconds)
        if not ready:
            return ""
        try:
            return os.read(self._file, 64).decode(errors="replace") or [""]
        except OSError:
            return [""]

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        termios.tcsetattr(self._file, termios.TCSADRAIN, self._before)
