"""A field of a configuration in Python that is misspelt, or has a value that it cannot have; and what is said of it."""

import json
import math
import re

import pytest

from replay_client.records import read_described
from replay_client.settings import described
from replay_generator import GeneratorConfig
from replay_generator.engines import SamplingConfig


@pytest.mark.parametrize(
    ("kind", "misspelt", "hint"),
    [
        (GeneratorConfig, "groupsize", "did you mean 'group_size'?"),
        (SamplingConfig, "temprature", "did you mean 'temperature'?"),
        (SamplingConfig, "zzz", "there are "),
    ],
)
def test_an_unknown_field_gets_the_nearest_name(kind, misspelt, hint):
    with pytest.raises(ValueError, match=re.escape(f"{kind.__name__}: there is no {misspelt!r}; {hint}")):
        kind(**{misspelt: 1})


@pytest.mark.parametrize(
    ("kind", "field", "value", "words"),
    [
        (GeneratorConfig, "group_size", 0, "must be at least 1, not 0"),
        (GeneratorConfig, "max_concurrent_groups", 0, "must be at least 1"),
        (GeneratorConfig, "reward_threads", 2.5, "must be a whole number"),
        (GeneratorConfig, "reload", "now", "must be 'between_groups' or 'in_flight', not 'now'"),
        (GeneratorConfig, "mask_truncated_completions", "drop", "must be "),
        (GeneratorConfig, "on_prompt_error", "ignore", "must be "),
        (GeneratorConfig, "on_full", "evict", "must be "),
        (GeneratorConfig, "scale_rewards", "batch", "must be "),
        (GeneratorConfig, "follow_policy", 1, "must be true or false, not 1"),
        (GeneratorConfig, "probe_tolerance", 0.0, "must be greater than 0, not 0"),
        (GeneratorConfig, "insert_timeout", 0.0, "must be greater than 0"),
        (GeneratorConfig, "reward_timeout", -1, "must be greater than 0, not -1"),
        (GeneratorConfig, "stale_timeout", math.nan, "must be greater than 0, not nan"),
        (SamplingConfig, "temperature", 2.5, "must be at most 2, not 2.5"),
        (SamplingConfig, "temperature", 0.0, "must be greater than 0"),
        (SamplingConfig, "top_p", 0.0, "must be greater than 0"),
        (SamplingConfig, "top_p", 1.1, "must be at most 1"),
        (SamplingConfig, "top_k", -1, "must be at least 0, not -1"),
        (SamplingConfig, "min_p", -0.1, "must be at least 0, not -0.1"),
        (SamplingConfig, "min_p", 1.1, "must be at most 1, not 1.1"),
        (SamplingConfig, "max_tokens", 0, "must be at least 1"),
    ],
)
def test_a_value_out_of_its_bounds_or_choices_is_refused_in_one_line_by_the_name_of_its_field(
    kind, field, value, words
):
    with pytest.raises(ValueError, match=re.escape(f"{field} {words}")) as refused:
        kind(**{field: value})
    assert "\n" not in str(refused.value)


def test_what_no_single_field_is_at_fault_for_is_refused_too():
    with pytest.raises(ValueError, match="tables must name at least one table"):
        GeneratorConfig(tables=())


@pytest.mark.parametrize("field", ["max_concurrent_groups", "reward_threads", "reward_timeout", "stale_timeout"])
def test_a_bound_does_not_apply_where_there_is_no_value(field):
    assert getattr(GeneratorConfig(**{field: None}), field) is None


def test_what_a_part_says_of_itself_can_be_read_and_fits_into_a_call():
    config = GeneratorConfig(tables=("rollouts", "eval"), priority=len, max_concurrent_groups=None)
    said = {"part": "generator", "tables": ["rollouts", "eval"], "priority": "len", "max_concurrent_groups": None}
    assert read_described(json.dumps(config.described())) == said
    assert read_described("") == {}
    assert read_described('{"mine": "no JSON"}') == {"mine": "no JSON"}
    assert "tables" not in described(
        "generator", {"tables": ["x" * 100] * 9}
    )  # too long: not said, rather than refused
