"""Pickle over ZMQ: a process that keeps the bytes it is sent, and a client that pickles and loads dicts of arrays."""

from __future__ import annotations

import pickle
from itertools import count
from typing import Any

import zmq

from benchmarks.systems import Arrays, Session


class ZmqPickleSession(Session):
    def __init__(self, address: str) -> None:
        self._socket = zmq.Context.instance().socket(zmq.REQ)
        self._socket.connect(f"tcp://{address}")
        self._names = count()

    def put_fields(self, fields: Arrays) -> bytes:
        name = str(next(self._names)).encode()
        self._ask(b"put", name, pickle.dumps(fields, protocol=5))
        return name

    def get_fields(self, handle: bytes) -> Arrays:
        found: Arrays = pickle.loads(self._ask(b"get", handle, b""))
        return found

    def drop(self, handle: Any) -> None:
        self._ask(b"drop", handle, b"")

    def _ask(self, verb: bytes, name: bytes, data: bytes) -> Any:
        self._socket.send_multipart([verb, name, data], copy=False)
        return self._socket.recv(copy=False).buffer

    def close(self) -> None:
        self._socket.close()


session = ZmqPickleSession


def serve() -> None:
    """Serves until killed."""
    socket = zmq.Context.instance().socket(zmq.REP)
    port = socket.bind_to_random_port("tcp://127.0.0.1")
    print(f"listening on 127.0.0.1:{port}", flush=True)
    kept: dict[bytes, Any] = {}
    while True:
        verb, name, data = socket.recv_multipart(copy=False)
        if verb.bytes == b"put":
            kept[name.bytes] = data
        found = kept.pop(name.bytes) if verb.bytes == b"drop" else kept[name.bytes]
        socket.send(found.buffer if verb.bytes == b"get" else b"", copy=False)


if __name__ == "__main__":
    serve()
