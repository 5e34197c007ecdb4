"""What adapters do with a framework that is not the one that they were run with."""

from __future__ import annotations

import importlib
import sys
from contextlib import nullcontext
from typing import Any

import pytest

from replay_trainer.integrations.hooks import RUN_WITH, check_hooks
from tests.trainer.integrations.conformance.sources import COMMITS


class Framework:
    """What an adapter needs, of any version."""

    __version__ = "99.0"

    def draw(self, count: int, table: str, further: int = 0) -> None:
        """Nothing is drawn."""


@pytest.mark.parametrize(
    ("owner", "wanted", "words"),
    [
        (Framework, {"draw": ("table", "count", "...")}, ""),
        (Framework(), {"draw": ("count", "table", "further"), "__version__": None}, ""),
        (
            Framework,
            {"draw": ("count", "table")},
            r"Framework\.draw takes \(count, table, further\), not \(count, table\)",
        ),
        (Framework, {"draw": ("count", "scope", "...")}, r".*takes .*, not \(count, scope, \.\.\.\)"),
        (object(), {"tools": None}, "object has no tools"),
    ],
)
def test_a_framework_is_refused_for_its_hooks_and_not_for_its_number(
    monkeypatch: pytest.MonkeyPatch, owner: Any, wanted: Any, words: str
) -> None:
    monkeypatch.setitem(sys.modules, "verl", Framework)
    refused = pytest.raises(ImportError, match=r"run with verl 0\.9\.1, .* \(verl 99\.0\): " + words)
    with refused if words else nullcontext():
        check_hooks("verl", {owner: wanted})


@pytest.mark.parametrize(
    ("adapter", "missing", "framework"),
    [
        ("trl_async", "trl.experimental.async_grpo.async_rollout_worker", "trl"),
        *((name, name, name) for name in ("verl", "slime", "miles", "skyrl")),
    ],
)
def test_an_adapter_without_its_hook_modules_says_in_one_sentence_what_it_was_run_with(
    monkeypatch: pytest.MonkeyPatch, adapter: str, missing: str, framework: str
) -> None:
    name = f"replay_trainer.integrations.{adapter}"
    monkeypatch.setitem(sys.modules, missing, None)
    monkeypatch.delitem(sys.modules, name, raising=False)
    with pytest.raises(ImportError, match=f"the adapter for {framework} was run with {RUN_WITH[framework]}, .*Install"):
        importlib.import_module(name)


def test_the_sources_that_the_tests_take_are_what_the_adapters_say() -> None:
    assert all(commit[:10] in RUN_WITH[name] for name, commit in COMMITS.items())
