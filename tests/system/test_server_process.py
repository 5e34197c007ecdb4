"""`replay serve` as a process: kills, restarts, signals, memory."""

import signal
import subprocess
import sys

import pytest

from replay_client import ReplayClient
from replay_client.errors import ReplayError, ServerUnavailableError
from replay_client.testing import until
from tests.kit.clocks import in_a_thread
from tests.kit.processes import free_port, server_process

CONFIG = """
tables = [{ name = "plain", sampler = "fifo" }]
"""


def test_killing_the_server_gives_clear_errors_and_no_hang(tmp_path):
    with (
        server_process(tmp_path, CONFIG) as server,
        ReplayClient(server.address) as client,
        ReplayClient(server.address, timeout=1.0) as hasty,
    ):
        client.insert(b"x", {"plain": 1.0})
        writer = hasty.writer()
        writer.insert(b"y", {"plain": 1.0})
        writer.flush(timeout=60.0)
        waiting = in_a_thread(client.sample, "plain", 5, timeout=5.0)
        until(lambda: client.server_info().tables["plain"].sampling.count)
        server.kill()
        writer.insert(b"z", {"plain": 1.0})
        with pytest.raises(ServerUnavailableError, match="is it running"):
            writer.flush()
        writer.close()
        assert type(waiting.exception()) is ServerUnavailableError


def test_writers_and_samplers_go_on_by_themselves_when_the_server_comes_back(tmp_path):
    address = f"127.0.0.1:{free_port()}"
    with server_process(tmp_path, CONFIG, address=address) as first:
        client = ReplayClient(address, timeout=60.0)
        writer, sampler = client.writer(), client.sampler("plain", batch_size=1)
        writer.insert(b"a", {"plain": 1.0})
        writer.flush()
        assert bytes(next(sampler)[0].payload) == b"a"
        watch = client.watch_policy()
        assert next(watch).version == 0
        first.kill()
        writer.insert(b"b", {"plain": 1.0})
    with server_process(tmp_path, CONFIG, address=address):
        writer.flush()
        assert bytes(next(sampler)[0].payload) == b"b"
        client.set_policy_version(4)
        assert next(watch).version == 4
        client.close()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_server_with_status_zero(tmp_path, number):
    with server_process(tmp_path, CONFIG, anew=True) as server, ReplayClient(server.address) as client:
        client.insert(b"x", {"plain": 1.0})
        watch, sampler, writer = client.watch_policy(), client.sampler("plain", batch_size=1), client.writer()
        next(watch), next(sampler), writer.insert(b"y", {"plain": 1.0}), writer.flush()
        waiting = in_a_thread(client.sample, "plain", 9)
        until(lambda: client.server_info().tables["plain"].sampling.count)
        server.process.send_signal(number)
        assert server.process.wait(timeout=200) == 0
        assert isinstance(waiting.exception(60), ReplayError)


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("replay_client", {"torch", "transformers", "vllm", "ray", "replay_server", "pydantic"}),
        ("replay_cli.app", {"torch", "transformers", "vllm", "ray"}),
        ("replay_server.shards", {"torch", "transformers", "vllm", "ray"}),
        ("replay_server.server", {"torch", "transformers", "vllm", "ray", "replay_client", "starlette", "pyarrow"}),
    ],
)
def test_the_client_and_the_server_load_only_what_they_need(module, absent):
    """So an idle server takes little memory, and a client starts soon."""
    code = f"import sys, {module}; print(*sorted({{name.partition('.')[0] for name in sys.modules}}))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert module.partition(".")[0] in loaded
    assert absent.isdisjoint(loaded)
