"""Runs whose generators insert groups without rewards, for scorers."""

from __future__ import annotations

from typing import Any

from tests.kit.engines import SAID
from tests.kit.generators import Hook
from tests.kit.stack import Stack

SIZE = 4
PROMPTS = [{"prompt": "+", "prompt_id": f"p{number}", "bonus": 100} for number in range(3)]
UNSCORED: dict[str, Any] = {
    "groups": 4,
    "permit_tables": ("partial_groups", "unscored"),
    "generator": {
        "completions": [SAID],
        "prompts": PROMPTS,
        "reward": None,
        "group_size": SIZE,
        "stop_grace": 0.0,
        "unscored_table": "unscored",
        "max_groups": 1,
        "max_concurrent_groups": 2,
    },
}
"""Options of a Stack whose generators make a group and end."""


async def play(stack: Stack, hook: Any = None, **options: Any) -> None:
    """Inserts groups without rewards, one unless told otherwise."""
    generator = await stack.generate(hook or Hook(*range(SIZE)), **options)
    await generator.task
    await generator.stop()
