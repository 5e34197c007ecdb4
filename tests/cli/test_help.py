"""The help of every command: one form of values, choices and defaults, and an example that can be typed."""

from __future__ import annotations

import re
import shlex

import pytest
import typer.main

from replay_cli.app import _mistake, app
from replay_cli.options import in_one_form
from tests.kit.processes import fails, run_replay

ROOT = typer.main.get_command(app)
VALUE = r"[A-Z]+([:=][A-Z]+)?"
"""TEXT, NAME=VALUE, HOST:PORT."""
CHOICES = r"[a-z_-]+(\|[a-z_-]+)*"
OPTION = re.compile(rf"(-\w, )?--[a-z0-9-]+( / --no-[a-z-]+)?( ({VALUE}|{CHOICES}))?")
NOTE = re.compile(r"default: .+|env: [A-Z_]+(, [A-Z_]+)*|required|from -?[\d.]+|-?[\d.]+ to -?[\d.]+")


def walk(command, words=()):
    yield words, command
    for name, below in getattr(command, "commands", {}).items():
        yield from walk(below, (*words, name))


COMMANDS = dict(walk(ROOT))


def name_of(words) -> str:
    return " ".join(("replay", *words))


@pytest.mark.parametrize("words", COMMANDS, ids=name_of)
def test_values_choices_and_defaults_have_one_form(words):
    command = COMMANDS[words]
    context = command.context_class(command, info_name=name_of(words))
    for parameter in command.get_params(context):
        names, text = in_one_form(parameter, *parameter.get_help_record(context))
        if parameter.param_type_name == "argument":
            assert re.fullmatch(VALUE, names), names
        else:
            assert OPTION.fullmatch(names), names
        about, _, notes = text.partition(" [") if text.endswith("]") else (text, "", "")
        assert about.endswith("."), text
        for note in notes.removesuffix("]").split("; ") if notes else ():
            assert NOTE.fullmatch(note), text


@pytest.mark.parametrize("words", COMMANDS, ids=name_of)
def test_the_usage_has_each_argument_once_and_without_brackets_of_the_parser(words):
    (usage,) = [line for line in run_replay(*words, "--help").stdout.splitlines() if line.startswith("Usage:")]
    assert re.fullmatch(
        rf"Usage: {name_of(words)} \[OPTIONS\]( {VALUE}(\.\.\.)?| \[[A-Z]+(\.\.\.)?\])*( \.\.\.)?", usage
    )


@pytest.mark.parametrize("words", COMMANDS, ids=name_of)
def test_the_help_ends_with_an_example_that_can_be_typed(words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    (tmp_path / "train.toml").touch()
    shown = run_replay(*words, "--help", COLUMNS="102").stdout
    (example,) = re.findall(r"^  Example: (.*)$", shown, re.MULTILINE)
    typed = shlex.split(example)
    assert typed[: len(words) + 1] == ["replay", *words] or not words
    context, command, arguments = None, ROOT, typed
    while arguments:
        context = command.make_context(arguments[0], arguments[1:], parent=context)
        arguments = [*context._protected_args, *context.args] if hasattr(command, "commands") else []
        if arguments:
            command = command.commands[arguments[0]]
    assert not hasattr(command, "commands") or command.invoke_without_command


def test_an_option_of_the_whole_command_is_understood_behind_a_command():
    wanted = "no replay server answers at 127.0.0.1:2 (tried for 0.1 s)"
    given = ("--address", "127.0.0.1:2", "--timeout", "0.1")
    for line in (
        (*given, "tables"),
        ("tables", *given),
        ("tables", "--json", *given),
        (*given[:2], "table", *given[2:], "delete", "replay", "7", "--yes"),
        ("table", "delete", *given, "replay", "7", "--yes"),
        ("--address", "127.0.0.1:3", "policy", "--address=127.0.0.1:2", "--timeout=0.1"),
    ):
        assert wanted in fails(*line), line


def test_an_option_of_a_command_is_its_own_where_the_whole_command_has_one_of_its_name():
    assert "--timeout must be at least 0" in fails("shards", "up", "--shards", "1", "--timeout", "-1", status=2)
    context = COMMANDS["checkpoint", "create"].make_context("create", ["mine"])
    assert context.params["name"] == "mine"
    assert "there is no option --name" in fails("checkpoint", "create", "--name", "mine", status=2)


def test_a_value_of_an_option_behind_a_command_is_checked_and_shown_as_before_it():
    for line in (("--timeout", "soon", "tables"), ("tables", "--timeout", "soon")):
        assert "--timeout must be a number; see `replay --help`" in fails(*line, status=2)


class NoSuchCommand(Exception):
    """The error of click 8.4 and later about an unknown command. It lists similar names, as that about options does."""

    message = "No such command 'srve'. Did you mean 'serve'?"
    command_name = "srve"
    possibilities = ("serve",)

    def format_message(self) -> str:
        return f"{self.message} (Did you mean 'serve'?)"


def test_an_unknown_command_is_named_also_by_the_error_of_newer_versions_of_click():
    assert _mistake(NoSuchCommand()) == "there is no command 'srve'; did you mean 'serve'?"
