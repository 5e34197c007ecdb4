"""Every compose service's own command, environment and health check, as local processes in compose's order."""

import json
import subprocess
import urllib.request

import pytest
import yaml

from replay_client import ReplayClient
from tests.docker import files
from tests.docker.machine import Machine, Process, can_make_root_read_only

FEW_STEPS = {"ENGINE": "transformers", "STEPS": "3", "TARGET_SOLVE_RATE": "0.005"}


@pytest.fixture
def up(tmp_path):
    """`docker compose up`: starts services when what they depend on is as they want it; all end with the test."""
    started: list[Process] = []

    def start(*names: str, profiles=("cpu",), **variables: str) -> tuple[Machine, dict[str, Process]]:
        compose = files.load(*names, variables=FEW_STEPS | variables)
        machine = Machine(compose, tmp_path)
        processes: dict[str, Process] = {}
        for name, service in files.services(compose, profiles).items():
            for other, wanted in service.get("depends_on", {}).items():
                processes[other].wait_for(wanted["condition"])
            processes[name] = machine.process(name)
            started.append(processes[name])
            processes[name].start()
        return machine, processes

    yield start
    for process in started:
        process.kill()


def steps(machine: Machine) -> list[int]:
    lines = (machine.volume("runs") / "train/metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["step"] for line in lines]


@pytest.mark.timeout(700)
def test_the_cpu_profile_trains_with_a_read_only_root_and_starts_again_where_it_was(up):
    machine, running = up()
    assert set(running) == {"server", "prepare", "trainer-cpu", "generator-cpu"}
    running["generator-cpu"].wait_for("service_healthy")
    assert running["trainer-cpu"].wait(300) == 0, running["trainer-cpu"].output()
    assert steps(machine) == [1, 2, 3]
    with ReplayClient(machine.address, timeout=10.0) as client:
        assert client.policy().version == 3
    with urllib.request.urlopen(f"http://127.0.0.1:{machine.ports[7401]}/metrics", timeout=10) as metrics:
        assert b"replay_policy_version 3.0" in metrics.read()
    assert running["generator-cpu"].stop() == 0, running["generator-cpu"].output()
    assert running["server"].stop() == 0, running["server"].output()
    assert not running["generator-cpu"].health()[0]

    machine, running = up(STEPS="5")
    assert running["trainer-cpu"].wait(300) == 0, running["trainer-cpu"].output()
    assert steps(machine) == [1, 2, 3, 4, 5]
    assert "it was ready" in running["prepare"].output()


@pytest.mark.skipif(not can_make_root_read_only(), reason="needs mounts of its own")
def test_a_process_here_can_write_to_its_volumes_and_nowhere_else(tmp_path):
    machine = Machine(files.load(variables=FEW_STEPS), tmp_path)
    generator = machine.process("generator-cpu")
    for folder, allowed in (("/cache", True), ("/tmp", True), ("/runs", False)):
        path = generator.folders[folder] / "probe"
        assert (generator.run(["touch", str(path)]).wait() == 0) is allowed, folder
        assert path.exists() is allowed
    assert generator.run(["touch", str(tmp_path / "elsewhere")]).wait() != 0


def test_the_server_is_scraped_where_prometheus_looks(up):
    machine, running = up(profiles=())
    running["server"].wait_for("service_healthy")
    [job] = yaml.safe_load((files.DOCKER / "prometheus.yml").read_text())["scrape_configs"]
    [target] = job["static_configs"][0]["targets"]
    address = machine.process("server").local(target)
    with urllib.request.urlopen(f"http://{address}{job.get('metrics_path', '/metrics')}", timeout=10) as response:
        assert 'replay_table_items{table="rollouts"} 0.0' in response.read().decode()


@pytest.mark.timeout(400)
def test_with_tls_and_tokens_only_those_with_the_secrets_get_in(up, tmp_path):
    secrets = tmp_path / "secrets"
    for said in ("made", "there already"):
        made = subprocess.run([files.DOCKER / "make-secrets.sh", secrets], capture_output=True, text=True, check=True)
        assert said in made.stdout
    assert secrets.stat().st_mode & 0o777 == 0o700
    names = ("compose.yaml", "compose.secure.yaml")
    machine, running = up(*names, profiles=(), SECRETS=str(secrets))
    server = running["server"]
    server.wait_for("service_healthy")
    assert "without t" not in server.output().lower()  # no warning of missing tokens or TLS
    trainer = machine.process("trainer-cpu")
    assert trainer.health()[0]
    right = dict(trainer.service["environment"])
    for missing, message in (("REPLAY_TOKEN_FILE", "token"), ("REPLAY_TLS_CA", "TLS")):
        trainer.service["environment"] = {name: value for name, value in right.items() if name != missing}
        healthy, said = trainer.health()
        assert not healthy
        assert message in said
