"""Which groups are replaced, by which, and that a replaced group is replaced as a whole."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from replay_client.errors import DeadlineExceededError, ServerUnavailableError
from replay_client.testing import make_group
from replay_trainer import GRPOConfig, ZeroVarianceReplacer
from replay_trainer.batching import to_batch
from replay_trainer.groups import GroupSource
from replay_trainer.metrics import group_drifts
from replay_trainer.ranks import Ranks
from replay_trainer.stopping import Stopping
from tests.kit.clients import FakeClient
from tests.kit.groups import make_sample

ALL_WRONG, ALL_RIGHT = [0.0] * 4, [1.0] * 4
MIXED = [0.0, 1.0, 1.0, 0.0]


def keys(samples: list) -> list[int]:
    return [sample.info.key for sample in samples]


def make_batch(*rewards: list[float]) -> list:
    return [make_sample(make_group(rewards=r), key=key) for key, r in enumerate(rewards)]


def make_pool(count: int, *, first_key: int = 100) -> list:
    return [make_sample(make_group(rewards=MIXED), key=first_key + i, age=10.0 * i, staleness=i) for i in range(count)]


def make_source(batches, client=None, size=1, added=0, **options):
    config = GRPOConfig(output_dir="", groups_per_step=size + added, replay_share=added / (size + added), **options)
    ranks = Ranks("cpu")
    return GroupSource(batches, ZeroVarianceReplacer(client or FakeClient()), ranks, "run", config, Stopping(ranks))


def test_groups_without_variance_give_their_place_to_groups_of_the_pool():
    batch = make_batch(ALL_WRONG, MIXED, ALL_RIGHT)
    pool = make_pool(5)
    replacement = ZeroVarianceReplacer(FakeClient(pool=pool)).replace(batch)
    assert keys(replacement.samples) == [100, 1, 101]
    assert replacement.replaced == [0, 2]
    assert replacement.groups == [pool[0].group, batch[1].group, pool[1].group]
    assert replacement.stats["groups_zero_variance"] == 2
    assert replacement.stats["groups_replaced"] == 2
    assert replacement.stats["groups_missing"] == 0
    assert replacement.stats["age_mean"] == 5.0
    assert replacement.stats["staleness_mean"] == 0.5
    assert replacement.stats["reward_mean"] == 0.5


def test_a_batch_with_variance_everywhere_asks_for_nothing():
    batch = make_batch(MIXED, MIXED)
    replacement = ZeroVarianceReplacer(client=None).replace(batch)  # type: ignore[arg-type]
    assert replacement.samples == batch
    assert replacement.replaced == []
    assert math.isnan(replacement.stats["age_mean"])


def test_what_is_in_the_batch_already_does_not_come_again():
    batch = make_batch(MIXED, ALL_WRONG)
    pool = [batch[0], *make_pool(1)]  # the fresh group has joined the pool the moment it was taken
    replacement = ZeroVarianceReplacer(FakeClient(pool=pool)).replace(batch)
    assert keys(replacement.samples) == [0, 100]


def test_ranks_of_one_step_get_different_groups():
    client = FakeClient(pool=make_pool(3))
    rank_0 = ZeroVarianceReplacer(client).replace(make_batch(ALL_WRONG, ALL_WRONG), scope="step-12")
    rank_1 = ZeroVarianceReplacer(client).replace(make_batch(ALL_WRONG, ALL_WRONG), scope="step-12")
    assert keys(rank_0.samples) == [100, 101]
    assert keys(rank_1.samples) == [102, 1]
    assert rank_1.stats["groups_missing"] == 1


def test_what_other_ranks_train_on_does_not_come():
    # Their fresh groups have joined the pool too, under no scope yet.
    pool = make_pool(3)
    replacement = ZeroVarianceReplacer(FakeClient(pool=pool)).replace(make_batch(ALL_WRONG), exclude=[100, 101])
    assert keys(replacement.samples) == [102]


def test_replacements_that_lag_too_far_are_passed_over_for_fresher_ones():
    pool = [make_sample(make_group(rewards=MIXED), key=100 + i, staleness=lag) for i, lag in enumerate([5, 3, 4, 0])]
    replacer = ZeroVarianceReplacer(FakeClient(pool=pool), max_staleness=3)
    replacement = replacer.replace(make_batch(ALL_WRONG, ALL_WRONG), scope="step-1")
    assert keys(replacement.samples) == [101, 103]
    assert replacement.stats["groups_too_stale"] == 2
    assert replacement.stats["staleness_max"] == 3


def test_groups_trained_on_sink_in_the_pool_as_far_as_they_are_no_longer_trusted():
    pool = make_pool(2)
    client = FakeClient(pool=pool)
    samples = [pool[0], make_sample(make_group(rewards=ALL_WRONG), key=101), make_sample(make_group(), key=7)]
    assert ZeroVarianceReplacer(client).update_priorities({100: 0.5, 101: 1.0, 7: 1.0}, samples) == 1
    # sum |A| = 4 * 0.866 (up to the 1e-4), std = 0.577: 2; key 7 is gone, and 101 has nothing to teach
    assert client.priorities == {100: pytest.approx(0.5 * 2.0, rel=1e-3)}


class RestartingClient(FakeClient):
    """Its first call finds no server, the next ones do."""

    calls = 0

    def sample(self, *args: Any, **options: Any) -> list:
        self.calls += 1
        if self.calls == 1:
            raise ServerUnavailableError("no replay server answers")
        return super().sample(*args, **options)


def test_a_server_that_starts_again_is_asked_again():
    client = RestartingClient(pool=make_pool(1))
    assert keys(ZeroVarianceReplacer(client).replace(make_batch(ALL_WRONG)).samples) == [100]
    assert client.calls == 2


def test_a_group_without_replacement_is_dropped_where_told():
    replacer = ZeroVarianceReplacer(FakeClient(pool=make_pool(2)), on_empty="drop")
    replacement = replacer.replace(make_batch(MIXED, ALL_WRONG, ALL_WRONG, ALL_RIGHT, MIXED))
    assert keys(replacement.samples) == [0, 100, 101, 4]
    assert replacement.replaced == [1, 2]
    assert replacement.stats["groups_dropped"] == 1


def test_waiting_for_the_pool_ends_with_the_servers_reason():
    replacer = ZeroVarianceReplacer(FakeClient(pool=make_pool(1)), on_empty="wait", timeout=0.1)
    with pytest.raises(DeadlineExceededError, match="replay: sampling blocked: size 1 < 2"):
        replacer.replace(make_batch(ALL_WRONG, ALL_WRONG))


def test_a_pool_group_without_variance_replaces_nothing():
    pool = [make_sample(make_group(rewards=ALL_RIGHT), key=100)]
    replacement = ZeroVarianceReplacer(FakeClient(pool=pool)).replace(make_batch(ALL_WRONG))
    assert keys(replacement.samples) == [0]
    assert replacement.stats["groups_missing"] == 1


def test_an_unknown_rule_for_the_empty_pool_is_refused():
    with pytest.raises(ValueError, match="on_empty must be one of keep, drop, wait, not 'skip'"):
        ZeroVarianceReplacer(FakeClient(), on_empty="skip")  # type: ignore[arg-type]


# -------------------------------------------------------------------------------------------------- the other rules


def batches_of(*rewards: list[list[float]]) -> Iterator[list]:
    """Batches with these rewards; keys count through."""
    key = itertools.count()
    return iter([[make_sample(make_group(rewards=r), key=next(key)) for r in batch] for batch in rewards])


def test_dynamic_sampling_draws_until_the_batch_is_full_and_keeps_what_is_too_much():
    stream = batches_of([MIXED, ALL_WRONG], [ALL_RIGHT, ALL_RIGHT], [MIXED, MIXED], [ALL_WRONG, MIXED])
    source = make_source(stream, zero_variance="dynamic", size=2, max_dynamic_batches=5)
    first = source.replace(1, source.collect())
    assert keys(first.samples) == [0, 4]
    assert keys(first.fresh) == [0, 1, 2, 3, 4, 5]
    assert first.stats["groups_zero_variance"] == 3
    assert first.stats["groups_dropped"] == 3
    assert first.stats["groups_missing"] == 0
    second = source.replace(2, source.collect())
    assert keys(second.samples) == [5, 7]
    assert keys(second.fresh) == [6, 7]


def test_dynamic_sampling_gives_up_after_so_many_batches_and_stays_short():
    batches = batches_of(*[[ALL_WRONG, MIXED]] * 3, [MIXED, MIXED])
    source = make_source(batches, zero_variance="dynamic", size=4, max_dynamic_batches=3)
    taken = source.replace(1, source.collect())
    assert keys(taken.samples) == [1, 3, 5]
    assert taken.stats["groups_missing"] == 1


def test_a_full_batch_left_over_needs_no_fresh_one():
    source = make_source(batches_of([MIXED] * 4, [MIXED] * 4), zero_variance="dynamic", size=2, max_dynamic_batches=1)
    assert keys(source.replace(1, source.collect()).samples) == [0, 1]
    taken = source.replace(2, source.collect())
    assert keys(taken.samples) == [2, 3]
    assert taken.fresh == []


# ---------------------------------------------------------------------------------------------------- a share of replay


def shared(client, count, *batches, start=0):
    """A share of `count` groups on top of replacement."""
    return make_source(batches_of(*batches), client, added=count, replay_start_step=start)


def test_a_share_of_the_pool_comes_after_the_fresh_groups_and_their_replacements():
    source = shared(FakeClient(pool=make_pool(9)), 3, [MIXED, ALL_WRONG])
    taken = source.replace(1, source.collect())
    assert keys(taken.samples) == [0, 100, 101, 102, 103]
    assert taken.replaced == [1, 2, 3, 4]
    assert keys(taken.fresh) == [0, 1]
    assert {name: count for name, count in taken.counts.items() if count} == {
        "groups_zero_variance": 1,
        "groups_replaced": 1,
        "groups_added": 3,
    }


def test_a_share_that_the_pool_does_not_have_makes_a_smaller_step():
    source = shared(FakeClient(pool=make_pool(2)), 3, [MIXED, ALL_WRONG])
    taken = source.replace(1, source.collect())
    assert keys(taken.samples) == [0, 100, 101]
    assert taken.counts["groups_added"] == 1


def test_the_share_holds_no_group_of_the_batch_and_each_step_draws_anew():
    batches = [[MIXED], [MIXED]]
    fresh = next(batches_of(*batches))  # has joined the pool already
    source = shared(FakeClient(pool=[*fresh, *make_pool(1)]), 1, *batches)
    assert keys(source.replace(1, source.collect()).samples) == [0, 100]
    assert keys(source.replace(2, source.collect()).samples) == [1, 0]


def test_a_share_comes_on_top_of_dynamic_sampling():
    batches = batches_of([MIXED, ALL_WRONG], [MIXED, MIXED])
    source = make_source(batches, FakeClient(pool=make_pool(9)), zero_variance="dynamic", size=2, added=2)
    assert keys(source.replace(1, source.collect()).samples) == [0, 2, 100, 101]


def test_the_drift_of_a_group_is_the_mean_log_ratio_of_its_known_tokens():
    groups = [
        make_group(completions=[[5], [6, 7]], logprobs=[-1.0, -2.0, math.nan]),
        make_group(completions=[[5, 6], []], logprobs=[-1.0, -1.0], loss_mask=[True, False]),
        make_group(completions=[[5], [6]], logprobs=math.nan),
    ]
    batch = to_batch(groups)
    logprobs_BT = torch.where(batch.mask_BT, torch.tensor(-1.8), 99.0)
    # (-0.8 + 0.2) / 2; -0.8 of the only token to train on; nothing known
    assert group_drifts(batch, logprobs_BT) == pytest.approx([0.3, 0.8, 0.0], abs=1e-6)
