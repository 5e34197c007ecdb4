"""Makes the options of commands, some from fields of settings classes, and reads settings of TOML files and recipes.

An option is declared once. If a command passes the value of an option on to a class of settings, a field of the class
declares the option: `options_of` makes an option from the name and the type of a field. The first clause of the field's
docstring is the help of the option. A field without an option is set in the file of --config, or by --set NAME=VALUE.
"""

from __future__ import annotations

import functools
import inspect
import json
import re
import types
import typing
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin

import typer
from typer.core import TyperCommand, TyperGroup

from replay_cli.output import in_words, misuse
from replay_cli.recipes import RECIPES, recipe_of
from replay_protos.settings import parse_toml, unknown_name

R = TypeVar("R")
Options = Sequence[inspect.Parameter]
HELP_WIDTH = 100
"""The width of the help in characters, unless the terminal is narrower."""
_FILE = "replay.file"
"""The key in a context's `meta` under which the settings in the file of --config are stored."""
_NOT_IN_FILES = {"config", "set", "recipe", "check"}
"""Options of a command that cannot stand in a file."""


def option(name: str, text: str, kind: Any = str, default: Any = None, *flags: str, **typers: Any) -> inspect.Parameter:
    """Makes the parameter of a command for the option `--name`. `text`: its help. `kind`: the type of its value.

    If the option is not given, its value is `default`. `flags`: names of the option on the command line that replace
    `--name`. `typers`: further arguments of typer.Option.
    """
    if kind == list[str]:  # the help shows the type of one value, not of the list
        typers = {"metavar": "TEXT"} | typers
    is_switch_with_default = kind is bool and default is not None
    # Without explicit flags, typer adds the flag `--no-name` to a switch. A switch whose default is None needs no such
    # flag, so its flag is explicit.
    if not flags and not is_switch_with_default:
        flags = (f"--{name.replace('_', '-')}",)
    declared = typer.Option(*flags, help=text, **typers)
    annotation: Any = Annotated[kind, declared]
    if default is None:
        annotation = Annotated[kind | None, declared]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def options_of(kind: type, panel: str, *names: str) -> Options:
    """Makes an option from each of these fields of a class of settings. `panel`: the group of these options in the
    help."""
    declared = kind.__pydantic_fields__  # type: ignore[attr-defined]  # pydantic adds it to its dataclasses
    options = []
    for name in names:
        field = declared[name]
        text = f"{_first_clause(field.description)}."
        if field.default not in (None, False):  # a switch is off by default, which needs no words
            text += f" [default: {_shown(field.default)}]"
        more = {"rich_help_panel": panel}
        metavar = _metavar_of(field.annotation)
        if metavar is not None:
            more["metavar"] = metavar
        # An option that is not given has the value None, because the class of settings has the actual default.
        options.append(option(name, text, _type_of(field.annotation), default=None, **more))
    return options


def _first_clause(text: str) -> str:
    """The beginning of a text, in one line: up to the end of a sentence, a semicolon or a bracket."""
    in_a_line = " ".join(text.split())
    return re.split(r"\.(?:\s|$)|;| \(", in_a_line)[0].rstrip(":")


def in_panel(panel: str, text: str, *flags: str, **typers: Any) -> Any:
    """Makes an option for a parameter of a command. The help shows the option in the group `panel`."""
    return typer.Option(*flags, help=text, rich_help_panel=panel, **typers)


def _shown(value: Any) -> str:
    """A value as a person types it: a text as it is, all else as JSON."""
    return value if isinstance(value, str) else json.dumps(value)


def _metavar_of(annotation: Any) -> str | None:
    """The word for a value in the help: its choices, or PATH. None: the help shows the type of the option."""
    if get_origin(annotation) is Annotated:
        return _metavar_of(get_args(annotation)[0])
    if get_origin(annotation) is Literal:
        return "|".join(get_args(annotation))
    if get_origin(annotation) in (types.UnionType, typing.Union):
        for member in get_args(annotation):
            metavar = _metavar_of(member)
            if metavar is not None:
                return metavar
        return None
    return "PATH" if annotation is Path else None


def _type_of(annotation: Any) -> Any:
    """The type to which the command line converts a value.

    Only switches and numbers are converted. All other values stay texts, and the class of settings checks them.
    """
    origin = get_origin(annotation)
    if origin is Annotated:
        return _type_of(get_args(annotation)[0])
    if origin in (types.UnionType, typing.Union):
        kinds = [_type_of(part) for part in get_args(annotation)]
        return next(kind for kind in kinds if kind is not type(None))
    # The type of None is returned as it is, so that the call for a union can leave it out.
    if origin is Literal or annotation not in (bool, int, float, type(None)):
        return str
    return annotation


