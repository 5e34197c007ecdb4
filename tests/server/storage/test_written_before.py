"""Data directories and checkpoints of version 0.1.0 open, and hold all that they held then."""

import json
import tarfile

import pytest

from tests.server.storage.written_by_0_1_0.state import HERE, answers, serving


@pytest.fixture
def written(tmp_path):
    with tarfile.open(HERE / "state.tar.xz") as archive:
        archive.extractall(tmp_path, filter="data")
    return tmp_path


@pytest.mark.parametrize(
    ("removed", "restore", "durable"),
    [("checkpoints", None, True), ("data", "written", True), ("data", "written", False)],
    ids=["data directory", "checkpoint into a data directory", "checkpoint into memory"],
)
def test_what_version_0_1_0_wrote_is_restored_as_it_was(written, removed, restore, durable):
    (written / removed).rename(written / "not used")
    with serving(written, durable=durable, restore=restore) as client:
        found = json.loads(json.dumps(answers(client)))
    assert found == json.loads((HERE / "answers.json").read_text())["checkpoint" if restore else "data directory"]
