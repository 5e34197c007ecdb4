"""Recipes: the file of each has settings that server, generator and trainer take, and that agree with each other."""

from __future__ import annotations

import pytest

from examples.demo.compare import RECIPE as COMPARED
from experiments.learning.arms import ARMS
from replay_cli.recipes import RECIPES, recipe_of
from replay_generator import GeneratorConfig
from replay_server import Config
from replay_trainer import GRPOConfig

OWN = """
[admission]
max_staleness = 3

[[tables]]
name = "replay"
max_size = 512
sampler = "uniform"

[[tables]]
name = "more"
"""


@pytest.mark.parametrize("name", RECIPES)
def test_the_parts_take_the_settings_of_a_recipe_which_agree(name):
    recipe = recipe_of(name)
    assert recipe.keys() == {"about", "serve", "generate", "train"}
    server, generator = Config.model_validate(recipe["serve"]), GeneratorConfig(**recipe["generate"])
    trainer = GRPOConfig(output_dir="runs/x", **recipe["train"])
    assert trainer.fresh_groups_per_step == server.admission.fresh_groups_per_step
    assert generator.tables == (trainer.rollouts_table,)
    tables = {table.name: table for table in server.tables}
    assert tables[trainer.rollouts_table].forward_to == trainer.replay_table
    assert tables[trainer.replay_table].sampler.type == "prioritized"


def test_a_file_changes_a_recipe_field_by_field_of_a_section_and_of_a_table(tmp_path):
    (tmp_path / "replay.toml").write_text(OWN)
    config = Config.load(tmp_path / "replay.toml", recipe_of("replay")["serve"])
    assert config.admission.fresh_groups_per_step == 4
    assert config.admission.max_staleness == 3
    rollouts, replay, more = config.tables
    assert rollouts.forward_to == "replay"
    assert rollouts.rate_limiter.max_size == 16
    assert more.name == "more"
    assert replay.max_size == 512
    assert replay.remover.type == "min_heap"
    assert replay.sampler.type == "uniform"


def test_a_name_that_there_is_not_is_refused_with_those_that_there_are():
    with pytest.raises(ValueError, match="recipe must be one of replay, not 'repaly'"):
        recipe_of("repaly")


def test_the_demo_and_the_experiments_compare_what_the_recipe_is():
    """They write its settings down, because neither knows of recipes."""
    train, serve = recipe_of("replay")["train"], recipe_of("replay")["serve"]
    arm = ARMS["small50-right"]
    assert GRPOConfig(output_dir="x", correction=train["correction"]).correction == arm.correction
    assert arm.stored == train["replay_rollouts"]
    assert arm.fresh == 4
    assert arm.replay == 4
    compared = COMPARED.sections
    assert compared["train"]["correction"] == train["correction"]
    assert serve["tables"][1].items() <= (compared["serve"]["tables"][1] | {"remover": {"type": "min_heap"}}).items()
    for name in ("groups_per_step", "replay_share", "replay_rollouts"):
        assert compared["train"][name] == train[name]
    assert compared["generate"]["priority"] == recipe_of("replay")["generate"]["priority"]
