"""`replay tables`, `top` and `dashboard`: show all tables once, live, or in a browser."""

from __future__ import annotations

import os
import select
import sys
import termios
import time
import tty
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Annotated, NoReturn, Self

import typer

from replay_cli.connection import ByShard, access_of, ask, connect
from replay_cli.output import AsJson, console, fail, misuse, need, print_json, say
from replay_protos import replay_pb2 as pb
from replay_protos.state import Document, document

if TYPE_CHECKING:
    from replay_client import ReplayClient
    from replay_client.records import ServerInfo

_ANSWER_SECONDS = 1.0
"""Seconds in which the server must answer `top`, unless --timeout says otherwise. The time is short because `top` reads
no keys while it waits for an answer."""


def tables(context: typer.Context, by_shard: ByShard = False, as_json: AsJson = False) -> None:
    """Show all tables: size, bytes, rates, staleness, and which requests wait for what.

    Example: replay tables --address 127.0.0.1:7400
    """
    with connect(context) as client:
        info = ask(client.server_info)
        address = client.address
    if as_json:
        print_json(_document(address, info, by_shard))
        return
    from replay_cli.screen import Screen

    screen = Screen(address, info, by_shard=by_shard)
    console().print(screen.render(), crop=False)


def _document(address: str, info: ServerInfo, by_shard: bool) -> Document:
    """The state of a server as JSON. With `by_shard`, also the state of each of several servers."""
    from replay_client.records import shards_of

    state: Document = {"address": address} | document(info, pb.ServerInfo.DESCRIPTOR)
    shards = dict(shards_of(info))  # empty for a single server
    if shards:
        state["gone"] = [name for name, shard in shards.items() if shard is None]
    if by_shard:
        documents: dict[str, Document | None] = {}
        for name, shard in shards.items():
            if shard is None:  # this server does not answer
                documents[name] = None
            else:
                documents[name] = {"address": name} | document(shard, pb.ServerInfo.DESCRIPTOR)
        state["shards"] = documents
    return state


def top(
    context: typer.Context,
    interval: Annotated[float, typer.Option(min=0.1, help="Seconds between updates.")] = 1.0,
    by_shard: ByShard = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON document a line. Needs no terminal.")] = False,
) -> None:
    """Show all tables, live: space pauses, q ends. With --json print a line for each look at the server.

    Example: replay top --interval 5
    """
    if not as_json:
        has_terminal = sys.stdin.isatty() and sys.stdout.isatty()
        if not has_terminal:
            misuse("top needs a terminal; use `replay top --json`, or `replay tables`")
    with connect(context, _ANSWER_SECONDS) as client:
        if as_json:
            _print_updates(client, interval, by_shard)
        else:
            _show_updates(client, interval, by_shard)


def _show_updates(client: ReplayClient, interval: float, by_shard: bool) -> None:
    """Asks the server again and again, and shows its tables on the whole terminal, until somebody presses q."""
    from rich.live import Live

    from replay_cli.screen import Screen
    from replay_client.errors import ReplayError

    with Keyboard() as keyboard, Live(console=console(), screen=True, auto_refresh=False) as live:
        screen = Screen(client.address, by_shard=by_shard)
        next_update = time.monotonic()
        while not screen.ended:
            if not screen.paused and time.monotonic() >= next_update:
                next_update = time.monotonic() + interval
                try:
                    screen.record(client.server_info())
                except ReplayError as error:
                    screen.problem = str(error)
            live.update(screen.render(live.console.height), refresh=True)
            # Wait for the next update. If a key is pressed, `read` returns at once, and the screen is shown again.
            wait = interval if screen.paused else max(0.0, next_update - time.monotonic())
            for key in keyboard.read(wait):
                screen.press(key)


def _print_updates(client: ReplayClient, interval: float, by_shard: bool) -> NoReturn:
    """Asks the server again and again, and prints a line of JSON each time, until a signal ends the command.

    If the server does not answer, the line has a `problem`, and no tables.
    """
    from replay_client.errors import DeadlineExceededError, ReplayError, ServerUnavailableError

    while True:
        update: Document = {"time": time.time()}
        try:
            update |= _document(client.address, client.server_info(), by_shard)
        except (ServerUnavailableError, DeadlineExceededError) as error:
            update |= {"address": client.address, "problem": str(error)}
        except ReplayError as error:  # the server refuses, perhaps because the token was revoked
            fail(error)
        print_json(update, indent=None)
        time.sleep(interval)


