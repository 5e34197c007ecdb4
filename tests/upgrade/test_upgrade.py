"""What an earlier version wrote is read by this one: `written.py` made the files, and says how."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path
from typing import Any

import pytest

from replay_client import PermitGrant
from replay_client.testing import make_group
from tests.kit.groups import keys_in
from tests.upgrade.written import CHECKPOINT, HERE, SCOPE, STATE, read, said, write

VERSIONS = [path.name.removesuffix(".tar.gz") for path in sorted(HERE.glob("*.tar.gz"))]


@pytest.fixture(scope="module", params=[*VERSIONS, "this"])
def left(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """What a version left behind, and what it then said of itself."""
    folder = tmp_path_factory.mktemp("left")
    if request.param == "this":
        write(folder)
    else:
        with tarfile.open(HERE / f"{request.param}.tar.gz") as archive:
            archive.extractall(folder, filter="data")
    return folder, json.loads((folder / "said.json").read_text())


@pytest.mark.parametrize(("of", "checkpoint"), [("data", ""), ("checkpoint", CHECKPOINT)])
def test_items_leases_permits_and_the_policy_version_are_read_as_they_were_written(left, of, checkpoint):
    folder, told = left
    with read(folder, checkpoint) as client:
        assert json.loads(json.dumps(said(client))) == told[of]


def test_a_run_goes_on_where_it_was(left):
    folder, told = left
    with read(folder) as client:
        pool = told["data"]["tables"]["replay"]
        drawn = {row[0] for row in pool["rows"] if row[2]}
        further = client.sample("replay", pool["size"] - len(drawn), scope=SCOPE)
        assert {sample.info.key for sample in further} == {row[0] for row in pool["rows"]} - drawn
        client.insert(make_group(), {"replay": 1.0}, key=7)
        assert client.server_info().tables["replay"].duplicates == pool["duplicates"] + 1
        assert client.release_permits(PermitGrant(told["permits"], 1, 0.0)) == 1
        client.set_policy_version(1, "weights/step-1", rollback=True, state=STATE)
        assert sorted(keys_in(client, "rollouts")) == [1, 3, 4]
        assert client.server_info().tables["rollouts"].reserved == 1  # the second is in its reader's hands
        assert [sample.info.key for sample in client.sample("rollouts", 3, timeout=10.0)] == [1, 3, 4]
