"""`make k8s-test`: the chart by a real Kubernetes: the life of one run, from install to uninstall, test after test.

Each test begins where the one before it ended. What was run, and how long it took, is printed at the end.
"""

from __future__ import annotations

import datetime
import json
import os
import time
import tomllib
from collections.abc import Iterator

import pytest

from replay_client.testing import until
from tests.docker.chart import CHART, CPU, OVERLAYS, helm, rendered
from tests.docker.k8s.cluster import NAMESPACE, Cluster, missing

if missing() or os.geteuid() != 0:
    pytest.exit(f"make k8s-test {missing() or 'needs root'}", returncode=1)

LONG = 3600.0
"""Seconds after which something is taken for a hang. Machines are slow at the wrong moment."""
VERSION = tomllib.loads((CHART.parent.parent / "pyproject.toml").read_text())["project"]["version"]
ENDLESS = 100_000
DEMO = ("--set-json", 'demo.args=["/runs","0","0.1"]')
report: list[str] = []


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path_factory.mktemp("k8s"))
    try:
        began = time.monotonic()
        cluster.up()
        report.append(f"cluster: {time.monotonic() - began:.0f} s")
        for image in (f"replay-server:{VERSION}", f"replay-trainer:{VERSION}-cpu"):
            cluster.tag(image, image.replace(VERSION, "next"))
        yield cluster
    finally:
        versions = " ".join(cluster.kubectl("version", check=False).split())
        print(
            f"\n{datetime.date.today()}, {versions}, helm {helm('version', '--short').strip()}, {os.cpu_count()} cores"
        )
        print("\n".join(report))
        cluster.down()


@pytest.fixture(autouse=True)
def timed(request: pytest.FixtureRequest, cluster: Cluster) -> Iterator[None]:
    began = time.monotonic()
    failures = request.session.testsfailed
    yield
    report.append(f"{request.node.name}: {time.monotonic() - began:.0f} s")
    if request.session.testsfailed > failures:
        print(cluster.kubectl("get", "all,pvc,events", "-o", "wide", check=False))
        for part in ("server", "trainer", "generator"):
            print(
                cluster.kubectl("logs", "--selector", f"app.kubernetes.io/name=replay-{part}", "--tail=30", check=False)
            )


def put(*values: str, steps: int = ENDLESS) -> None:
    """Installs the release, or upgrades it, with these options beside those of the CPU demo."""
    train = ["train", "--model=/runs/warm", "--config=/runs/train.toml", "--output-dir=/runs/train", "--resume"]
    arguments = json.dumps([*train, f"--max-steps={steps}"])
    below = ("--install", "--namespace", NAMESPACE, "--set-json", f"trainer.args={arguments}")
    print(helm("upgrade", "replay", CHART, *below, *CPU, *DEMO, *values))


def trained(cluster: Cluster) -> list[int]:
    """The steps that the trainer wrote, in the volume that nobody deletes."""
    path = cluster.folder / "volumes/runs/train/metrics.jsonl"
    return [json.loads(line)["step"] for line in path.read_text().splitlines()] if path.exists() else []


def goes_on(cluster: Cluster, steps: int = 3) -> None:
    """Waits for more steps. All are there, once, in order: no two trainers wrote them."""
    last = max(trained(cluster), default=0)
    until(lambda: max(trained(cluster), default=0) >= last + steps, f"no step after {last}", LONG, pause=1.0)
    assert trained(cluster)[:last] == list(range(1, last + 1))


def pods(cluster: Cluster, part: str) -> list[dict]:
    """The pods of a part that have not ended."""
    found = cluster.get("pods", "--selector", f"app.kubernetes.io/name=replay-{part}")
    return [pod for pod in found if pod["status"]["phase"] in ("Pending", "Running")]


def servers_are(cluster: Cluster, number: int, image: str) -> None:
    """Waits until so many servers are ready, all with this tag."""

    def ready() -> bool:
        found = pods(cluster, "server")
        states = [state for pod in found for state in pod["status"].get("containerStatuses", [])]
        tags = {pod["spec"]["containers"][0]["image"].rpartition(":")[2] for pod in found}
        return len(found) == number and sum(state["ready"] for state in states) == number and tags == {image}

    until(ready, f"there are not {number} servers of {image}", LONG, pause=1.0)


def tables(cluster: Cluster, server: int = 0) -> dict:
    said = cluster.kubectl("exec", f"replay-server-{server}", "--", "replay", "tables", "--json")
    answer: dict = json.loads(said)["tables"]
    return answer


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_the_api_takes_every_object_and_pod_security_has_nothing_against_them(cluster, overlay):
    for each in rendered(*OVERLAYS[overlay]):
        said = cluster.kubectl("apply", "--dry-run=server", "--validate=strict", "-f", "-", text=json.dumps(each))
        assert "created (server dry run)" in said
        assert "Warning" not in said or 'restricted volume type "hostPath"' in said


