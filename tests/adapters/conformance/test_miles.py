"""ServerDataBuffer beside Miles' own buffer: equal samples for the same operations. A dead trainer loses nothing."""

from __future__ import annotations

import asyncio
import dataclasses
from argparse import Namespace
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import yaml

from replay_client import ReplayClient
from replay_client.folder_lock import FolderLock
from replay_client.testing import make_group, until
from replay_server import ReplayServer, TableConfig
from tests.adapters.conformance.sample_factories import as_agents, equal, with_columns
from tests.adapters.conformance.sources import missing
from tests.docs.blocks import ROOT, blocks
from tests.kit.processes import server_process, start

if why := missing("miles"):
    pytest.skip(why, allow_module_level=True)

from miles.rollout.fully_async_data_buffer import DataBufferInput
from miles.utils.types import Sample

from replay_adapters.miles import PREFIX, BufferSettings, ServerDataBuffer
from tests.adapters.conformance.miles_buffer import (
    drain,
    hold_and_wait,
    make_buffer,
    make_buffers,
    make_input,
    numbers,
)

SHARED = (
    *("queue_size", "aborted_groups_filtered", "stale_groups_filtered", "avg_staleness", "max_staleness"),
    *("buffer_avg_staleness", "buffer_max_staleness"),
)
"""Metrics that both buffers have."""


@pytest.fixture
def server() -> Iterator[ReplayServer]:
    queue = TableConfig(name="rollouts", rate_limiter={"type": "queue", "max_size": 8}, forward_to="replay")
    with ReplayServer([queue, TableConfig(name="replay", sampler="prioritized", max_size=64)], port=0) as server:
        yield server


@pytest.fixture
def make(server: ReplayServer) -> Iterator[Callable[..., ServerDataBuffer]]:
    """Makes a buffer that ends with the test."""
    made: list[ServerDataBuffer] = []

    def make_one(**args: Any) -> ServerDataBuffer:
        made.append(make_buffer(server.address, **args))
        return made[-1]

    yield make_one
    for buffer in made:
        buffer.close()


def removed(entry: Any) -> Any:
    for sample in entry.group:
        sample.remove_sample = True
    return entry


def in_place(entry: Any) -> Any:
    """As Miles generates: the samples of the prompt group become those of the group."""
    return DataBufferInput(prompt_group=entry.group, group=entry.group)


def agents(entry: Any, counts: tuple[int, int]) -> Any:
    return dataclasses.replace(entry, group=as_agents(entry.group, counts))


OPERATIONS: dict[str, list[Any]] = {
    "in order": [make_input(0), make_input(1), 0, make_input(2), 0, 0],
    "stale, and of unknown versions": [
        *(make_input(0, 5), make_input(1, None), make_input(2, 9), make_input(3, 8), 10, 10, make_input(4, 10), 12),
    ],
    "no version yet": [make_input(0, 5), make_input(1, 3), None, None],
    "aborted, failed, removed": [
        make_input(0, status=Sample.Status.ABORTED),
        make_input(1, status=Sample.Status.FAILED),
        removed(make_input(2)),
        *(0, 0),
    ],
    "refused by the filter": [make_input(0, label="odd"), make_input(1), 0],
    "samples and lists of samples": [
        agents(make_input(0, rewards=(0.0, 1.0, 1.0)), (2, 1)),
        make_input(1),
        agents(make_input(2), (1, 1)),
        *(0, 0, 0),
    ],
    "in place, with columns of tokens": [
        in_place(dataclasses.replace(e := make_input(0, 9), group=[with_columns(s, k) for k, s in enumerate(e.group)])),
        in_place(make_input(1, 5)),
        make_input(2, 10),
        *(10, 10),
    ],
}
"""What is put, and at which version the trainer gets one."""


@pytest.mark.parametrize("operations", OPERATIONS.values(), ids=OPERATIONS)
async def test_the_same_operations_give_the_samples_and_metrics_of_miles_own_buffer(server, operations):
    (theirs, their_unused), (ours, our_unused) = make_buffers(server.address, max_weight_staleness=3)
    given: list[list[Any]] = [[], []]
    for operation in operations:
        for buffer, got in zip((theirs, ours), given, strict=True):
            if isinstance(operation, DataBufferInput):
                await buffer.put(operation)
            else:
                got.append(await asyncio.wait_for(buffer.get(current_version=operation), 30))
    assert equal(given[1], given[0])
    assert equal(our_unused, their_unused)
    same_object = [[any(p is s for s in e.group) for p in e.prompt_group] for e in given[0]]
    assert [[any(p is s for s in e.group) for p in e.prompt_group] for e in given[1]] == same_object
    expected, metrics = theirs.get_metrics(), ours.get_metrics()
    named = {name for name in expected if name.removeprefix(PREFIX) in SHARED or "dynamic_filter" in name}
    assert {name: metrics.get(name) for name in named} == {name: expected[name] for name in named}
    assert {name for name in metrics if name.removeprefix(PREFIX) in SHARED} <= expected.keys()
    assert metrics[f"{PREFIX}server_away"] == 0.0
    assert ours.get_metrics()[f"{PREFIX}stale_groups_filtered"] == 0.0
    ours.close()


