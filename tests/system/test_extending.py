"""A server killed with SIGKILL while items are extended: no column lost, none twice, none on the wrong item."""

import pytest

from tests.system.extending import run


@pytest.mark.parametrize("kills", [1, pytest.param(10, marks=pytest.mark.long)])
def test_kills_cost_no_column_and_put_none_on_another_item(tmp_path, transport, kills):
    """The clients of this process put all their payloads into rings, or none."""
    ledger = run(kills=kills, seed=7, folder=tmp_path, fsync="always")
    assert ledger.violations == []
    assert ledger.totals["kills"] == kills
    assert ledger.totals["added"] >= 10 * kills
    assert ledger.totals["columns seen"] > 0
    assert (ledger.totals["clients over rings"] > 0) == (transport == "shared memory")
