"""EpochGroups on a real server: what a killed run leaves behind is found, and goes when a checkpoint contains it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest

from replay_adapters.finished_groups import EpochGroups
from replay_client import ReplayClient, RolloutGroup
from replay_client.testing import make_group
from replay_server import ReplayServer, TableConfig

TABLES: dict[str, dict[str, Any]] = {
    "finished": {},
    "queue": {"rate_limiter": {"type": "queue", "max_size": 8}},
    "stack": {"rate_limiter": {"type": "stack", "max_size": 8}},
    "ratio": {"rate_limiter": {"type": "sample_to_insert_ratio", "samples_per_insert": 1.0, "error_buffer": 2.0}},
    "once": {"max_times_sampled": 1},
    "blocks": {"when_full": "block"},
}


@pytest.fixture(scope="module")
def client() -> Iterator[ReplayClient]:
    tables = [TableConfig(name=name, **settings) for name, settings in TABLES.items()]
    with ReplayServer(tables, port=0) as server, ReplayClient(server.address) as client:
        yield client


@pytest.mark.parametrize(
    ("table", "why"),
    [
        ("queue", "its rate_limiter is 'queue', under which inserts wait for draws; leave rate_limiter out"),
        ("stack", "its rate_limiter is 'stack', under which inserts wait for draws; leave rate_limiter out"),
        ("ratio", "its rate_limiter is 'sample_to_insert_ratio', under which inserts wait for draws; leave"),
        ("once", "its max_times_sampled is 1, after which a group is gone; write 0"),
        ("blocks", "its when_full is 'block', under which inserts wait once it is full; leave when_full out"),
    ],
)
def test_a_table_that_does_not_keep_what_nobody_draws_is_refused(client, table, why):
    words = f"table {table!r} cannot keep finished groups until a checkpoint has them: {why}"
    with pytest.raises(ValueError, match=re.escape(words)):
        EpochGroups(client, table)


def test_a_run_finds_what_the_one_before_left_until_the_next_checkpoint_but_one(client):
    def group(token: int) -> RolloutGroup:
        return make_group(completions=[[token]])

    def tokens(run: EpochGroups) -> dict[str, int | None]:
        found = {uid: run.get((0, uid)) for uid in "abc"}
        return {uid: None if each is None else int(each.completion_ids[0]) for uid, each in found.items()}

    other, first = (EpochGroups(client, "finished", run=run) for run in ("other", "run"))
    other.store((0, "a"), group(9))
    for token, uid in enumerate("aab", start=3):  # the second one of "a" counts
        first.store((0, uid), group(token))
    resumed = EpochGroups(client, "finished", run="run")
    assert tokens(resumed) == {"a": None, "b": None, "c": None}
    resumed.find()
    resumed.find()
    listed = client.list_items("finished", tags={"run": "run"}).items
    assert sorted(str(item.tags["uid"]) for item in listed) == ["a", "b"], "the older one of a goes"
    assert tokens(resumed) == {"a": 4, "b": 5, "c": None}
    resumed.saved(0, {"a"})
    assert tokens(resumed)["a"] == 4, "the checkpoint may still be on its way to the disk"
    resumed.store((1, "c"), group(6))
    resumed.saved(1, set())
    assert tokens(resumed) == {"a": None, "b": 5, "c": None}
    resumed.saved(1, {"c"})
    assert set(resumed.held) == {(1, "c")}
    other.find()
    assert tokens(other) == {"a": 9, "b": None, "c": None}
