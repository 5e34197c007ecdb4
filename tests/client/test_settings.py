"""A field of a configuration in Python that is misspelt, or has a value that it cannot have."""

import math
import re

import pytest

from replay_client.generator import GeneratorConfig
from replay_client.generator.engines import SamplingConfig


@pytest.mark.parametrize(
    ("kind", "misspelt", "hint"),
    [
        (GeneratorConfig, "groupsize", "did you mean 'group_size'?"),
        (SamplingConfig, "temprature", "did you mean 'temperature'?"),
        (SamplingConfig, "zzz", "there are "),
    ],
)
def test_an_unknown_field_gets_the_nearest_name(kind, misspelt, hint):
    with pytest.raises(TypeError, match=re.escape(f"{kind.__name__}: there is no {misspelt!r}; {hint}")):
        kind(**{misspelt: 1})


@pytest.mark.parametrize(
    ("kind", "field", "value", "words"),
    [
        (GeneratorConfig, "group_size", 0, "must be at least 1, not 0"),
        (GeneratorConfig, "max_concurrent_groups", 0, "must be at least 1"),
        (GeneratorConfig, "reward_threads", 2.5, "must be a whole number, not 2.5"),
        (GeneratorConfig, "tables", (), ""),
        (GeneratorConfig, "reload", "now", "must be one of between_groups, at_once, not 'now'"),
        (GeneratorConfig, "truncated", "drop", "must be one of"),
        (GeneratorConfig, "on_prompt_error", "ignore", "must be one of"),
        (GeneratorConfig, "when_full", "evict", "must be one of"),
        (GeneratorConfig, "advantage_scale", "batch", "must be one of"),
        (GeneratorConfig, "follow_policy", 1, "must be true or false, not 1"),
        (GeneratorConfig, "probe_tolerance", 0.0, "must be above 0, not 0"),
        (GeneratorConfig, "insert_timeout", 0.0, "must be above 0"),
        (GeneratorConfig, "reward_timeout", 0, "must be above 0, not 0"),
        (GeneratorConfig, "stale_timeout", math.nan, "must be above 0, not nan"),
        (SamplingConfig, "temperature", 2.5, "must be at most 2, not 2.5"),
        (SamplingConfig, "temperature", 0.0, "must be above 0"),
        (SamplingConfig, "top_p", 0.0, "must be above 0"),
        (SamplingConfig, "top_p", 1.1, "must be at most 1"),
        (SamplingConfig, "top_k", -1, "must be at least 0, not -1"),
        (SamplingConfig, "min_p", -0.1, "must be at least 0, not -0.1"),
        (SamplingConfig, "min_p", 1.1, "must be at most 1, not 1.1"),
        (SamplingConfig, "max_tokens", 0, "must be at least 1"),
    ],
)
def test_a_value_out_of_its_bounds_or_choices_is_refused_by_the_name_of_its_field(kind, field, value, words):
    with pytest.raises(ValueError, match=re.escape(f"{field} {words}")):
        kind(**{field: value})


@pytest.mark.parametrize("field", ["max_concurrent_groups", "reward_threads", "reward_timeout", "stale_timeout"])
def test_a_bound_does_not_apply_where_there_is_no_value(field):
    assert getattr(GeneratorConfig(**{field: None}), field) is None
