"""What adapters do with a framework that is not the one that they were run with."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterable
from contextlib import nullcontext
from typing import Any

import pytest

from replay_adapters import hooks
from replay_adapters.hooks import RUN_WITH, hooks_of
from tests.adapters.conformance.latest import differences, installed
from tests.adapters.conformance.sources import COMMITS
from tests.packages import ROOT

FORGETTABLE = {"replay_adapters", "miles", "skyrl", "slime", "trl", "verl"}


class Framework:
    """What an adapter needs, of any version."""

    tools = None

    def draw(self, count: int, table: str, further: int = 0) -> None:
        """Nothing is drawn."""


@pytest.mark.parametrize(
    ("hook", "words"),
    [
        ("draw(table, count, ...)", ""),
        ("draw(count, table, further)", ""),
        ("tools", ""),
        ("draw(count, table)", r".*draw takes \(count, table, further\), not \(count, table\)"),
        ("draw(count, scope, ...)", r".*draw takes .*, not \(count, scope, \.\.\.\)"),
        ("toys", "type object 'Framework' has no attribute 'toys'"),
    ],
)
def test_a_framework_is_refused_for_its_hooks_and_not_for_its_number(monkeypatch, hook, words):
    monkeypatch.setitem(hooks.HOOKS, "verl", f"{__name__}:Framework.{hook}")
    refused = pytest.raises(ImportError, match=r"run with verl 0\.9\.1, .* differs: " + words)
    with refused if words else nullcontext(), hooks_of("verl"):
        pass


@pytest.mark.parametrize(
    ("adapter", "missing", "framework"),
    [
        ("trl_async", "trl.experimental.async_grpo.async_rollout_worker", "AsyncGRPO"),
        ("verl_recovery", "verl", "verl"),
        *((name.lower(), name.lower(), name) for name in ("verl", "slime", "Miles", "SkyRL")),
    ],
)
def test_an_adapter_without_its_hook_modules_says_in_one_sentence_what_it_was_run_with(
    monkeypatch, request, adapter, missing, framework
):
    name = f"replay_adapters.{adapter}"
    before = dict(sys.modules)
    for loaded in before:
        if loaded.startswith(f"{missing}."):  # from a checkout, by an earlier test of this process
            monkeypatch.delitem(sys.modules, loaded)
    monkeypatch.setitem(sys.modules, missing, None)
    monkeypatch.delitem(sys.modules, name, raising=False)
    request.addfinalizer(lambda: _check_modules(before))
    request.addfinalizer(lambda: _forget_modules_since(before))
    with pytest.raises(ImportError, match=f"the adapter for {framework} was run with {RUN_WITH[framework]}, .*Install"):
        importlib.import_module(name)


def _forgettable(names: Iterable[str]) -> set[str]:
    """The modules of adapters and frameworks. A process cannot import others, such as torch, a second time."""
    return {name for name in names if name.partition(".")[0] in FORGETTABLE}


def _forget_modules_since(before: dict[str, Any]) -> None:
    """An import that failed may have left half a package, which tests after this one would find."""
    for name in _forgettable(sys.modules.keys() - before.keys()):
        del sys.modules[name]
    sys.modules.update(before)


def _check_modules(before: dict[str, Any]) -> None:
    """No module of a framework is left, and no module was replaced."""
    assert _forgettable(sys.modules) == _forgettable(before)
    for name, module in before.items():
        assert sys.modules[name] is module, name


def test_the_sources_that_the_tests_take_are_what_the_adapters_say():
    said = {name.lower(): text for name, text in RUN_WITH.items()}
    assert all(commit[:10] in said[name] for name, commit in COMMITS.items())
    assert RUN_WITH["TRL"].replace(" ", "==") in (ROOT / "docker/constraints/cpu.txt").read_text().splitlines()


def test_what_a_newer_framework_lacks_is_named_hook_by_hook(monkeypatch):
    lines = ["draw(table, count)", "draw(count, table, further)", "toys"]
    monkeypatch.setitem(hooks.HOOKS, "TRL", "\n".join(f"{__name__}:Framework.{line}" for line in lines))
    first, second = differences("TRL")
    assert first.endswith("draw takes (count, table, further), not (table, count)")
    assert second.endswith("type object 'Framework' has no attribute 'toys'")
    assert installed("TRL") == RUN_WITH["TRL"]
