"""A replay server inside the trainer's process, for a script that names no server of its own.

This is the only module of the trainer that imports the server.
"""

from __future__ import annotations

from replay_server import ReplayServer, TableConfig


def start_embedded(table: str, max_size: int, max_staleness: int | None) -> ReplayServer:
    """A running server on the loopback address, with one table: a pool in memory that keeps the best `max_size` groups.

    The caller stops it.
    """
    config = TableConfig(
        name=table, sampler="prioritized", remover="min_heap", max_size=max_size, max_staleness=max_staleness
    )
    server = ReplayServer(tables=[config], port=0)
    server.start()
    return server
