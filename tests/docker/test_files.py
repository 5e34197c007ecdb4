"""Dockerfiles and compose files: schema, linter, and what every service of ours must have."""

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

from examples.demo.variants import GROUP_SIZE, GROUPS_PER_STEP
from replay_client.waits import STOP_SECONDS
from replay_server import Config
from tests.docker import files
from tests.docker.engine import make_secrets
from tests.kit.processes import fails

DOCKERFILES = sorted(files.DOCKER.glob("Dockerfile.*"))
BIN = Path(sys.executable).parent


def tool(name: str, *arguments: object) -> None:
    done = subprocess.run([BIN / name, *map(str, arguments)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr


PROJECT = tomllib.loads((files.ROOT / "pyproject.toml").read_text())["project"]


def our_services() -> dict:
    return files.load("compose.yaml", "compose.secure.yaml")["services"]


def test_the_compose_files_follow_the_compose_specification():
    for name in ("compose.yaml", "compose.secure.yaml"):
        tool("check-jsonschema", "--builtin-schema", "vendor.compose-spec", files.DOCKER / name)


def test_a_generator_is_not_killed_before_it_can_have_stopped():
    grace = {
        name: int(service["stop_grace_period"].removesuffix("s"))
        for name, service in our_services().items()
        if "generator" in name
    }
    assert grace
    assert min(grace.values()) >= 1.5 * STOP_SECONDS


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda path: path.name)
def test_the_linter_finds_nothing_in_a_dockerfile(dockerfile):
    tool("hadolint", "--failure-threshold", "info", dockerfile)


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda path: path.name)
def test_a_dockerfile_pins_its_base_drops_root_and_copies_what_the_context_has(dockerfile):
    found = files.instructions(dockerfile)
    (base,) = [rest.removeprefix("PYTHON=") for word, rest in found if word == "ARG" and rest.startswith("PYTHON=")]
    assert re.fullmatch(r"python:3\.\d+\.\d+-slim-\w+", base)
    stages = [rest for word, rest in found if word == "FROM"]
    assert stages == ["${PYTHON} AS wheel", "${PYTHON}"]
    stage = files.last_stage(dockerfile)
    assert ("USER", "10001:10001") in stage
    assert max(n for n, (word, _) in enumerate(stage) if word == "RUN") < stage.index(("USER", "10001:10001"))
    assert ("ARG", f"VERSION={PROJECT['version']}") in stage


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda path: path.name)
def test_a_change_of_the_code_leaves_the_layer_with_the_dependencies(dockerfile):
    stage = files.last_stage(dockerfile)
    first, second, *later = [rest.split() for word, rest in stage if word == "COPY"]
    assert first[:2] == ["pyproject.toml", "docker/requirements.py"]
    assert re.fullmatch(r"docker/constraints/(\$\{VARIANT\}|cpu)\.txt", first[2])
    assert second[0] == "--from=wheel"
    assert later == ([["examples", "/examples"]] if dockerfile.name == "Dockerfile.trainer" else [])
    *_, dependencies, wheel = [rest for word, rest in stage if word == "RUN"]
    assert "--constraint" in dependencies
    assert wheel == "pip install --no-cache-dir --no-deps /wheels/*.whl"


@pytest.mark.parametrize("extra", PROJECT["optional-dependencies"])
def test_an_image_installs_what_an_extra_asks_for_with_what_that_names(extra):
    done = subprocess.run(
        [sys.executable, files.DOCKER / "requirements.py", files.ROOT / "pyproject.toml", extra],
        capture_output=True,
        text=True,
        check=True,
    )
    asked, listed = done.stdout.splitlines(), PROJECT["optional-dependencies"]
    assert set(PROJECT["dependencies"]) <= set(asked)
    for named in (extra, *{"demo": ["trainer", "dashboard"], "dev": ["trl", "trainer"]}.get(extra, [])):
        assert {line for line in listed[named] if not line.startswith(PROJECT["name"])} <= set(asked)
    assert not any(line.startswith(PROJECT["name"]) for line in asked)


def test_the_build_context_holds_what_the_wheel_is_made_of():
    ignore = (files.ROOT / ".dockerignore").read_text().splitlines()
    kept = {line[1:] for line in ignore if line.startswith("!")}
    assert "*" in ignore
    assert all((files.ROOT / name).exists() for name in kept)
    project = tomllib.loads((files.ROOT / "pyproject.toml").read_text())
    packages = project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    needed = {path.partition("/")[0] for path in packages} | {"pyproject.toml", "README.md", "LICENSE"}
    needed |= {"docker/requirements.py", "docker/constraints", "examples"}
    assert needed <= kept


@pytest.mark.parametrize("name", our_services())
def test_a_service_is_confined_limited_and_pinned(name):
    service = our_services()[name]
    user = service["user"].split(":")[0]
    assert user.isdecimal()
    assert int(user) > 0
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert "no-new-privileges:true" in service["security_opt"]
    assert any(mount.startswith("/tmp") for mount in service["tmpfs"])
    assert {"cpus", "memory", "pids"} <= set(service["deploy"]["resources"]["limits"])
    assert re.search(r":v?\d+\.\d+\.\d+(\.dev\d+)?(-cpu)?$", service["image"])
    assert "healthcheck" in service
    assert all(port.startswith("127.0.0.1:") for port in service.get("ports", []))


