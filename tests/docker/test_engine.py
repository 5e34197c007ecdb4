"""The server's image, built from this checkout and run by a real engine as compose runs it."""

import os
from itertools import chain, combinations

import pytest

from replay_client import ReplayClient
from replay_client.testing import make_group, until
from tests.docker.engine import Project, needs_compose, needs_engine

SOURCE, REVISION = "a place", "0123abc"
PROFILES = ("cpu", "gpu", "metrics", "shards")


@pytest.fixture(scope="module")
def server():
    project = Project(SOURCE_URL=SOURCE, REVISION=REVISION)
    try:
        project("build", "server")
        project("up", "--detach", "--wait", "server")
        yield project
        project.remove()
        assert project.leftovers() == []
    finally:
        project.remove()


@pytest.mark.long
@needs_engine
@pytest.mark.timeout(600)
def test_a_client_outside_inserts_and_samples_what_the_server_in_its_container_holds(server):
    with ReplayClient(server.address, timeout=30.0) as client:
        key = client.insert(make_group(), {"rollouts": 1.0})
        assert [sample.info.key for sample in client.sample("rollouts")] == [key]


@needs_engine
def test_the_image_says_which_version_it_holds(server):
    labels = server.container("server")["Config"]["Labels"]
    assert labels["org.opencontainers.image.version"] == server.name
    assert labels["org.opencontainers.image.source"] == SOURCE
    assert labels["org.opencontainers.image.revision"] == REVISION


@needs_engine
def test_the_image_has_what_traces_the_page_and_the_archive_need(server):
    server("exec", "--no-TTY", "server", "python", "-c", "import opentelemetry.sdk.trace, pyarrow, uvicorn, uvloop")


@needs_engine
def test_the_server_is_an_ordinary_user_who_writes_to_its_volumes_and_nowhere_else(server):
    def inside(script):
        return server("exec", "--no-TTY", "server", "sh", "-c", script)

    assert inside("id -u; id -g").split() == ["10001", "10001"]
    assert inside("grep CapEff /proc/1/status").split() == ["CapEff:", "0" * 16]
    inside("touch /var/lib/replay/probe /tmp/probe /shared/probe && rm /var/lib/replay/probe /tmp/probe /shared/probe")
    for folder in ("/", "/opt/replay", "/etc", "/home"):
        assert "Read-only file system" in server.fails("exec", "--no-TTY", "server", "touch", f"{folder}/probe")


@pytest.mark.long
@needs_engine
@pytest.mark.skipif(os.geteuid() != 0, reason="only root may kill a container's process from outside")
@pytest.mark.timeout(600)
def test_a_killed_server_comes_back_by_its_restart_policy_with_its_items(server):
    with ReplayClient(server.address, timeout=120.0) as client:
        keys = [client.insert(make_group(seed=seed), {"replay": 1.0}) for seed in range(3)]
        before = client.server_info()
        server.kill("server")
        until(lambda: server.container("server")["RestartCount"] == 1, "it stays away", timeout=120, pause=0.5)
        until(lambda: server.health("server") == "healthy", "it is not healthy", timeout=120, pause=0.5)
        assert client.server_info().server_id != before.server_id
        assert {item.key for item in client.get(keys)} == set(keys)


@pytest.mark.long
@needs_engine
def test_its_health_check_passes_and_fails_while_it_hangs(server):
    check = ["timeout", "5", *server.container("server")["Config"]["Healthcheck"]["Test"][1:]]
    server("exec", "--no-TTY", "server", *check)
    server("exec", "--no-TTY", "server", "bash", "-c", "kill -STOP -1")  # all processes but the first
    server.fails("exec", "--no-TTY", "server", *check)
    server("exec", "--no-TTY", "server", "bash", "-c", "kill -CONT -1")
    server("exec", "--no-TTY", "server", *check)


@needs_engine
def test_the_server_stops_with_status_0_when_it_is_asked_to(server):
    server("stop", "server")
    assert server.container("server")["State"]["ExitCode"] == 0
    assert "stopped" in server("logs", "server")


@needs_compose
@pytest.mark.parametrize("secure", [(), ("compose.secure.yaml",)], ids=["open", "secure"])
def test_compose_accepts_each_combination_of_profiles(secure):
    for profiles in chain.from_iterable(combinations(PROFILES, count) for count in range(len(PROFILES) + 1)):
        project = Project("compose.yaml", *secure, profiles=profiles)
        found = set(project("config", "--services").split())
        assert "server" in found
        assert ("trainer-cpu" in found) == ("cpu" in profiles)
        assert ("trainer" in found) == ("gpu" in profiles)
