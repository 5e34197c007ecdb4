"""The Python environments of the compared systems. Those of the other systems are built here, at the first use.

A folder is changed or removed only if it was made here.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from benchmarks.interpreter import build_of, installed

ROOT = Path(__file__).parent.parent


_MARK = ".made-by-benchmarks"
"""A file in each environment that was made here. It has the requirements once all of them are installed."""


FILES = ROOT / "runs/benchmark"
"""The folder for the files of servers during a benchmark."""


@dataclass(frozen=True)
class RunningEnvironment:
    """The environment that the benchmark itself runs in. It is never changed."""

    python: Path = Path(sys.executable)

    def ensure(self) -> None:
        """Does nothing: the environment runs already."""


@dataclass(frozen=True)
class BuiltEnvironment:
    """A virtual environment in `folder`, for one system."""

    folder: Path
    requirements: tuple[str, ...]
    python_version: tuple[int, int] | None = None
    """The version of its Python; None: the Python that runs the benchmark."""
    program: str | None = None
    """A program of the machine that the system needs too."""

    @property
    def python(self) -> Path:
        return self.folder / "bin/python"

    def ensure(self) -> None:
        """Builds it unless it is there with these requirements. Raises RuntimeError with the reason."""
        if self.program is not None and shutil.which(self.program) is None:
            raise RuntimeError(f"{self.program} is not installed; on Debian and Ubuntu: apt-get install {self.program}")
        mark = self.folder / _MARK
        base = self._base_python()
        build = build_of(base)
        wanted = "\n".join((*self.requirements, f"{build['version']}, optimised: {build['optimised']}"))
        if mark.is_file() and mark.read_text() == wanted:
            return
        if self.folder.exists():
            if not mark.is_file():
                raise RuntimeError(f"{self.folder.name} was not made by the benchmark; move it away")
            shutil.rmtree(self.folder)
        print(f"Building {self.folder.name} ({', '.join(self.requirements)}); this takes some minutes ...", flush=True)
        self.folder.mkdir()
        mark.write_text("")
        (self.folder / ".gitignore").write_text("*\n")
        self._run(base, "-m", "venv", str(self.folder))
        self._run(
            str(self.python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *self.requirements
        )
        mark.write_text(wanted)

    def _base_python(self) -> str:
        """The Python with which the environment is made. Raises RuntimeError if it is not installed."""
        if self.python_version is None or self.python_version == sys.version_info[:2]:
            return sys.executable
        found = installed(self.python_version)
        if not found:
            name = "python{}.{}".format(*self.python_version)
            raise RuntimeError(f"{self.folder.name} needs {name}, which is not installed")
        return found[0]

    def _run(self, *command: str) -> None:
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            lines = [line for line in done.stderr.splitlines() if line.strip()] or ["no reason given"]
            raise RuntimeError(f"building {self.folder.name} failed: {lines[-1]}")


OURS = RunningEnvironment()
REVERB = BuiltEnvironment(
    ROOT / ".venv-reverb", ("dm-reverb==0.14.0", "tensorflow-cpu~=2.14.0", "numpy<2"), python_version=(3, 11)
)
TRANSFERQUEUE = BuiltEnvironment(ROOT / ".venv-transferqueue", ("TransferQueue==0.1.11", "ray", "torch==2.13.0"))
REDIS = BuiltEnvironment(ROOT / ".venv-redis", ("redis==6.4.0", "hiredis==3.2.1", "numpy"), program="redis-server")
TRL = BuiltEnvironment(ROOT / ".venv-trl", ("trl==1.16.0", "torch==2.13.0", "transformers==5.19.0"))
"""The torch and transformers are those with which our own side was measured."""


CERTIFICATE = FILES / "tls/cert.pem"
"""The certificate for the rows with TLS."""
KEY = FILES / "tls/key.pem"


def ensure_certificate() -> None:
    """Makes the certificate unless it exists. Raises RuntimeError with the reason."""
    if CERTIFICATE.exists():
        return
    CERTIFICATE.parent.mkdir(parents=True, exist_ok=True)
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"]
    command += ["-days", "3650", "-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
    try:
        command += ["-keyout", str(KEY), "-out", str(CERTIFICATE)]
        subprocess.run(command, check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise RuntimeError(f"openssl made no certificate: {error}") from error
