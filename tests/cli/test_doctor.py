"""`doctor`: each trouble is named, with the remedy, and a healthy server has none."""

import json
import subprocess

import pytest

from replay_client import ReplayClient
from replay_client.testing import make_group, until
from replay_server import ReplayServer, SecurityConfig, TableConfig
from replay_server.telemetry import host
from tests.kit.processes import COMMAND, run_replay, tokens_file


@pytest.fixture(autouse=True)
def much_memory(monkeypatch):
    """Little memory of the machine that runs the tests would be a finding, too."""
    monkeypatch.setattr(host, "memory_available", lambda: 64 << 30)


def findings_of(server, *options, status=0):
    result = run_replay("doctor", "--json", *options, address=server.address)
    assert result.returncode == status, result
    return json.loads(result.stdout)["findings"]


def findings_of_the_healthy(server):
    """Once no round trip takes long: on a busy machine that is a warning."""

    def all_well():
        result = run_replay("doctor", "--json", "--strict", address=server.address)
        return json.loads(result.stdout)["findings"] if result.returncode == 0 else None

    return until(all_well, "the doctor always finds something")


def server_with(*tables, **options):
    return ReplayServer(tables=[TableConfig(**table) for table in tables], port=0, **options)


def test_a_healthy_server_has_no_finding(tmp_path):
    with (
        server_with({"name": "pool", "max_size": 100}, max_bytes="1MB") as server,
        ReplayClient(server.address) as client,
    ):
        client.insert(make_group(), {"pool": 1.0})
        findings = findings_of_the_healthy(server)
        assert {found["level"] for found in findings} == {"ok"}
        checks = ["access", "connection", "payloads", "version", "clock", "memory", "policy", "clients", "pool"]
        assert set(checks) == {found["check"] for found in findings}


def test_the_way_of_the_payloads_is_named_with_the_reason():
    for folder, message in (
        ("/dev/shm", "travel over shared memory"),
        (False, "travel over grpc: the server does not share memory ([server] shared_memory)"),
    ):
        with server_with({"name": "pool"}, max_bytes="1MB", shared_memory=folder) as server:
            assert message in [found["message"] for found in findings_of(server) if found["check"] == "payloads"]


def test_without_a_server_that_is_the_one_failure():
    result = run_replay("--timeout", "0.2", "doctor", address="127.0.0.1:1")
    assert result.returncode == 1
    access, connection = result.stdout.splitlines()
    assert access == "ok       access: no token, not encrypted"
    assert connection.startswith("failure  connection: no replay server answers at 127.0.0.1:1")
    assert "replay serve" in connection


def test_a_missing_token_is_a_failure_and_an_unencrypted_way_to_another_machine_a_warning(tmp_path):
    security = SecurityConfig(tokens_file=tokens_file(tmp_path, "read-only:0123456789abcdef0123"))
    with ReplayServer(tables=[TableConfig(name="pool")], port=0, max_bytes="1MB", security=security) as server:
        refused = run_replay("doctor", address=server.address)
        assert refused.returncode == 1
        assert (
            "failure  connection: this server wants a token and the call has none: set REPLAY_TOKEN" in refused.stdout
        )
        allowed = run_replay("doctor", address=server.address, REPLAY_TOKEN="0123456789abcdef0123")
        assert allowed.returncode == 0, allowed.stdout
        assert "access: a token, not encrypted\n" in allowed.stdout
    far = run_replay("--timeout", "0.2", "doctor", "--json", address="192.0.2.1:7400")
    assert [found["level"] for found in json.loads(far.stdout)["findings"]] == ["warning", "failure"]


def test_each_finding_is_one_line_that_ends_with_its_remedy_after_one_that_sums_up(server, client):
    client.insert(make_group(), {"rollouts": 1.0})
    result = run_replay("doctor", address=server.address)
    assert result.returncode == 0
    assert run_replay("doctor", "--strict", address=server.address).returncode == 1
    lines = result.stdout.splitlines()
    assert all(line.startswith(("ok ", "warning ", "failure ")) for line in lines)
    assert lines[0] == "ok       run: No trainer has connected yet"
    assert any(line.startswith("warning  replay: empty: ") and line.endswith("; start the trainer") for line in lines)


def test_module_and_script_are_the_same_command():
    help_text = subprocess.run([*COMMAND, "--help"], capture_output=True, text=True).stdout
    assert "Usage: replay " in help_text
    assert "Exit status: 0 all is well, 1 it failed" in " ".join(help_text.split())
