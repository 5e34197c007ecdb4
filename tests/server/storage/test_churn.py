"""Disk space follows the live data, in whatever order it goes. Real sizes: `python -m tests.server.storage.churn`."""

import pytest

from replay_server.storage import lmdb
from tests.server.storage.churn import ORDERS, churn


@pytest.mark.parametrize("order", ORDERS)
def test_the_file_stays_near_the_live_data_over_many_turnovers(tmp_path, monkeypatch, order):
    monkeypatch.setattr(lmdb, "CHUNK_BYTES", 8 * 4096 - 24)  # an eighth of everything
    ratios = churn(tmp_path, order, live=20_000_000, turnovers=50, least=50_000 // 8, most=5_000_000 // 8)
    assert max(ratios) <= 1.3
