"""Interpreters: says how a Python was built, and finds one that was built with optimisations.

    python3 benchmarks/interpreter.py       prints the first such python3.11, 3.12, ... of PATH

An interpreter without profile-guided optimisation needs 1.1 to 1.3 times the processor time. Imports nothing of ours.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

VERSIONS = tuple((3, minor) for minor in range(11, 16))
"""3.11 comes first, because Reverb needs it. So all sides run on the same version."""

_ASK = """
import json, os, platform, sys, sysconfig
arguments = sysconfig.get_config_var("CONFIG_ARGS") or ""
flags = [each.strip("'") for each in arguments.split() if each.strip("'").startswith(("--enable-", "--with-"))]
# A distribution builds its interpreter twice, and sysconfig tells the settings of the other one.
distribution = os.path.realpath(sys._base_executable).startswith("/usr/bin/")
print(json.dumps({
    "version": platform.python_version(),
    "compiler": platform.python_compiler(),
    "built_by": "the distribution" if distribution else "others",
    "options": flags,
    "compiler_options": sysconfig.get_config_var("OPT") or "",
    "optimised": distribution or "--enable-optimizations" in flags,
}))
"""


@functools.cache
def build_of(python: str) -> dict[str, Any]:
    """The facts about the build of an interpreter. Raises RuntimeError if it does not run."""
    done = subprocess.run([python, "-c", _ASK], capture_output=True, text=True)
    if done.returncode:
        lines = done.stderr.splitlines() or ["no reason given"]
        raise RuntimeError(f"{Path(python).name} does not run: {lines[-1]}")
    return dict(json.loads(done.stdout))


def installed(version: tuple[int, int]) -> list[str]:
    """The interpreters of this version in the folders of PATH, those with optimisations first."""
    name = "python{}.{}".format(*version)
    optimised = []
    others = []
    for folder in os.get_exec_path():
        path = Path(folder) / name
        if not path.is_file():
            continue
        try:
            build = build_of(str(path))
        except RuntimeError:  # the stand-in of a version manager, for a version that is not active
            continue
        if build["optimised"]:
            optimised.append(str(path))
        else:
            others.append(str(path))
    return optimised + others


def main() -> None:
    found = []
    for version in VERSIONS:
        found += installed(version)[:1]
    optimised = [path for path in found if build_of(path)["optimised"]]
    if not optimised:
        print("no Python that was built with optimisations is on PATH; name one: BENCH_PYTHON=...", file=sys.stderr)
    print((optimised or found or [sys.executable])[0])


if __name__ == "__main__":
    main()
