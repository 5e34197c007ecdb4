"""The options of `replay generate`: those that dataclasses declare, and their defaults, as people type them."""

from __future__ import annotations

import dataclasses

import pytest
import typer

from replay_client.generator import GeneratorConfig
from replay_client.generator.engines import SamplingConfig
from replay_server.cli.app import app

OPTIONS = {option.opts[0]: option for option in typer.main.get_command(app).commands["generate"].params}
DEFAULTS = {
    "--model": None,
    "--prompts": None,
    "--reward": None,
    "--rollout": None,
    "--environment": None,
    "--environment-args": None,
    "--config": None,
    "--recipe": None,
    "--engine": "vllm",
    "--base-url": None,
    "--engine-arg": None,
    "--table": None,
    "--tag": None,
    "--prompt-field": "prompt",
    "--split": "train",
    "--chat": False,
    "--system": None,
    "--group-size": 8,
    "--min-rollouts": None,
    "--rollout-timeout": 3600.0,
    "--temperature": 1.0,
    "--top-p": 1.0,
    "--top-k": 0,
    "--min-p": 0.0,
    "--sampling-masks": 512,
    "--max-tokens": 256,
    "--max-length": None,
    "--max-concurrent-groups": 16,
    "--building": None,
    "--building-lease": 30.0,
    "--group-timeout": None,
    "--max-groups": None,
    "--prompts-table": None,
    "--prompts-mode": "epoch",
    "--prompts-epochs": None,
    "--prompts-lease": 60.0,
    "--wait-for-policy": False,
    "--weights-root": None,
    "--reload": "between_groups",
    "--probe-tolerance": 0.02,
    "--truncated": "keep",
    "--priority": "advantage",
    "--drop-zero-variance": False,
    "--on-prompt-error": "raise",
    "--when-full": "wait",
    "--reward-threads": None,
    "--reward-timeout": 300.0,
    "--stale-timeout": 600.0,
    "--metrics": None,
    "--metrics-interval": 10.0,
    "--seed": 0,
    "--json": False,
    "--log-format": "text",
}


def test_generate_has_these_options_with_these_defaults():
    assert {name: option.default for name, option in OPTIONS.items()} == DEFAULTS
    assert {name for name, option in OPTIONS.items() if option.required} == {"--model"}
    switches = {name: option.secondary_opts for name, option in OPTIONS.items() if option.secondary_opts}
    assert switches == {name: [f"--no-{name[2:]}"] for name in ("--chat", "--wait-for-policy", "--drop-zero-variance")}


@pytest.mark.parametrize("kind", [GeneratorConfig, SamplingConfig], ids=lambda kind: kind.__name__)
def test_an_option_that_passes_a_field_on_has_the_default_and_the_first_sentence_of_the_field(kind):
    options = {option.name: option for option in OPTIONS.values()}
    shared = [field for field in dataclasses.fields(kind) if field.name in options and field.name != "seed"]
    assert len(shared) > 3
    for field in shared:
        assert options[field.name].default == field.default
        assert options[field.name].help.endswith(".")


@pytest.mark.parametrize(
    ("file", "typed", "priority", "recipe"),
    [
        ("", (), "advantage", None),
        ("", ("--recipe", "replay"), "learnability", "replay"),
        ("", ("--recipe", "replay", "--priority", "advantage"), "advantage", "replay"),
        ('recipe = "replay"', (), "learnability", "replay"),
        ('recipe = "replay"\npriority = "advantage"', (), "advantage", "replay"),
        ('priority = "advantage"', ("--recipe", "replay"), "advantage", "replay"),
    ],
    ids=["none", "typed", "an option wins", "in the file", "the file wins", "the file wins over what is typed"],
)
def test_a_recipe_gives_generate_its_settings_and_what_the_user_sets_wins(tmp_path, file, typed, priority, recipe):
    path = tmp_path / "generate.toml"
    path.write_text(file)
    for config in (("--config", str(path), *typed), (*typed, "--config", str(path))):
        command = typer.main.get_command(app).commands["generate"]
        given = command.make_context("generate", ["--model", "m", "--prompts", "p.jsonl", *config]).params
        assert (given["priority"], given["recipe"]) == (priority, recipe)
        assert list(given["table"]) == (["rollouts"] if recipe else [])
