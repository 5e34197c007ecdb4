"""A machine without containers: runs compose services as local processes, with the rest of the root read-only."""

from __future__ import annotations

import functools
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.docker.files import ROOT, Image, dockerfile_of, secret_and_config_files

PORTS = (7400, 7401)
READ_ONLY_ROOT = (
    'for folder in $WRITABLE; do mount --bind "$folder" "$folder"; done && mount -o remount,bind,ro / && exec "$@"'
)


@functools.cache
def can_make_root_read_only() -> bool:
    """Whether this user may have mounts of its own (in containers without privileges it may not)."""
    command = ["unshare", "--mount", "sh", "-c", "mount --bind /tmp /tmp && mount -o remount,bind,ro / && true"]
    return shutil.which("unshare") is not None and subprocess.run(command, capture_output=True).returncode == 0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class Machine:
    """Gives each container path a folder below `work`, and each container port a free local one."""

    def __init__(self, compose: Mapping[str, Any], work: Path) -> None:
        self.compose = compose
        self.work = work
        self.ports = {port: free_port() for port in PORTS}

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.ports[7400]}"

    def volume(self, name: str) -> Path:
        folder = self.work / "volumes" / name
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def process(self, name: str) -> Process:
        return Process(self, name, self.compose["services"][name])


class Process:
    """One service: its command, environment and health check, as its container would have them."""

    def __init__(self, machine: Machine, name: str, service: Mapping[str, Any]) -> None:
        self.name = name
        self.machine = machine
        self.service = service
        dockerfile = dockerfile_of(service)
        assert dockerfile is not None, f"{name} runs an image that is not ours"
        self.image = Image.of(dockerfile)
        self.log = machine.work / f"{name}.log"
        self._popen: subprocess.Popen[bytes] | None = None
        self.folders = {"/tmp": machine.work / "tmp" / name}
        self.folders["/tmp"].mkdir(parents=True, exist_ok=True)
        self.writable = [self.folders["/tmp"]]
        for volume in service.get("volumes", []):
            source, target, *mode = volume.split(":")
            self.folders[target] = machine.volume(source)
            if "ro" not in mode:
                self.writable.append(self.folders[target])
        for target, source in secret_and_config_files(machine.compose, service).items():
            self.folders[target] = machine.work / "mounted" / name / target.lstrip("/")
            self.folders[target].parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, self.folders[target])
        for target in [target for target in self.folders if target.startswith("/etc/")]:
            self.folders[target].write_text(self.local(self.folders[target].read_text()))

    def local(self, text: str) -> str:
        """The same with paths and addresses of this machine."""
        paths = "|".join(sorted(map(re.escape, self.folders), key=len, reverse=True))
        text = re.sub(rf"(?<![\w/])(?:{paths})(?![\w.-])", lambda match: str(self.folders[match[0]]), text)
        for inside, outside in self.machine.ports.items():
            text = re.sub(rf"\b(server|127\.0\.0\.1|0\.0\.0\.0):{inside}\b", f"127.0.0.1:{outside}", text)
        return text

    def environment(self) -> dict[str, str]:
        """What the container would have, and what makes this checkout's packages and Python stand for the image's."""
        own = self.image.environment | self.service.get("environment", {})
        here = {
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONPATH": os.pathsep.join(str(ROOT / name) for name in (".", "client", "protos", "trainer")),
            "TMPDIR": str(self.folders["/tmp"]),
            "OMP_NUM_THREADS": "1",
        }
        return {name: self.local(value) for name, value in own.items()} | here

    def run(self, command: list[str], **options: Any) -> subprocess.Popen[bytes]:
        environment = self.environment()
        if can_make_root_read_only():
            environment["WRITABLE"] = " ".join(map(str, self.writable))
            command = ["unshare", "--mount", "sh", "-c", READ_ONLY_ROOT, "sh", *command]
        return subprocess.Popen(command, env=environment, cwd="/", stdin=subprocess.DEVNULL, **options)

    def start(self) -> None:
        entrypoint = self.service.get("entrypoint", self.image.entrypoint)
        command = self.service.get("command", [] if "entrypoint" in self.service else self.image.command)
        with self.log.open("ab") as log:
            words = [self.local(word) for word in [*entrypoint, *command]]
            self._popen = self.run(words, stdout=log, stderr=subprocess.STDOUT)

    def output(self) -> str:
        return self.log.read_text()

    def health(self) -> tuple[bool, str]:
        """One run of the health check: whether it passed, and what it said."""
        kind, *words = self.service["healthcheck"]["test"]
        assert kind == "CMD"
        words = [self.local(word) for word in words]
        check = self.run(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        said, _ = check.communicate(timeout=120)
        return check.returncode == 0, said.decode()

    def wait(self, timeout: float) -> int:
        """Its exit status."""
        assert self._popen is not None
        return self._popen.wait(timeout)

    def wait_for(self, condition: str, timeout: float = 300.0) -> None:
        """Until a condition of `depends_on` holds."""
        if condition == "service_completed_successfully":
            assert self.wait(timeout) == 0, self.output()
            return
        assert condition == "service_healthy", condition
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            assert self._popen is not None
            assert self._popen.poll() is None, f"{self.name} ended: {self.output()}"
            healthy, said = self.health()
            if healthy:
                return
            time.sleep(0.5)
        raise AssertionError(f"{self.name} is not healthy after {timeout} s: {said}; {self.output()}")

    def stop(self) -> int:
        """As `docker stop`: SIGTERM, and the time that the service asks for."""
        assert self._popen is not None
        if self._popen.poll() is None:
            self._popen.terminate()
        return self._popen.wait(float(self.service.get("stop_grace_period", "10s").removesuffix("s")))

    def kill(self) -> None:
        if self._popen is not None and self._popen.poll() is None:
            self._popen.kill()
            self._popen.wait()
