"""A client and a server of different versions of the protocol say so, instead of what gRPC or the tokens would say."""

from __future__ import annotations

import pytest

from replay_client import ReplayClient
from replay_client.errors import UnsupportedError
from replay_server import ReplayServer, SecurityConfig, TableConfig
from replay_server.rpc import auth, service
from tests.kit.processes import fails, tokens_file

SAID = "is of another version than this client, which speaks replay.v1.Replay: install one version of replay-server"
CALLS = {
    "info": lambda client: client.server_info(),
    "insert": lambda client: client.insert(b"x", {"pool": 1.0}),
    "sample": lambda client: client.sample("pool"),
    "delete": lambda client: client.delete("pool", [1]),
    "watch": lambda client: next(iter(client.watch_policy())),
}


@pytest.fixture(scope="module", params=["open", "tokens"])
def another(request, tmp_path_factory):
    """The address of a server of another version of the protocol, and a token of a run."""
    token = "0123456789abcdef" if request.param == "tokens" else None
    security = SecurityConfig()
    if token is not None:
        security = SecurityConfig(tokens_file=tokens_file(tmp_path_factory.mktemp("other"), f"read-write:{token}"))
    with pytest.MonkeyPatch.context() as patch:
        for module in (auth, service):
            patch.setattr(module, "SERVICE", "replay.v2.Replay")
        with ReplayServer([TableConfig(name="pool")], port=0, security=security) as server:
            yield server.address, token


@pytest.mark.parametrize("call", CALLS)
def test_a_client_says_that_the_server_is_of_another_version(another, call):
    address, token = another
    with ReplayClient(address, token=token) as client, pytest.raises(UnsupportedError, match=SAID):
        CALLS[call](client)


def test_a_command_says_it_in_one_line(another):
    address, token = another
    assert SAID in fails("tables", address=address, **{"REPLAY_TOKEN": token} if token else {})
