"""When the heartbeat of a generator, and that of a trainer, comes."""

import asyncio
import os
import threading

import pytest

from replay_client.testing import async_until, until
from replay_generator.testing import ScriptedEngine
from replay_trainer.background import ServerWaits
from tests.kit.clients import FakeClient, RecordingClient
from tests.kit.clocks import turns
from tests.kit.generators import make_generator, running
from tests.kit.trainers import make_batches, make_trainer
from tests.trainer.test_wait_log import Server

LONG_AGO = 1e9


@pytest.fixture
def heartbeat(tmp_path, monkeypatch):
    path = tmp_path / "heartbeat"
    monkeypatch.setenv("REPLAY_HEARTBEAT", str(path))
    return path


def age(path):
    """Makes the file old."""
    path.touch()
    os.utime(path, (LONG_AGO, LONG_AGO))


def is_old(path):
    return path.stat().st_mtime == LONG_AGO


async def test_a_generator_beats_with_each_group_and_not_while_its_engine_hangs(heartbeat):
    client, engine = RecordingClient(), ScriptedEngine()
    generator = make_generator(client, engine, max_concurrent_groups=1)
    task = await running(generator)
    await client.inserted(1)
    await async_until(heartbeat.exists)
    engine.hold = asyncio.Event()
    await async_until(lambda: engine.generating == 1)
    age(heartbeat)
    await turns()
    assert is_old(heartbeat)
    engine.hold.set()
    await async_until(lambda: not is_old(heartbeat))
    generator.stop()
    await task


async def test_a_generator_beats_while_it_waits_for_the_first_weights(heartbeat):
    generator = make_generator(RecordingClient(), ScriptedEngine(), wait_for_policy=True)
    task = await running(generator)
    await async_until(heartbeat.exists)
    generator.stop()
    await task


def test_a_trainer_beats_while_it_waits_for_groups(heartbeat):
    go_on = threading.Event()

    def batches():
        go_on.wait(60)
        yield 1

    trainer = threading.Thread(
        target=lambda: list(ServerWaits(Server(1), "rollouts", look_seconds=0.02).watch(batches()))
    )
    trainer.start()
    for _ in range(2):
        until(heartbeat.exists)
        heartbeat.unlink()
    go_on.set()
    trainer.join(60)


def test_a_trainer_beats_with_each_micro_batch(heartbeat, tmp_path):
    beats = []

    def on_step(metrics):
        beats.append(not is_old(heartbeat))
        age(heartbeat)

    age(heartbeat)
    make_trainer(FakeClient(make_batches(2)), tmp_path, on_step=on_step, max_steps=2).train()
    assert beats == [True, True]
