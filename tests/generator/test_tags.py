"""The tags of generated groups: those of the generator, those of each prompt, and the prompt's name where it counts."""

import json

import pytest

from replay_client import AsyncReplayClient, ReplayClient
from replay_generator import GeneratorConfig, RolloutGenerator
from replay_generator.prompts.prompt import Prompt, read_prompts
from replay_generator.testing import ScriptedEngine
from replay_server import ReplayServer, TableConfig

POOL = TableConfig(name="pool", index=["prompt_id"])
TABLES = {
    "no table indexes anything": [TableConfig(name="rollouts")],
    "the table indexes prompt_id": [TableConfig(name="rollouts", index=["prompt_id"])],
    "the table balances prompt_id": [TableConfig(name="rollouts", balance={"tag": "prompt_id"})],
    "a table further on indexes it": [
        TableConfig(name="rollouts", forward_to="between"),
        TableConfig(name="between", forward_to="pool"),
        POOL,
    ],
    "another table indexes it": [TableConfig(name="rollouts"), POOL],
}
TELLS = {
    "the table indexes prompt_id",
    "the table balances prompt_id",
    "a table further on indexes it",
}


async def generated_tags(tables, prompts, **config):
    """The tags in the table `rollouts` after one group of each prompt, the oldest first."""
    with ReplayServer(tables, port=0) as server:
        async with AsyncReplayClient(server.address, timeout=30.0) as client:
            settings = GeneratorConfig(group_size=3, max_groups=len(prompts), max_concurrent_groups=1, **config)
            await RolloutGenerator(client, ScriptedEngine(), prompts, lambda row, text: len(text), settings).run()
        with ReplayClient(server.address) as looking:
            return [item.tags for item in looking.list_items("rollouts", descending=True).items]


@pytest.mark.parametrize("tables", TABLES.values(), ids=TABLES)
async def test_prompt_id_is_a_tag_exactly_where_a_table_of_the_groups_indexes_it(tables):
    name = next(name for name, each in TABLES.items() if each is tables)
    found = await generated_tags(tables, [{"prompt": "1+1=", "prompt_id": "sums/1"}])
    assert found == [{"prompt_id": "sums/1"} if name in TELLS else {}]


async def test_tags_of_a_prompt_come_beside_those_of_the_generator_and_count_first():
    prompts = [
        {"prompt": "1+1=", "tags": {"environment": "sums", "level": 2, "absent": None}},
        {"prompt": "2+2="},
        {"prompt": "3+3=", "tags": ["keywords", "of a data set"]},
    ]
    found = await generated_tags([TableConfig(name="rollouts")], prompts, tags={"environment": "math", "run": "a"})
    assert found == [
        {"environment": "sums", "level": 2, "run": "a"},
        {"environment": "math", "run": "a"},
        {"environment": "math", "run": "a"},
    ]


def test_tags_that_no_item_can_have_are_refused_where_they_are_written(tmp_path):
    with pytest.raises(ValueError, match=r"tag 'level' is 1\.5: a tag is a string, or an integer of 64 bits"):
        GeneratorConfig(tags={"level": 1.5})
    with pytest.raises(ValueError, match="tag 'level' is True: a tag is a string"):
        Prompt.of({"prompt": "1", "tags": {"level": True}})
    file = tmp_path / "prompts.jsonl"
    file.write_text(json.dumps({"prompt": "1"}) + "\n" + json.dumps({"prompt": "2", "tags": {"": "x"}}) + "\n")
    with pytest.raises(ValueError, match="line 2: tag '' has a name of 0 bytes: 1 to 64"):
        read_prompts(file)
