"""Shards, trainers, both and Ray's head, killed at random moments; tests.system.shards.kills kills more often."""

import random

import pytest

from tests.system.shards.kills import kill_heads, kill_shards_and_trainers

pytestmark = pytest.mark.long


def test_a_trainer_trains_on_every_group_and_on_none_twice_whoever_is_killed(tmp_path):
    groups, wrong = kill_shards_and_trainers(["shards", "trainers", "both"], tmp_path, random.Random(1))
    assert wrong == []
    assert groups > 10


def test_a_trainer_trains_on_every_group_and_on_none_twice_when_the_head_of_ray_dies(tmp_path):
    pytest.importorskip("ray")
    groups, wrong = kill_heads(1, tmp_path, random.Random(1))
    assert wrong == []
    assert groups > 10
