"""Both ways of a payload between a client and a server of this process; and no deadline for hypothesis."""

import pytest
from hypothesis import settings

from replay_protos import shared_memory

# On a loaded machine one example of a test can take longer than hypothesis allows it by default.
settings.register_profile("no deadline", deadline=None)
settings.load_profile("no deadline")


@pytest.fixture(params=["grpc", "shared memory"])
def transport(request, monkeypatch) -> str:
    """Runs a test twice: all payloads travel in messages, and all of them through rings."""
    monkeypatch.setattr(shared_memory, "MIN_SHARED", 1 if request.param == "shared memory" else 1 << 62)
    return request.param
