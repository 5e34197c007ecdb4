"""BlockedLog with a clock in the hand of the test."""

import logging

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
