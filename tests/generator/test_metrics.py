"""The totals that a generator counts."""

from replay_client.testing import make_group
from replay_generator.metrics import GeneratorMetrics, GroupTimes


def test_a_group_may_be_given_up_after_groups_that_took_no_measurable_time():
    metrics = GeneratorMetrics(solved_reward=1.0)
    group = make_group()
    metrics.count_inserted(group, {}, staleness=0, times=GroupTimes(generate=0.0))
    metrics.count_given_up(GroupTimes(generate=0.0))
    assert metrics.stats["groups_aborted"] == 1
    assert metrics.stats["tokens_wasted"] == group.num_tokens
    assert metrics.stats["tokens_saved"] == 0
