"""A real container engine: the compose files of this checkout as a project of their own, of which nothing stays.

The engine is the one that `docker` finds, also by DOCKER_HOST. Nothing is pulled: it must have the base of the images.
`.ci/engine COMMAND` starts one where it may, for that command.
"""

from __future__ import annotations

import functools
import json
import os
import secrets
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from replay_client.testing import until
from tests.docker import files
from tests.kit.processes import free_port

BASE = next(
    rest.removeprefix("PYTHON=")
    for word, rest in files.instructions(files.DOCKER / "Dockerfile.server")
    if word == "ARG" and rest.startswith("PYTHON=")
)


def _runs(*command: str) -> bool:
    try:
        return subprocess.run(command, capture_output=True, timeout=60).returncode == 0
    except OSError:
        return False


@functools.cache
def missing(*, to: str = "run") -> str:
    """Why containers cannot run here, or compose files cannot be read; empty: they can."""
    if not _runs("docker", "compose", "version"):
        return "needs `docker compose`"
    if to == "read":
        return ""
    if not _runs("docker", "version"):
        return "needs a container engine that answers; .ci/engine starts one"
    if not _runs("docker", "image", "inspect", BASE):
        return f"needs the image {BASE}, which tests do not pull"
    return ""


needs_engine = pytest.mark.skipif(bool(missing()), reason=missing() or "an engine is there")
needs_compose = pytest.mark.skipif(bool(missing(to="read")), reason=missing(to="read") or "compose is there")


class Project:
    """`docker compose` with files of docker/, under a name of its own, and with images and ports of its own."""

    def __init__(
        self, *names: str, profiles: Iterable[str] = (), version: str | None = None, **variables: object
    ) -> None:
        self.name = f"replay-test-{secrets.token_hex(4)}"
        self.port = free_port()
        self._version = version
        own = {"VERSION": version or self.name, "SERVER_PORT": self.port, "BUILD_NETWORK": "host"}
        self._environment = os.environ | {name: str(value) for name, value in (own | variables).items()}
        self._command = ["docker", "compose", "--project-name", self.name]
        for name in names or ("compose.yaml",):
            self._command += ["--file", str(files.DOCKER / name)]
        for profile in profiles:
            self._command += ["--profile", profile]

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def __call__(self, *words: str, check: bool = True, timeout: float = 1800.0) -> str:
        """What `docker compose WORDS` prints."""
        done = subprocess.run(
            [*self._command, *words], capture_output=True, text=True, timeout=timeout, env=self._environment
        )
        assert not check or done.returncode == 0, f"{' '.join(words)}: {done.stdout[-4000:]}{done.stderr[-4000:]}"
        return done.stdout + done.stderr

    def fails(self, *words: str) -> str:
        """What a command prints that must not succeed."""
        done = subprocess.run(
            [*self._command, *words], capture_output=True, text=True, timeout=300, env=self._environment
        )
        assert done.returncode != 0, done.stdout
        return done.stdout + done.stderr

    def container(self, service: str) -> dict[str, Any]:
        """What the engine knows of the only container of a service."""
        (number,) = self("ps", "--all", "--quiet", service).split()
        (container,) = json.loads(docker("inspect", number))
        return container  # type: ignore[no-any-return]

    def health(self, service: str) -> str:
        return str(self.container(service)["State"]["Health"]["Status"])

    def has_ended(self, service: str) -> bool:
        return bool(self.container(service)["State"]["Status"] == "exited")

    def kill(self, service: str) -> None:
        """SIGKILL from outside. After `docker kill` no restart policy applies: it counts as a stop by hand."""
        os.kill(self.container(service)["State"]["Pid"], 9)

    def wait(self, service: str, timeout: float = 600.0) -> int:
        """The exit status of a service that ends."""
        until(lambda: self.has_ended(service), f"{service} goes on", timeout=timeout, pause=0.5)
        return int(self.container(service)["State"]["ExitCode"])

    def remove(self) -> None:
        """Containers, networks, volumes and, unless their version was given, images."""
        self("--profile", "*", "down", "--volumes", "--remove-orphans", "--timeout", "20")
        if self._version is None:
            for image in set(docker("image", "ls", "--format", "{{.Repository}}:{{.Tag}}").split()):
                if f":{self.name}" in image:
                    docker("image", "rm", image)

    def leftovers(self) -> list[str]:
        """Containers, networks and volumes of this project."""
        mine = ["--quiet", "--filter", f"label=com.docker.compose.project={self.name}"]
        kinds = (["container", "ls", "--all"], ["network", "ls"], ["volume", "ls"])
        return [number for kind in kinds for number in docker(*kind, *mine).split()]


def docker(*words: str) -> str:
    done = subprocess.run(["docker", *words], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def make_secrets(folder: Path) -> None:
    subprocess.run([files.DOCKER / "make-secrets.sh", folder], check=True, capture_output=True)
