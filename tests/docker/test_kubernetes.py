"""The Helm chart as it is rendered: schemas, what its objects refer to, and that it runs what compose runs.

`make k8s-test` gives it to a real Kubernetes. Skipped where no `helm` is found; `make test` brings it.
"""

from __future__ import annotations

import base64
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from cryptography import x509

from replay_client.waits import STOP_SECONDS
from replay_server import Config
from tests.docker import files
from tests.docker.chart import CHART, CPU, EVERYTHING, OVERLAYS, found, helm, rendered
from tests.kit.processes import run_replay

pytestmark = pytest.mark.skipif(found("helm") is None, reason="needs helm: make .venv/bin/helm")
PROJECT = tomllib.loads((files.ROOT / "pyproject.toml").read_text())["project"]


def of(kind: str, *values: str, part: str = "server") -> dict[str, Any]:
    """The only object of a kind and of a part."""
    (one,) = (o for o in rendered(*values) if o["kind"] == kind and o["metadata"]["name"].startswith(f"replay-{part}"))
    return one


def pods(*values: str) -> dict[str, dict[str, Any]]:
    """What each part's pods are made from, by the part's name."""
    templates = [o["spec"]["template"] for o in rendered(*values) if "template" in o.get("spec", {})]
    return {t["metadata"]["labels"]["app.kubernetes.io/name"].removeprefix("replay-"): t for t in templates}


def containers(pod: dict[str, Any]) -> list[dict[str, Any]]:
    return [*pod["spec"].get("initContainers", []), *pod["spec"]["containers"]]


def environment(container: dict[str, Any]) -> dict[str, str]:
    return {entry["name"]: entry["value"] for entry in container["env"]}


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_helm_finds_nothing_to_complain_about(overlay):
    assert "0 chart(s) failed" in helm("lint", "--strict", CHART, *OVERLAYS[overlay])


@pytest.mark.parametrize(
    ("overlay", "name"), [("gpu", "chart/gpu.yaml"), ("everything", "chart/everything.yaml")], ids=["gpu", "everything"]
)
def test_the_chart_renders_these_objects(overlay, name, golden):
    """Without the alerts and the dashboard, which are files of the chart, and without secrets, hashes and versions."""
    parts = helm("template", "replay", CHART, *OVERLAYS[overlay]).split("---\n")
    text = "---\n".join(part for part in parts if not re.search("kind: PrometheusRule|grafana_dashboard", part))
    text = re.sub(r'^data: {".*}$', "data: SECRETS", text, flags=re.MULTILINE)
    text = re.sub(r"(checksum/config: |replay-trainer-)[0-9a-f]{8,}", r"\1HASH", text)
    golden(name, text.replace(f":{PROJECT['version']}", ":VERSION"))


@pytest.mark.parametrize(
    "wrong", ["server.replica=3", "server.replicas=three", "generators.replicas=2", "sharedMemory=x"]
)
def test_a_value_that_is_misspelt_or_of_another_kind_is_refused(wrong):
    with pytest.raises(subprocess.CalledProcessError) as caught:
        helm("template", CHART, "--set", wrong)
    assert "values don't meet the specifications of the schema" in caught.value.output


