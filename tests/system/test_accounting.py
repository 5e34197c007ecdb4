"""Real client processes insert and sample a queue, break and are killed: every acknowledged item is there exactly once.

What is promised, and counted here:

* An insert that was acknowledged is in exactly one batch that a client got, or still in the table. One that was not
  acknowledged, because its client was killed first, may be in the table or not, but never twice.
* A consumer writes down a batch when it has it in hand. One that is killed between the server's `take` and its own note
  may lose what it had asked for: for each kill (or break of its connection) one batch in doubt, of `BATCH` items.

REPLAY_ACCOUNTING_SECONDS=60 looks longer than a run of all tests does.
"""

import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from replay_client import ReplayClient
from replay_client.errors import DeadlineExceededError
from replay_client.testing import until
from replay_protos import shared_memory
from tests.kit.processes import server_process

SECONDS = float(os.environ.get("REPLAY_ACCOUNTING_SECONDS", "10"))
BATCH = 4
PRODUCERS, CONSUMERS = 2, 2
CONFIG = """
tables = [{ name = "queue", rate_limiter = { type = "queue", max_size = 64 } }]
"""

# Each line of a record is one write, so that a kill leaves whole lines. `+` comes before an attempt, `=` after it, and
# `~` says whether the payloads went through a ring.
PRODUCER = """
import os, random, sys
from replay_client import ReplayClient
from replay_client.errors import ReplayError
from replay_protos import shared_memory
address, record, seed, least = sys.argv[1:]
shared_memory.MIN_SHARED = int(least)
rng, note = random.Random(seed), os.open(record, os.O_CREAT | os.O_APPEND | os.O_WRONLY)
def say(sign, keys):
    os.write(note, (sign + " " + " ".join(map(str, keys)) + "\\n").encode())
while True:
    client = ReplayClient(address, timeout=600.0)  # on a loaded machine nobody may make room for long
    if rng.random() < 0.5:
        for _ in range(rng.randint(1, 20)):
            key = rng.getrandbits(63)
            say("+", [key])
            client.insert(rng.randbytes(rng.choice([10, 1000, 3_000_000 if rng.random() < 0.02 else 100])),
                          {"queue": 1.0}, key=key)
            say("=", [key])
    else:
        with client.writer(max_in_flight=16) as writer:
            for _ in range(rng.randint(1, 10)):
                keys = [writer.insert(rng.randbytes(100), {"queue": 1.0}) for _ in range(rng.randint(1, 30))]
                writer.flush()
                say("=", keys)
    say("~", [int(client._aio.transport == "shared memory")])
    client.close()
"""

CONSUMER = f"""
import os, random, sys, time
from replay_client import ReplayClient
from replay_client.errors import DeadlineExceededError
from replay_protos import shared_memory
address, record, seed, least = sys.argv[1:]
shared_memory.MIN_SHARED = int(least)
rng, note = random.Random(seed), os.open(record, os.O_CREAT | os.O_APPEND | os.O_WRONLY)
def say(samples):
    os.write(note, ("= " + " ".join(str(sample.info.key) for sample in samples) + "\\n").encode())
while True:
    client = ReplayClient(address, timeout=60.0)
    if rng.random() < 0.3:
        for _ in range(rng.randint(1, 10)):
            try:
                say(client.sample("queue", {BATCH}, min_samples=1, timeout=0.05))
            except DeadlineExceededError:
                pass
    else:
        with client.sampler("queue", {BATCH}, prefetch=rng.randint(0, 4), timeout=rng.choice([0.02, 5.0])) as sampler:
            for _ in range(rng.randint(1, 40)):
                try:
                    say(next(sampler))
                except DeadlineExceededError:
                    pass
    client.close()
"""


class Fleet:
    """Processes that are killed at random and replaced by others, with the record of each."""

    def __init__(self, code: str, name: str, count: int, address: str, folder: Path) -> None:
        self.code, self.name, self.address, self.folder = code, name, address, folder
        self.started = self.killed = 0
        self.running = [self.start() for _ in range(count)]

    def start(self) -> subprocess.Popen[bytes]:
        self.started += 1
        record = self.folder / f"{self.name}-{self.started}"
        least = str(shared_memory.MIN_SHARED)
        command = [sys.executable, "-c", self.code, self.address, str(record), str(self.started), least]
        return subprocess.Popen(command, stderr=(self.folder / f"{record.name}.err").open("wb"))

    def kill(self, index: int) -> None:
        process = self.running[index]
        assert process.poll() is None, self.error(process)
        process.send_signal(signal.SIGKILL)
        process.wait()
        self.killed += 1

    def error(self, process: subprocess.Popen[bytes]) -> str:
        return "\n".join(path.read_text() for path in sorted(self.folder.glob(f"{self.name}-*.err")))

    def records(self, sign: str) -> list[int]:
        """The keys of all whole lines of all records."""
        keys: list[int] = []
        for path in self.folder.glob(f"{self.name}-*"):
            if path.suffix != ".err":
                lines = path.read_text().split("\n")[:-1]
                keys += [int(key) for line in lines if line[0] == sign for key in line[2:].split()]
        return keys