def taking(*groups: Options) -> Callable[[Callable[..., R]], Callable[..., R]]:
    """Makes a decorator that adds options to a command.

    The first arguments of the command are dicts, one for each group: the values of the group's options by name.
    """

    def decorate(command: Callable[..., R]) -> Callable[..., R]:
        """Returns the function that typer calls. It collects the options of each group, and then calls `command`."""

        @functools.wraps(command)
        def run(**arguments: Any) -> R:
            dicts = []
            for group in groups:
                dicts.append({parameter.name: arguments.pop(parameter.name) for parameter in group})
            return command(*dicts, **arguments)

        declared = list(inspect.signature(command, eval_str=True).parameters.values())
        without_dicts = declared[len(groups) :]
        parameters = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in without_dicts]
        for group in groups:
            parameters += group
        # typer reads the options of a command from its signature and from its annotations.
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return run

    return decorate


def typed(values: Mapping[str, Any]) -> set[str]:
    """The names of the options that the person has given. `values`: name of an option -> its value; None: not given."""
    return {name for name, value in values.items() if value is not None}


def in_flags(message: str, names: Collection[str]) -> str:
    """Returns `message` with its first word replaced by the option of this name: `--tls-ca` for `tls_ca`.

    If the first word is not in `names`, returns `message` unchanged.
    """
    name = re.split("[ :]", message, maxsplit=1)[0]
    if name not in names:
        return message
    return f"--{name.replace('_', '-')}{message.removeprefix(name)}"


# ------------------------------------------------------------------------------------------------ files and recipes

ABOUT_RECIPE = "Start from the settings of a recipe; yours override them."
RECIPE_CHOICES = "|".join(RECIPES)


