"""A server killed with SIGKILL at random moments keeps its promises; `make crash-test N=100` kills more often."""

import pytest

from tests.system import extending
from tests.system.crash import run


@pytest.mark.parametrize("kills", [1, pytest.param(5, marks=pytest.mark.long)])
def test_kills_break_no_promise(tmp_path, transport, kills):
    """The clients of this process put all their payloads into rings, or none. Payloads are stored in LMDB."""
    ledger = run(kills=kills, seed=7, folder=tmp_path, fsync="always")
    assert ledger.violations == []
    assert ledger.totals["kills"] == kills
    assert ledger.totals["inserts"] >= 10 * kills
    assert (ledger.totals["clients over rings"] > 0) == (transport == "shared memory")


@pytest.mark.parametrize("kills", [1, pytest.param(5, marks=pytest.mark.long)])
def test_kills_of_one_of_three_shards_break_no_promise(tmp_path, kills):
    ledger = run(kills=kills, seed=8, folder=tmp_path, fsync="always", shards=3)
    assert ledger.violations == []
    assert ledger.totals["kills"] == kills
    assert ledger.totals["inserts"] >= 10 * kills


@pytest.mark.parametrize("kills", [1, pytest.param(10, marks=pytest.mark.long)])
def test_kills_cost_no_column_and_put_none_on_another_item(tmp_path, transport, kills):
    """The clients of this process put all their payloads into rings, or none."""
    ledger = extending.run(kills=kills, seed=7, folder=tmp_path, fsync="always")
    assert ledger.violations == []
    assert ledger.totals["kills"] == kills
    assert ledger.totals["added"] >= 10 * kills
    assert ledger.totals["columns seen"] > 0
    assert (ledger.totals["clients over rings"] > 0) == (transport == "shared memory")