def left_in_table(client: ReplayClient) -> list[int]:
    keys: list[int] = []
    while True:
        try:
            keys += [sample.info.key for sample in client.sample("queue", 64, min_samples=1, timeout=0.0)]
        except DeadlineExceededError:
            return keys


@pytest.mark.timeout(600 + 3 * SECONDS)
@pytest.mark.parametrize("seconds", [2.0, pytest.param(SECONDS, marks=pytest.mark.long)])
def test_every_acknowledged_item_is_accounted_for_exactly_once(tmp_path, transport, seconds):
    rng = random.Random(1)
    with server_process(tmp_path, CONFIG) as server, ReplayClient(server.address, timeout=60.0) as client:
        producers = Fleet(PRODUCER, "producer", PRODUCERS, server.address, tmp_path)
        consumers = Fleet(CONSUMER, "consumer", CONSUMERS, server.address, tmp_path)
        try:
            end = time.monotonic() + seconds
            while time.monotonic() < end:
                time.sleep(rng.uniform(0.3, 1.5))
                fleet = rng.choice([producers, consumers])
                index = rng.randrange(len(fleet.running))
                fleet.kill(index)
                fleet.running[index] = fleet.start()
            # On a slow machine no process may have lived long enough to do anything until now.
            shared = int(transport == "shared memory")  # the first rings can come too late for the first payloads
            until(lambda: shared in producers.records("~") and consumers.records("="), "nobody did anything", pause=0.5)
            for fleet in (producers, consumers):
                for index in range(len(fleet.running)):
                    fleet.kill(index)
        finally:
            for process in (*producers.running, *consumers.running):
                process.kill()
                process.wait()
        quiet(client)
        before = client.server_info()
        left = left_in_table(client)
        after = client.server_info()

    assert (1 in producers.records("~")) == (transport == "shared memory")
    acknowledged, attempted = Counter(producers.records("=")), set(producers.records("+"))
    got = Counter(consumers.records("="))
    table = before.tables["queue"]
    report = (
        f"{len(acknowledged)} acknowledged, {len(got)} got, {len(left)} left, {table.samples} taken, "
        f"{producers.killed} producers and {consumers.killed} consumers killed"
    )
    print(report)

    assert max(acknowledged.values()) == 1
    assert max(got.values(), default=1) == 1, f"an item was delivered twice; {report}"
    assert len(set(left)) == len(left), f"an item is in the table twice; {report}"
    assert not set(left) & set(got), f"an item was delivered and is still there; {report}"
    lost = set(acknowledged) - set(got) - set(left)
    assert len(lost) <= BATCH * consumers.killed, f"{len(lost)} items lost; {report}"
    # What the server counts as taken is what consumers wrote down and what is in doubt, nothing else.
    in_doubt = table.samples - len(got)
    assert 0 <= in_doubt <= BATCH * consumers.killed, f"{in_doubt} in doubt; {report}"
    assert len(lost) <= in_doubt, report
    assert table.inserts == table.samples + len(left), report
    assert table.inserts >= len(acknowledged), report
    unacknowledged = (set(got) | set(left)) - set(acknowledged) - attempted
    assert len(unacknowledged) <= 300 * producers.killed, report  # a writer that was killed before its flush
    assert after.items == 0
    assert after.bytes == 0
    assert after.tables["queue"].size == 0
    assert after.tables["queue"].reserved == 0
    assert got, report


def quiet(client: ReplayClient) -> None:
    """Waits until the server has noticed that everybody is gone."""

    held: dict[str, int] = {}

    def is_quiet() -> bool:
        info = client.server_info()
        table = info.tables["queue"]
        held.update(
            insert_streams=info.insert_streams,
            sample_streams=info.sample_streams,
            reserved=table.reserved,
            inserting=table.inserting.count,
        )
        return not any(held.values())

    try:
        until(is_quiet, pause=0.05)
    except AssertionError:
        raise AssertionError(f"all clients are dead, and the server still holds something for one: {held}") from None
