"""What LeasedTable logs while a request waits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from replay_adapters.leased_table import LeasedTable
from replay_adapters.patient_requests import PatientRequests
from replay_client import ReplayClient
from replay_client.errors import ClientClosedError
from replay_client.testing import until
from replay_server import ReplayServer, TableConfig
from tests.kit.clocks import in_a_thread

TABLES = [TableConfig(name="rollouts", max_size=1, when_full="reject")]


@pytest.fixture
def table(tmp_path: Path) -> Iterator[LeasedTable]:
    with ReplayServer(TABLES, port=0) as server:
        table = LeasedTable("the reader", "rollouts", tmp_path, lease=60.0, address=server.address)
        yield table
        table.close()


@pytest.fixture
def says(caplog: pytest.LogCaptureFixture) -> Callable[[str], bool]:
    return lambda text: any(text in record.getMessage() for record in caplog.records)


def test_a_full_table_is_not_called_a_server_that_is_away(table, says):
    insert: Callable[..., Any] = partial(table.client.insert, b"x", {"rollouts": 1.0})
    key = insert()
    inserting = in_a_thread(table.reach, insert)
    until(lambda: says("the reader waits: "))
    table.client.delete("rollouts", [key])
    inserting.result(60)
    assert says("size 1 = max_size 1")
    assert not says("away")


def test_a_request_that_misses_its_deadline_again_and_again_is_logged(table, says):
    sampling = in_a_thread(table.reach, partial(table.client.sample, "rollouts", 1, timeout=0.1))
    until(lambda: says("the reader waits: rollouts: sampling blocked"))
    table.client.insert(b"x", {"rollouts": 1.0})
    assert len(sampling.result(60)) == 1


def test_a_request_ends_when_the_client_is_closed(says):
    with ReplayServer(TABLES, port=0) as server, ReplayClient(server.address) as client:
        requests = PatientRequests("the reader")
        sampling = in_a_thread(requests.reach, partial(client.sample, "rollouts", 1, timeout=0.1))
        until(lambda: says("the reader waits"))
        client.close()
        with pytest.raises(ClientClosedError):
            sampling.result(60)
