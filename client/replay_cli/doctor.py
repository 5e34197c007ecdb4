"""`replay doctor`: prints what is wrong with a server, and the remedies."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from importlib.metadata import version
from typing import TYPE_CHECKING, Annotated, Any

import typer

from replay_cli.connection import ByShard, access_of, connect
from replay_cli.output import AsJson, console, print_json

if TYPE_CHECKING:
    from replay_client import ReplayClient
    from replay_dashboard.diagnosis import Finding

_ROUND_TRIPS = 5
_SLOW = 0.1
"""Seconds of a round trip: a warning from here on."""


def doctor(
    context: typer.Context,
    strict: Annotated[bool, typer.Option("--strict", help="Count warnings as failures.")] = False,
    max_staleness: Annotated[
        float | None,
        typer.Option(
            min=0,
            help="How many policy versions old fresh groups may be in the mean: says what keeps them within. [as their "
            "table and its permits say]",
        ),
    ] = None,
    by_shard: ByShard = False,
    as_json: AsJson = False,
) -> None:
    """Check the connection, versions, clocks, memory, disk, permits and every table. Status 1 after a failure."""
    from replay_dashboard.diagnosis import Level

    with connect(context) as client:
        findings, address = [_access(access_of(context)), *examine(client, by_shard, max_staleness)], client.address
    worst = {finding.level for finding in findings}
    healthy = Level.FAILURE not in worst and not (strict and Level.WARNING in worst)
    if as_json:
        print_json({"address": address, "healthy": healthy, "findings": [vars(finding) for finding in findings]})
    else:
        _print(findings)
    if not healthy:
        raise typer.Exit(1)


def _access(given: dict[str, Any]) -> Finding:
    """Whether tokens and data are encrypted on their way to another machine."""
    from replay_client.access import Access, split_addresses
    from replay_dashboard.diagnosis import Finding, Level, found
    from replay_protos.transport import is_loopback

    access = Access.find(**given)
    token = "no token" if access.token is None else "a token"
    hosts = [address.rpartition(":")[0] for address in split_addresses(access.address).values()] or [""]
    if access.tls is None and not all(map(is_loopback, hosts)):
        return found("not-encrypted", "access", token=token)
    return Finding("access", Level.OK, f"{token}, {'not encrypted' if access.tls is None else 'encrypted'}")


def examine(client: ReplayClient, by_shard: bool = False, max_staleness: float | None = None) -> Iterator[Finding]:
    """All findings; with `by_shard` also those about each server of several.

    If the server does not answer, only that of the connection.
    """
    from replay_client.errors import DeadlineExceededError, ReplayError, ServerUnavailableError
    from replay_client.records import shards_of
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
        yield found("no-server" if away else "server-hangs" if hangs else "refused", "connection", error=error)
        return
    trip = sorted(trips)[_ROUND_TRIPS // 2]
    if trip > _SLOW:
        yield found("slow", "connection", address=client.address, milliseconds=1000 * trip)
    else:
        yield Finding("connection", Level.OK, f"{client.address} answers in {1000 * trip:.1f} ms")
    yield Finding("payloads", Level.OK, f"travel over {transport}")
    yield from diagnose(info, version("replay-server"), time.time(), max_staleness)
    for name, shard in shards_of(info):
        if by_shard and shard is not None:
            for finding in diagnose(shard, version("replay-server"), time.time(), max_staleness):
                yield replace(finding, check=f"{name} {finding.check}")


def _print(findings: list[Finding]) -> None:
    from rich.text import Text

    styles = {"ok": "green", "warning": "yellow", "failure": "red"}
    out = console()
    for finding in findings:
        line = Text(f"{finding.level:8}", style=styles[finding.level])
        line.append(f" {finding.check}: {finding.message}", style="default")
        if finding.remedy:
            line.append(f"; {finding.remedy}", style="default")
        out.print(line, soft_wrap=True)
