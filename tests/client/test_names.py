"""A misspelt field of a configuration in Python."""

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