def test_an_install_trains_the_demo_on_cpus(cluster):
    put()
    servers_are(cluster, 1, VERSION)
    goes_on(cluster)


OF_THE_RELEASE = {"app.kubernetes.io/instance": "replay", "app.kubernetes.io/part-of": "replay"}
OF_PROMETHEUS = {"app.kubernetes.io/name": "prometheus"}


class Visitor:
    """A pod that the chart did not make, in the namespace of the release."""

    name = "visitor"

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        container = {
            "name": "visitor",
            "image": f"replay-server:{VERSION}",
            "imagePullPolicy": "Never",
            "command": ["sleep", "infinity"],
            "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
        }
        user = {"runAsNonRoot": True, "runAsUser": 10001, "seccompProfile": {"type": "RuntimeDefault"}}
        spec = {"containers": [container], "securityContext": user, "terminationGracePeriodSeconds": 1}
        cluster.apply({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": self.name}, "spec": spec})
        cluster.kubectl("wait", f"pod/{self.name}", "--for=condition=Ready", "--timeout=280s")

    def wears(self, labels: dict[str, str]) -> None:
        """Gives the pod these labels, and takes all others away."""
        self._cluster.kubectl("label", "pod", self.name, *(f"{each}-" for each in OF_THE_RELEASE | OF_PROMETHEUS))
        self._cluster.kubectl("label", "pod", self.name, *(f"{key}={value}" for key, value in labels.items()))

    def asks_for_tables(self) -> str:
        address = "replay-server-0.replay-server:7400"
        return self._does("replay", "--address", address, "tables")

    def asks_for_metrics(self) -> str:
        url = "http://replay-server-0.replay-server:7401/metrics"
        return self._does("python", "-c", f"import urllib.request as u; print(u.urlopen('{url}', timeout=5).read())")

    def _does(self, *command: str) -> str:
        return self._cluster.kubectl("exec", self.name, "--", *command, check=False)


@pytest.fixture
def visitor(cluster: Cluster) -> Iterator[Visitor]:
    visitor = Visitor(cluster)
    yield visitor
    cluster.kubectl("delete", "pod", visitor.name, "--wait")


def test_the_network_lets_only_pods_of_the_release_call_servers_and_only_prometheus_read_metrics(cluster, visitor):
    until(lambda: "did not answer" in visitor.asks_for_tables(), "a stranger gets in", LONG, pause=1.0)
    assert "timed out" in visitor.asks_for_metrics()
    visitor.wears(OF_THE_RELEASE)
    until(lambda: "rollouts" in visitor.asks_for_tables(), "the release's own pod does not get in", LONG, pause=1.0)
    assert "timed out" in visitor.asks_for_metrics()
    visitor.wears(OF_PROMETHEUS)
    until(lambda: "replay_" in visitor.asks_for_metrics(), "Prometheus does not get in", LONG, pause=1.0)
    assert "did not answer" in visitor.asks_for_tables()
    goes_on(cluster)


def test_without_the_network_policy_every_pod_reaches_the_servers(cluster, visitor):
    put("--set=networkPolicy.enabled=false")
    until(lambda: "rollouts" in visitor.asks_for_tables(), "it does not get in", LONG, pause=1.0)
    assert "replay_" in visitor.asks_for_metrics()
    put()
    until(lambda: "did not answer" in visitor.asks_for_tables(), "the policy did not come back", LONG, pause=1.0)
    goes_on(cluster)


def test_another_image_configuration_and_argument_in_mid_run(cluster, tmp_path):
    mine = tmp_path / "mine.toml"
    mine.write_text((CHART / "replay.toml").read_text().replace("max_size = 512", "max_size = 500"))
    before = {job["metadata"]["name"] for job in cluster.get("jobs")}
    put(f"--set-file=config={mine}", "--set=images.tag=next", steps=ENDLESS + 1)
    servers_are(cluster, 1, "next")
    assert tables(cluster)["replay"]["config"]["max_size"] == 500
    goes_on(cluster)
    (job,) = cluster.get("jobs")
    assert job["metadata"]["name"] not in before
    assert [pod["spec"]["containers"][0]["image"] for pod in pods(cluster, "trainer")] == ["replay-trainer:next-cpu"]


def test_one_server_becomes_three_and_each_gets_groups(cluster):
    put("--set=images.tag=next,server.replicas=3")
    servers_are(cluster, 3, "next")
    goes_on(cluster)
    until(lambda: all(tables(cluster, server)["rollouts"]["inserts"] for server in range(3)), "idle", LONG, pause=2.0)


@pytest.mark.parametrize("part", ["server", "generator", "trainer"])
def test_after_a_kill_of_every_pod_of_a_part_the_run_goes_on(cluster, part):
    old = {pod["metadata"]["uid"] for pod in pods(cluster, part)}
    items = [tables(cluster, server)["replay"]["size"] for server in range(3)]
    cluster.kubectl(
        "delete", "pods", "--selector", f"app.kubernetes.io/name=replay-{part}", "--grace-period=0", "--force"
    )
    until(lambda: not old & {pod["metadata"]["uid"] for pod in pods(cluster, part)}, "still there", LONG, pause=1.0)
    servers_are(cluster, 3, "next")
    if part == "server":
        assert all(tables(cluster, server)["replay"]["size"] for server in range(3) if items[server])
    goes_on(cluster)


def test_a_drain_takes_one_server_and_the_run_goes_on_after_it(cluster):
    old = {pod["metadata"]["uid"] for pod in pods(cluster, "server")}
    said = cluster.kubectl(
        "drain", "node1", "--delete-emptydir-data", "--ignore-daemonsets", "--timeout=60s", check=False
    )
    assert "would violate the pod's disruption budget" in said
    assert len(old & {pod["metadata"]["uid"] for pod in pods(cluster, "server")}) == 2
    cluster.kubectl("uncordon", "node1")
    servers_are(cluster, 3, "next")
    goes_on(cluster)
    (job,) = cluster.get("jobs")
    assert "failed" not in job["status"] or job["status"]["failed"] <= 1  # the pod that was killed before, at most


def test_a_run_that_is_done_frees_its_trainer(cluster):
    put("--set=images.tag=next,server.replicas=3", steps=max(trained(cluster)) + 5)
    done = lambda: [job for job in cluster.get("jobs") if job["status"].get("succeeded")]  # noqa: E731
    until(done, "it trains on", LONG, pause=1.0)
    assert pods(cluster, "trainer") == []
    assert trained(cluster) == list(range(1, len(trained(cluster)) + 1))


def test_an_uninstall_and_another_install_lose_neither_weights_nor_items(cluster):
    steps = trained(cluster)
    put("--set=images.tag=next,server.replicas=3,generator.replicas=0,trainer.enabled=false")
    until(lambda: pods(cluster, "generator") == [], "generators go on", LONG, pause=1.0)
    items = [tables(cluster, server)["replay"]["size"] for server in range(3)]
    assert sum(items)
    helm("uninstall", "replay", "--namespace", NAMESPACE, "--wait")
    until(lambda: cluster.get("pods") == [], "pods go on", LONG, pause=1.0)
    assert {claim["status"]["phase"] for claim in cluster.get("pvc")} == {"Bound"}
    assert len(cluster.get("pvc")) == 4
    put("--set=images.tag=next,server.replicas=3,generator.replicas=0,trainer.enabled=false")
    servers_are(cluster, 3, "next")
    assert [tables(cluster, server)["replay"]["size"] for server in range(3)] == items
    assert trained(cluster) == steps


def test_with_tokens_and_tls_it_trains_on_and_archives_and_nobody_else_gets_in(cluster, tmp_path):
    mine = tmp_path / "mine.toml"
    text = (CHART / "replay.toml").read_text()
    mine.write_text(text.replace('forward_to = "replay"', 'forward_to = "replay"\ncopy_to = "archive"'))
    more = "--set=server.replicas=3,access.enabled=true,page.enabled=true,archiver.enabled=true,monitoring.enabled=true"
    put(more, f"--set-file=config={mine}")
    servers_are(cluster, 3, VERSION)
    goes_on(cluster)
    inside = ("exec", "deployment/replay-generator", "--", "sh", "-c")
    assert "rollouts" in cluster.kubectl(*inside, "replay tables")
    assert "token" in cluster.kubectl(*inside, "env -u REPLAY_TOKEN_FILE replay tables", check=False)
    plain = (
        "unset REPLAY_TLS_CA REPLAY_TLS_SERVER_NAME REPLAY_TOKEN_FILE; replay --address replay-server-0.replay-server"
    )
    assert "TLS" in cluster.kubectl(*inside, f"{plain}:7400 tables", check=False)
    assert "read-only" in cluster.kubectl("exec", "replay-server-0", "--", "replay", "policy", "set", "9", check=False)
    archive = cluster.folder / "volumes/runs/archive"
    until(lambda: list(archive.rglob("*.parquet")), "nothing is archived", LONG, pause=1.0)
    page = "import urllib.request as u; print(u.urlopen('http://127.0.0.1:7402').status)"
    until(
        lambda: "200" in cluster.kubectl("exec", "deployment/replay-page", "--", "python", "-c", page, check=False),
        "no page",
    )
    secrets = {secret["metadata"]["name"]: secret["data"] for secret in cluster.get("secrets")}
    put(more, f"--set-file=config={mine}", "--set=generator.env.A=b")
    again = {secret["metadata"]["name"]: secret["data"] for secret in cluster.get("secrets")}
    assert all(again[name] == secrets[name] for name in ("replay-tls", "replay-tokens"))
    goes_on(cluster)
