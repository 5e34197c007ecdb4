"""`replay dashboard`: the live buffer in a browser."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from replay_server.cli.options import with_access
from replay_server.cli.output import fail, need, say


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