@pytest.mark.parametrize("version", ["1.32", "1.37"])
def test_the_objects_follow_the_schemas_of_kubernetes(version, tmp_path):
    for name, values in OVERLAYS.items():
        ours = [each for each in rendered(*values) if not each["apiVersion"].startswith("monitoring")]
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump_all(ours))
    command = [Path(sys.executable).parent / "kubernetes-validate", "--strict", "-k", version, *tmp_path.iterdir()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_chart_installs_the_images_of_this_version_from_where_it_is_told():
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["appVersion"] == PROJECT["version"]
    assert chart["version"] == PROJECT["version"].replace(".dev", "-dev")
    for values, server, trainer in (
        (CPU, f"replay-server:{PROJECT['version']}", f"replay-trainer:{PROJECT['version']}-cpu"),
        (("--set=images.registry=a:5000/b,images.tag=v7",), "a:5000/b/replay-server:v7", "a:5000/b/replay-trainer:v7"),
        (("--set=trainer.image=mine@sha256:00",), f"replay-server:{PROJECT['version']}", "mine@sha256:00"),
    ):
        found = pods(*values)
        assert [each["image"] for each in containers(found["server"])] == [server]
        assert {each["image"] for each in containers(found["trainer"])} == {trainer}


def test_a_generator_is_not_killed_before_it_can_have_stopped():
    assert pods()["generator"]["spec"]["terminationGracePeriodSeconds"] >= 1.5 * STOP_SECONDS


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_no_pod_gets_variables_named_after_the_services_of_its_namespace(overlay):
    found = pods(*OVERLAYS[overlay])
    assert "server" in found
    for part, pod in found.items():
        assert pod["spec"]["enableServiceLinks"] is False, part  # a Service named vllm would set VLLM_PORT


def test_a_cluster_that_chooses_the_user_itself_gets_pods_that_name_none():
    chosen = '--set-json=podSecurityContext={"runAsUser":null,"runAsGroup":null,"fsGroup":null}'
    found = pods(*EVERYTHING, chosen)
    assert "server" in found
    for part, pod in found.items():
        assert pod["spec"]["securityContext"].keys().isdisjoint({"runAsUser", "runAsGroup", "fsGroup"}), part
        assert pod["spec"]["securityContext"]["runAsNonRoot"] is True, part


def test_a_namespace_with_policies_of_its_own_gets_none_of_ours():
    kinds = {each["kind"] for each in rendered(*EVERYTHING, "--set=networkPolicy.enabled=false")}
    assert "NetworkPolicy" not in kinds
    assert "StatefulSet" in kinds


def test_rendered_without_a_cluster_named_secrets_are_used_and_none_are_made():
    """`helm template` and Argo cannot look up the secrets that an install made, so each run would make others."""
    named = rendered("--set=access.enabled=true,access.tls=our-tls,access.tokens=our-tokens")
    assert [each for each in named if each["kind"] == "Secret"] == []
    projected = {
        source["secret"]["name"]
        for pod in pods("--set=access.enabled=true,access.tls=our-tls,access.tokens=our-tokens").values()
        for volume in pod["spec"]["volumes"]
        for source in volume.get("projected", {}).get("sources", ())
    }
    assert projected == {"our-tls", "our-tokens"}


@pytest.mark.parametrize("part", ["server", "trainer", "generator", "archiver", "weights", "page"])
def test_a_pod_is_confined_and_limited_and_mounts_only_volumes_that_it_has(part):
    spec = pods(*EVERYTHING)[part]["spec"]
    assert spec["securityContext"]["runAsNonRoot"]
    assert spec["securityContext"]["runAsUser"] > 0
    assert spec["automountServiceAccountToken"] is False
    claims = of("StatefulSet", *EVERYTHING)["spec"]["volumeClaimTemplates"] if part == "server" else []
    volumes = {volume["name"] for volume in spec["volumes"]} | {claim["metadata"]["name"] for claim in claims}
    for container in containers(pods(*EVERYTHING)[part]):
        assert container["securityContext"]["readOnlyRootFilesystem"]
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
        assert "memory" in container["resources"]["limits"]
        assert {mount["name"] for mount in container["volumeMounts"]} <= volumes
    for volume in spec["volumes"]:
        if "persistentVolumeClaim" in volume:
            assert (
                of("PersistentVolumeClaim", part="runs")["metadata"]["name"]
                == volume["persistentVolumeClaim"]["claimName"]
            )


def test_labels_ports_and_names_meet():
    labels = pods()["server"]["metadata"]["labels"]
    (server,) = containers(pods()["server"])
    ports = {port["name"]: port["containerPort"] for port in server["ports"]}
    for selector in (
        of("Service")["spec"]["selector"],
        of("StatefulSet")["spec"]["selector"]["matchLabels"],
        of("PodDisruptionBudget")["spec"]["selector"]["matchLabels"],
        of("NetworkPolicy")["spec"]["podSelector"]["matchLabels"],
        of("PodMonitor", *EVERYTHING)["spec"]["selector"]["matchLabels"],
    ):
        assert selector.items() <= labels.items()
    assert {port["targetPort"]: port["port"] for port in of("Service")["spec"]["ports"]} == ports
    assert server["livenessProbe"]["tcpSocket"]["port"] in ports
    config = Config.load(CHART / "replay.toml").server
    assert [config.listen, config.metrics_listen] == [f"0.0.0.0:{port}" for port in ports.values()]
    allowed = of("NetworkPolicy")["spec"]["ingress"][0]["from"][0]["podSelector"]["matchLabels"]
    assert all(allowed.items() <= pod["metadata"]["labels"].items() for pod in pods(*EVERYTHING).values())


@pytest.mark.parametrize("servers", [1, 3])
def test_clients_get_the_name_of_each_server_behind_the_headless_service(servers):
    values = (f"--set=server.replicas={servers},archiver.enabled=true,page.enabled=true",)
    service, stateful = of("Service", *values), of("StatefulSet", *values)["spec"]
    assert service["spec"]["clusterIP"] == "None"
    assert stateful["serviceName"] == service["metadata"]["name"]
    assert stateful["replicas"] == servers
    expected = ",".join(f"replay-server-{i}.{stateful['serviceName']}:7400" for i in range(servers))
    for part in ("trainer", "generator", "archiver", "page"):
        assert environment(containers(pods(*values)[part])[-1])["REPLAY_ADDRESS"] == expected


def services(*values: str) -> set[str]:
    return {each["metadata"]["name"] for each in rendered(*values) if each["kind"] == "Service"}


def test_sessions_and_weights_have_a_service_only_where_they_are_switched_on():
    assert services() == {"replay-server"}
    assert services("--set=generator.port=8100") == {"replay-server", "replay-generator"}
    assert services(*EVERYTHING) == {"replay-server", "replay-generator", "replay-weights"}
    for part in ("generator", "weights"):
        service = of("Service", *EVERYTHING, part=part)["spec"]
        assert service["selector"].items() <= pods(*EVERYTHING)[part]["metadata"]["labels"].items()


def test_weights_are_not_served_without_a_token():
    with pytest.raises(subprocess.CalledProcessError) as caught:
        helm("template", CHART, "--set", "weights.enabled=true")
    assert "weights.enabled needs access.enabled" in caught.value.output


def test_what_kubernetes_forbids_to_change_is_the_same_with_more_servers():
    one, three = of("StatefulSet")["spec"], of("StatefulSet", "--set=server.replicas=3")["spec"]
    assert {name for name in one if one[name] != three[name]} == {"replicas"}
    assert one["podManagementPolicy"] == "Parallel"


def test_a_trainer_that_changes_is_another_job_and_one_that_does_not_is_left_alone():
    def name(values: str) -> str:
        return str(of("Job", f"--set={values}", part="trainer")["metadata"]["name"])

    changed = ["images.tag=v7", "trainer.args={train}", "trainer.env.A=b", "server.replicas=3", "access.enabled=true"]
    names = [name(values) for values in ("generator.replicas=4", *changed)]
    assert len(set(names)) == len(names)
    assert names[0] == name("config=text,server.env.A=b,page.enabled=true")


def test_two_trainers_never_run_at_once():
    job, labels = of("Job", part="trainer")["spec"], pods()["trainer"]["metadata"]["labels"]
    assert job["podReplacementPolicy"] == "Failed"
    (rule,) = pods()["trainer"]["spec"]["affinity"]["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert rule["labelSelector"]["matchLabels"].items() <= labels.items()
    assert rule["topologyKey"] == "kubernetes.io/os"  # a label with one value for all nodes


def test_an_uninstall_leaves_weights_and_items():
    claim = of("PersistentVolumeClaim", part="runs")
    assert claim["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep"
    assert (
        "persistentVolumeClaimRetentionPolicy" not in of("StatefulSet")["spec"]
    )  # what it says is retain, unless told
    given = rendered("--set=runs.existingClaim=mine")
    assert not [each for each in given if each["kind"] == "PersistentVolumeClaim"]
    claims = [
        v["persistentVolumeClaim"] for v in pods("--set=runs.existingClaim=mine")["trainer"]["spec"]["volumes"][:1]
    ]
    assert claims == [{"claimName": "mine"}]


def test_probes_ask_what_the_health_checks_of_compose_ask():
    (server,) = containers(pods()["server"])
    ports = {port["name"]: port["containerPort"] for port in server["ports"]}
    for probe in (server["startupProbe"], server["readinessProbe"]):
        assert probe["httpGet"] == {"path": "/health", "port": "metrics"}
    (check,) = [word for word in files.load()["services"]["server"]["healthcheck"]["test"] if "/dev/tcp" in word]
    assert f"/dev/tcp/127.0.0.1/{ports['metrics']} " in check
    assert "GET /health " in check
    for name in ("trainer", "generator"):
        container = containers(pods()[name])[-1]
        beats = environment(container)["REPLAY_HEARTBEAT"]
        assert container["livenessProbe"]["exec"]["command"][-1] == f'test -n "$(find {beats} -mmin -10)"'
        assert f"find {beats} " in files.load()["services"][name]["healthcheck"]["test"][-1]


def test_each_part_has_the_time_to_stop_that_its_values_say():
    default = {name: pod["spec"]["terminationGracePeriodSeconds"] for name, pod in pods().items()}
    assert default == {"server": 60, "trainer": 60, "generator": 30}
    longer = [f"--set={name}.terminationGracePeriodSeconds=900" for name in default]
    assert {pod["spec"]["terminationGracePeriodSeconds"] for pod in pods(*longer).values()} == {900}


def test_the_containers_run_what_the_compose_services_run():
    services = files.load()["services"]
    for name in ("server", "trainer", "generator"):
        container = containers(pods()[name])[-1]
        assert container["args"] == services[name]["command"]
        assert environment(container).keys() == services[name]["environment"].keys()
    prepare = containers(pods()["trainer"])[0]
    assert prepare["command"] == services["prepare"]["entrypoint"]
    assert prepare["args"] == services["prepare"]["command"]
    # Without GPUs all is the same but for the engine.
    cpu = {name: containers(pod)[-1]["args"] for name, pod in pods(*CPU).items()}
    engine = [word.replace("--engine=vllm", "--engine=transformers") for word in services["generator"]["command"]]
    assert cpu == {
        "server": services["server"]["command"],
        "trainer": services["trainer"]["command"],
        "generator": engine,
    }
    assert "nvidia.com/gpu" not in json.dumps([pod["spec"]["containers"] for pod in pods(*CPU).values()])


@pytest.mark.parametrize("part", ["server", "trainer", "generator", "archiver", "weights", "page"])
def test_every_argument_is_one_that_the_command_has(part):
    *_, container = containers(pods(*EVERYTHING)[part])
    command = [word for word in container["args"] if not word.startswith(("-", "/"))]
    known = run_replay(*command, "--help").stdout
    for word in container["args"]:
        assert not word.startswith("--") or word.partition("=")[0] in known


def test_without_the_demo_nothing_is_made_or_waited_for():
    assert all("initContainers" not in pod["spec"] for pod in pods("--set=demo.enabled=false").values())


# ---------------------------------------------------------------------------------------------- tokens and certificates


def secret(name: str) -> dict[str, str]:
    return {
        key: base64.b64decode(value).decode() for key, value in of("Secret", *EVERYTHING, part=name)["data"].items()
    }


def test_tokens_and_certificates_are_made_for_the_name_that_clients_look_for():
    tokens = secret("tokens")
    roles = dict(line.split(":") for line in tokens.pop("tokens").splitlines())
    assert roles == tokens
    assert tokens.keys() == {"read-only", "read-write", "admin"}
    assert len(set(tokens.values())) == 3
    certificate = x509.load_pem_x509_certificate(secret("tls")["tls.crt"].encode())
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    for pod in pods(*EVERYTHING).values():
        assert environment(containers(pod)[-1])["REPLAY_TLS_SERVER_NAME"] in names.get_values_for_type(x509.DNSName)
    certificate.verify_directly_issued_by(x509.load_pem_x509_certificate(secret("tls")["ca.crt"].encode()))


def test_only_a_server_gets_its_key_and_all_tokens_and_reads_them_where_they_are(tmp_path):
    for part, pod in pods(*EVERYTHING).items():
        (volume,) = (volume for volume in pod["spec"]["volumes"] if volume["name"] == "access")
        paths = {item["path"]: item["key"] for s in volume["projected"]["sources"] for item in s["secret"]["items"]}
        assert paths["token"] == {"server": "read-only", "page": "read-only"}.get(part, "read-write")
        assert ("tls.key" in paths) == (part == "server")
        assert ("tokens" in paths) == (part == "server")
    (tmp_path / "replay.toml").write_text(of("ConfigMap", *EVERYTHING, part="config")["data"]["replay.toml"])
    security = Config.load(tmp_path / "replay.toml").security
    (mount,) = {
        m["mountPath"] for m in containers(pods(*EVERYTHING)["server"])[0]["volumeMounts"] if m["name"] == "access"
    }
    assert {security.tls_cert, security.tls_key, security.tokens_file} == {
        Path(mount, name) for name in ("tls.crt", "tls.key", "tokens")
    }


def test_secrets_that_are_named_are_used_and_not_made():
    values = ("--set=access.enabled=true,access.tls=mine,access.tokens=ours,access.serverName=*.lab",)
    assert not [each for each in rendered(*values) if each["kind"] == "Secret"]
    for pod in pods(*values).values():
        (volume,) = (volume for volume in pod["spec"]["volumes"] if volume["name"] == "access")
        assert [source["secret"]["name"] for source in volume["projected"]["sources"]] == ["mine", "ours"]
        assert environment(containers(pod)[-1])["REPLAY_TLS_SERVER_NAME"] == "*.lab"


def test_a_server_starts_anew_with_another_configuration(tmp_path):
    mine = tmp_path / "mine.toml"
    mine.write_text("[[tables]]\nname = 'a'\n")
    values = (f"--set-file=config={mine}",)
    assert of("ConfigMap", *values, part="config")["data"]["replay.toml"] == mine.read_text()
    plain, changed = (pods(*each)["server"]["metadata"]["annotations"] for each in ((), values))
    assert plain != changed


# ----------------------------------------------------------------------------------------------------------- monitoring


def test_every_server_is_scraped_as_the_job_of_the_alerts_under_its_pods_name():
    monitor = of("PodMonitor", *EVERYTHING)["spec"]
    labels = pods(*EVERYTHING)["server"]["metadata"]["labels"]
    assert f'job="{labels[monitor["jobLabel"]]}"' in (CHART / "alerts.yml").read_text()
    (endpoint,) = monitor["podMetricsEndpoints"]
    assert endpoint["port"] == "metrics"
    assert endpoint["relabelings"] == [{"sourceLabels": ["__meta_kubernetes_pod_name"], "targetLabel": "instance"}]


def test_the_alerts_and_the_dashboard_are_those_of_compose_and_a_server_too_few_is_one_more():
    rules = of("PrometheusRule", *EVERYTHING)["spec"]["groups"][0]["rules"]
    compose = yaml.safe_load((CHART / "alerts.yml").read_text())["groups"][0]["rules"]
    assert rules[:-1] == compose
    assert rules[-1]["expr"].endswith("< 3")
    boards = [o for o in rendered(*EVERYTHING) if o["metadata"].get("labels", {}).get("grafana_dashboard")]
    assert json.loads(boards[0]["data"]["replay.json"]) == json.loads((CHART / "dashboard.json").read_text())
