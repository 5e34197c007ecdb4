"""Both ways of a payload between a client and a server of this process."""

import pytest

from replay_protos import shared_memory


@pytest.fixture(params=["grpc", "shared memory"])
def transport(request, monkeypatch) -> str:
    """Runs a test twice: all payloads travel in messages, and all of them through rings."""
    monkeypatch.setattr(shared_memory, "MIN_SHARED", 1 if request.param == "shared memory" else 1 << 62)
    return request.param
