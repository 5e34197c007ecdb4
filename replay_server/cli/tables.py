"""`replay tables`, `top`, `watch` and `dashboard`: show all tables once, live, by their changes, or in a browser."""

from __future__ import annotations

import os
import select
import sys
import termios
import time
import tty
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Annotated, Any, Self

import typer

from replay_protos import replay_pb2 as pb
from replay_protos.state import Document, declared, document
from replay_server.cli.connection import ByShard, Timeout, ask, connect
from replay_server.cli.options import with_access
from replay_server.cli.output import AsJson, console, fail, misuse, need, print_json, say

if TYPE_CHECKING:
    from replay_client.records import ServerInfo, TableInfo

_ANSWER_SECONDS = 1.0
"""The server must answer `top` within this time. Keys are read only afterwards."""


@with_access
def tables(access: dict[str, Any], by_shard: ByShard = False, as_json: AsJson = False, timeout: Timeout = 5.0) -> None:
    """Show all tables: size, bytes, rates, staleness, and which requests wait for what."""
    with connect(access, timeout) as client:
        info, address = ask(client.server_info), client.address
    if as_json:
        from replay_client.records import shards_of

        found: Document = {"address": address} | document(info, pb.ServerInfo.DESCRIPTOR)
        shards = dict(shards_of(info))
        if shards:
            found["gone"] = [name for name, shard in shards.items() if shard is None]
        if by_shard:
            found["shards"] = {
                name: None if shard is None else {"address": name} | document(shard, pb.ServerInfo.DESCRIPTOR)
                for name, shard in shards.items()
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
                    screen.see(client.server_info())
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


Event = dict[str, Any]


class Kind(StrEnum):
    POLICY = "policy"
    TABLE = "table"
    BLOCKED = "blocked"
    SERVER = "server"


@with_access
def watch(
    access: dict[str, Any],
    only: Annotated[list[Kind] | None, typer.Option(help="Only events of this kind; repeatable. [all]")] = None,
    interval: Annotated[float, typer.Option(min=0.05, help="Seconds between two looks at the server.")] = 1.0,
    count: Annotated[int | None, typer.Option(min=1, help="Stop after this many lines.")] = None,
    as_json: AsJson = False,
    timeout: Timeout = 5.0,
) -> None:
    """Print a line for each event: new policy versions, items in and out, waits, a server that comes or goes.

    With --json each line is a JSON document.
    """
    from replay_client.errors import DeadlineExceededError, ReplayError, ServerUnavailableError

    changes, printed = Changes(), 0
    with connect(access, timeout) as client:
        info: ServerInfo | None = ask(client.server_info)
        while True:
            for event in changes.since_last(info):
                if only and event["event"] not in only:
                    continue
                if as_json:
                    print_json({"time": time.time()} | event, indent=None)
                else:
                    say(f"{time.strftime('%H:%M:%S')} {in_words(event)}")
                printed += 1
                if printed == count:
                    return
            time.sleep(interval)
            try:
                info = client.server_info()
            except (ServerUnavailableError, DeadlineExceededError):
                info = None
            except ReplayError as error:  # it refuses: the token was revoked
                fail(error)


@dataclass
class Changes:
    """Finds what changed between two looks at a server."""

    last: ServerInfo | None = None
    there: bool = True
    waiting: set[tuple[str, str]] = field(default_factory=set)

    def since_last(self, info: ServerInfo | None) -> Iterator[Event]:
        """The events since the last call. `info` None: no server answered."""
        if info is None:
            if self.there:
                yield {"event": "server", "state": "gone"}
            self.there = False
            return
        from replay_client.records import restarted, shards_of, starts_of

        last, self.last = self.last, info
        shards = {} if last is None else dict(shards_of(last))
        for name, shard in shards_of(info):
            if name in shards and (shard is None) != (shards[name] is None):
                yield {"event": "server", "state": "gone" if shard is None else "back", "name": name}
        if last is not None and restarted(last, info):
            yield {"event": "server", "state": "restarted"}
            last = None
        elif not self.there:
            yield {"event": "server", "state": "back"}
        self.there = True
        if last is None or (last.policy.version, last.policy.weights) != (info.policy.version, info.policy.weights):
            yield {"event": "policy", "version": info.policy.version, "weights": info.policy.weights}
        # What a shard counted before it was away is no event of the moment when it is back.
        as_before = last is not None and starts_of(last) == starts_of(info)
        for name, table in info.tables.items():
            before = last.tables.get(name) if last is not None and as_before else None
            if before is not None and (moved := _moved(before, table)):
                yield {"event": "table", "table": name, **moved, "size": table.size}
            yield from self._waits(table)

    def _waits(self, table: TableInfo) -> Iterator[Event]:
        for verb, wait in (("inserting", table.inserting), ("sampling", table.sampling)):
            place, facts = (table.name, verb), {"event": "blocked", "table": table.name, "verb": verb}
            if wait.count and place not in self.waiting:
                self.waiting.add(place)
                yield facts | {"state": "begins", "count": wait.count, "reason": wait.reason}
            elif not wait.count and place in self.waiting:
                self.waiting.remove(place)
                yield facts | {"state": "ends", "count": 0, "reason": ""}


_COUNTERS = tuple(
    field.name
    for field, option in declared(pb.TableInfo.DESCRIPTOR)
    if option.counter and field.name != "duplicates"  # those are retries, and no event
)
"""The fields of a TableInfo that only grow, until a reset."""


def _moved(before: TableInfo, after: TableInfo) -> dict[str, int]:
    """How far each counter went up. After a reset, which sets it to 0, its whole value counts."""
    moved = {}
    for name in _COUNTERS:
        old, new = getattr(before, name), getattr(after, name)
        if new != old:
            moved[name] = new - old if new > old else new
    return moved


def in_words(event: Event) -> str:
    match event["event"]:
        case "server":
            server = f"server {event['name']}" if "name" in event else "the server"
            return f"{server} {'was' if event['state'] == 'restarted' else 'is'} {event['state']}"
        case "policy":
            return f"policy version {event['version']} {event['weights']}".rstrip()
        case "table":
            counts = [f"{value} {name.replace('_', ' ')}" for name, value in event.items() if name in _COUNTERS]
            return f"{event['table']}: {', '.join(counts)}; size {event['size']}"
        case _:
            if event["state"] == "ends":
                return f"{event['table']}: {event['verb']} goes on"
            return f"{event['count']} wait: {event['reason']}"


@with_access
def dashboard(
    access: dict[str, Any],
    tokenizer: Annotated[
        Path | None,
        typer.Option(help="Folder with a tokenizer.json, to show text. Else that of the published weights is used."),
    ] = None,
    runs: Annotated[Path | None, typer.Option(help="Folder below which metrics.jsonl files of trainers lie.")] = None,
    host: Annotated[str, typer.Option(help="Address to listen on. Other than loopback the page wants a token.")] = (
        "127.0.0.1"
    ),
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: a free one.")] = 7402,
    allow_host: Annotated[
        list[str] | None, typer.Option(help="A host name under which browsers may ask for the page; repeatable.")
    ] = None,
    solved_above: Annotated[float, typer.Option(help="A completion with a larger reward solves its prompt.")] = 0.5,
    browser: Annotated[bool, typer.Option("--browser/--no-browser", help="Open the page in a browser.")] = True,
) -> None:
    """Look at the live buffer in a browser: what is in it, what waits and why, and every group. Only reads."""
    need("the page", "dashboard", "starlette", "uvicorn", "tokenizers")
    import os
    import secrets
    import signal
    import socket
    import sys
    import webbrowser

    from replay_client.dashboard.app import PageServer, Settings
    from replay_protos.transport import is_loopback

    if runs is not None and not runs.is_dir():
        fail(f"--runs: there is no folder {runs}")
    token = None if is_loopback(host) else secrets.token_urlsafe(32)
    settings = Settings(access, tokenizer, runs, token, tuple(allow_host or ()), solved_above)
    try:
        server = PageServer(settings)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, port), family=family)
    except (ValueError, OSError) as error:
        fail(error if isinstance(error, ValueError) else f"cannot listen on {host}:{port}: {error.strerror}")
    shown = socket.gethostname() if host in ("0.0.0.0", "::") else f"[{host}]" if ":" in host else host
    url = f"http://{shown}:{listener.getsockname()[1]}/" + (f"#token={token}" if token else "")
    # The server notes signals while it runs. One that comes before that must end it too.
    early: list[int] = []

    def end(number: int, frame: object) -> None:
        early.append(number)
        server.should_exit = True

    handlers = {number: signal.signal(number, end) for number in (signal.SIGINT, signal.SIGTERM)}
    say(f"dashboard at {url}")
    if browser and (sys.platform != "linux" or {"DISPLAY", "WAYLAND_DISPLAY"} & os.environ.keys()):
        webbrowser.open(url)
    os.nice(5)  # on a machine that they share the server goes first
    server.run(sockets=[listener])
    for number, handler in handlers.items():
        signal.signal(number, handler)
    if early:
        signal.raise_signal(early[0])
