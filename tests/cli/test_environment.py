"""The environment of a process: proxies, signals of terminals and schedulers, limits, variables of Kubernetes."""

from __future__ import annotations

import resource
import signal
import socket
import subprocess
from collections.abc import Iterator

import pytest

from replay_client import ReplayClient
from replay_client.testing import until
from replay_generator.engines.vllm import VLLMEngine
from replay_protos.transport import is_near
from tests.kit.processes import COMMAND, Running, run_replay, server_process

PROXIES = ("grpc_proxy", "http_proxy", "https_proxy")


@pytest.fixture
def proxy() -> Iterator[str]:
    """The address of a proxy that nobody may ask: it accepts, and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(0.1)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        with pytest.raises(TimeoutError):
            listener.accept()


# ------------------------------------------------------------------------------------------------ proxies


@pytest.mark.parametrize("variable", PROXIES)
@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_no_proxy_is_asked_for_a_server_on_this_machine(tmp_path, proxy, variable, host):
    with server_process(tmp_path) as server:
        port = server.address.rpartition(":")[2]
        done = run_replay("tables", "--json", address=f"{host}:{port}", **{variable: proxy})
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("variable", PROXIES)
def test_elsewhere_the_error_names_the_variable_and_the_remedy(variable):
    done = run_replay(
        "--timeout", "0.5", "tables", address="replay.example.com:7400", **{variable: "http://127.0.0.1:1"}
    )
    assert done.returncode == 1
    says = f"the variable {variable} sends it through a proxy: no_proxy=replay.example.com goes there directly"
    assert says in done.stderr


def test_an_error_names_no_proxy_that_is_not_asked():
    named = {"http_proxy": "http://127.0.0.1:1", "no_proxy": "example.com"}
    done = run_replay("--timeout", "0.5", "tables", address="replay.example.com:7400", **named)
    assert "proxy" not in done.stderr
    done = run_replay("--timeout", "0.5", "tables", address="127.0.0.1:1", http_proxy="http://127.0.0.1:1")
    assert "proxy" not in done.stderr


@pytest.mark.parametrize(
    ("host", "near"),
    [
        ("127.0.0.1", True),
        ("127.8.0.1", True),
        ("[::1]", True),
        ("localhost", True),
        ("10.1.2.3", True),
        ("172.16.0.1", True),
        ("172.32.0.1", False),
        ("192.168.1.1", True),
        ("169.254.1.1", True),
        ("100.64.0.1", True),
        ("fd00::1", True),
        ("fe80::1", True),
        ("replay-server", True),
        ("replay-0.replay.default.svc.cluster.local", True),
        ("replay-0.replay.default.svc", True),
        ("ip-10-0-0-1.ec2.internal", True),
        ("8.8.8.8", False),
        ("203.0.113.7", False),
        ("2001:db8::1", False),
        ("replay.example.com", False),
    ],
)
def test_an_address_is_near_if_no_proxy_can_lead_there(host, near):
    assert is_near(host) == near


# ------------------------------------------------------------------------------------------------ signals

OTHERS = [signal.SIGHUP, signal.SIGUSR1]


@pytest.mark.parametrize("number", OTHERS)
def test_a_server_and_a_scorer_finish_their_work_at_the_signals_of_terminals_and_schedulers(tmp_path, number):
    config = '[[tables]]\nname = "unscored"\n[[tables]]\nname = "rollouts"\n'
    with server_process(tmp_path, config) as server, ReplayClient(server.address) as client:
        scorer = Running(
            *("--address", server.address, "--name", "scorer-1", "score"),
            *("--source-table", "unscored", "--table", "rollouts", "--reward", "exact_match"),
            stderr=subprocess.PIPE,
        )
        until(lambda: any(each.name == "scorer-1" and each.settings for each in client.server_info().clients))
        scorer.send_signal(number)
        _, complained = scorer.communicate(timeout=100)
        assert scorer.returncode == 0, complained
        server.process.send_signal(number)
        assert server.process.wait(timeout=100) == 0


@pytest.mark.parametrize(("number", "status"), [(signal.SIGHUP, 129), (signal.SIGUSR1, 138)])
def test_other_commands_end_as_with_sigterm(tmp_path, number, status):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        words = [*COMMAND, "--timeout", "600", "--address", address, "tables"]
        with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            connection, _ = silent.accept()  # now the command waits for an answer
            with connection:
                process.send_signal(number)
                said, complained = process.communicate(timeout=100)
    assert process.returncode == status
    assert said == ""
    assert "Traceback" not in complained


def test_a_hangup_that_is_ignored_ends_nothing(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        words = ["nohup", *COMMAND, "--timeout", "600", "--address", address, "tables"]
        with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            connection, _ = silent.accept()
            with connection:
                process.send_signal(signal.SIGHUP)
                process.send_signal(signal.SIGTERM)
                process.communicate(timeout=100)
    assert process.returncode == 143


# ------------------------------------------------------------------------------------------------ limits


def test_a_limit_of_the_address_space_is_named_with_the_remedy(tmp_path):
    (tmp_path / "replay.toml").write_text(
        f'[server]\ndata_dir = "{tmp_path / "data"}"\n[[tables]]\nname = "rollouts"\n'
    )
    words = [*COMMAND, "serve", "--listen", "127.0.0.1:0", "--config", str(tmp_path / "replay.toml")]
    limit = 8 << 30
    done = subprocess.run(
        words,
        capture_output=True,
        text=True,
        timeout=100,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (limit, limit)),
    )
    assert done.returncode == 1
    assert f"this process may have {limit:,} bytes of address space (ulimit -v)" in done.stderr
    assert "start it with `ulimit -v unlimited`" in done.stderr


def test_what_kubernetes_sets_for_a_service_named_vllm_is_named_with_the_remedy(monkeypatch):
    monkeypatch.setenv("VLLM_PORT", "tcp://10.0.0.1:8000")
    with pytest.raises(ValueError, match=r"VLLM_PORT is 'tcp://10.0.0.1:8000', .*enableServiceLinks: false"):
        VLLMEngine("model")
