"""Rings of shared memory, asked for by hand: a client that can say what no real one says."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from replay_protos import replay_pb2 as pb
from replay_protos.replay_pb2_grpc import ReplayStub
from replay_protos.shared_memory import Mailbox, Segment
from tests.server.rpc.calls import Requests

CAPACITY = 1 << 16


def open_rings() -> dict[int, str]:
    """The memory of the rings that this process has open, by its number: paths under which it can be opened."""
    found = {}
    for fd in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            if "replay-ring" in str(fd.readlink()):
                found[fd.stat().st_ino] = str(fd)
    return found


@contextmanager
def own_folder() -> Iterator[Path]:
    """A folder in memory that no other server uses."""
    folder = Path(f"/dev/shm/replay-test-{os.getpid()}-{random.getrandbits(32)}")
    folder.mkdir()
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


class Asking(Requests):
    """A call of ShareMemory, one request after the other."""

    def __init__(self, stub: ReplayStub) -> None:
        super().__init__()
        self.call = stub.ShareMemory(iter(self), timeout=60)

    def __call__(self, **fields) -> pb.ShareMemoryResponse:
        self.put(pb.ShareMemoryRequest(**fields))
        return next(self.call)

    def ring(self, capacity: int = CAPACITY) -> Segment:
        opened = self(open=capacity)
        mailbox = Mailbox(Path(opened.path))
        assert self(send=opened.ring).ring == opened.ring
        segment = mailbox.receive(opened.ring, capacity)
        assert segment is not None
        return segment


def insert_of(key: int, ring: int, position: int, size: int) -> pb.InsertRequest:
    shared = pb.SharedBytes(ring=ring, position=position, size=size)
    return pb.InsertRequest(
        keys=[key], targets=[pb.InsertTarget(table="plain")], payload_sizes=[size], timeout=5.0, shared=shared
    )
