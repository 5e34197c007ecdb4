"""`replay tables`: shows all tables."""

from __future__ import annotations

from typing import Any

from replay_server.cli.connection import ByShard, Timeout, ask, connect
from replay_server.cli.documents import server_document, shard_documents
from replay_server.cli.options import with_access
from replay_server.cli.output import AsJson, console, print_json


@with_access
def tables(access: dict[str, Any], by_shard: ByShard = False, as_json: AsJson = False, timeout: Timeout = 5.0) -> None:
    """Show all tables: size, bytes, rates, staleness, and which requests wait for what."""
    with connect(access, timeout) as client:
        info, address = ask(client.server_info), client.address
    if as_json:
        print_json(server_document(address, info) | (shard_documents(info) if by_shard else {}))
        return
    from replay_server.cli import overview

    out = console()
    out.print(overview.headline(address, info))
    out.print(overview.TableView(list(info.tables.values())))
    if (line := overview.permits(info)) is not None:
        out.print(line)
    for line in (*overview.clients(info), *overview.waits(info)):
        out.print(line, soft_wrap=True)
    for row in overview.shard_rows(info) if by_shard else ():
        out.print(row)
