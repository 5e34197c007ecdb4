"""BlockedLog with a clock in the hand of the test."""

import logging
import math

from replay_server.rpc import info
from replay_server.tables.config import AdmissionConfig
from replay_server.tables.extensions.admission import Admission
from replay_server.tables.waiting import ASKS_AGAIN
from replay_server.telemetry.blocked_log import LOG_AFTER, BlockedLog
from tests.server.tables.test_buffer import Bench, queue


def test_a_long_wait_is_logged_once_with_its_reason_and_again_when_it_moves(caplog):
    caplog.set_level(logging.INFO, logger="replay_server")
    bench = Bench(queue())
    blocked_log = BlockedLog(bench.buffer)
    bench.sample(1)
    bench.now += LOG_AFTER - 1
    blocked_log.look()
    assert caplog.messages == []
    bench.now += 1
    blocked_log.look()
    blocked_log.look()
    why = "t: sampling blocked: items there: 0, wanted: 1 (size 0 < min_size 1); nobody inserted for 30 s"
    assert caplog.messages == [f"blocked for 30 s: {why}"]
    bench.insert()
    bench.now += 5
    blocked_log.look()
    assert caplog.messages[1:] == ["t: sampling moves again after 35 s"]


def ask_again_and_again(bench, ask, *, seconds, every=30.0):
    """Waits `every` seconds, is told so, and asks again, as a generator or trainer does."""
    end = bench.now + seconds
    while bench.now < end:
        pending = ask(every)
        bench.now += every
        yield pending
        bench.now += 0.2  # until it asks again


def test_a_wait_that_is_asked_for_again_and_again_is_one_wait(caplog):
    caplog.set_level(logging.INFO, logger="replay_server")
    bench = Bench(queue(), admission=AdmissionConfig(fresh_groups_per_step=2, max_staleness=0))
    permits, blocked_log = Admission.of(bench.buffer), BlockedLog(bench.buffer)
    permits.acquire(2, math.inf)
    for pending in ask_again_and_again(bench, lambda wait: permits.acquire(1, bench.now + wait), seconds=360):
        blocked_log.look()
        permits.time_out(pending)
    acquiring = info.server_info(bench.buffer, []).admission.acquiring
    assert acquiring.count == 0  # between two attempts
    assert acquiring.seconds > 360
    assert len(caplog.messages) == 1
    words = "blocked for 30 s: permits: there: 0, wanted: 1; the next policy version brings more ("
    assert caplog.messages[0].startswith(words)
    last = permits.acquire(1, math.inf)
    acquiring = info.server_info(bench.buffer, []).admission.acquiring
    assert acquiring.count == 1
    assert acquiring.seconds > 360
    bench.buffer.set_policy_version(0, "")
    bench.buffer.set_policy_version(1, "")
    assert last.done
    blocked_log.look()
    assert caplog.messages[1:] == ["permits: acquiring moves again after 362 s"]
    assert info.server_info(bench.buffer, []).admission.acquiring.seconds == 0


def test_a_wait_begins_anew_when_something_was_served_or_nobody_asked_for_long():
    bench = Bench(queue())
    line = bench.buffer.lines["t"].samples
    for pending in ask_again_and_again(bench, lambda wait: bench.sample(1, wait=wait), seconds=60):
        bench.buffer.time_out(pending)
    assert line.standstill > 60
    bench.insert()
    bench.consume(1)
    assert line.standstill == 0
    bench.buffer.time_out(bench.sample(1, wait=0))
    bench.now += ASKS_AGAIN + 1
    assert line.standstill == 0
    bench.sample(1)
    bench.now += 2
    assert line.standstill == 2


def test_a_line_moves_when_another_insert_passes_it():
    bench = Bench(queue(size=1))
    line = bench.buffer.lines["t"].inserts
    bench.insert()
    for pending in ask_again_and_again(bench, lambda wait: bench.insert(wait=wait), seconds=60):
        bench.buffer.time_out(pending)
    bench.consume(1)
    bench.insert()  # at once, while the others are between two attempts
    bench.now += 5
    bench.insert()
    assert line.standstill == 0
