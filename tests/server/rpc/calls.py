"""Calls that tests make by hand: on a connection of their own, on streams that stay open, and beside what others do."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from queue import Queue
from typing import Any, Self

import grpc

from replay_client import ReplayClient
from replay_protos.replay_pb2_grpc import ReplayStub
from tests.kit.clocks import in_a_thread


@contextmanager
def connection(address: str) -> Iterator[ReplayStub]:
    """A connection of its own: gRPC would share one between channels with the same options."""
    options = [("grpc.max_receive_message_length", -1), ("grpc.use_local_subchannel_pool", 1)]
    with grpc.insecure_channel(address, options) as channel:
        yield ReplayStub(channel)


class Requests(Queue[Any]):
    """The requests of a stream: those put into it, in their order. It stays open until the end of the block."""

    def __init__(self, *requests: Any) -> None:
        super().__init__()
        for request in requests:
            self.put(request)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.get, None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.put(None)


@contextmanager
def bystander(client: ReplayClient) -> Iterator[None]:
    """One small call after the other while the block runs, and at least one.

    A call that reaches the client's deadline fails the block. How many there are says nothing: on a busy machine the
    thread that makes them may get no turn.
    """
    stop = threading.Event()

    def call() -> None:
        client.policy()
        while not stop.is_set():
            client.policy()

    calls = in_a_thread(call)
    try:
        yield
    finally:
        stop.set()
    calls.result()
