"""Clients that break off in the middle of something: killed, with a closed connection, or by cancelling their call."""

from __future__ import annotations

import multiprocessing
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

import grpc

from replay_protos import replay_pb2 as pb
from replay_protos.replay_pb2_grpc import ReplayStub
from tests.kit.processes import start
from tests.server.rpc.calls import Requests

OPTIONS = [("grpc.max_receive_message_length", -1), ("grpc.use_local_subchannel_pool", 1)]


def insert(key: int, size: int, payload: bytes, table: str = "queue") -> pb.InsertRequest:
    return pb.InsertRequest(keys=[key], targets=[pb.InsertTarget(table=table)], payload_sizes=[size], payloads=payload)


def begin(stub: ReplayStub, where: str, requests: Requests) -> Any:
    """The call that is under way. Its stream of requests stays open."""

    def and_stay(*first: Any) -> Iterator[Any]:
        for request in first:
            requests.put(request)
        return iter(requests)

    many = pb.SampleRequest(table="plain", num_samples=100)
    untaken = [pb.DrawRequest(draw=pb.SampleRequest(table="queue", num_samples=1, id=2**40 + n)) for n in range(4)]
    match where:
        case "mid item":
            half = insert(11, 5_000_000, bytes(1_000_000), "plain")
            return stub.InsertStream(and_stay(half, pb.InsertRequest(payloads=bytes(999_999))))
        case "blocked insert":
            return stub.InsertStream(and_stay(insert(11, 1, b"x"), insert(12, 1, b"y")))
        case "blocked unary insert":
            return stub.Insert.future(insert(11, 1, b"x"))
        case "waiting sample":
            return stub.Sample(many)
        case "waiting sample stream":
            many.id = 2**40
            return stub.Draw(and_stay(pb.DrawRequest(draw=many)))
        case "untaken batches":
            call = stub.Draw(and_stay(*untaken))
            for _ in range(4):
                next(call)
        case "mid get":
            call = stub.Get(pb.GetRequest(keys=[77]))
            next(call)
        case "watch":
            call = stub.WatchPolicy(pb.GetPolicyRequest())
            next(call)
        case "permits":
            return stub.AcquirePermits.future(pb.AcquirePermitsRequest(count=200))
        case _:
            lease = 60.0 if where == "mid response with lease" else 0.0
            call = stub.Sample(pb.SampleRequest(table="large", num_samples=1, lease=lease))
            next(call)
    return call


def begin_and_stay(address: str, where: str, there: Connection) -> None:
    with grpc.insecure_channel(address, OPTIONS) as channel:
        begun = begin(ReplayStub(channel), where, Requests())  # noqa: F841  # the call ends with its last reference
        there.send("there")
        threading.Event().wait()


@contextmanager
def hanging(address: str, where: str, how: str) -> Iterator[Callable[[], object]]:
    """A client that is in the middle of something. Yields what breaks it off."""
    if how == "kill":
        here, there = multiprocessing.get_context("forkserver").Pipe()
        process = start(begin_and_stay, address, where, there)
        try:
            assert here.recv() == "there"
            yield process.kill
        finally:
            process.kill()
            process.join()
        return
    with grpc.insecure_channel(address, OPTIONS) as channel, Requests() as requests:
        call = begin(ReplayStub(channel), where, requests)
        yield channel.close if how == "close" else call.cancel
