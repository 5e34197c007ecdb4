"""A real Prometheus with the configuration of docker/: what the dashboard and the documentation ask it for is there.

Skipped where no `prometheus` is installed (Debian and Ubuntu: apt-get install prometheus).
"""

import json
import re
import shutil
import subprocess
import urllib.parse
import urllib.request
from contextlib import suppress

import pytest
import yaml

from replay_client import ReplayClient
from replay_client.errors import ReplayError
from replay_client.testing import PATIENCE, until
from replay_server import AdmissionConfig, ReplayServer, TableConfig
from tests.docker.files import DOCKER, ROOT
from tests.kit.processes import free_port

pytestmark = pytest.mark.skipif(shutil.which("prometheus") is None, reason="needs prometheus")
DASHBOARD = json.loads((DOCKER / "chart/dashboard.json").read_text())
ALERTS = re.findall(r"^\| `([^`]+)` \|", (ROOT / "docs/how-to/look.md").read_text(), re.MULTILINE)
VARIABLES = {"$__rate_interval": "10s", "$instance": ".*", "$table": ".*"}


@pytest.fixture(scope="module")
def server():
    tables = [
        TableConfig(name="rollouts", rate_limiter={"type": "queue", "max_size": 8}, forward_to="replay"),
        TableConfig(name="replay", max_bytes="1MB"),
    ]
    admission = AdmissionConfig(fresh_groups_per_step=4, max_staleness=1)
    with ReplayServer(tables, port=0, admission=admission, max_bytes="1GB", metrics_listen="127.0.0.1:0") as server:
        yield server


