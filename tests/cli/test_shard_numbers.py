"""Shards are counted by their numbers, in a service that stands in for a Ray cluster."""

from typing import Any

import pytest

from replay_server import shards
from replay_server.config import Config
from replay_server.shards import ShardError, Shards, ShardStatus
from replay_server.tables.config import TableConfig

CONFIG = Config(tables=(TableConfig(name="a"),))


@pytest.fixture
def numbers(monkeypatch) -> list[int]:
    """The numbers of the shards that run."""
    numbers = [0, 2]

    def status(self) -> list[ShardStatus]:
        return [ShardStatus(f"replay-{number}", address="localhost:1") for number in sorted(numbers)]

    def start(self, configs, *rest: Any) -> list[ShardStatus]:
        numbers.extend(number for number in range(len(configs)) if number not in numbers)
        return status(self)

    def stop(self, names) -> None:
        numbers[:] = [number for number in numbers if f"replay-{number}" not in names]

    def init(self, name, namespace, ray_address) -> None:
        self.name = name

    methods = {"__init__": init, "status": status, "start": start, "stop": stop}
    methods["actors"] = lambda self: dict.fromkeys(shard.name for shard in status(self))
    methods["_numbers"] = lambda self: sorted(numbers)
    methods["drain"] = methods["hand_over"] = lambda self, *rest, **options: None
    for name, method in methods.items():
        monkeypatch.setattr(Shards, name, method)
    return numbers


def test_a_resize_fills_a_gap_and_stops_the_shard_beyond(numbers):
    statuses = shards.resize(2, CONFIG)
    assert [status.name for status in statuses] == ["replay-0", "replay-1"]


def test_up_refuses_while_a_shard_beyond_runs(numbers):
    with pytest.raises(ShardError, match="running already: replay-2; to have 2, use resize"):
        shards.up(2, CONFIG)
    assert numbers == [0, 2]


def test_an_ipv6_address_of_a_cluster_is_asked_without_its_brackets(monkeypatch):
    asked = []

    def refuse(address, timeout) -> None:
        asked.append(address)
        raise OSError("refused")

    monkeypatch.setattr(shards.socket, "create_connection", refuse)
    with pytest.raises(ShardError, match="no Ray cluster answers at ray://"):
        shards._check_answers("ray://[::1]:10001")
    assert asked == [("::1", 10001)]
