"""What is said of a wrong setting, and of a number of things."""

from __future__ import annotations

import pytest
from pydantic import BaseModel, Field, ValidationError, field_validator

from replay_protos.settings import explain
from replay_protos.words import counted


class Example(BaseModel, extra="forbid"):
    size: int = Field(default=1, ge=1)
    url: str = Field(default="http://x", pattern="^https?://.*[^/]$")
    own: str = ""

    @field_validator("own")
    @classmethod
    def _check(cls, value: str) -> str:
        if value:
            raise ValueError("Expected a string a valid number of groups")
        return value


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ({"size": 0}, "size must be at least 1, not 0"),
        ({"size": "x"}, "size must be a whole number, not 'x'"),
        ({"url": "ftp://x"}, "url must match the pattern '^https?://.*[^/]$', not 'ftp://x'"),
        ({"own": "x"}, "own: Expected a string a valid number of groups, not 'x'"),
        ({"sise": 1}, "sise is no setting"),
    ],
)
def test_what_is_wrong_with_a_setting_is_a_sentence_of_ours(setting, says):
    with pytest.raises(ValidationError) as raised:
        Example(**setting)
    assert explain(raised.value) == says


@pytest.mark.parametrize(
    ("count", "noun", "says"),
    [
        (1, "group", "1 group"),
        (0, "group", "0 groups"),
        (2, "batch", "2 batches"),
        (2, "entry", "2 entries"),
        (2, "reply", "2 replies"),
        (2, "key", "2 keys"),
        (2, "push", "2 pushes"),
    ],
)
def test_a_noun_agrees_with_its_number(count, noun, says):
    assert counted(count, noun) == says
