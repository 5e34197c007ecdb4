"""`replay doctor`: prints what is wrong with a server, and the remedies."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from importlib.metadata import version
from typing import TYPE_CHECKING, Annotated, Any

import typer

from replay_cli.connection import ByShard, access_of, connect
from replay_cli.output import AsJson, console, one_line, print_json

if TYPE_CHECKING:
    from replay_client import ReplayClient
    from replay_client.records import ServerInfo
    from replay_dashboard.diagnosis import Finding

_ROUND_TRIPS = 5
"""The number of requests that are timed. The median of their times is the round trip."""
_SLOW = 0.1
"""A round trip that takes more seconds than this gives a warning."""
_LEVELS = {"ok": "ok", "idle": "ok", "warning": "warning", "blocked": "warning", "failure": "failure"}
"""Level of a verdict -> the level of a finding that is equally bad."""


def doctor(
    context: typer.Context,
    strict: Annotated[bool, typer.Option("--strict", help="Count warnings as failures.")] = False,
    max_staleness: Annotated[
        float | None,
        typer.Option(
            min=0,
            help="Mean staleness of fresh groups that you accept, in policy versions; the doctor says how to stay "
            "below it. [default: as their table and its permits say]",
        ),
    ] = None,
    by_shard: ByShard = False,
    as_json: AsJson = False,
) -> None:
    """Check the connection, versions, clocks, memory, disk, permits and every table. Status 1 after a failure.

    Example: replay doctor --strict
    """
    from replay_dashboard.diagnosis import Level
    from replay_dashboard.health import verdict

    with connect(context) as client:
        info, examined = look(client, max_staleness)
        address = client.address
    access_options = access_of(context)
    findings = [_access(access_options), *examined]
    judgement = verdict(info, findings, signs=())  # the doctor looks for no warning signs in the trainer's metrics
    if by_shard and info is not None:
        # These findings are added after the verdict, because the verdict is about all servers as one.
        findings += _of_shards(info, max_staleness)
    levels = {finding.level for finding in findings}
    healthy = Level.FAILURE not in levels
    if strict and Level.WARNING in levels:
        healthy = False
    if as_json:
        documents = [vars(finding) for finding in findings]
        print_json({"address": address, "healthy": healthy, "verdict": judgement, "findings": documents})
    else:
        _print(None if info is None else judgement, findings)
    if not healthy:
        raise typer.Exit(1)


def _access(options: dict[str, Any]) -> Finding:
    """The finding about the security of the connection. It is a warning if the token and the data go to another machine
    unencrypted. `options`: the options of the connection, by name."""
    from replay_client.access import Access, split_addresses
    from replay_dashboard.diagnosis import Finding, Level, found
    from replay_protos.transport import is_loopback

    access = Access.find(**options)
    token = "no token" if access.token is None else "a token"
    addresses = split_addresses(access.address).values()
    # The hosts behind a ray:// address are not known. The empty text stands for them, and does not count as loopback.
    hosts = [address.rpartition(":")[0] for address in addresses] or [""]
    if access.tls is not None:
        return Finding("access", Level.OK, f"{token}, encrypted")
    if not all(is_loopback(host) for host in hosts):
        return found("not-encrypted", "access", token=token)  # the warning, with its remedy
    return Finding("access", Level.OK, f"{token}, not encrypted")


def look(client: ReplayClient, max_staleness: float | None = None) -> tuple[ServerInfo | None, list[Finding]]:
    """Examines the server. Returns its state, and all findings about it.

    If the server does not answer, or refuses the requests, returns None and the finding about the connection.
    `max_staleness`: the mean staleness of fresh groups that the person accepts; None: as their table and its permits
    say.
    """
    from replay_client.errors import DeadlineExceededError, ReplayError, ServerUnavailableError
    from replay_dashboard.diagnosis import Finding, Level, diagnose, found

    try:
        client.policy()  # not timed, because the first request also opens the connection
        trip_seconds = []
        for _ in range(_ROUND_TRIPS):
            begin = time.perf_counter()
            client.policy()
            trip_seconds.append(time.perf_counter() - begin)
        info = client.server_info()
        transport = client.transport
    # In each case below, `found` makes the finding about the connection, with the remedy for the error.
    except ServerUnavailableError as error:
        return None, [found("no-server", "connection", error=error)]
    except DeadlineExceededError as error:
        return None, [found("server-hangs", "connection", error=error)]
    except ReplayError as error:
        return None, [found("refused", "connection", error=error)]
    median_seconds = sorted(trip_seconds)[_ROUND_TRIPS // 2]
    milliseconds = 1000 * median_seconds
    if median_seconds > _SLOW:
        connection = found("slow", "connection", address=client.address, milliseconds=milliseconds)
    else:
        connection = Finding("connection", Level.OK, f"{client.address} answers in {milliseconds:.1f} ms")
    payloads = Finding("payloads", Level.OK, f"travel over {transport}")
    # `diagnose` compares the version and the clock of the server with those of this command.
    diagnosed = diagnose(info, version("replay-server"), time.time(), max_staleness)
    return info, [connection, payloads, *diagnosed]


def _of_shards(info: ServerInfo, max_staleness: float | None) -> Iterator[Finding]:
    """Yields the findings about each shard that answers. `look` reports the shards that do not answer."""
    from replay_client.records import shards_of
    from replay_dashboard.diagnosis import diagnose

    for name, shard in shards_of(info):
        if shard is not None:
            for finding in diagnose(shard, version("replay-server"), time.time(), max_staleness):
                yield replace(finding, check=f"{name} {finding.check}")


def _print(verdict: dict[str, str] | None, findings: list[Finding]) -> None:
    """Prints the verdict and the findings. `verdict` is None if the server does not answer. A finding then says so."""
    from rich.text import Text

    styles = {"ok": "green", "warning": "yellow", "failure": "red"}
    out = console()
    if verdict is not None:
        level = _LEVELS[verdict["level"]]
        line = Text(f"{level:8}", style=styles[level])
        line.append(f" run: {verdict['short']}", style="default")
        out.print(line, soft_wrap=True)
    for finding in findings:
        line = Text(f"{finding.level:8}", style=styles[finding.level])
        remedy = f"; {finding.remedy}" if finding.remedy else ""
        line.append(one_line(f" {finding.check}: {finding.message}{remedy}"), style="default")
        out.print(line, soft_wrap=True)
