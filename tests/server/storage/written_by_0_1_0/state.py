"""The state that version 0.1.0 wrote into `state.tar.xz`, and the questions whose answers stand in `answers.json`.

`python -m tests.server.storage.written_by_0_1_0.state` writes both, and is to be run with the code of version 0.1.0.
The answers are those of a server of that version, after it had restored the state itself.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from replay_client import ReplayClient
from replay_server import AdmissionConfig, CheckpointsSection, ReplayServer, TableConfig

HERE = Path(__file__).parent
TABLES = (
    TableConfig(name="queue", rate_limiter={"type": "queue", "max_size": 100}, forward_to="pool", seed=1),
    TableConfig(name="pool", sampler="prioritized", remover="min_heap", max_size=1000, seed=2),
    TableConfig(
        name="recent",
        max_staleness=5,
        max_times_sampled=2,
        rate_limiter={"type": "sample_to_insert_ratio", "samples_per_insert": 2.0, "min_size": 1, "error_buffer": 50.0},
        seed=3,
    ),
)
ADMISSION = AdmissionConfig(groups_per_step=10, max_staleness=1, permit_ttl=1e9)
LARGE = 15
"""The key of an item whose payload needs several records."""


def payload_of(key: int) -> bytes:
    return bytes([key]) * (600_000 if key == LARGE else 10 * key)


@contextmanager
def serving(folder: Path, *, durable: bool, restore: str | None = None) -> Iterator[ReplayClient]:
    """A server over the data directory and the checkpoints in `folder`."""
    server = ReplayServer(
        TABLES,
        port=0,
        data_dir=folder / "data" if durable else None,
        admission=ADMISSION,
        checkpoints=CheckpointsSection(dir=folder / "checkpoints"),
    )
    if restore is not None:
        server.restore(restore)
    server.start()
    try:
        with ReplayClient(server.address, timeout=20.0) as client:
            yield client
    finally:
        server.stop()


def fill(client: ReplayClient) -> None:
    """Inserts, draws, forwards, updates and deletes; leaves batches under leases, permits, and keys given out once."""
    permits = client.acquire_permits(6)
    for key in range(1, 9):
        client.insert(payload_of(key), {"queue": float(key)}, key=key, permits=permits if key <= 4 else None)
    for key in range(11, LARGE + 1):
        client.insert(payload_of(key), {"pool": float(key), "recent": 1.0}, key=key, policy_version=key - 10)
    client.set_policy_version(2, weights="step-2")
    client.sample("queue", 3)
    client.sample("queue", 2, lease=3600.0)
    client.sample("pool", 2, scope="step-2")
    client.sample("recent", 2)
    client.sample("recent", 1, lease=3600.0)
    client.update_priorities("pool", {12: 7.5})
    client.delete("recent", [14])
    client.insert(payload_of(1), {"queue": 1.0}, key=1)  # a retry: counted, and nothing else


def answers(client: ReplayClient) -> dict[str, Any]:
    """All that a client can find out of the state, in a form that JSON keeps. Draws, so ask once."""
    info = client.server_info()
    counted = ("size", "bytes", "reserved", "inserts", "samples", "consumed", "deleted", "evicted", "stale")
    counted += ("duplicates", "forwarded", "forward_refused", "stale_refused", "evicted_unsampled")
    listed = {table.name: client.list_items(table.name, limit=100).items for table in TABLES}
    keys = sorted({item.key for items in listed.values() for item in items})
    found: dict[str, Any] = {
        "policy": [info.policy.version, info.policy.weights],
        "permits": [info.admission.accepted, info.admission.running, info.admission.expired],
        "items": [info.items, info.bytes, info.damaged],
        "counters": {name: [getattr(table, field) for field in counted] for name, table in info.tables.items()},
        "tables": {
            name: [[item.key, item.priority, item.policy_version, item.times_sampled] for item in items]
            for name, items in listed.items()
        },
        "payloads": {str(item.key): hashlib.sha256(bytes(item.payload)).hexdigest() for item in client.get(keys)},
    }
    # Keys of a scope do not come again (a checkpoint has no scopes), and the random state goes on where it was.
    found["rest of the scope"] = [sample.info.key for sample in client.sample("pool", 6, scope="step-2")]
    found["next draws"] = {
        table: [[sample.info.key, sample.info.probability] for sample in client.sample(table, 2)]
        for table in ("pool", "recent", "queue")
    }
    client.insert(payload_of(1), {"queue": 1.0}, key=1)  # consumed long ago, and still known
    found["duplicates"] = client.server_info().tables["queue"].duplicates
    return found


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        root, copy = Path(folder) / "state", Path(folder) / "copy"
        with serving(root, durable=True) as client:
            fill(client)
            client.checkpoint("written")
            shutil.copytree(root, copy)  # as a kill would leave it: the leases are open
        with tarfile.open(HERE / "state.tar.xz", "w:xz") as archive:
            archive.add(copy / "data/data.mdb", "data/data.mdb")
            archive.add(copy / "data/server.lock", "data/server.lock")
            archive.add(copy / "checkpoints/written.checkpoint", "checkpoints/written.checkpoint")
        given = {}
        for kind, restore in (("data directory", None), ("checkpoint", "written")):
            with serving(copy, durable=restore is None, restore=restore) as client:
                given[kind] = answers(client)
        (HERE / "answers.json").write_text(json.dumps(given, indent=1) + "\n")


if __name__ == "__main__":
    main()
