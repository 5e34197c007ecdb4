"""The options of all commands: few, on one screen, in groups; and where their values come from."""

from __future__ import annotations

import pytest
import typer

from replay_cli import generate, train
from replay_cli.app import app
from replay_cli.options import HELP_WIDTH
from replay_generator import GeneratorConfig
from replay_generator.engines import SamplingConfig
from replay_trainer import GRPOConfig
from tests.kit.processes import fails, run_replay

ROOT = typer.main.get_command(app)
MOST_LINES = 62
"""Of a screen, the example included."""


def walk(command, name="replay"):
    yield name, command
    for part, inner in getattr(command, "commands", {}).items():
        yield from walk(inner, f"{name} {part}")


COMMANDS = dict(walk(ROOT))


def options_of(name):
    return {each.name: each for each in COMMANDS[name].params if each.param_type_name == "option"}


def test_the_options_of_a_connection_are_those_of_the_whole_command():
    assert {"address", "token_file", "tls_ca", "client_config", "timeout", "name"} <= options_of("replay").keys()
    assert [name for name in COMMANDS if "tls_ca" in options_of(name)] == ["replay"]


@pytest.mark.parametrize("name", COMMANDS)
def test_the_help_of_a_command_fits_on_a_screen(name):
    shown = run_replay(*name.split()[1:], "--help", COLUMNS=str(HELP_WIDTH + 2)).stdout
    assert shown.count("\n") <= MOST_LINES


@pytest.mark.parametrize(
    ("command", "groups"),
    [
        ("", ["Options", "Connection", "Commands"]),
        ("generate", ["Options", "Data", "Engine", "Sampling", "Groups", "Staleness"]),
        ("train", ["Options", "Evaluation", "Learning", "Replay", "Memory", "Output"]),
    ],
)
def test_the_help_has_the_options_in_groups(command, groups):
    lines = run_replay(*command.split(), "--help").stdout.splitlines()
    assert [line[:-1] for line in lines if line.endswith(":") and not line.startswith(" ")] == groups


@pytest.mark.parametrize(
    ("command", "kinds"), [("generate", (GeneratorConfig, SamplingConfig)), ("train", (GRPOConfig,))]
)
def test_an_option_that_passes_a_field_on_has_its_name_and_the_first_clause_of_its_docstring(command, kinds):
    options, found = options_of(f"replay {command}"), 0
    for kind in kinds:
        for name, field in kind.__pydantic_fields__.items():
            if name in options and name not in ("seed", "tables", "tags", "max_concurrent_groups", "output_dir"):
                assert options[name].default is None
                assert " ".join(field.description.split()).startswith(
                    options[name].help.rpartition(" [")[0].rstrip(".")
                )
                found += 1
    assert found > 10


@pytest.mark.parametrize(
    ("file", "given", "priority", "tables"),
    [
        ("", (), None, None),
        ("", ("--recipe", "replay"), "learnability", ["rollouts"]),
        ("", ("--recipe", "replay", "--priority", "advantage"), "advantage", ["rollouts"]),
        ('priority = "a:b"', ("--recipe", "replay"), "a:b", ["rollouts"]),
        ('priority = "a:b"\ntables = ["c"]', ("--priority", "d:e", "--recipe", "replay"), "d:e", ["c"]),
        ('priority = "a:b"', ("--set", "priority=d:e", "--table", "c", "--table", "f"), "d:e", ["c", "f"]),
    ],
    ids=["nothing", "a recipe", "an option wins", "the file wins over the recipe", "and an option over it", "--set"],
)
def test_a_setting_comes_from_the_command_line_else_from_the_file_else_from_the_recipe(
    tmp_path, file, given, priority, tables
):
    path = tmp_path / "generate.toml"
    path.write_text(file)
    for words in (("--config", str(path), *given), (*given, "--config", str(path))):
        context = COMMANDS["replay generate"].make_context("generate", ["--model", "m", *words])
        said = {name: context.params[name] for name in ("priority", "tables") if context.params[name]}
        found = generate.SETTINGS.resolve(context, context.params, said)
        assert found.get("priority") == priority
        assert (found.get("tables") and list(found["tables"])) == tables


def test_a_file_of_train_has_the_fields_of_the_trainer_the_options_of_the_command_and_lora(tmp_path):
    path = tmp_path / "train.toml"
    path.write_text(
        'model = "m"\nlearning_rate = 1e-5\neval_max_tokens = 7\n[correction]\nclip_max = 3.0\n[lora]\nr = 8\n'
    )
    words = ["--output-dir", "o", "--config", str(path), "--recipe", "replay", "--set", "prefetch=2"]
    context = COMMANDS["replay train"].make_context("train", words)
    assert context.params["model"] == "m"
    assert context.params["eval_max_tokens"] == 7
    found = train.SETTINGS.resolve(context, context.params, {})
    assert found["learning_rate"] == 1e-5
    assert found["prefetch"] == 2
    assert found["lora"] == {"r": 8}
    assert found["correction"]["clip_max"] == 3.0
    assert found["correction"]["clip_min"] == 1.0


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("generate --model m --set gruop_size=3", "--set: there is no 'gruop_size'; did you mean 'group_size'?"),
        ("generate --model m --set group_size", "--set 'group_size' is not NAME=VALUE"),
        ("train --model m --output-dir o --recipe repaly", "recipe must be one of replay, not 'repaly'"),
    ],
)
def test_a_setting_that_there_is_not_is_one_line(command, words):
    assert words in fails(*command.split(), status=2)
