"""ReplayServer on a thread of its own: an error that ends the server after its start."""

import logging

import pytest

from replay_server import ReplayServer, TableConfig
from replay_server.rpc.service import Listener


@pytest.fixture
def failing_server(monkeypatch, caplog) -> ReplayServer:
    """A server whose thread an error has ended after a start without an error."""

    stop = Listener.stop

    async def fail(self, grace) -> None:
        await stop(self, grace)
        raise OSError("the listener cannot be closed")

    caplog.set_level(logging.ERROR, logger="replay_server")
    monkeypatch.setattr(Listener, "stop", fail)
    server = ReplayServer([TableConfig(name="a")], port=0)
    server.start()
    return server


def test_stop_raises_the_error_that_ends_the_server(failing_server, caplog):
    with pytest.raises(OSError, match="the listener cannot be closed"):
        failing_server.stop()
    assert "the server has failed" in caplog.text
    failing_server.stop()  # the error is raised once


def test_stop_raises_the_error_of_a_server_that_has_ended_already(failing_server):
    loop = failing_server._loop
    loop.call_soon_threadsafe(failing_server.request_stop)
    failing_server._thread.join()
    with pytest.raises(OSError, match="the listener cannot be closed"):
        failing_server.stop()
