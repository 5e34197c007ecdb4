"""Settings of all tests, clients of a test's own server, both ways of a payload in this process, and golden files."""

import os
import signal
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

from replay_client import ReplayClient
from replay_protos import shared_memory
from tests.kit.golden import Golden

# On a loaded machine examples can take longer than hypothesis allows by default, and so can making them. The examples
# are the same in every run, so that no run fails by chance; `make fuzz` and REPLAY_MODEL_EXAMPLES look for others.
settings.register_profile("same", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("same")
# A process that a test starts, and that crashes in native code, says in which line of Python it was.
os.environ.setdefault("PYTHONFAULTHANDLER", "1")
# A shell that runs the tests in the background lets them ignore Ctrl-C. The processes that tests interrupt would too.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def client(server) -> Iterator[ReplayClient]:
    """Of the server of a test."""
    with ReplayClient(server.address, timeout=60.0) as client:
        yield client


@pytest.fixture(params=["grpc", "shared memory"])
def transport(request, monkeypatch) -> str:
    """Runs a test twice: all payloads travel in messages, and all of them through rings."""
    monkeypatch.setattr(shared_memory, "MIN_SHARED", 1 if request.param == "shared memory" else 1 << 62)
    return request.param


@pytest.fixture
def golden() -> Golden:
    """Compares a text with a file of tests/golden/."""
    return Golden()


@pytest.hookimpl(tryfirst=True)  # before `-m golden` selects tests
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks the golden tests, so that `make golden` runs these and no others."""
    for item in items:
        if "golden" in getattr(item, "fixturenames", ()):
            item.add_marker("golden")
