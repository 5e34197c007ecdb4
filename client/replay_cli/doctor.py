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
_SLOW = 0.1
"""Seconds of a round trip: a warning from here on."""
_LEVELS = {"ok": "ok", "idle": "ok", "warning": "warning", "blocked": "warning", "failure": "failure"}
"""The level of a finding that is as bad as each level of a verdict."""


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
    findings = [_access(access_of(context)), *examined]
    said = verdict(info, findings, ())
    if by_shard and info is not None:
        findings += _of_shards(info, max_staleness)
    worst = {finding.level for finding in findings}
    healthy = Level.FAILURE not in worst and not (strict and Level.WARNING in worst)
    if as_json:
        found = [vars(finding) for finding in findings]
        print_json({"address": address, "healthy": healthy, "verdict": said, "findings": found})
    else:
        _print(said if info is not None else None, findings)
    if not healthy:
        raise typer.Exit(1)


def _access(options: dict[str, Any]) -> Finding:
    """Whether tokens and data are encrypted on their way to another machine."""
    from replay_client.access import Access, split_addresses
    from replay_dashboard.diagnosis import Finding, Level, found
    from replay_protos.transport import is_loopback

    access = Access.find(**options)
    token = "no token" if access.token is None else "a token"
    hosts = [address.rpartition(":")[0] for address in split_addresses(access.address).values()] or [""]
    if access.tls is None and not all(map(is_loopback, hosts)):
        return found("not-encrypted", "access", token=token)
    return Finding("access", Level.OK, f"{token}, {'not encrypted' if access.tls is None else 'encrypted'}")


def look(client: ReplayClient, max_staleness: float | None = None) -> tuple[ServerInfo | None, list[Finding]]:
    """The state of the server, and all findings. If it does not answer, None and the finding about the connection."""
    from replay_client.errors import DeadlineExceededError, ReplayError, ServerUnavailableError
    from replay_dashboard.diagnosis import Finding, Level, diagnose, found

    try:
        client.policy()
        trips = []
        for _ in range(_ROUND_TRIPS):
            begin = time.perf_counter()
            client.policy()
            trips.append(time.perf_counter() - begin)
        info, transport = client.server_info(), client.transport
    except ReplayError as error:
        away, hangs = isinstance(error, ServerUnavailableError), isinstance(error, DeadlineExceededError)
        rule = "no-server" if away else "server-hangs" if hangs else "refused"
        return None, [found(rule, "connection", error=error)]
    trip = sorted(trips)[_ROUND_TRIPS // 2]
    if trip > _SLOW:
        connection = found("slow", "connection", address=client.address, milliseconds=1000 * trip)
    else:
        connection = Finding("connection", Level.OK, f"{client.address} answers in {1000 * trip:.1f} ms")
    payloads = Finding("payloads", Level.OK, f"travel over {transport}")
    return info, [connection, payloads, *diagnose(info, version("replay-server"), time.time(), max_staleness)]


def _of_shards(info: ServerInfo, max_staleness: float | None) -> Iterator[Finding]:
    """The findings about each server of several."""
    from replay_client.records import shards_of
    from replay_dashboard.diagnosis import diagnose

    for name, shard in shards_of(info):
        if shard is not None:
            for finding in diagnose(shard, version("replay-server"), time.time(), max_staleness):
                yield replace(finding, check=f"{name} {finding.check}")


def _print(said: dict[str, str] | None, findings: list[Finding]) -> None:
    """`said`: the verdict; None: the server does not answer, which is the only finding."""
    from rich.text import Text

    styles = {"ok": "green", "warning": "yellow", "failure": "red"}
    out = console()
    if said is not None:
        level = _LEVELS[said["level"]]
        line = Text(f"{level:8}", style=styles[level])
        line.append(f" run: {said['short']}", style="default")
        out.print(line, soft_wrap=True)
    for finding in findings:
        line = Text(f"{finding.level:8}", style=styles[finding.level])
        remedy = f"; {finding.remedy}" if finding.remedy else ""
        line.append(one_line(f" {finding.check}: {finding.message}{remedy}"), style="default")
        out.print(line, soft_wrap=True)
