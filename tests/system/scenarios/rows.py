"""A server that is killed while it holds the rows of TransferQueue: no acknowledged row is lost or changed.

Some clients put rows, others read them, clear them and save checkpoints, each with a RowTable of its own, as the
processes of a job have. The ledger is the controller: it lists the rows in use, and a checkpoint is a copy of its list.
After each kill the rows of the list and of the last two checkpoints must be there, bit by bit. Sometimes the whole job
dies then, and goes back to the last checkpoint.
"""

from __future__ import annotations

import itertools
import random
import time
from pathlib import Path

import torch

from replay_adapters.column_rows import Place, pack_rows
from replay_adapters.plain_values import unpack
from replay_adapters.row_table import RowTable
from replay_client import ReplayClient
from tests.kit.faults import Books, Crew
from tests.system.scenarios.servers import KilledServers

CONFIG = """
server = { data_dir = "{folder}", fsync = "FSYNC" }
tables = [{ name = "tq", when_full = "block" }]
"""
CHECKPOINTS = 2
_SIZES = (1, 300, 9_000)
"""Numbers in the tensor of a row: some rows take less than a chunk of the storage, and some several."""
_KEPT = 4
"""So many of the newest rows are never cleared. So the checks always have rows to look at."""


def columns_of(numbers: list[int]) -> dict[str, object]:
    """The columns of a batch whose rows tell their numbers in every field."""
    tokens = [torch.full((_SIZES[number % 3],), number) for number in numbers]
    return {
        "name": [f"row {number}" for number in numbers],
        "tokens": torch.nested.as_nested_tensor(tokens, layout=torch.jagged),
    }


class RowLedger(Books):
    """The rows in use, and what each checkpoint lists: places of the fields by the number of the row."""

    def __init__(self) -> None:
        super().__init__()
        self.in_use: dict[int, dict[str, Place]] = {}
        self.checkpoints: list[dict[int, dict[str, Place]]] = []

    def check_rows(self, rows: RowTable, what: str, listed: dict[int, dict[str, Place]]) -> None:
        sizes = {place.key: place.size for places in listed.values() for place in places.values()}
        payloads = dict(rows.get(sizes))
        for number, places in listed.items():
            for name, place in places.items():
                payload = payloads.get(place.key)
                if payload is None:
                    self.violated(f"{what}: row {number} is lost")
                    continue
                value = unpack(memoryview(payload)[place.offset : place.offset + place.size])
                if name == "name":
                    is_right = value == f"row {number}"
                else:
                    is_right = torch.equal(value, torch.full((_SIZES[number % 3],), number))
                if not is_right:
                    self.violated(f"{what}: row {number} has {name} {value}")
                self.totals["values seen"] += 1

    def check(self, client: ReplayClient) -> None:
        """Compares, with nobody else at work."""
        rows = RowTable(client, "tq", CHECKPOINTS)
        self.check_rows(rows, "in use", self.in_use)
        for age, listed in enumerate(reversed(self.checkpoints[-CHECKPOINTS:])):
            self.check_rows(rows, f"checkpoint {age} before the last", listed)
        if self.checkpoints and self.totals["kills"] % 3 == 0:  # the job has died as well
            listed = self.checkpoints[-1]
            missing = rows.restore({place.key for places in listed.values() for place in places.values()})
            if missing:
                self.violated(f"the checkpoint misses {len(missing)} rows when it is loaded")
            self.in_use = dict(listed)
            self.check_rows(rows, "loaded", self.in_use)
            self.totals["checkpoints loaded"] += 1


class RowClients(Crew):
    """The processes of a job."""

    def __init__(self, ledger: RowLedger, numbers: itertools.count[int], address: str, rng: random.Random) -> None:
        self.ledger = ledger
        self.numbers = numbers
        self.rng = rng
        super().__init__(address, ledger, [self.put] * 3 + [self.read] * 2 + [self.clear] * 2 + [self.save])

    def put(self, client: ReplayClient) -> None:
        rows = RowTable(client, "tq", CHECKPOINTS)
        numbers = [next(self.numbers) for _ in range(self.rng.choice((1, 4, 16)))]
        packed = pack_rows(columns_of(numbers), len(numbers))
        places = packed.places(rows.put(packed.payloads))
        with self.ledger.lock:
            for row, number in enumerate(numbers):
                self.ledger.in_use[number] = {name: Place.decode(column[row]) for name, column in places.items()}
            self.ledger.totals["rows put"] += len(numbers)

    def read(self, client: ReplayClient) -> None:
        with self.ledger.lock:
            listed = dict(list(self.ledger.in_use.items())[-20:])
        sizes = {places["name"].key: 1 for places in listed.values()}
        payloads = dict(RowTable(client, "tq", CHECKPOINTS).get(sizes))
        for number, places in listed.items():
            place = places["name"]
            payload = payloads.get(place.key)  # None: it was cleared meanwhile
            if payload is not None and unpack(memoryview(payload)[: place.size]) != f"row {number}":
                self.ledger.violated(f"row {number} was read as another one")

    def clear(self, client: ReplayClient) -> None:
        time.sleep(0.01)
        with self.ledger.lock:
            clearable = sorted(self.ledger.in_use)[:-_KEPT]
            numbers = self.rng.sample(clearable, min(8, len(clearable)))
            # First the controller takes the rows from its list, as TransferQueue does.
            taken = [self.ledger.in_use.pop(number) for number in numbers]
        RowTable(client, "tq", CHECKPOINTS).clear([places["name"].key for places in taken])
        self.ledger.totals["rows cleared"] += len(taken)

    def save(self, client: ReplayClient) -> None:
        time.sleep(0.1 * self.rng.random())
        rows = RowTable(client, "tq", CHECKPOINTS)
        rows.begin_save(completed=self.save_completed)
        self.save_completed = False
        with self.ledger.lock:
            listed = dict(self.ledger.in_use)
        rows.end_save()
        with self.ledger.lock:
            self.ledger.checkpoints.append(listed)
            self.ledger.totals["checkpoints"] += 1
        self.save_completed = True

    save_completed = False
    """True if the last save of this job was completed."""


class ServerOfRows(KilledServers):
    """A server under a job that keeps its rows there, and the list of these rows."""

    config = CONFIG
    counted = "rows put"

    def __init__(self, folder: Path, rng: random.Random, kills: int, fsync: str = "always") -> None:
        super().__init__(folder, rng, kills, RowLedger(), shards=1, fsync=fsync)
        self.numbers = itertools.count(1)

    def start_clients(self, rng: random.Random) -> Crew:
        return RowClients(self.books, self.numbers, self.servers.address, rng)
