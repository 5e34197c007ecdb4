"""`replay serve` as a process: kills, restarts, signals, memory."""

import signal
import subprocess
import sys
import threading
import time

import psutil
import pytest

from replay_client import ReplayClient
from replay_client.errors import ReplayError, ServerUnavailableError
from tests.factories import server_process

CONFIG = """
[[tables]]
name = "plain"
sampler = "fifo"
"""


def replay(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "replay_server.cli", *arguments], capture_output=True, text=True, timeout=60
    )


def test_killing_the_server_gives_clear_errors_and_no_hang(tmp_path):
    with server_process(tmp_path, CONFIG) as server, ReplayClient(server.address, timeout=1.0) as client:
        client.insert(b"x", {"plain": 1.0})
        errors: list[ReplayError] = []

        def wait_for_more() -> None:
            try:
                client.sample("plain", 5, timeout=1.0)
            except ReplayError as error:
                errors.append(error)

        thread = threading.Thread(target=wait_for_more)
        thread.start()
        writer = client.writer()
        writer.insert(b"y", {"plain": 1.0})
        writer.flush()
        server.kill()
        writer.insert(b"z", {"plain": 1.0})
        with pytest.raises(ServerUnavailableError, match="is it running"):
            writer.flush()
        writer.close()
        thread.join(timeout=60)
        assert [type(error) for error in errors] == [ServerUnavailableError]


def test_writers_and_samplers_go_on_by_themselves_when_the_server_comes_back(tmp_path):
    with server_process(tmp_path, CONFIG) as first:
        address = first.address
        client = ReplayClient(address, timeout=20.0)
        writer, sampler = client.writer(), client.sampler("plain", batch_size=1)
        writer.insert(b"a", {"plain": 1.0})
        writer.flush()
        assert bytes(next(sampler)[0].payload) == b"a"
        watch = client.watch_policy()
        assert next(watch).version == 0
        first.kill()
        writer.insert(b"b", {"plain": 1.0})
        time.sleep(0.5)
    with server_process(tmp_path, CONFIG, address=address):
        writer.flush()
        assert bytes(next(sampler)[0].payload) == b"b"
        client.set_policy_version(4)
        assert next(watch).version == 4
        client.close()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_server_with_status_zero(tmp_path, number):
    with server_process(tmp_path, CONFIG) as server, ReplayClient(server.address) as client:
        client.insert(b"x", {"plain": 1.0})
        watch, sampler, writer = client.watch_policy(), client.sampler("plain", batch_size=1), client.writer()
        next(watch), next(sampler), writer.insert(b"y", {"plain": 1.0}), writer.flush()
        thread = threading.Thread(target=lambda: pytest.raises(ReplayError, client.sample, "plain", 9))
        thread.start()
        time.sleep(0.2)
        server.process.send_signal(number)
        assert server.process.wait(timeout=60) == 0
        thread.join(timeout=60)
        assert not thread.is_alive()


def test_the_idle_server_stays_under_100_mb(tmp_path):
    with server_process(tmp_path) as server, ReplayClient(server.address) as client:
        client.server_info()
        assert psutil.Process(server.process.pid).memory_info().rss < 100e6


def test_importing_the_client_loads_neither_torch_nor_the_server():
    code = "import sys, replay_client; print(sorted({m.partition('.')[0] for m in sys.modules}))"
    modules = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert "'replay_client'" in modules
    for absent in ("torch", "transformers", "vllm", "replay_server", "pydantic"):
        assert f"'{absent}'" not in modules


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ("", "tables"),
        ("[[tables]]\nname = 'a'\nsampler = 'best'", "tables.0.sampler"),
        ("[[tables]]\nname = 'a'\nmax_sise = 3", "max_sise"),
        ("[[tables]]\nname = 'a'\nforward_to = 'b'", "forwards to 'b', which does not exist"),
        (
            "[[tables]]\nname = 'a'\nforward_to = 'b'\n[[tables]]\nname = 'b'\nforward_to = 'a'",
            "a -> b -> a",
        ),
        ("[[tables]]\nname = 'a'\nmax_size = 2\nrate_limiter = {type='min_size', min_size=3}", "never be sampled"),
        (
            "[[tables]]\nname = 'a'\nrate_limiter = {type='sample_to_insert_ratio', samples_per_insert=1.0, "
            "error_buffer=0.5}",
            "widen error_buffer",
        ),
        ("[[tables]]\nname = 'a'\nrate_limiter = 'queue'", "needs max_size"),
        ("not toml", "replay.toml"),
        ("[server]\nmax_bytes = '3 apples'\n[[tables]]\nname = 'a'", "3 apples"),
    ],
)
def test_a_configuration_that_cannot_work_is_refused_with_its_place(tmp_path, config, words):
    path = tmp_path / "replay.toml"
    path.write_text(config)
    result = replay("serve", "--config", str(path), "--address", "127.0.0.1:0")
    assert result.returncode == 1
    assert words in result.stderr
    assert "Traceback" not in result.stderr
