"""Shards that are added to a run with [admission], and taken away from it: all together grant what the run may use."""

import threading
from contextlib import contextmanager

import pytest

import replay_client.shards.fleet
from replay_client import ReplayClient
from replay_client.errors import DeadlineExceededError
from replay_client.testing import PATIENCE, until
from replay_server import ReplayServer
from replay_server.tables.config import AdmissionConfig, TableConfig
from replay_server.tables.extensions.admission import Admission
from tests.client.shards.conftest import connected
from tests.kit.processes import free_port

GROUPS = 48
QUEUE = TableConfig(name="queue", rate_limiter={"type": "queue", "max_size": 1000})


class Names:
    """The names of shards in Ray, for a test without Ray, and what `replay shards resize` does to them."""

    def __init__(self, admission: AdmissionConfig) -> None:
        self._admission = admission
        self.servers: list[ReplayServer] = []

    def add(self, count: int) -> None:
        for _ in range(count):
            server = ReplayServer([QUEUE], free_port(), admission=self._admission)
            server.start()
            self.servers.append(server)

    def take_away_the_last(self) -> bool:
        """As soon as it is empty and hands its groups over. Until then it drains."""
        leaving = self.servers[-1]
        leaving.draining = True
        if leaving.items or (groups := leaving.on_loop(lambda buffer: Admission.of(buffer).hand_over())) is None:
            return False
        self.servers[0].on_loop(lambda buffer: Admission.of(buffer).take_over(groups))
        leaving.stop(grace=0)
        self.servers.pop()
        return True

    def find(self) -> list[str]:
        return [f"replay-{number}" for number in range(len(self.servers))]

    async def listed(self) -> list[str]:
        return self.find()

    def locate(self, name: str) -> str | None:
        number = int(name.rpartition("-")[2])
        return self.servers[number].address if number < len(self.servers) else None


@pytest.mark.parametrize("max_staleness", [0, 2])
def test_a_run_goes_on_after_shards_came_or_went_and_their_permits_keep_their_sum(monkeypatch, max_staleness):
    names = Names(AdmissionConfig(table="queue", fresh_groups_per_step=GROUPS, max_staleness=max_staleness))
    names.add(1)
    monkeypatch.setattr(replay_client.shards.fleet.RayNames, "of", lambda _: names)
    monkeypatch.setattr(replay_client.shards.fleet, "SECONDS_PER_LOOK", 0.05)
    try:
        with connected("ray://a/b", timeout=PATIENCE) as trainer, ReplayClient("ray://a/b", PATIENCE) as generator:
            trainer.set_policy_version(0)
            with trainer.sampler("queue", GROUPS, prefetch=2) as batches, generating(generator):
                run = Run(trainer, batches)
                run.steps(3)
                names.add(2)
                until(lambda: len(trainer.server_info().shards) == 3)
                run.steps(3)
                for shards in 2, 1:
                    while not names.take_away_the_last():
                        run.steps(1)
                    run.steps(3)
                    until(lambda shards=shards: len(trainer.server_info().shards) == shards)
            until(lambda: trainer.server_info().admission.running == 0)  # what a slower shard granted has gone back
            info = trainer.server_info()
            assert info.admission.capacity + info.tables["queue"].size == (max_staleness + 1) * GROUPS
    finally:
        for server in names.servers:
            server.stop(grace=0)


@contextmanager
def generating(client: ReplayClient):
    """Two generators, one of which inserts by a writer. They use all their permits before they end."""
    done = threading.Event()
    with client.writer() as writer:
        threads = [
            threading.Thread(target=generate, args=(client, each, done), daemon=True) for each in (client, writer)
        ]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            done.set()
            for thread in threads:
                thread.join(PATIENCE)


def generate(client: ReplayClient, inserts, done: threading.Event) -> None:
    while not done.is_set():
        try:
            permits = client.acquire_permits(1, timeout=0.5)
        except DeadlineExceededError:
            continue
        inserts.insert(b"", {"queue": 1.0}, permits=permits)


class Run:
    """The steps of a trainer."""

    def __init__(self, client: ReplayClient, batches) -> None:
        self.client, self.batches, self.version = client, batches, 0

    def steps(self, count: int) -> None:
        for _ in range(count):
            assert len({sample.info.key for sample in next(self.batches)}) == GROUPS
            self.version += 1
            self.client.set_policy_version(self.version)


def test_three_servers_with_one_file_grant_the_groups_of_a_step_before_any_trainer_is_there(make_service):
    service = make_service(admission=AdmissionConfig(table="queue", fresh_groups_per_step=GROUPS, max_staleness=0))
    with connected(service.addresses) as one, connected(list(reversed(service.addresses))) as other:
        leases = [client.acquire_permits(1, timeout=5.0) for _ in range(GROUPS // 2) for client in (one, other)]
        with pytest.raises(DeadlineExceededError):
            one.acquire_permits(1, timeout=0.5)
        assert {lease.shard for lease in leases} == set(service.addresses)
        info = one.server_info().admission
        assert info.fresh_groups_per_step == GROUPS
        assert info.running == GROUPS
        assert info.capacity == 0
