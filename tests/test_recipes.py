"""Recipes: one declaration, which the configurations of server, generator and trainer take, and users may change."""

from __future__ import annotations

import json

import pytest

from replay_client.generator import GeneratorConfig
from replay_protos.recipes import RECIPES, described, read_described, settings_of
from replay_server import AdmissionConfig, Config, ReplayServer, TableConfig
from replay_trainer import PRESETS, GRPOConfig
from replay_trainer.config import config_from


def changed(settings) -> dict:
    return {each.name: each.actual for each in settings if not each.kept}


@pytest.mark.parametrize("name", RECIPES)
def test_all_parts_of_a_recipe_have_its_settings_and_agree_with_each_other(name):
    server, generator = Config(recipe=name), GeneratorConfig.recipe(name)
    trainer = GRPOConfig.recipe(name, output_dir="runs/x")
    parts = (server, generator, trainer)
    assert all(len(part.recipe_settings()) > 1 and not changed(part.recipe_settings()) for part in parts)
    assert trainer.fresh_groups_per_step == server.admission.groups_per_step
    assert generator.tables == (trainer.rollouts_table,)
    tables = {table.name: table for table in server.tables}
    assert tables[trainer.rollouts_table].forward_to == trainer.replay_table
    assert tables[trainer.replay_table].sampler.type == "prioritized"


def test_without_the_word_nothing_changes():
    assert (GeneratorConfig().priority, GeneratorConfig().recipe_name) == ("advantage", "")
    assert (GRPOConfig(output_dir="x").replay_share, GRPOConfig(output_dir="x").recipe_name) == (0.0, "")
    plain = Config(tables=[TableConfig(name="replay")])
    assert (plain.admission, len(plain.tables), plain.recipe_settings()) == (None, 1, [])


@pytest.mark.parametrize(
    ("own", "differs"),
    [
        ({"tables": [{"name": "replay", "max_size": 512}]}, {"tables.replay.max_size": 512}),
        ({"tables": [TableConfig(name="replay", max_size=512)]}, {"tables.replay.max_size": 512}),
        ({"tables": [{"name": "more"}], "admission": {"max_staleness": 3}}, {"admission.max_staleness": 3}),
        (
            {"admission": AdmissionConfig(groups_per_step=8, max_staleness=1, permit_ttl=9)},
            {"admission.groups_per_step": 8},
        ),
        (
            {"tables": [{"name": "replay", "sampler": "uniform"}]},
            {"tables.replay.sampler.type": "uniform", "tables.replay.sampler.exponent": 1.0},
        ),
    ],
    ids=["a table in a file", "a table in Python", "another table", "admission in Python", "a sampler as a whole"],
)
def test_what_the_user_sets_wins_field_by_field_in_the_server(own, differs):
    config = Config(recipe="replay", **own)
    assert changed(config.recipe_settings()) == differs
    assert [table.name for table in config.tables][:2] == ["rollouts", "replay"]


def test_what_the_user_sets_wins_in_generator_and_trainer():
    generator = GeneratorConfig.recipe("replay", priority="advantage", group_size=4)
    assert changed(generator.recipe_settings()) == {"priority": "advantage"}
    options = {"recipe": "replay", "output_dir": "x", "groups_per_step": 16, "correction": {"clip_max": 2.0}}
    trainer = config_from(options)
    assert changed(trainer.recipe_settings()) == {"groups_per_step": 16, "correction.clip_max": 2.0}
    assert trainer == GRPOConfig.recipe(
        **{"name" if name == "recipe" else name: each for name, each in options.items()}
    )
    preset = GRPOConfig.recipe("replay", output_dir="x", correction="icepop")
    assert preset.correction == PRESETS["icepop"]()


@pytest.mark.parametrize(
    "make",
    [
        lambda name: Config(recipe=name),
        lambda name: ReplayServer(recipe=name, port=0),
        lambda name: GeneratorConfig.recipe(name),
        lambda name: GeneratorConfig(recipe_name=name),
        lambda name: GRPOConfig.recipe(name, output_dir="x"),
        lambda name: config_from({"recipe": name, "output_dir": "x"}),
    ],
    ids=["Config", "ReplayServer", "GeneratorConfig", "its field", "GRPOConfig", "train.toml"],
)
def test_a_name_that_there_is_not_is_refused_with_those_that_there_are(make):
    with pytest.raises(ValueError, match="recipe must be one of replay, not 'repaly'"):
        make("repaly")


def test_what_a_part_says_of_itself_can_be_read_and_fits_into_a_call():
    config = GeneratorConfig.recipe("replay", tables=("rollouts", "eval"), priority=len, max_concurrent_groups=None)
    said = {"recipe": "replay", "tables": ["rollouts", "eval"], "priority": "len", "max_concurrent_groups": None}
    assert read_described(json.dumps(config.described())) == said | {"part": "generator"}
    assert read_described("") == {}
    assert read_described('{"mine": "no JSON"}') == {"mine": "no JSON"}
    many = described("generator", {"tables": ["x" * 100] * 9}, {})
    assert "tables" not in many  # too long: not said, rather than refused
    trainer = GRPOConfig.recipe("replay", output_dir="x").described()
    assert {each.name for each in settings_of(RECIPES["replay"].trainer, {})} <= trainer.keys()
