"""A server killed with SIGKILL at random moments keeps its promises; `make crash-test N=100` kills more often."""

from tests.system.crash import run


def test_ten_kills_break_no_promise(tmp_path):
    ledger = run(kills=10, seed=7, folder=tmp_path, fsync="1.0")
    assert ledger.violations == []
    assert ledger.totals["kills"] == 10
    assert ledger.totals["inserts"] > 500
    assert ledger.totals["consumed"] > 100
