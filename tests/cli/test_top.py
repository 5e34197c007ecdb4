"""`top` on a terminal of its own: what it shows, its keys, and what it leaves behind."""

import codecs
import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import termios
import time

import pytest

from replay_client.testing import PATIENCE
from replay_server import ReplayServer, TableConfig
from tests.kit.processes import COMMAND


class Terminal:
    """A pseudo-terminal with `replay top` in it."""

    def __init__(self, address, *options):
        self.master, self.slave = pty.openpty()
        self._poll = select.poll()  # unlike select.select it takes any file descriptor
        self._poll.register(self.master, select.POLLIN)
        fcntl.ioctl(self.slave, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 160, 0, 0))
        self.before = termios.tcgetattr(self.slave)
        self.process = subprocess.Popen(
            [*COMMAND, "--address", address, "top", "--interval", "0.2", *options],
            stdin=self.slave,
            stdout=self.slave,
            stderr=self.slave,
            # COLUMNS would go before the size of the terminal.
            env={name: value for name, value in os.environ.items() if name != "COLUMNS"} | {"TERM": "xterm"},
            start_new_session=True,
        )
        self.written = ""
        self._decode = codecs.getincrementaldecoder("utf-8")().decode  # a character may come in two parts

    def until(self, words):
        """Reads until the words are shown; forgets what came before."""
        end = time.monotonic() + PATIENCE
        while (found := re.search(words, shown := re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", self.written))) is None:
            assert time.monotonic() < end, shown[-3000:]
            if self._poll.poll(100):
                self.written += self._decode(os.read(self.master, 65536))
        self.written = shown[found.end() :]
        return found

    def press(self, key):
        os.write(self.master, key.encode())

    def end(self):
        """The exit status, and whether the terminal is as it was."""
        end = time.monotonic() + PATIENCE
        while self.process.poll() is None and time.monotonic() < end:
            if self._poll.poll(100):
                os.read(self.master, 65536)
        return self.process.poll(), termios.tcgetattr(self.slave) == self.before

    def close(self):
        self.process.kill()
        self.process.wait()
        os.close(self.master)
        os.close(self.slave)


@pytest.fixture
def terminal(server):
    terminal = Terminal(server.address)
    yield terminal
    terminal.close()


def test_top_shows_tables_with_sparklines_and_obeys_its_keys(terminal, client):
    client.insert(b"x", {"replay": 1.0})
    terminal.until(r"rollouts\s+0 / 8")
    terminal.until(r"replay\s+1 / 16")
    client.insert(b"x", {"replay": 1.0})
    terminal.until("█")
    terminal.press(" ")
    terminal.until("PAUSED")
    client.insert(b"x", {"replay": 1.0})
    for _ in range(3):  # it is drawn again, with the figures of before
        assert terminal.until(r"replay +(\d) / 16(?s:.*?)PAUSED")[1] == "2"
    terminal.press("p")
    terminal.until("3 / 16")
    terminal.press("q")
    assert terminal.end() == (0, True)


def test_top_goes_on_without_the_server_and_says_so(terminal, server):
    terminal.until("rollouts")
    server.stop()
    terminal.until("no replay server answers")
    terminal.press("q")
    assert terminal.end() == (0, True)


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_top_leaves_the_terminal_as_it_was_after_a_signal(terminal, number, status):
    terminal.until("rollouts")
    terminal.process.send_signal(number)
    assert terminal.end() == (status, True)


@pytest.mark.parametrize("by_shard", [True, False], ids=["with a row for each", "with one for all"])
def test_it_names_a_server_of_several_that_does_not_answer(by_shard):
    with ReplayServer([TableConfig(name="pool")], 0) as first, ReplayServer([TableConfig(name="pool")], 0) as second:
        terminal = Terminal(f"{first.address},{second.address}", *(["--by-shard"] if by_shard else []))
        try:
            terminal.until("policy version 0")
            if by_shard:
                terminal.until(f"(?s){re.escape(second.address)}.*policy version 0")
            second.stop(grace=0)
            terminal.until(rf"{re.escape(second.address)}\s+does not answer")
            terminal.press("q")
            assert terminal.end() == (0, True)
        finally:
            terminal.close()