@pytest.fixture(scope="module")
def ask(server, tmp_path_factory):
    """Asks a Prometheus that has seen a server at work."""
    folder = tmp_path_factory.mktemp("prometheus")
    config = (DOCKER / "prometheus.yml").read_text()
    assert "/tmp/servers.yml" in config
    assert "scrape_interval: 5s" in config
    (folder / "servers.yml").write_text(f"- targets: [{server.metrics_address}]")
    config = config.replace("/tmp/servers.yml", str(folder / "servers.yml"))
    config = config.replace("scrape_interval: 5s", "scrape_interval: 250ms")
    assert "rule_files: [alerts.yml]" in config
    config = config.replace("[alerts.yml]", f"[{DOCKER / 'chart/alerts.yml'}]")
    (folder / "prometheus.yml").write_text(config)
    address = f"127.0.0.1:{free_port()}"
    command = ["prometheus", f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data"]

    def ask(expression):
        query = urllib.parse.urlencode({"query": expression})
        with urllib.request.urlopen(f"http://{address}/api/v1/query?{query}", timeout=PATIENCE) as response:
            return json.load(response)["data"]["result"]

    def seen(expression):
        with suppress(OSError):  # it does not listen yet
            return ask(expression)

    with subprocess.Popen([*command, f"--web.listen-address={address}"], stderr=subprocess.DEVNULL) as process:
        try:
            with ReplayClient(server.address) as client:
                uptime = "count_over_time(replay_uptime_seconds[1m]) > 5"
                until(lambda: work(client) or seen(uptime), pause=0.2)
                client.leave()  # so that nobody misses it while the tests take their time
            yield ask
        finally:
            process.terminate()


def work(client):
    """Inserts, samples and fails."""
    client.insert(b"x", {"rollouts": 1.0})
    client.sample("rollouts")
    with pytest.raises(ReplayError):
        client.sample("nope")


def lines():
    for panel in DASHBOARD["panels"]:
        for target in panel["targets"]:
            yield pytest.param(target["expr"], id=f"{panel['title']}: {target['legendFormat']}")


@pytest.mark.parametrize("expression", list(lines()))
def test_each_line_of_the_dashboard_has_data(ask, expression):
    for name, value in VARIABLES.items():
        expression = expression.replace(name, value)
    until(lambda: ask(expression))  # after a scrape that failed, a gauge has no value until the next one


@pytest.mark.parametrize("expression", ALERTS)
def test_no_alert_of_the_documentation_goes_off_without_need(ask, expression):
    # After a scrape that failed, a gauge has no value until the next one.
    until(lambda: ask(re.sub(r" > .*", "", expression)))
    assert ask(expression) == []


NEEDS_PROMTOOL = pytest.mark.skipif(shutil.which("promtool") is None, reason="needs promtool")
RULES = {
    rule["alert"]: rule["expr"]
    for rule in yaml.safe_load((DOCKER / "chart/alerts.yml").read_text())["groups"][0]["rules"]
}
SERVER = {"instance": "server:7401", "job": "replay"}
HEALTHY = {
    "up": "1x60",
    "replay_commit_failing": "0x60",
    "replay_damaged_total": "0x60",
    "replay_fell_back": "0x60",
    'replay_overdue_seconds{role="trainer"}': "0x60",
    'replay_table_waiting_seconds{table="rollouts",operation="sample"}': "0x60",
    'replay_table_incomplete_items_seconds{table="rollouts"}': "0x60",
    "replay_permits_waiting_seconds": "0x60",
    "replay_long_wait_seconds": "20x60",
    "replay_bytes": "5000000000x60",
    "replay_max_bytes": "10000000000x60",
    "replay_disk_available_bytes": "90000000000x60",
}
"""Values of a healthy server, every 10 s for ten minutes."""
GROWS = "0+10x60"
"""A wait of as many seconds as the test lasts."""
SICK = {
    "ReplayServerDown": {"up": "0x60"},
    "ReplayDiskFails": {"replay_commit_failing": "1x60"},
    "ReplayDamage": {"replay_damaged_total": "3x60"},
    "ReplayFellBack": {"replay_fell_back": "1x60"},
    "ReplayClientOverdue": {'replay_overdue_seconds{role="trainer"}': "94+10x60"},
    "ReplayWaits": {'replay_table_waiting_seconds{table="rollouts",operation="sample"}': GROWS},
    "ReplayWaitsForColumns": {'replay_table_incomplete_items_seconds{table="rollouts"}': GROWS},
    "ReplayPermitsWait": {"replay_permits_waiting_seconds": GROWS},
    "ReplayMemoryFull": {"replay_bytes": "9100000000x60"},
    "ReplayDiskFull": {"replay_disk_available_bytes": "4000000000x60"},
}


def fired(folder, values):
    """The alerts that go off within ten minutes, as promtool computes them for these values."""
    series = []
    for name, course in values.items():
        metric, _, labels = name.partition("{")
        given = ",".join([*(f'{key}="{value}"' for key, value in SERVER.items()), *filter(None, [labels.rstrip("}")])])
        series.append({"series": f"{metric}{{{given}}}", "values": course})
    # promtool compares what fires with what is expected: each alert is asked for, and expected not to fire.
    quiet = [{"eval_time": "9m", "alertname": name, "exp_alerts": []} for name in RULES]
    tests = [{"interval": "10s", "input_series": series, "alert_rule_test": quiet}]
    path = folder / "alerts_test.yml"
    path.write_text(json.dumps({"rule_files": [str(DOCKER / "chart/alerts.yml")], "tests": tests}))
    done = subprocess.run(["promtool", "test", "rules", str(path)], capture_output=True, text=True)
    names = set(re.findall(r"alertname:\s*(\w+), time: 9m", done.stdout + done.stderr))
    assert (done.returncode == 0) == (not names), done.stdout + done.stderr
    return names


@NEEDS_PROMTOOL
@pytest.mark.parametrize("alert", RULES)
def test_each_alert_goes_off_for_its_trouble_and_no_other_does(tmp_path, alert):
    assert fired(tmp_path, HEALTHY | SICK[alert]) == {alert}


@NEEDS_PROMTOOL
@pytest.mark.parametrize(
    "course",
    [
        pytest.param({}, id="nothing happens"),
        pytest.param(
            {
                "replay_long_wait_seconds": "900x60",
                'replay_table_waiting_seconds{table="rollouts",operation="sample"}': GROWS,
                'replay_table_incomplete_items_seconds{table="rollouts"}': GROWS,
                "replay_permits_waiting_seconds": GROWS,
            },
            id="steps take five minutes",
        ),
        pytest.param({"replay_commit_failing": "_x60", "replay_max_bytes": "_x60"}, id="no disk and no bound"),
    ],
)
def test_no_alert_goes_off_for_a_healthy_server(tmp_path, course):
    assert fired(tmp_path, HEALTHY | course) == set()


@pytest.mark.parametrize("alert", RULES)
def test_a_real_server_has_the_metrics_of_each_alert_and_is_healthy(ask, alert):
    assert ask(f'ALERTS{{alertname="{alert}"}}') == []
    names = set(re.findall(r"replay_\w+|up", RULES[alert]))
    of_disks = {"replay_commit_failing", "replay_damaged_total", "replay_fell_back", "replay_disk_available_bytes"}
    for name in names - of_disks:
        until(lambda name=name: ask(name))


def test_a_server_on_disk_has_the_metrics_of_the_disk(tmp_path):
    tables = [TableConfig(name="pool")]
    with (
        ReplayServer(tables, port=0, data_dir=tmp_path / "data", metrics_listen="127.0.0.1:0") as server,
        urllib.request.urlopen(f"http://{server.metrics_address}/metrics", timeout=PATIENCE) as response,
    ):
        lines = response.read().decode().splitlines()
    values = dict(line.split(" ") for line in lines if line.startswith("replay_") and "{" not in line)
    for name in ("replay_commit_failing", "replay_damaged_total", "replay_fell_back"):
        assert float(values[name]) == 0.0
    assert float(values["replay_disk_available_bytes"]) > 0


@NEEDS_PROMTOOL
def test_promtool_finds_nothing_to_complain_about(server, ask, tmp_path):
    for name in ("prometheus.yml", "chart/alerts.yml"):  # side by side, as compose mounts them
        shutil.copy(DOCKER / name, tmp_path)
    subprocess.run(["promtool", "check", "config", str(tmp_path / "prometheus.yml")], check=True)
    with urllib.request.urlopen(f"http://{server.metrics_address}/metrics", timeout=PATIENCE) as response:
        result = subprocess.run(["promtool", "check", "metrics"], input=response.read(), capture_output=True)
    assert result.returncode == 0
    assert result.stdout == b""
    assert result.stderr == b""
