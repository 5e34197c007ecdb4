"""Clients and forks: a client in a forked process works or says at once why not, and never hangs."""

import multiprocessing
import pickle
import subprocess
import sys

import pytest

from replay_client import AsyncReplayClient, ReplayClient
from tests.kit.processes import server_process


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    with server_process(tmp_path_factory.mktemp("server")) as server:
        yield server.address


def answer(scenario: str, address: str) -> str:
    """What the program of forking.py prints."""
    command = [sys.executable, "-m", "tests.client.forking", scenario, address]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize("scenario", ["unused", "closed"])
def test_a_client_works_in_a_child_if_no_grpc_was_in_use_at_the_fork(address, scenario):
    assert answer(scenario, address) == "inserted b'child'"


def test_a_client_cannot_be_made_in_a_child_if_grpc_was_in_use_at_the_fork(address):
    said = answer("open", address)
    assert said.startswith("RuntimeError: gRPC was in use when this process was forked")
    assert "`spawn`" in said
    assert 'multiprocessing_context="spawn"' in said  # the words for a data loader


@pytest.mark.long
def test_a_data_loader_that_forks_says_what_to_do(address):
    pytest.importorskip("torch")
    assert 'multiprocessing_context="spawn"' in answer("loader, fork", address)


@pytest.mark.long
@pytest.mark.parametrize("scenario", ["loader, spawn", "loader, fork, closed"])
def test_a_data_loader_works_with_spawn_or_after_the_client_was_closed(address, scenario):
    pytest.importorskip("torch")
    assert answer(scenario, address) == "versions [0, 0, 0, 0]"


def use(client: ReplayClient, words) -> None:
    try:
        client.policy(timeout=5)
        words.put("it worked")
    except RuntimeError as error:
        client.close()  # by itself harmless
        words.put(str(error))


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_client_refuses_to_work_after_a_fork(address):
    context = multiprocessing.get_context("fork")
    words = context.SimpleQueue()
    with ReplayClient(address) as client:
        client.policy()
        process = context.Process(target=use, args=(client, words))
        process.start()
        assert "before a fork" in words.get()
        process.join()


@pytest.mark.parametrize("kind", [AsyncReplayClient, ReplayClient])
def test_a_client_cannot_be_pickled_and_says_what_to_do(address, kind):
    with pytest.raises(TypeError, match="make one in each process"):
        pickle.dumps(kind(address))