def test_what_services_mount_and_wait_for_exists():
    compose = files.load("compose.yaml", "compose.secure.yaml")
    for service in compose["services"].values():
        for volume in service.get("volumes", []):
            # A folder of secrets that is missing must not be made, empty and of root.
            assert isinstance(volume, dict) or volume.split(":")[0] in compose["volumes"]
            assert isinstance(volume, str) or volume["bind"] == {"create_host_path": False}
        for path in files.config_files(compose, service).values():
            assert path.exists()
        for other, wanted in service.get("depends_on", {}).items():
            check = compose["services"][other].get("healthcheck", {})
            assert wanted["condition"] != "service_healthy" or not check.get("disable")
        dockerfile = files.dockerfile_of(service)
        assert dockerfile is None or dockerfile.exists()


def test_the_defaults_ask_for_nothing_that_a_small_machine_or_an_older_engine_lacks():
    for service in our_services().values():
        assert float(service["deploy"]["resources"]["limits"]["cpus"]) == 0  # no limit: a machine has some
        assert "start_interval" not in service["healthcheck"]


def test_every_variable_has_a_default_that_the_example_names():
    text = "".join((files.DOCKER / name).read_text() for name in ("compose.yaml", "compose.secure.yaml"))
    used = dict(re.findall(r"\$\{(\w+):-([^}]*)\}", text))
    assert set(re.findall(r"\$\{(\w+)", text)) == set(used)
    example = (files.DOCKER / ".env.example").read_text()
    assert dict(re.findall(r"^#(\w+)=(.*)$", example, re.MULTILINE)) == used
    assert used["VERSION"] == PROJECT["version"]


def test_no_health_check_starts_python():
    for service in our_services().values():
        assert not {"replay", "python"} & set(service["healthcheck"].get("test", []))


def test_the_server_of_the_files_is_the_one_that_the_demo_needs():
    config = Config.load(files.DOCKER / "chart/replay.toml")
    assert config.admission is not None
    assert config.admission.fresh_groups_per_step == GROUPS_PER_STEP
    assert [table.name for table in config.tables] == ["rollouts", "replay"]
    for name in ("generator", "generator-cpu"):
        assert f"--group-size={GROUP_SIZE}" in our_services()[name]["command"]


def test_what_listens_on_all_addresses_of_a_container_starts_only_where_somebody_says_who_comes():
    """A server without tokens refuses an open address unless it is told otherwise, also that of a container."""
    (line,) = [rest for word, rest in files.last_stage(files.DOCKER / "Dockerfile.server") if word == "CMD"]
    of_image = json.loads(line)
    assert "refusing to listen on 0.0.0.0:7400 without tokens" in fails(*of_image)
    plain = files.load()["services"]
    for name in ("server", "server-1", "server-2"):
        assert "--insecure" in plain[name]["command"]
        secured = our_services()[name]["command"]
        assert "--insecure" not in " ".join(secured)  # there tokens count, and a start without them is refused
    of_chart = yaml.safe_load((files.DOCKER / "chart/values.yaml").read_text())["server"]["args"]
    assert "--insecure" in of_chart


def test_prometheus_asks_each_server_of_the_run_at_its_metrics(tmp_path):
    (line,) = files.load()["services"]["prometheus"]["command"]
    write = line.partition(" && ")[0].replace("$$", "$").replace("/tmp/servers.yml", str(tmp_path / "servers.yml"))
    subprocess.run(["sh", "-c", write], env={"ADDRESSES": "server:7400,server-1:7400,server-2:7400"}, check=True)
    (found,) = yaml.safe_load((tmp_path / "servers.yml").read_text())
    (scrape,) = yaml.safe_load((files.DOCKER / "prometheus.yml").read_text())["scrape_configs"]
    (relabel,) = scrape["relabel_configs"]
    asked = [re.sub(relabel["regex"], relabel["replacement"].replace("$", "\\"), one) for one in found["targets"]]
    assert asked == ["server:7401", "server-1:7401", "server-2:7401"]
    assert Config.load(files.DOCKER / "chart/replay.toml").server.metrics_listen == "0.0.0.0:7401"


def test_secrets_that_exist_stay_and_each_side_gets_no_more_than_it_needs(tmp_path):
    make_secrets(tmp_path / "secrets")
    held = {each: {path.name for path in (tmp_path / "secrets" / each).iterdir()} for each in ("server", "client")}
    assert held == {"server": {"ca.crt", "server.crt", "server.key", "token", "tokens"}, "client": {"ca.crt", "token"}}
    token = (tmp_path / "secrets/client/token").read_text()
    make_secrets(tmp_path / "secrets")
    assert (tmp_path / "secrets/client/token").read_text() == token
    assert f"read-write:{token}" in (tmp_path / "secrets/server/tokens").read_text()
