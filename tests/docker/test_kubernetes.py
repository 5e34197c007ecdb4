"""The Kubernetes manifests: schema, what they refer to, and that they run what compose runs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from replay_client.waits import STOP_SECONDS
from replay_server import Config
from tests.docker import files

MANIFESTS = sorted((files.DOCKER / "kubernetes").glob("*.yaml"))
OBJECTS = [document for path in MANIFESTS for document in yaml.safe_load_all(path.read_text())]
KUSTOMIZATION = yaml.safe_load((files.DOCKER / "kustomization.yaml").read_text())
PODS = {o["metadata"]["name"]: o["spec"]["template"] for o in OBJECTS if "template" in o["spec"]}


def of(kind: str, name: str = "replay-server") -> dict[str, Any]:
    (found,) = (o for o in OBJECTS if o["kind"] == kind and o["metadata"]["name"] == name)
    return found


def containers(pod: dict[str, Any]) -> list[dict[str, Any]]:
    return [*pod["spec"].get("initContainers", []), *pod["spec"]["containers"]]


@pytest.mark.parametrize("version", ["1.32", "1.37"])
def test_the_manifests_follow_the_schemas_of_kubernetes(version):
    command = [Path(sys.executable).parent / "kubernetes-validate", "--strict", "-k", version, *MANIFESTS]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_generator_is_not_killed_before_it_can_have_stopped():
    (grace,) = (pod["spec"]["terminationGracePeriodSeconds"] for name, pod in PODS.items() if "generator" in name)
    assert grace >= 1.5 * STOP_SECONDS


def test_kustomize_takes_every_manifest_and_makes_the_configuration_that_they_mount():
    assert sorted(files.DOCKER / path for path in KUSTOMIZATION["resources"]) == MANIFESTS
    (generated,) = KUSTOMIZATION["configMapGenerator"]
    assert all((files.DOCKER / name).exists() for name in generated["files"])
    maps = [v["configMap"]["name"] for pod in PODS.values() for v in pod["spec"]["volumes"] if "configMap" in v]
    assert maps == [generated["name"]]
    images = {container["image"] for pod in PODS.values() for container in containers(pod)}
    assert images == {image["name"] for image in KUSTOMIZATION["images"]}


@pytest.mark.parametrize("name", PODS)
def test_a_pod_is_confined_and_limited_and_mounts_only_volumes_that_it_has(name):
    spec = PODS[name]["spec"]
    assert spec["securityContext"]["runAsNonRoot"]
    assert spec["securityContext"]["runAsUser"] > 0
    assert spec["automountServiceAccountToken"] is False
    claims = of("StatefulSet")["spec"]["volumeClaimTemplates"] if name == "replay-server" else []
    volumes = {volume["name"] for volume in spec["volumes"]} | {claim["metadata"]["name"] for claim in claims}
    for container in containers(PODS[name]):
        assert container["securityContext"]["readOnlyRootFilesystem"]
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
        assert "memory" in container["resources"]["limits"]
        assert {mount["name"] for mount in container["volumeMounts"]} <= volumes
    for volume in spec["volumes"]:
        if "persistentVolumeClaim" in volume:
            assert of("PersistentVolumeClaim", volume["persistentVolumeClaim"]["claimName"])


def test_labels_ports_and_names_meet():
    labels = PODS["replay-server"]["metadata"]["labels"]
    (server,) = containers(PODS["replay-server"])
    ports = {port["name"]: port["containerPort"] for port in server["ports"]}
    for selector in (
        of("Service")["spec"]["selector"],
        of("StatefulSet")["spec"]["selector"]["matchLabels"],
        of("PodDisruptionBudget")["spec"]["selector"]["matchLabels"],
        of("NetworkPolicy")["spec"]["podSelector"]["matchLabels"],
    ):
        assert selector.items() <= labels.items()
    assert {port["targetPort"]: port["port"] for port in of("Service")["spec"]["ports"]} == ports
    assert server["livenessProbe"]["tcpSocket"]["port"] in ports
    config = Config.load(files.DOCKER / "replay.toml").server
    assert [config.address, config.metrics_address] == [f"0.0.0.0:{port}" for port in ports.values()]
    allowed = of("NetworkPolicy")["spec"]["ingress"][0]["from"][0]["podSelector"]["matchLabels"]
    for name in ("replay-trainer", "replay-generator"):
        assert allowed.items() <= PODS[name]["metadata"]["labels"].items()
        environment = {entry["name"]: entry["value"] for entry in containers(PODS[name])[-1]["env"]}
        assert environment["REPLAY_ADDRESS"] == "replay-server:7400"


def test_probes_ask_what_the_health_checks_of_compose_ask():
    (server,) = containers(PODS["replay-server"])
    ports = {port["name"]: port["containerPort"] for port in server["ports"]}
    for probe in (server["startupProbe"], server["readinessProbe"]):
        assert probe["httpGet"] == {"path": "/health", "port": "metrics"}
    (check,) = [word for word in files.load()["services"]["server"]["healthcheck"]["test"] if "/dev/tcp" in word]
    assert f"/dev/tcp/127.0.0.1/{ports['metrics']} " in check
    assert "GET /health " in check
    for name in ("trainer", "generator"):
        container = containers(PODS[f"replay-{name}"])[-1]
        beats = {entry["name"]: entry["value"] for entry in container["env"]}["REPLAY_HEARTBEAT"]
        assert f"find {beats} " in container["livenessProbe"]["exec"]["command"][-1]
        assert f"find {beats} " in files.load()["services"][name]["healthcheck"]["test"][-1]


def test_the_containers_run_what_the_compose_services_run():
    services = files.load()["services"]
    for name in ("server", "trainer", "generator"):
        container = containers(PODS[f"replay-{name}"])[-1]
        assert container["args"] == services[name]["command"]
        assert {entry["name"] for entry in container["env"]} == set(services[name]["environment"])
    prepare = containers(PODS["replay-trainer"])[0]
    assert prepare["command"] == services["prepare"]["entrypoint"]
    assert prepare["args"] == services["prepare"]["command"]


# ------------------------------------------------------------------------------------------------------ several servers

SHARDS = files.DOCKER / "kubernetes/shards"
COMPONENT = yaml.safe_load((SHARDS / "kustomization.yaml").read_text())


def patches() -> list[dict[str, Any]]:
    paths = [SHARDS / patch["path"] for patch in COMPONENT["patches"]]
    return [document for path in paths for document in yaml.safe_load_all(path.read_text())]


def test_the_component_of_three_servers_patches_what_is_there_and_leaves_no_file_out():
    named = {*COMPONENT["resources"], *(patch["path"] for patch in COMPONENT["patches"]), "kustomization.yaml"}
    assert {path.name for path in SHARDS.iterdir()} == named
    there = {(document["kind"], document["metadata"]["name"]): document for document in OBJECTS}
    for patch in patches():
        whole = there[patch["kind"], patch["metadata"]["name"]]
        assert patch["apiVersion"] == whole["apiVersion"]
        for container in patch["spec"].get("template", {}).get("spec", {}).get("containers", []):
            assert container["name"] in {each["name"] for each in containers(whole["spec"]["template"])}


def test_clients_get_the_name_of_each_pod_behind_the_headless_service():
    service = yaml.safe_load((SHARDS / "service.yaml").read_text())
    assert service["spec"]["clusterIP"] == "None"
    server = next(patch["spec"] for patch in patches() if patch["kind"] == "StatefulSet")
    assert server["serviceName"] == service["metadata"]["name"]
    expected = [f"replay-server-{i}.{server['serviceName']}:7400" for i in range(server["replicas"])]
    addresses = [
        variable["value"].split(",")
        for patch in patches()
        for container in patch["spec"].get("template", {}).get("spec", {}).get("containers", [])
        for variable in container["env"]
    ]
    assert addresses == [expected, expected]