async def test_put_waits_while_the_table_is_full_and_generation_goes_on(make):
    buffer = make()
    for number in range(8):
        await buffer.put(make_input(number))
    blocked = asyncio.create_task(buffer.put(make_input(8)))
    with ReplayClient(buffer.client.address) as client:
        while not client.server_info().tables["rollouts"].inserting.count:  # the event loop is free meanwhile
            await asyncio.sleep(0.01)
    assert not blocked.done()
    assert numbers(await drain(buffer, 0, 1)) == [0]
    await asyncio.wait_for(blocked, 30)


async def test_a_cancelled_get_loses_no_group(make):
    buffer = make()
    waiting = asyncio.create_task(buffer.get(current_version=0))
    await asyncio.sleep(0)
    waiting.cancel()
    for number in range(3):
        await buffer.put(make_input(number))
    assert numbers(await drain(buffer, 0, 3)) == [0, 1, 2]


async def test_a_share_of_the_groups_comes_from_the_pool_under_indices_of_their_own(make):
    buffer = make(replay_share=0.5)
    for number in range(4):
        entry = make_input(number)
        await buffer.put(agents(entry, (1, 1)) if number else entry)
    first = await drain(buffer, 0, 2)  # the pool has nothing that this drain does not have
    assert numbers(first) == [0, 1]
    second = [await buffer.get(current_version=0) for _ in range(4)]
    metrics = buffer.get_metrics()
    replayed = [entry for entry in second if entry.prompt_group and _index(entry) < 0]
    assert sorted(numbers(replayed)) == [0, 1]
    assert metrics[f"{PREFIX}replayed_groups"] == 2
    assert sorted(numbers([entry for entry in second if _index(entry) >= 0])) == [2, 3]
    for entry in replayed:
        [source] = [each for each in first if numbers([each]) == numbers([entry])]
        samples, sources = _flat(entry.group), _flat(source.group)
        assert len({sample.index for sample in samples}) == 2
        for sample, stored in zip(samples, sources, strict=True):
            assert sample.rollout_id in (None, sample.index)
            names = {"group_index": stored.group_index, "index": stored.index, "rollout_id": stored.rollout_id}
            assert equal(dataclasses.replace(sample, **names), stored)
    assert len({sample.index for entry in second for sample in _flat(entry.group)}) == 8


def _flat(group: Any) -> list[Any]:
    return [sample for rollout in group for sample in (rollout if isinstance(rollout, list) else [rollout])]


def _index(entry: Any) -> int:
    return int(_flat(entry.group)[0].index)


async def test_a_group_of_another_writer_or_size_is_put_aside_and_counted(make, caplog):
    buffer = make()
    buffer.client.insert(make_group(), {"rollouts": 1.0})
    await buffer.put(make_input(0, rewards=(0.0, 1.0, 1.0)))
    await buffer.put(make_input(1))
    assert numbers([await buffer.get(current_version=0)]) == [1]
    assert buffer.get_metrics()[f"{PREFIX}groups_unusable"] == 2
    assert len([line for line in caplog.messages if "is rejected" in line]) == 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"label": object()}, "miles's samples have a label that cannot be stored, <object object at"),
        ({"metadata": {"of": {1, 2}}}, "have a metadata that cannot be stored, {'of': {1, 2}}"),
    ],
    ids=["an object", "a set"],
)
async def test_what_cannot_be_stored_is_named(make, changes, message):
    with pytest.raises(ValueError, match=message):
        await make().put(make_input(0, **changes))


def test_a_share_that_is_none_is_refused(server):
    with pytest.raises(ValueError, match=r"replay_share is 1.5, and must be from 0 to 0.9"):
        make_buffer(server.address, replay_share=1.5)


@pytest.mark.parametrize("no_folder", [None, ""])
async def test_without_checkpoints_a_group_is_used_up_when_the_next_but_one_batch_is_drawn(
    make, no_folder, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("7")  # of another run, in the present folder
    buffer = make(save=no_folder, load=no_folder)
    held = []
    for number in range(4):
        await buffer.put(make_input(number))
        await buffer.get(current_version=number)
        held.append(buffer.get_metrics()[f"{PREFIX}held_groups"])
    assert held == [1, 2, 3, 3]


@pytest.mark.long
async def test_a_second_trainer_is_refused_while_the_first_lives(server, make, tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    filling = make_buffer(server.address)
    for number in range(2):
        await filling.put(make_input(number))
    filling.close()
    living = start(hold_and_wait, server.address, first)
    until((first / "holds").exists, timeout=120.0)
    with pytest.raises(RuntimeError, match=r"miles:.* reads table 'rollouts' already, .* replay_table"):
        make(save=str(second))
    with pytest.raises(RuntimeError, match="is in use by another training run"):
        make(save=str(first))
    assert not FolderLock(second / "replay").acquire(), "the refused one holds nothing"
    living.kill()
    living.join()
    with ReplayClient(server.address) as client:
        until(lambda: client.server_info().sample_streams == 0)
    assert sorted(numbers(await drain(make(save=str(first)), 0))) == [0, 1]


def test_the_page_runs_and_prints_what_it_says(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    found = blocks(ROOT / "docs/how-to/frameworks.md")
    text = {block.language: block.text for block in found}
    tables = "\n".join(block.text for block in found if block.language == "toml")
    settings = BufferSettings.of(Namespace(**yaml.safe_load(text["yaml"])))
    assert settings == BufferSettings(), "the page names the defaults"
    with server_process(tmp_path, tables) as server:
        exec(text["python"], {"ADDRESS": server.address})
    assert capsys.readouterr().out == text["text"]