class CommandSettings:
    """The settings of a command: from --config, from --set, from --recipe, and from options for single settings."""

    def __init__(self, *kinds: type, also: Collection[str] = (), without: Collection[str] = ()) -> None:
        """A file may have the fields of `kinds` except `without`, the sections `also`, and the command's options."""
        self._fields = set(also)
        for kind in kinds:
            self._fields.update(field.name for field in fields(kind))
        self._fields.difference_update(without)
        config_help = "TOML file with these options and all other settings."
        set_help = "Another setting as in the file; repeatable."
        config_option = option(
            "config",
            config_help,
            Path,
            None,
            "--config",
            "-c",
            metavar="FILE",
            callback=self._read_file,
            is_eager=True,  # the file has the defaults of other options, so it is read before these options
        )
        self.options: Options = (
            config_option,
            option("set", set_help, list[str], metavar="NAME=VALUE"),
            option("recipe", ABOUT_RECIPE, metavar=RECIPE_CHOICES),
        )
        """The options --config, --set and --recipe of the command."""

    def resolve(self, context: typer.Context, source: Mapping[str, Any], chosen: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the settings by name. The command line overrides the file, and the file overrides the recipe.

        `source` has the values of `self.options` by name. `chosen` has the values of the options for single settings.
        """
        from replay_server.config import changed

        texts = pairs("--set", source["set"], self._fields)
        typed_settings = {name: json_or_word(text) for name, text in texts.items()}
        typed_settings |= {name: value for name, value in chosen.items() if value is not None}
        recipe: dict[str, Any] = {}
        if source["recipe"] is not None:
            try:
                parts = recipe_of(source["recipe"])
            except ValueError as error:
                misuse(error)
            recipe = parts[str(context.info_name)]  # a recipe has a part for each command, by the command's name
        file_settings = context.meta.get(_FILE, {})
        # If both have a section, the fields that the section has in the file override those in the recipe.
        settings = changed(recipe, file_settings)
        return settings | typed_settings

    def _read_file(self, context: typer.Context, path: Path | None) -> Path | None:
        """Reads the file of --config, and stores its values with `keep`. typer calls this with the value of --config.

        Raises BadParameter if the file cannot be read, or if `keep` refuses it.
        """
        if path is None:
            return None
        try:
            self.keep(context, parse_toml(path.read_text()))
        except OSError as error:
            raise typer.BadParameter(in_words(error)) from error
        except ValueError as error:  # the file is no text or no TOML, or has an unknown name
            raise typer.BadParameter(f"{path}: {error}") from error
        return path

    def keep(self, context: typer.Context, found: Mapping[str, Any]) -> None:
        """Stores the settings of a file, and makes the other values of the file the defaults of the command's options.

        `found`: the values in the file, by name. Raises ValueError for a name that is neither a setting nor an option.
        """
        options = {str(parameter.name): parameter for parameter in context.command.params}
        known = (options.keys() | self._fields) - _NOT_IN_FILES
        values = with_underscores(found)
        for name in values:
            if name not in known:
                raise ValueError(unknown_name(name, sorted(known)))
        settings = {}
        defaults = {}
        for name, value in values.items():
            if name in self._fields:
                settings[name] = value
            else:
                is_repeatable = getattr(options[name], "multiple", False)
                defaults[name] = _as_option(value, multiple=is_repeatable)
        context.meta[_FILE] = settings
        context.default_map = defaults


def with_underscores(found: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a file by their names in Python, such as `max_tokens` for `max-tokens`."""
    return {name.replace("-", "_"): value for name, value in found.items()}


def pairs(what: str, texts: Sequence[str] | None, known: Collection[str] = ()) -> dict[str, str]:
    """Calls `named_values`, and returns the values by name. If it raises ValueError, ends the command."""
    try:
        return named_values(what, texts, known)
    except ValueError as error:
        misuse(error)


def named_values(what: str, texts: Sequence[str] | None, known: Collection[str] = ()) -> dict[str, str]:
    """Splits texts of the form NAME=VALUE, and returns the values by name. `what`: the option with these texts, for the
    message of an error.

    Raises ValueError for a text of another form, and for a name that comes twice. If `known` is not empty, also raises
    ValueError for a name that is not in `known`.
    """
    values: dict[str, str] = {}
    for text in texts or ():
        name, equals, value = text.partition("=")
        if not name or not equals:
            raise ValueError(f"{what} {text!r} is not NAME=VALUE")
        if name in values:
            raise ValueError(f"{what} names {name!r} twice")
        if known and name not in known:
            raise ValueError(f"{what}: {unknown_name(name, sorted(known))}")
        values[name] = value
    return values


def json_or_word(text: str) -> Any:
    """Returns the value of a JSON text. A text that is no JSON is returned as it is."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _as_option(value: Any, *, multiple: bool) -> Any:
    """Returns a value of a file in the form that it would have on the command line.

    A TOML table becomes JSON or, if the option is repeatable (`multiple`), a text `name=value` for each field.
    """
    if isinstance(value, dict):
        if multiple:
            return [f"{name}={_shown(entry)}" for name, entry in value.items()]
        return json.dumps(value)
    if multiple and not isinstance(value, list):
        return [value]
    return value


# ------------------------------------------------------------------------------------------------ help


_FORMS = {"str": "TEXT", "int": "INTEGER", "float": "NUMBER", "Path": "PATH", "path": "PATH", "dir": "FOLDER"}
"""typer's name of the type of a value -> the word that stands for such a value in the help.

Choices, such as `text|json`, have no entry here, and the help shows them as they are."""
_WIDEST = 40
"""The greatest width, in characters, of the column with the names of the options. If the name of an option is longer,
its help begins on a line of its own."""
_TYPE = re.compile(r"<(?:list\[)?(.+?)(?: range)?\]?>")
"""The type of an option, as typer shows it: `<int>`, `<int range>` or `<list[str]>`."""
_NOTES = re.compile(r"\s*\[([^][]+)\]$")
"""The notes in brackets at the end of an option's help, as typer writes them: `[default: 20; x>=1]`."""


class _InGroups:
    """A command whose help shows its options in groups. The options without a `rich_help_panel` come first.

    The command also accepts the options of the root command behind its own name: `replay tables --address X` means the
    same as `replay --address X tables`. If the command itself has an option of the same name, its own option counts.
    """

    def make_parser(self: Any, ctx: Any) -> Any:
        """Overrides click's method. Adds the root's options to the parser, and passes their values on to the root."""
        parser = super().make_parser(ctx)  # type: ignore[misc]
        root = ctx.find_root()
        root_options = {} if root is ctx else self._options_of_root(root)
        for parameter in root_options.values():
            parameter.add_to_parser(parser, ctx)
        parse_all = parser.parse_args  # click's method, which parses the options of the command and of the root

        def parse_args(args: list[str]) -> tuple[dict[str, Any], list[str], list[Any]]:
            """Parses the arguments of the command, and passes the root's options on to the root. click calls this."""
            values, rest, order = parse_all(args=args)
            for name in values.keys() & root_options.keys():
                value = values.pop(name)
                # Stores the value in `root.params`, as if the option stood before the command.
                root_options[name].handle_parse_result(root, {name: value}, [])
            return values, rest, order

        parser.parse_args = parse_args
        return parser

    def _options_of_root(self: Any, root: Any) -> dict[str, Any]:
        """The options of the root command by name, without those that this command has too.

        Leaves out eager options, such as --version, which must stand before the command.
        """
        own_names = {parameter.name for parameter in self.params}
        options = {}
        for parameter in root.command.params:
            if not parameter.is_eager and parameter.name not in own_names:
                options[parameter.name] = parameter
        return options

    def collect_usage_pieces(self: Any, ctx: Any) -> list[str]:
        """Overrides click's method. Returns the words after the command's name in the line "Usage:" of the help."""
        pieces = ["[OPTIONS]"]
        for parameter in self.get_params(ctx):
            if parameter.param_type_name != "argument":
                continue
            piece = str(parameter.metavar)
            if parameter.nargs == -1:  # any number of values
                piece += "..."
            pieces.append(piece if parameter.required else f"[{piece}]")
        if isinstance(self, TyperGroup):
            pieces.append("COMMAND ...")
        return pieces

    def format_options(self: Any, ctx: Any, formatter: Any) -> None:
        """Overrides click's method. Writes the arguments and options in their groups, and then the commands."""
        # Heading of a group -> the records of its parameters. The two headings that are named here come first.
        groups: defaultdict[str, list[Any]] = defaultdict(list, {"Arguments": [], "Options": []})
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if not record:
                continue  # a hidden option
            names, text = record
            default_heading = f"{parameter.param_type_name.title()}s"  # "Arguments" or "Options"
            heading = getattr(parameter, "rich_help_panel", None) or default_heading
            groups[heading].append(in_one_form(parameter, names, text))
        for heading, records in groups.items():
            if records:
                with formatter.section(heading):
                    formatter.write_dl(records, col_max=_WIDEST)
        if isinstance(self, TyperGroup):
            self.format_commands(ctx, formatter)


def in_one_form(parameter: Any, names: str, text: str) -> tuple[str, str]:
    """Returns the names and the help of an option in the form that all options have in the help.

    For example: `--limit INTEGER` and `Most items. [default: 20; from 1]`. `names` and `text` are what typer shows.
    """
    if parameter.param_type_name == "argument":
        names = parameter.metavar
    else:
        names = _TYPE.sub(lambda match: _FORMS.get(match[1], match[1]), names)
    notes: list[str] = []
    while (match := _NOTES.search(text)) is not None:
        # Each match is the last pair of brackets of the text, so its notes come before those that are found already.
        notes[:0] = match[1].split("; ")
        text = text[: match.start()]
    shown = []
    for note in notes:
        note = re.sub("^env var: ", "env: ", note)
        note = re.sub(r"^x>=(.*)$", r"from \1", note)
        note = re.sub(r"^(.*)<=x<=(.*)$", r"\1 to \2", note)
        shown.append(note)
    if shown:
        text += f" [{'; '.join(shown)}]"
    return names, text


class _Command(_InGroups, TyperCommand):
    """One command."""


class _CommandGroup(_InGroups, TyperGroup):
    """A group of commands."""


class Commands(typer.Typer):
    """A group of commands, in the order in which they are added."""

    def __init__(self, text: str, **further: Any) -> None:
        """`text`: the help of the group, which may end with an example. `further`: other arguments of typer.Typer."""
        arguments = {
            **_help_of(text),
            "no_args_is_help": True,
            "rich_markup_mode": None,
            "context_settings": {"max_content_width": HELP_WIDTH},
            **further,
        }
        super().__init__(cls=_CommandGroup, **arguments)

    def add(self, *commands: Callable[..., Any], name: str | None = None, text: str | None = None) -> None:
        """Adds commands to the group. The help of a command is `text` or, without it, the docstring of the command."""
        for command in commands:
            help_text = text or inspect.getdoc(command) or ""
            decorate = self.command(name, cls=_Command, **_help_of(help_text))
            decorate(command)


def _help_of(text: str) -> dict[str, Any]:
    """The arguments of typer for the help of a command. The help shows the example of `text` below the options."""
    about, _, example = text.partition("\n\nExample: ")
    # Because of \b, click does not wrap the lines of the example.
    epilog = f"\b\nExample: {example}" if example else None
    return {"help": about, "epilog": epilog}
