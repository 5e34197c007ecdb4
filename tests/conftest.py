"""Settings of all tests, and both ways of a payload between a client and a server of this process."""

import os

import pytest
from hypothesis import settings

from replay_protos import shared_memory

# On a loaded machine one example of a test can take longer than hypothesis allows it by default.
settings.register_profile("no deadline", deadline=None)
settings.load_profile("no deadline")
# A process that a test starts, and that crashes in native code, says in which line of Python it was.
os.environ.setdefault("PYTHONFAULTHANDLER", "1")


@pytest.fixture(params=["grpc", "shared memory"])
def transport(request, monkeypatch) -> str:
    """Runs a test twice: all payloads travel in messages, and all of them through rings."""
    monkeypatch.setattr(shared_memory, "MIN_SHARED", 1 if request.param == "shared memory" else 1 << 62)
    return request.param
