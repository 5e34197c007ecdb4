"""Waits: that Patience tries again until its judge gives up, what WaitLog logs, and a heartbeat that fails."""

import asyncio
import logging
from types import SimpleNamespace

import pytest

from replay_client import AsyncReplayClient, connection, waits
from replay_client.errors import (
    ClientClosedError,
    DeadlineExceededError,
    InvalidRequestError,
    ServerBusyError,
    ServerUnavailableError,
)
from replay_client.waits import Patience, WaitLog, beat, try_patiently
from tests.client.fake_server import FakeServer


def test_a_file_that_cannot_be_written_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("REPLAY_HEARTBEAT", str(tmp_path / "missing/none"))
    with pytest.raises(ValueError, match=r"REPLAY_HEARTBEAT: cannot write .*/none"):
        beat()


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


async def test_no_attempt_with_a_closed_client_is_made_again_whatever_the_judge_says():
    async def judge_that_never_gives_up(error, late):
        pass

    attempts = []

    async def attempt():
        attempts.append("one")
        raise ClientClosedError("this client is closed")

    with pytest.raises(ClientClosedError):
        await asyncio.wait_for(Patience(judge_that_never_gives_up).result(attempt), 10)
    assert attempts == ["one"]


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


async def test_the_timeout_of_a_flush_bounds_the_whole_wait(monkeypatch):
    async with AsyncReplayClient("127.0.0.1:1") as client:
        writer = client.writer()

        rounds = iter(range(300))

        def drain_while_others_insert(when_drained) -> bool:
            """Other callers insert an item every 10 ms, for longer than the timeout."""
            writer.loop.call_later(0.01, when_drained)
            return next(rounds, None) is None

        monkeypatch.setattr(writer, "_drain", drain_while_others_insert)
        with pytest.raises(DeadlineExceededError):
            await writer.flush(timeout=1.0)
        await writer.close()


def test_the_end_of_a_wait_is_logged_only_if_the_wait_was_logged(monkeypatch, caplog):
    caplog.set_level(logging.WARNING)
    now = 100.0
    monkeypatch.setattr(waits, "time", SimpleNamespace(monotonic=lambda: now))
    log = WaitLog(every=30.0)
    log.wait("no server")
    now += 5.0
    log.go_on()
    assert caplog.messages == ["no server", "the generator goes on after 5 s"]
    log.wait("no server again")  # the last line is less than 30 s old
    now += 5.0
    log.go_on()
    assert len(caplog.messages) == 2
