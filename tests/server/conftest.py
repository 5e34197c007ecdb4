"""Calls as they are, to the server of a test."""

from collections.abc import Iterator

import grpc
import pytest

from replay_protos.replay_pb2_grpc import ReplayStub


@pytest.fixture
def stub(server) -> Iterator[ReplayStub]:
    with grpc.insecure_channel(server.address) as channel:
        yield ReplayStub(channel)
