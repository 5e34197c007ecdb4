"""Any byte of a data directory may be flipped and its file cut anywhere: never a crash, never a wrong payload."""

import json
import subprocess
import sys

import pytest

from tests.server.storage.damage import KINDS

SECONDS = 15


@pytest.mark.long
def test_damage_anywhere_costs_the_item_that_it_hits_or_is_refused(tmp_path):
    result = subprocess.run(
        [sys.executable, "-m", "tests.server.storage.damage", str(tmp_path), str(SECONDS)],
        capture_output=True,
        text=True,
        check=True,
    )
    found = json.loads(result.stdout)
    assert found["broken"] == []
    assert found["outcomes"].keys() >= KINDS
