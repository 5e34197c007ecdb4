"""A real Prometheus with the configuration of docker/: what the dashboard and the documentation ask it for is there.

Skipped where no `prometheus` is installed (Debian and Ubuntu: apt-get install prometheus).
"""

import json
import re
import shutil
import socket
import subprocess
import time
import urllib.parse
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import pytest

from replay_client import ReplayClient
from replay_client.errors import DeadlineExceededError, ReplayError
from replay_server import AdmissionConfig, ReplayServer, TableConfig
from tests.docker.files import DOCKER, ROOT
from tests.factories import until

pytestmark = pytest.mark.skipif(shutil.which("prometheus") is None, reason="needs prometheus")
DASHBOARD = json.loads((DOCKER / "grafana/replay.json").read_text())
ALERTS = re.findall(r"^\| `(.+)` \|", (ROOT / "docs/how-to/monitor.md").read_text(), re.MULTILINE)
WAITS = [alert for alert in ALERTS if alert.endswith("> 300")]
SHORT, ASKS_EVERY = 5, 1
"""Seconds: what stands for the 300 of the documentation here, and after which a client that waits asks again."""
VARIABLES = {"$__rate_interval": "10s", "$instance": ".*", "$table": ".*"}


@pytest.fixture(scope="module")
def server():
    tables = [
        TableConfig(name="rollouts", rate_limiter={"type": "queue", "max_size": 8}, forward_to="replay"),
        TableConfig(name="replay", max_bytes="1MB"),
    ]
    admission = AdmissionConfig(groups_per_step=4, max_staleness=1)
    with ReplayServer(tables, port=0, admission=admission, max_bytes="1GB", metrics_address="127.0.0.1:0") as server:
        yield server


@pytest.fixture(scope="module")
def ask(server, tmp_path_factory):
    """Asks a Prometheus that has seen some seconds of a server at work."""
    folder = tmp_path_factory.mktemp("prometheus")
    config = (DOCKER / "prometheus.yml").read_text()
    assert "server:7401" in config
    assert "scrape_interval: 5s" in config
    config = config.replace("server:7401", server.metrics_address).replace("scrape_interval: 5s", "scrape_interval: 1s")
    rules = [
        {"alert": f"wait{number}", "expr": expression.replace("> 300", f"> {SHORT}")}
        for number, expression in enumerate(WAITS)
    ]
    (folder / "rules.yml").write_text(json.dumps({"groups": [{"name": "replay", "interval": "1s", "rules": rules}]}))
    (folder / "prometheus.yml").write_text(config + "\nrule_files: [rules.yml]\n")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    command = ["prometheus", f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data"]

    def ask(expression):
        query = urllib.parse.urlencode({"query": expression})
        with urllib.request.urlopen(f"http://{address}/api/v1/query?{query}", timeout=10) as response:
            return json.load(response)["data"]["result"]

    with subprocess.Popen([*command, f"--web.listen-address={address}"], stderr=subprocess.DEVNULL) as process:
        try:
            with ReplayClient(server.address) as client:
                work_until(lambda: ask("count_over_time(replay_uptime_seconds[1m]) > 5"), client)
            yield ask
        finally:
            process.terminate()


def work_until(seen, client):
    """Inserts, samples and fails until `seen` says something."""
    end = time.monotonic() + 60
    while True:
        client.insert(b"x", {"rollouts": 1.0})
        client.sample("rollouts")
        with pytest.raises(ReplayError):
            client.sample("nope")
        try:
            if seen():
                return
        except OSError:
            pass  # it does not listen yet
        assert time.monotonic() < end
        time.sleep(0.2)


def lines():
    for panel in DASHBOARD["panels"]:
        for target in panel["targets"]:
            yield pytest.param(target["expr"], id=f"{panel['title']}: {target['legendFormat']}")


@pytest.mark.parametrize("expression", list(lines()))
def test_each_line_of_the_dashboard_has_data(ask, expression):
    for name, value in VARIABLES.items():
        expression = expression.replace(name, value)
    assert ask(expression)


@pytest.mark.parametrize("expression", ALERTS)
def test_no_alert_of_the_documentation_goes_off_without_need(ask, expression):
    assert ask(expression) == []
    assert ask(re.sub(r" > .*", "", expression)), "it asks for metrics that are not there"


def test_an_alert_on_waiting_goes_off_for_a_run_that_is_blocked_though_its_clients_ask_again(server, ask):
    firing = 'ALERTS{alertstate="firing"}'
    assert len(WAITS) == 2
    assert ask(firing) == []
    with ReplayClient(server.address) as client:
        while True:  # let go of what the tests before have left, and take all permits
            try:
                client.sample("rollouts", timeout=0)
            except ReplayError:
                break
        client.acquire_permits(client.server_info().admission.capacity)
        end, alerts = time.monotonic() + 60, []
        while len(alerts) < 2 and time.monotonic() < end:
            with ThreadPoolExecutor(2) as threads:
                waits = [
                    threads.submit(client.sample, "rollouts", timeout=ASKS_EVERY),
                    threads.submit(client.acquire_permits, timeout=ASKS_EVERY),
                ]
                assert all(isinstance(wait.exception(), DeadlineExceededError) for wait in waits)
            alerts = ask(firing)
        assert sorted(alert["metric"]["alertname"] for alert in alerts) == ["wait0", "wait1"]
        client.set_policy_version(1)
        client.set_policy_version(2)
        client.insert(b"x", {"rollouts": 1.0})
        client.acquire_permits()
        client.sample("rollouts")
    until(lambda: ask(firing) == [], "the run goes on and the alerts stay")


def test_promtool_finds_nothing_to_complain_about(server, ask):
    subprocess.run(["promtool", "check", "config", str(DOCKER / "prometheus.yml")], check=True)
    with urllib.request.urlopen(f"http://{server.metrics_address}/metrics", timeout=10) as response:
        result = subprocess.run(["promtool", "check", "metrics"], input=response.read(), capture_output=True)
    assert (result.returncode, result.stdout, result.stderr) == (0, b"", b"")
