"""The interpreters on this machine of each Python that the package supports, for `make test-pythons`.

python -m tests.pythons            a path a line, the oldest Python first; stderr names each Python that is missing
python -m tests.pythons 3.13       the path for this Python. The exit status is 1 if the machine has none
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
PREFIX = "Programming Language :: Python :: "
CHECK = "import ensurepip, sys, venv; print('%d.%d' % sys.version_info[:2])"
"""Prints the version of an interpreter that can make an environment; Debian's own may lack what that needs."""


def supported() -> list[str]:
    """The versions, such as "3.11", that the classifiers in pyproject.toml name."""
    classifiers = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["classifiers"]
    versions = []
    for classifier in classifiers:
        version = classifier.removeprefix(PREFIX)
        if classifier.startswith(PREFIX) and "." in version:
            versions.append(version)
    return versions


def candidates(version: str) -> Iterator[Path]:
    """Paths that may be an interpreter of this version: on the path, then those of pyenv and of uv."""
    on_path = shutil.which(f"python{version}")
    if on_path is not None:
        yield Path(on_path)
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    yield from sorted(pyenv.glob(f"versions/{version}.*/bin/python{version}"))
    uv = Path(os.environ.get("UV_PYTHON_INSTALL_DIR", Path.home() / ".local/share/uv/python"))
    yield from sorted(uv.glob(f"cpython-{version}.*/bin/python{version}"))


def find(version: str) -> Path | None:
    """The first candidate that starts and has this version. pyenv's programs on the path start only where it allows."""
    for path in candidates(version):
        done = subprocess.run([path, "-c", CHECK], capture_output=True, text=True, timeout=60)
        if done.returncode == 0 and done.stdout.strip() == version:
            return path
    return None


def main(arguments: Sequence[str]) -> None:
    versions = list(arguments) or supported()
    missing = []
    for version in versions:
        path = find(version)
        if path is None:
            missing.append(version)
        else:
            print(path)
    for version in missing:
        print(f"no Python {version} is on this machine: nothing is tested with it", file=sys.stderr)
    if missing and arguments:
        sys.exit(1)


if __name__ == "__main__":
    main(sys.argv[1:])
