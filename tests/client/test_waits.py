"""Waits: when a heartbeat comes, and that Patience tries again until its judge gives up."""

import asyncio
import os
import threading

import pytest

pytest.importorskip("torch", reason="beats of the trainer need it")

from replay_client import AsyncReplayClient, connection
from replay_client.errors import DeadlineExceededError, InvalidRequestError, ServerBusyError, ServerUnavailableError
from replay_client.waits import Patience, beat, try_patiently
from replay_trainer.background import ServerWaits
from tests.client.fake_server import FakeServer
from tests.factories import async_until, turns, until
from tests.generator.factories import RecordingClient, ScriptedEngine
from tests.generator.test_generator import make_generator, running
from tests.trainer.factories import FakeClient, make_batches, make_trainer
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


def test_a_file_that_cannot_be_written_is_named(heartbeat, monkeypatch):
    monkeypatch.setenv("REPLAY_HEARTBEAT", str(heartbeat / "none"))
    with pytest.raises(ValueError, match=r"REPLAY_HEARTBEAT: cannot write .*/none"):
        beat()


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


async def test_an_attempt_is_made_again_until_it_succeeds_or_the_judge_gives_up():
    told = []

    async def judge(error, late):
        told.append((type(error), late))
        if isinstance(error, InvalidRequestError):
            raise error

    outcomes = [ServerBusyError("busy"), DeadlineExceededError("late"), 7, InvalidRequestError("wrong")]

    async def attempt():
        outcome = outcomes.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    patience = Patience(judge, first=0.001)
    assert await patience.result(attempt) == 7
    with pytest.raises(InvalidRequestError):
        await patience.result(attempt)
    assert told == [(ServerBusyError, False), (DeadlineExceededError, False), (InvalidRequestError, False)]


async def test_the_judge_hears_that_there_is_no_time_for_another_attempt():
    heard = []

    async def judge(error, late):
        heard.append(late)
        if late:
            raise error

    async def attempt():
        raise ServerBusyError("busy")

    with pytest.raises(ServerBusyError):
        await Patience(judge, 0.05, first=0.01).result(attempt)
    assert heard[-1]
    assert not any(heard[:-1])
    with pytest.raises(ServerBusyError):
        await Patience(judge, 0.0).result(attempt)


def test_a_thread_without_an_event_loop_has_the_same_patience():
    pauses, told = [], []

    def judge(error, late):
        told.append((type(error), late))
        if late or isinstance(error, InvalidRequestError):
            raise error

    outcomes = [ServerBusyError("busy"), ServerBusyError("busy"), DeadlineExceededError("late"), 7]

    def attempt():
        outcome = outcomes.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def tried():
        return try_patiently(attempt, judge, 60.0, first=0.5, longest=0.8, sleep=pauses.append)

    assert tried() == 7
    assert pauses == [0.5, 0.8]
    assert told == [(ServerBusyError, False), (ServerBusyError, False), (DeadlineExceededError, False)]
    outcomes += [ServerBusyError("busy"), 8, InvalidRequestError("wrong"), KeyError("a bug")]
    with pytest.raises(ServerBusyError):
        try_patiently(attempt, judge, 0.0)
    assert told[-1] == (ServerBusyError, True)
    assert tried() == 8
    with pytest.raises(InvalidRequestError):
        tried()
    with pytest.raises(KeyError):
        tried()


async def test_a_client_tries_a_server_that_is_away_again_until_it_answers(monkeypatch):
    server = FakeServer("fifo", {1: 1.0})
    monkeypatch.setattr(connection, "open_transport", lambda _: server)
    server.go()
    async with AsyncReplayClient("127.0.0.1:1") as client:
        with pytest.raises(ServerUnavailableError, match=r"tried for 0\.2 s.*the server is gone"):
            await client.policy(timeout=0.2)
        asking = asyncio.create_task(client.policy(timeout=60.0))
        await asyncio.sleep(0.01)
        server.is_up = True
        assert (await asking).version == 0
