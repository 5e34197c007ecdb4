"""One test for all adapters: a group comes back as it went in, and each side may die, hang and start again.

The cases are data: the groups below, and the two frameworks whose samples are objects. What an adapter shows in a test
of its own, and what cannot be shown, is in `adapters.TABLE`, which the page docs/record/adapters.md repeats.
"""

from __future__ import annotations

import ast
import asyncio
import functools
import os
import re
import signal
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import pytest

from replay_adapters.group_pool import GroupPool
from replay_client import ReplayClient
from replay_client.testing import make_group, until
from replay_server import ReplayServer, TableConfig
from tests.adapters.conformance.adapters import COLUMNS, TABLE, Shown, clones, markdown
from tests.adapters.conformance.sample_factories import (
    as_agents,
    equal,
    make_samples,
    own_prompt,
    with_columns,
)
from tests.adapters.conformance.sources import missing
from tests.docs.blocks import ROOT
from tests.kit.processes import server_process, start

TESTS = ROOT / "tests"
QUEUE = {"type": "queue", "max_size": 8}
TABLES = """
server.data_dir = "{folder}/data"
tables = [
    { name = "rollouts", rate_limiter = { type = "queue", max_size = 8 } },
    { name = "replay", sampler = "prioritized" },
]
"""


# ------------------------------------------------------------------------------------------------------- groups

REWARDS = (0.0, 1.0, 0.0)
GROUPS: dict[str, Callable[[Any], list[Any]]] = {
    "prompts": lambda kind: [own_prompt(sample, k) for k, sample in enumerate(make_samples(kind, 0, REWARDS))],
    "sequences": lambda kind: as_agents(make_samples(kind, 0, (0.0, 0.0, 1.0, 1.0, 0.0)), (2, 2, 1)),
    "masks": lambda kind: make_samples(kind, 0, REWARDS),
    "columns": lambda kind: [with_columns(sample, k) for k, sample in enumerate(make_samples(kind, 0, REWARDS))],
    "columns of some samples": lambda kind: [
        with_columns(sample, k) if k else sample for k, sample in enumerate(make_samples(kind, 0, REWARDS))
    ],
    "columns of agents": lambda kind: as_agents(
        [with_columns(own_prompt(s, k), k) for k, s in enumerate(make_samples(kind, 0, (0.0, 0.0, 1.0, 0.5)))],
        (2, 1, 1),
    ),
    "removed": lambda kind: [_change(s, remove_sample=not k) for k, s in enumerate(make_samples(kind, 0, REWARDS))],
    "failed": lambda kind: [
        *make_samples(kind, 0, REWARDS[:2]),
        kind(group_index=0, index=2, prompt="p", status=kind.Status.FAILED, remove_sample=True),
    ],
    "failed halfway": lambda kind: [
        *make_samples(kind, 0, REWARDS[:2]),
        _change(make_samples(kind, 0, REWARDS)[2], reward=None, rollout_log_probs=[-1.0], status=kind.Status.FAILED),
    ],
}
"""A group of three rollouts, made of a framework's own Sample."""
LEFT_ALONE = {"slime": ("failed", "failed halfway")}
"""Groups that an adapter does not store: the framework's own group stays where it was."""


def _change(sample: Any, **fields: Any) -> Any:
    for name, value in fields.items():
        setattr(sample, name, value)
    return sample


@contextmanager
def serving() -> Iterator[ReplayServer]:
    tables = [TableConfig(name="rollouts", rate_limiter=QUEUE), TableConfig(name="replay", sampler="prioritized")]
    with ReplayServer(tables, port=0) as server:
        yield server


def need(framework: str) -> Any:
    """The class Sample of a framework."""
    if why := missing(framework):
        pytest.skip(why)
    return import_module(f"{framework}.utils.types").Sample


def through_slime(address: str, group: list[Any]) -> list[Any]:
    """What stands in the place of a group without variance, with the indices of the stored group again."""
    samples = [sample for rollout in group for sample in (rollout if isinstance(rollout, list) else [rollout])]
    barren = make_samples(type(samples[0]), 7, (1.0, 1.0, 1.0))
    rollouts = [_as_agents_of(barren, group)] if isinstance(group[0], list) else [barren]
    _, second = run_slime(address, [[group], rollouts])
    restored = second.samples[0]
    flat = [sample for rollout in restored for sample in (rollout if isinstance(rollout, list) else [rollout])]
    for sample, source in zip(flat, samples, strict=True):
        assert sample.index // 10 == 7, "slime's own order"
        for name in ("group_index", "index", "rollout_id", "metadata"):
            setattr(sample, name, getattr(source, name))
    return list(restored)


