"""Writes what a version of the server leaves behind, so that later versions can be tested to read it.

    python -m tests.upgrade.written

writes `VERSION.tar.gz` here: a data directory as a kill leaves it, a checkpoint, and `said.json`, what the server then
said of itself. Run it when a version is released, and keep the older files for as long as they have to be read. Who
changes the format reads the old one, or removes its file and says so in CHANGELOG.md.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

from replay_client import ReplayClient
from replay_client.testing import make_group
from replay_server import AdmissionConfig, ReplayServer, TableConfig
from tests.kit.groups import every_item

HERE = Path(__file__).parent
CHECKPOINT, STATE, SCOPE = "before-the-kill", "state-1", "step-1"
TABLES = (
    TableConfig(name="rollouts", rate_limiter={"type": "queue", "max_size": 8}, forward_to="replay", retain_consumed=2),
    TableConfig(name="replay", sampler="prioritized", remover="min_heap", max_size=16),
    TableConfig(name="scored", sampler="fifo", requires=("values",)),
)
ADMISSION = AdmissionConfig(fresh_groups_per_step=4, max_staleness=2, permit_ttl=1e9, permit_tables="partial_groups")
"""The permits of a fixture last for thirty years."""
COUNTERS = ("size", "reserved", "inserts", "samples", "consumed", "deleted", "forwarded", "duplicates")


def serving(data_dir: Path, **options: Any) -> ReplayServer:
    return ReplayServer(TABLES, port=0, data_dir=data_dir, admission=ADMISSION, **options)


def said(client: ReplayClient) -> dict[str, Any]:
    """What a server holds, without what depends on the clock."""
    info = client.server_info()
    admission = info.admission
    tables = {}
    for name, table in info.tables.items():
        rows = [[row.key, row.priority, row.times_sampled, row.policy_version] for row in every_item(client, name)]
        tables[name] = {counter: getattr(table, counter) for counter in COUNTERS} | {"rows": rows}
    items = {}
    for item in client.get(sorted({row[0] for table in tables.values() for row in table["rows"]})):
        columns = sorted(item.group.extras)
        digest = hashlib.sha256(item.group.completion_ids.tobytes() + item.group.rollout_logprobs.tobytes())
        items[str(item.key)] = [dict(item.tags), columns, item.group.rewards.tolist(), digest.hexdigest()]
    return {
        "policy": [info.policy.version, info.policy.weights],
        "permits": [admission.accepted, admission.running, admission.partial_groups],
        "tables": tables,
        "items": items,
    }


def fill(client: ReplayClient) -> int:
    """Has one of everything: items, tags, columns, priorities, permits, a lease, a scope, kept rows, a policy.

    Returns the id of the permits, one of which is left.
    """
    client.set_policy_version(1, "weights/step-1", state=STATE)
    permits = client.acquire_permits(6)
    for key in range(1, 5):
        tags = {"environment": "math" if key % 2 else "code", "level": key}
        group = make_group(seed=key, version=key % 2)
        client.insert(group, {"rollouts": 1.0}, key=key, permits=permits, tags=tags)
    client.insert(make_group(seed=5, version=1), {"partial_groups": 1.0}, key=5, permits=permits)
    for key in (6, 7):
        client.insert(make_group(seed=key), {"scored": 1.0, "replay": 0.25 * key}, key=key)
    client.extend(6, {"values": [0.5, 1.0, 2.0]})
    client.sample("rollouts", scope=SCOPE)
    client.sample("replay", 2, scope=SCOPE)
    client.update_priorities("replay", {7: 3.5})
    client.renew(client.sample("rollouts", lease=3600.0), 3600.0)
    return permits.id


def write(folder: Path) -> None:
    """Writes `data` and `said.json`: what servers say that start with the directory, and with its checkpoint."""
    with serving(folder / "live") as server, ReplayClient(server.address) as client:
        told: dict[str, Any] = {"permits": fill(client)}
        client.create_checkpoint(CHECKPOINT)
        client.delete("replay", [6])  # so that the directory and its checkpoint differ
        shutil.copytree(folder / "live", folder / "data")
    with read(folder) as of_data:
        told["data"] = said(of_data)
    with read(folder, CHECKPOINT) as of_checkpoint:
        told["checkpoint"] = said(of_checkpoint)
    (folder / "said.json").write_text(json.dumps(told))


@contextmanager
def read(folder: Path, checkpoint: str = "") -> Iterator[ReplayClient]:
    """A server that starts with a copy of `data`, or restores a checkpoint that lies in it."""
    with tempfile.TemporaryDirectory() as copy:
        data = Path(shutil.copytree(folder / "data", Path(copy, "data")))
        server = serving(data)
        if checkpoint:
            server.restore(checkpoint, replace=True)
        with server, ReplayClient(server.address) as client:
            yield client


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder))
        with tarfile.open(HERE / f"{version('replay-server')}.tar.gz", "w:gz") as archive:
            for name in ("data", "said.json"):
                archive.add(Path(folder, name), name)


if __name__ == "__main__":
    main()