class Keyboard:
    """Reads keys as they are pressed, in a `with` block. The end of the block restores the terminal, even after an
    error."""

    def __enter__(self) -> Self:
        self._file = sys.stdin.fileno()
        self._before = termios.tcgetattr(self._file)
        tty.setcbreak(self._file)  # keys arrive without Enter, and are not shown
        return self

    def read(self, seconds: float) -> str | list[str]:
        """Waits up to `seconds` for keys, and returns the keys as a sequence.

        Returns an empty text if no key was pressed, and `[""]` if the terminal is gone.
        """
        ready, _, _ = select.select([self._file], [], [], seconds)
        if not ready:
            return ""
        try:
            keys = os.read(self._file, 64).decode(errors="replace")
            return keys or [""]  # no bytes: the end of the input
        except OSError:
            return [""]

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        termios.tcsetattr(self._file, termios.TCSADRAIN, self._before)


def dashboard(
    context: typer.Context,
    tokenizer: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="Folder with a tokenizer.json, to show text. Else that of the published weights is used.",
        ),
    ] = None,
    runs: Annotated[
        Path | None, typer.Option(exists=True, file_okay=False, help="Folder with metrics.jsonl files below it.")
    ] = None,
    listen: Annotated[
        str,
        typer.Option(
            metavar="HOST:PORT", help="Listen here; port 0: a free one. Beyond loopback the page wants a token."
        ),
    ] = "127.0.0.1:7402",
    allow_host: Annotated[
        list[str] | None, typer.Option(help="A host name under which browsers may ask for the page; repeatable.")
    ] = None,
    solved_reward: Annotated[
        float, typer.Option(help="A completion with at least this reward solves its prompt.")
    ] = 1.0,
    browser: Annotated[bool, typer.Option("--browser/--no-browser", help="Open the page in a browser.")] = True,
) -> None:
    """Look at the live buffer in a browser: what is in it, what waits and why, and every group. Only reads.

    Example: replay dashboard --runs runs --listen 127.0.0.1:7402
    """
    need("the page", "dashboard", "starlette", "uvicorn", "tokenizers")
    import secrets
    import signal
    import socket
    import webbrowser

    from replay_client.access import check_address
    from replay_dashboard.app import PageServer, Settings
    from replay_protos.transport import is_loopback

    try:
        host = check_address(listen, "--listen", least_port=0)
    except ValueError as error:
        misuse(error)
    port = int(listen.rpartition(":")[2])
    token = None if is_loopback(host) else secrets.token_urlsafe(32)  # a page beyond loopback needs a token
    settings = Settings(
        access=access_of(context),
        tokenizer=tokenizer,
        runs=runs,
        token=token,
        allow_hosts=tuple(allow_host or ()),
        solved_reward=solved_reward,
    )
    try:
        server = PageServer(settings)  # raises ValueError for settings that cannot be used
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, port), family=family)
    except ValueError as error:
        fail(error)
    except OSError as error:
        fail(f"cannot listen on {listen}: {error.strerror}")
    if host in ("0.0.0.0", "::"):  # all interfaces: no address that a browser could open
        shown_host = socket.gethostname()
    elif ":" in host:
        shown_host = f"[{host}]"
    else:
        shown_host = host
    url = f"http://{shown_host}:{listener.getsockname()[1]}/"
    if token is not None:
        url += f"#token={token}"  # a browser does not send the part after #
    # Inside `server.run`, uvicorn handles SIGINT and SIGTERM. `end` handles all stop signals before that, and the other
    # stop signals at any time. After `server.run`, uvicorn raises the signals that it has handled again, so `end` notes
    # them too.
    arrived: list[int] = []  # the numbers of all signals that `end` has noted

    def end(number: int, frame: object) -> None:
        """Notes the signal, and makes `server.run` return."""
        arrived.append(number)
        server.should_exit = True

    from replay_client.waits import stop_signals

    handlers = {number: signal.signal(number, end) for number in stop_signals()}
    say(f"dashboard at {url}")
    has_display = sys.platform != "linux" or bool({"DISPLAY", "WAYLAND_DISPLAY"} & os.environ.keys())
    if browser and has_display:
        webbrowser.open(url)
    os.nice(5)  # so that a replay server on the same machine gets the processor first
    server.run(sockets=[listener])  # until a signal, or at once if `end` has set `should_exit`
    for number, handler in handlers.items():
        signal.signal(number, handler)
    if arrived:  # the signal now ends the command, with the status of the signal
        signal.raise_signal(arrived[0])