def _as_agents_of(samples: list[Any], group: list[Any]) -> list[Any]:
    return [[sample] for sample, _ in zip(samples, group, strict=True)]


def run_slime(address: str, rollouts: list[list[Any]], first: int = 0, **settings: Any) -> list[Any]:
    """slime's rollouts from number `first` on, each with these groups from its engine."""
    from slime.rollout.base_types import RolloutFnTrainOutput

    from replay_adapters.slime import generate_rollout

    PLANNED.clear()
    PLANNED.update({first + i: RolloutFnTrainOutput(samples=groups) for i, groups in enumerate(rollouts)})
    args = Namespace(replay_rollout_function=f"{__name__}.planned_rollout", replay_address=address, **settings)
    return [generate_rollout(args, first + i, None) for i in range(len(rollouts))]


PLANNED: dict[int, Any] = {}


def planned_rollout(args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> Any:
    """Stands where slime's SGLang rollout does."""
    return PLANNED[rollout_id]


def through_miles(address: str, group: list[Any]) -> list[Any]:
    """What the trainer gets of a group that was put."""
    from miles.rollout.fully_async_data_buffer import DataBufferInput

    from tests.adapters.conformance.miles_buffer import make_buffer

    async def run() -> list[Any]:
        buffer = make_buffer(address, n_samples_per_prompt=3)
        await buffer.put(DataBufferInput(prompt_group=[], group=group))
        entry = await asyncio.wait_for(buffer.get(current_version=0), 30)
        buffer.close()
        return list(entry.group)

    return asyncio.run(run())


THROUGH = {"slime": through_slime, "miles": through_miles}


@pytest.mark.parametrize("name", GROUPS)
@pytest.mark.parametrize("framework", THROUGH)
def test_a_group_comes_back_bit_by_bit(framework, name):
    group, expected = GROUPS[name](need(framework)), GROUPS[name](need(framework))
    if name in LEFT_ALONE.get(framework, ()):
        with serving() as server, ReplayClient(server.address) as client:
            [output] = run_slime(server.address, [[group]])
            assert output.samples == [group]
            assert client.server_info().tables["replay"].size == 0
        return
    with serving() as server:
        assert equal(THROUGH[framework](server.address, group), expected)
        assert equal(group, expected), "what is put stays as it was"


def test_columns_of_tokens_are_extras_with_axes_and_small():
    group = GROUPS["columns"](need("slime"))
    with serving() as server, ReplayClient(server.address) as client:
        run_slime(server.address, [[group]])
        [item] = client.list_items("replay").items
        stored = client.get([item.key])[0].group
    assert stored.axes == {
        "rollout_routed_experts": "whole",
        "teacher_log_probs": "token",
        "rollout_top_p_token_ids": "ragged:token",
    }
    experts = stored.extras["rollout_routed_experts"]
    assert experts.dtype.name == "uint8"
    assert len(experts) == stored.prompt_ids.size + stored.num_tokens
    # The routing of the prompt differs, so the samples share no prompt.
    assert stored.prompt_ids.size == 0


# --------------------------------------------------------------------------------------------- versions, the pool


def test_slime_uses_no_group_beyond_the_bound():
    kind = need("slime")
    informative, barren = make_samples(kind, 0, REWARDS), make_samples(kind, 7, (1.0, 1.0, 1.0))
    with serving() as server:
        run_slime(server.address, [[informative]])
        for rollout_id, replaced in ((4, 0), (3, 1)):
            # A server's version does not go back: rollout 4 is asked for a bound of 3, and then for one of 4.
            [output] = run_slime(server.address, [[barren]], rollout_id, replay_max_staleness=7 - rollout_id)
            assert output.metrics["replay/groups_replaced"] == replaced


def test_a_pool_gives_no_group_beyond_the_bound():
    with serving() as server, ReplayClient(server.address) as client:
        pool = GroupPool(client, max_staleness=2)
        for version in (0, 1, 2):
            client.insert(make_group(version=version), {"replay": 1.0})
        assert pool.advance(3) == 3
        drawn = pool.draw(3, "step", lambda group: True)
        assert sorted(sample.group.policy_version for sample in drawn) == [1, 2]


def test_a_pool_that_starts_again_counts_its_versions_on():
    with serving() as server, ReplayClient(server.address) as client:
        first = GroupPool(client)
        assert [first.advance(step) for step in (0, 1, 5)] == [0, 1, 5]
        again = GroupPool(client)
        assert [again.advance(step) for step in (0, 1)] == [5, 6]
        assert client.policy().version == 6


# ------------------------------------------------------------------------------------------- kills and a hanging server


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    """The process hangs for the time of the block."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


@pytest.mark.long
def test_a_pool_whose_server_hangs_is_empty_until_it_goes_on(tmp_path):
    with server_process(tmp_path) as server, ReplayClient(server.address, timeout=1.0) as client:
        pool = GroupPool(client, timeout=1.0)
        client.insert(make_group(), {"replay": 1.0})
        with stopped(server.process.pid):
            assert pool.draw(1, "first", lambda group: True) == []  # as of a table that is empty
            assert pool.insert([make_group()]) == 0
            assert pool.problem is not None
        assert until(lambda: pool.draw(1, "second", lambda group: True))
        assert pool.problem is None


def test_slime_goes_on_while_the_server_hangs(tmp_path, monkeypatch):
    kind = need("slime")
    from replay_adapters import slime

    monkeypatch.setattr(slime, "GroupPool", functools.partial(slime.GroupPool, timeout=0.5))
    barren = make_samples(kind, 7, (1.0, 1.0, 1.0))
    with server_process(tmp_path) as server:
        run_slime(server.address, [[make_samples(kind, 0, REWARDS)]])
        with stopped(server.process.pid):
            [output] = run_slime(server.address, [[barren]], 1)
        assert output.samples == [barren]
        assert output.metrics["replay/unavailable"] == 1.0
        rollout_ids = iter(range(2, 1000))
        until(
            lambda: (run_slime(server.address, [[barren]], next(rollout_ids))[0].metrics["replay/groups_replaced"] == 1)
        )


def test_miles_goes_on_where_it_was_after_a_server_hung(tmp_path, monkeypatch):
    need("miles")
    from tests.adapters.conformance.miles_buffer import drain, make_buffer, make_input, numbers

    monkeypatch.chdir(tmp_path)

    async def run(address: str, pid: int) -> list[int]:
        buffer = make_buffer(address)
        for number in range(3):
            await buffer.put(make_input(number))
        taken = await drain(buffer, 0, 1)
        with stopped(pid):
            puts = [asyncio.create_task(buffer.put(make_input(number))) for number in (3, 4)]
            get = asyncio.create_task(drain(buffer, 1, 4))
            await asyncio.sleep(0)  # the event loop is free: what is awaited waits in threads
        await asyncio.wait_for(asyncio.gather(*puts), 60)
        taken += await asyncio.wait_for(get, 60)
        assert buffer.get_metrics()["rollout/fully_async/queue_size"] == 0
        buffer.close()
        return sorted(numbers(taken))

    with server_process(tmp_path, TABLES) as server:
        assert asyncio.run(run(server.address, server.process.pid)) == [0, 1, 2, 3, 4]


def store_and_die(address: str) -> None:
    """A slime that is killed behind its first rollout."""
    run_slime(address, [[make_samples(need("slime"), 0, REWARDS)]], 5)
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.long
def test_what_a_killed_slime_stored_is_there_for_the_next_one():
    barren = make_samples(need("slime"), 7, (1.0, 1.0, 1.0))
    with serving() as server, ReplayClient(server.address) as client:
        dying = start(store_and_die, server.address)
        dying.join(120)
        assert dying.exitcode == -signal.SIGKILL
        assert client.policy().version == 5
        # Numbers of rollouts begin anew, the server's versions go on.
        [output] = run_slime(server.address, [[barren]], 0)
        assert output.metrics["replay/groups_replaced"] == 1
        assert client.policy().version == 5


# ------------------------------------------------------------------------------------------------------ the table


def test_every_adapter_has_every_column_and_the_tests_that_it_names():
    modules = {
        path.stem: path for folder in ("adapters", "contracts") for path in TESTS.joinpath(folder).rglob("test_*.py")
    }
    for adapter, row in TABLE.items():
        assert list(row) == list(COLUMNS), adapter
        for column, cell in row.items():
            if isinstance(cell, Shown):
                module, function = cell.test.split("::")
                tree = ast.parse(modules[module].read_text())
                names = {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
                assert function in names, f"{adapter}, {column}"


def test_the_page_repeats_the_table():
    page = (ROOT / "docs/record/adapters.md").read_text()
    found = re.search(r"<!-- table -->\n(.*?)<!-- /table -->", page, re.DOTALL)
    assert found is not None
    assert found[1].strip() == markdown().strip(), "python -m tests.adapters.conformance.adapters prints it"
    assert f"```shell\n{clones()}" in page
