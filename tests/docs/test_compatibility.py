"""docs/reference/compatibility.md gives the numbers of formats that the code has."""

from __future__ import annotations

import pytest

from replay_client.columns import SEGMENT_MAGIC
from replay_client.rollout import MAGIC
from replay_generator.groups.codec import PARTIAL_GROUP_MAGIC, ROLLOUT_MAGIC
from replay_generator.prompts import stored
from replay_protos.replay_pb2 import DESCRIPTOR
from replay_server.storage.records import FORMAT
from tests.packages import ROOT

PAGE = ROOT / "docs/reference/compatibility.md"
NUMBERS = {
    "wire protocol": f"`{DESCRIPTOR.package}`",
    "`data_dir` and checkpoints": str(FORMAT),
    "group": str(MAGIC[-1]),
    "segment of a group": str(SEGMENT_MAGIC[-1]),
    "partial group": str(PARTIAL_GROUP_MAGIC[-1]),
    "prompt of a table of prompts": str(stored.MAGIC[-1]),
}


@pytest.mark.parametrize("format_", NUMBERS)
def test_the_page_gives_the_number_of_a_format(format_):
    rows = [line.split(" | ") for line in PAGE.read_text().splitlines() if line.startswith(f"| {format_} | ")]
    assert NUMBERS[format_] in {row[1] for row in rows}


def test_rollouts_within_a_partial_group_have_the_number_of_the_partial_group():
    assert ROLLOUT_MAGIC[-1] == PARTIAL_GROUP_MAGIC[-1]
