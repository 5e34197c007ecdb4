"""Redis with an append-only file: each table is a stream, cut to its size by each insert.

The pipelines of redis-py were tried with 64 to 1024 commands: more than 256 gave nothing.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import redis

from benchmarks.systems import Bytes, Session, at_once


class Pipeline:
    def __init__(self, client: Any, table: str, nbytes: int) -> None:
        self._table, self._pipeline = table, client.pipeline(transaction=False)
        self._size = int(client.get(f"{table}/size"))
        self._most = at_once(nbytes, budget=16 << 20, most=256)
        self._waiting = 0

    def insert(self, payload: bytes, priority: float) -> None:
        self._pipeline.xadd(self._table, {b"p": payload, b"w": priority}, maxlen=self._size, approximate=False)
        self._waiting += 1
        if self._waiting == self._most:
            self.flush()

    def flush(self) -> None:
        self._pipeline.execute()
        self._waiting = 0


class RedisSession(Session):
    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        self._client: Any = redis.Redis(host, int(port))

    def native(self, payload: Bytes) -> bytes:
        return payload.tobytes()

    @contextmanager
    def inserter(self, table: str, nbytes: int) -> Iterator[Pipeline]:
        yield Pipeline(self._client, table, nbytes)

    def size(self, table: str) -> int:
        return int(self._client.xlen(table))

    def close(self) -> None:
        self._client.close()


session = RedisSession


def serve(tables: Sequence[dict[str, Any]], durability: str, folder: str) -> None:
    """Becomes redis-server. Another process says when it answers, and ends."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    if not os.fork():
        _announce(tables, port)
        os._exit(0)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    options = {"port": port, "bind": "127.0.0.1", "dir": folder, "appendonly": "yes", "appendfsync": durability}
    arguments = [text for name, value in options.items() for text in (f"--{name}", str(value))]
    os.execv(shutil.which("redis-server") or "redis-server", ["redis-server", *arguments, "--save", ""])


def _announce(tables: Sequence[dict[str, Any]], port: int) -> None:
    parent = os.getppid()
    while os.getppid() == parent:
        try:
            client = redis.Redis("127.0.0.1", port)
            client.ping()
            client.mset({f"{table['name']}/size": table["max_size"] for table in tables})
        except (redis.ConnectionError, redis.BusyLoadingError):
            time.sleep(0.01)
        else:
            print(f"listening on 127.0.0.1:{port}", flush=True)
            return


if __name__ == "__main__":
    serve(json.loads(sys.argv[1]), sys.argv[2], sys.argv[3])
