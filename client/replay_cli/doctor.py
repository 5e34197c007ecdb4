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
"""Requests whose median time is the round trip."""
_SLOW = 0.1
"""A round trip that takes more seconds gives a warning."""
_LEVELS = {"ok": "ok", "idle": "ok", "warning": "warning", "blocked": "warning", "failure": "failure"}
"""For each level of a verdict: the level of a finding that is equally bad."""


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
    judgement = verdict(info, findings, ())  # (): without the warning signs in the trainer's metrics
    if by_shard and info is not None:  # after the verdict, which is about all servers as one
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
    """The finding about the connection's security: a warning if token and data reach another machine unencrypted."""
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
    """Returns the state of the server, and all findings about it.

    If the server does not answer, or refuses, returns None and the finding about the connection. `max_staleness`: the
    mean staleness of fresh groups that the person accepts; None: as their table and its permits say.
    """
    from replay_client.errors import DeadlineExceededError, ReplayError, ServerUnavailableError
    from replay_dashboard.diagnosis import Finding, Level, diagnose, found

    try:
        client.policy()  # opens the connection, whose time is not measured
        trips = []
        for _ in range(_ROUND_TRIPS):
            begin = time.perf_counter()
            client.policy()
            trips.append(time.perf_counter() - begin)
        info = client.server_info()
        transport = client.transport
    # `found` makes the finding of a known problem, here about the connection, with its remedy.
    except ServerUnavailableError as error:
        return None, [found("no-server", "connection", error=error)]
    except DeadlineExceededError as error:
        return None, [found("server-hangs", "connection", error=error)]
    except ReplayError as error:
        return None, [found("refused", "connection", error=error)]
    median = sorted(trips)[_ROUND_TRIPS // 2]
    milliseconds = 1000 * median
    if median > _SLOW:
        connection = found("slow", "connection", address=client.address, milliseconds=milliseconds)
    else:
        connection = Finding("connection", Level.OK, f"{client.address} answers in {milliseconds:.1f} ms")
    payloads = Finding("payloads", Level.OK, f"travel over {transport}")
    # `diagnose` compares the server's version and clock with those of this command.
    return info, [connection, payloads, *diagnose(info, version("replay-server"), time.time(), max_staleness)]


def _of_shards(info: ServerInfo, max_staleness: float | None) -> Iterator[Finding]:
    """The findings about each of several servers that answers. `look` reports the servers that do not answer."""
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
