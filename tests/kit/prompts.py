"""Tables of prompts, generators that draw from them, and what becomes of each prompt."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from replay_client import AsyncReplayClient
from replay_generator import RolloutGenerator
from replay_generator.prompts.stored import StoredPrompt, decode_item
from replay_server import TableConfig
from tests.kit.generators import make_generator, make_prompts

ROLLOUTS = TableConfig(name="rollouts")
EPOCH = (TableConfig(name="prompts", sampler="fifo", max_times_sampled=1), ROLLOUTS)
CURRICULUM = (TableConfig(name="prompts", sampler="prioritized", seed=3), ROLLOUTS)
PARTIAL_GROUPS = TableConfig(name="partial_groups", rate_limiter={"type": "queue", "max_size": 1000})


def make_epoch(client: AsyncReplayClient, rows: Any = 10, **options: Any) -> RolloutGenerator:
    """A generator that makes a group of each prompt once, for an epoch. `rows`: the prompts, or how many."""
    prompts = make_prompts(rows) if isinstance(rows, int) else rows
    settings = {"group_size": 3, "prompts_table": "prompts", "prompts_epochs": 1} | options
    return make_generator(client, prompts=prompts, **settings)


def make_curriculum(
    client: AsyncReplayClient, rows: int = 10, *, taught: Sequence[str] | set[str] = (), **options: Any
) -> RolloutGenerator:
    """Groups of four. Those of the prompts in `taught` are solved half of the time, and all others never."""
    answers = iter(range(1_000_000))

    def reward(row: Any, text: str) -> float:
        return float(next(answers) % 2) if row["prompt_id"] in taught else 0.0

    settings = {"prompts_mode": "curriculum", "prompts_epochs": None, "group_size": 4} | options
    return make_epoch(client, rows, reward=reward, **settings)


def names(count: int, times: int = 1) -> Counter[str]:
    """The prompts p0, p1, ..., each so many times."""
    return Counter({f"p{index}": times for index in range(count)})


async def made(client: AsyncReplayClient) -> list[str]:
    """The prompts of all groups, in the order of their inserts."""
    page = await client.list_items("rollouts", limit=10_000, descending=True)
    items = {item.key: item for item in await client.get([row.key for row in page])}
    return [items[row.key].group.prompt_id for row in page]


async def held(client: AsyncReplayClient) -> tuple[int, int]:
    """How many prompts the table has, and how many are drawn and not done."""
    table = (await client.server_info()).tables["prompts"]
    return table.size, table.reserved


async def priorities(client: AsyncReplayClient) -> dict[str, float]:
    """The priority of each prompt, by its name."""
    page = await client.list_items("prompts", limit=1000)
    stored = {item.key: decode_item(item.payload) for item in await client.get([row.key for row in page])}
    by_key = {row.key: row.priority for row in page}
    prompts = {key: each for key, each in stored.items() if isinstance(each, StoredPrompt)}
    assert {by_key[key] for key in stored.keys() - prompts.keys()} == {0.0}  # cursors are never drawn
    return {each.prompt.prompt_id: by_key[key] for key, each in prompts.items()}
