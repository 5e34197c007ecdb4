"""What of each framework's newest release, and of its newest sources, no longer fits its adapter: by name.

`make adapters-latest SOURCES=folder` installs the releases and calls this; `folder/NAME` is a checkout at any commit.

    python -m tests.adapters.conformance.latest [SOURCES]
    python -m tests.adapters.conformance.latest --hooks FRAMEWORK     prints what is installed and what it lacks
"""

from __future__ import annotations

import os
import subprocess
import sys
import typing
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from unittest.mock import patch

import typing_extensions

from replay_adapters.hooks import HOOKS, RUN_WITH, hooks_of
from tests.adapters.conformance.sources import ANY, COMMITS, VARIABLE, commit_of
from tests.adapters.conformance.test_skyrl import PACKAGES
from tests.packages import ROOT

OURS = [str(ROOT / name) for name in ("", "client", "trainer", "protos")]
ENVIRONMENTS = {"TRL": ".venv-latest-trl", "AsyncGRPO": ".venv-latest-trl", "verl": ".venv-latest-verl"}
"""Where the frameworks of the index are. The others are imported from their sources."""
TESTS = {
    "TRL": ["test_trl.py", "test_trl_prompts.py", "test_trl_shared.py"],
    "AsyncGRPO": ["test_trl_async.py", "../contracts/test_trainer.py"],
    "verl": ["test_verl.py"],
    "slime": ["conformance/test_slime.py"],
    "Miles": ["conformance/test_miles.py", "../contracts/test_trainer.py"],
    "SkyRL": ["conformance/test_skyrl.py"],
}


def installed(framework: str) -> str:
    """What this process can import of a framework, as RUN_WITH says it."""
    if (name := framework.lower()) in COMMITS:
        folder = Path(os.environ[VARIABLE], name)
        commit = commit_of(folder)[:10] if (folder / ".git").exists() else "an unknown commit"
        return f"{RUN_WITH[framework].partition(' at ')[0]} at {commit}"
    packages = [each.split()[0] for each in RUN_WITH[framework].split(", ")]
    return ", ".join(f"{package} {version(package)}" for package in packages)


def differences(framework: str) -> Iterator[str]:
    """Each hook of an adapter that its framework has no more, or has otherwise."""
    texts = [text for name, text in HOOKS.items() if name.partition(":")[0] == framework]
    for hook in filter(None, map(str.strip, "\n".join(texts).splitlines())):
        try:
            with patch.dict(HOOKS, {framework: hook}), hooks_of(framework):
                pass
        except Exception as error:  # while it is imported, a framework raises what it likes
            reason = " ".join(str(error.__cause__ or error).split())
            yield f"{hook.partition('(')[0]}: {reason}"


def check(framework: str, sources: Path | None) -> bool:
    """Prints whether a framework fits its adapter, and what fails if not."""
    python, paths, environment = sys.executable, list(OURS), os.environ | {ANY: "1"}
    if folder := ENVIRONMENTS.get(framework):
        python = environment["REPLAY_VERL_PYTHON"] = str(ROOT / folder / "bin/python")
    elif sources is None or not (source := sources / framework.lower()).is_dir():
        print(f"{framework}: no checkout of it in SOURCES")
        return True
    else:
        environment[VARIABLE] = str(sources)
        paths.append(str(source))
        if framework == "SkyRL":
            PACKAGES.ensure()
            paths += [str(source / "skyrl-gym"), *map(str, PACKAGES.folder.glob("lib/*/site-packages"))]

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        found = environment | {"PYTHONPATH": os.pathsep.join(paths)}
        return subprocess.run([python, "-m", *words], cwd=ROOT, env=found, capture_output=True, text=True)

    hooks = run("tests.adapters.conformance.latest", "--hooks", framework)
    if hooks.returncode:
        print(f"{framework} (run with {RUN_WITH[framework]}): {hooks.stdout or hooks.stderr[-2000:]}", flush=True)
        return False
    # verl's and SkyRL's tests start processes of theirs, and run themselves where all of ours is.
    python = python if framework in ("TRL", "AsyncGRPO") else sys.executable
    paths = list(OURS)
    names = [f"tests/adapters/{name}" for name in TESTS[framework]]
    tests = run("pytest", "-q", "-n0", "-p", "no:cacheprovider", "-m", "not long", "--no-header", "-rfE", *names)
    failed = [line for line in tests.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    last = (tests.stdout.splitlines() or [tests.stderr[-500:]])[-1]
    print("\n  ".join([f"{framework}: {hooks.stdout.strip()}: {last}", *failed]), flush=True)
    return tests.returncode == 0


def main() -> int:
    match sys.argv[1:]:
        case ["--hooks", framework]:
            if sys.version_info < (3, 12):
                typing.TypedDict = typing_extensions.TypedDict  # type: ignore[assignment]  # as run_skyrl.py does
            lacking = list(differences(framework))
            print("\n  ".join([installed(framework), *lacking]))
            return bool(lacking)
        case [] | [""]:
            sources = None
        case [folder]:
            sources = Path(folder).resolve()
    fits = [check(framework, sources) for framework in RUN_WITH]
    return int(not all(fits))


if __name__ == "__main__":
    sys.exit(main())
