"""A shard that is stopped under load; `python -m tests.system.shards.stopped` stops it for a minute."""

import pytest

from tests.system.shards.stopped import KINDS, OPEN, run


@pytest.mark.long
def test_calls_of_every_kind_go_on_while_a_shard_stands_still_and_no_item_is_lost_or_comes_twice(tmp_path):
    load = run(seconds=6.0, folder=tmp_path, around=1.0)
    assert load.books.violations == []
    assert len(load.acknowledged) > 20
    kinds = load.calls.keys() - {OPEN, "insert"}  # with bad luck the stopped shard has one of each thread
    assert len(kinds) == KINDS - 1
    assert [kind for kind in kinds if not load.calls[kind]["stopped"]] == []
