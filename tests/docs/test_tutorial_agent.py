"""The page "Train an agent" as its reader runs it, with a shorter warm-up and fewer steps."""

from __future__ import annotations

import pytest

from tests.docs.blocks import ROOT
from tests.docs.reader import Reader

pytestmark = pytest.mark.long

PAGE = ROOT / "docs/tutorial-agent.md"
SHORTER = {"SOLVED = 0.1": "SOLVED = 0.05"}
"""What the test does less of than the reader."""


def test_the_page_runs_from_its_first_block_to_its_last_and_shows_turns_with_a_tool(tmp_path):
    with Reader(PAGE, tmp_path, "agent", SHORTER) as reader:
        reader.read()
    for words in (
        '{"prompt": ',
        "completion 7",
        '<tool_call>{"name": "calculator", "arguments": {"expression": "',
        ", trained on]",
        "[tool, ",
        ", not trained on]",
        "last steps: fresh reward 0.",
    ):
        assert words in reader.said
