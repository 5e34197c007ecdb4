"""A server killed with SIGKILL at random moments keeps its promises; `make crash-test N=100` kills more often."""

from tests.system.crash import run


def test_five_kills_break_no_promise(tmp_path, transport):
    """The clients of this process put all their payloads into rings, or none. Payloads are stored in LMDB."""
    ledger = run(kills=5, seed=7, folder=tmp_path, fsync="always")
    assert ledger.violations == []
    assert ledger.totals["kills"] == 5
    assert ledger.totals["inserts"] >= 50
    assert ledger.totals["consumed"] > 0
    assert (ledger.totals["clients over rings"] > 0) == (transport == "shared memory")
