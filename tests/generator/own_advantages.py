"""Advantage functions of a user, for tests: right ones, and one for each way of being wrong."""

from __future__ import annotations

import numpy as np


def as_built_in(rewards_G):
    """What scale_rewards = "group" computes, written as a user would."""
    return (rewards_G - rewards_G.mean()) / (rewards_G.std(ddof=1) + 1e-4)


def without_division(rewards_G):
    """What scale_rewards = "none" computes."""
    return rewards_G - rewards_G.mean()


def leave_one_out(rewards_G):
    others_G = (rewards_G.sum() - rewards_G) / (len(rewards_G) - 1)
    return rewards_G - others_G


def above_half(rewards_G):
    """A baseline from elsewhere: equal rewards have advantages too."""
    return rewards_G - 0.5


def by_row(rewards_G, row):
    return rewards_G * row["difficulty"]


def divides_by_the_spread(rewards_G):
    """NaN for equal rewards."""
    return (rewards_G - rewards_G.mean()) / rewards_G.std()


def of_one_rollout(rewards_G):
    return rewards_G[:1]


def of_each_token(rewards_G):
    return np.zeros((len(rewards_G), 3))


def forgets_to_return(rewards_G):
    rewards_G - rewards_G.mean()


def as_texts(rewards_G):
    return [str(reward) for reward in rewards_G]


def raises(rewards_G):
    return rewards_G.no_such_method()


def ends_the_process(rewards_G):
    raise SystemExit(3)


def takes_a_row_first(row, rewards_G):
    return rewards_G


def takes_more(rewards_G, difficulty):
    return rewards_G * difficulty


async def is_async(rewards_G):
    return rewards_G


not_a_function = 3
