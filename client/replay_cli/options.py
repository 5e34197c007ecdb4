"""Makes the options of commands, some from fields of settings classes, and reads settings of TOML files and recipes.

An option is declared once. If a command passes an option on to a class of settings, the class declares it:
`options_of` makes an option of a field, with its name and type. The first clause of the field's docstring is the help
of the option. All other fields are set in the file of --config, or by --set NAME=VALUE.
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
    """The option `--name`, or `flags`, as a parameter of a command. A default of None means: not given.

    `typers`: further arguments of typer.Option.
    """
    if kind == list[str]:  # the help shows the type of one value, not of the list
        typers = {"metavar": "TEXT"} | typers
    is_switch_with_default = kind is bool and default is not None
    # Without explicit flags, typer adds `--no-name` to a switch. A switch whose default means "not given" needs no such
    # flag, so its flag is given here.
    if not flags and not is_switch_with_default:
        flags = (f"--{name.replace('_', '-')}",)
    shown = typer.Option(*flags, help=text, **typers)
    annotation: Any = Annotated[kind, shown]
    if default is None:
        annotation = Annotated[kind | None, shown]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def options_of(kind: type, panel: str, *names: str) -> Options:
    """An option for each of these fields of a class of settings. `panel`: their group in the help."""
    declared = kind.__pydantic_fields__  # type: ignore[attr-defined]  # pydantic adds it to its dataclasses
    options = []
    for name in names:
        field = declared[name]
        text = f"{_first_clause(field.description)}."
        if field.default not in (None, False):  # a switch is off by default, which needs no words
            text += f" [default: {_shown(field.default)}]"
        more = {"rich_help_panel": panel}
        form = _form_of(field.annotation)
        if form is not None:
            more["metavar"] = form
        # The default is None, which means "not given": the class of settings has the actual default.
        options.append(option(name, text, _type_of(field.annotation), None, **more))
    return options


def _first_clause(text: str) -> str:
    """The text up to the first end of a sentence, semicolon or bracket, in one line."""
    in_a_line = " ".join(text.split())
    return re.split(r"\.(?:\s|$)|;| \(", in_a_line)[0].rstrip(":")


def in_panel(panel: str, text: str, *flags: str, **typers: Any) -> Any:
    """An option for a parameter of a command. The help shows it in the group `panel`."""
    return typer.Option(*flags, help=text, rich_help_panel=panel, **typers)


def _shown(value: Any) -> str:
    """A value as a person types it: a text as it is, all else as JSON."""
    return value if isinstance(value, str) else json.dumps(value)


def _form_of(annotation: Any) -> str | None:
    """The word for a value in the help: its choices, or PATH. None: the help shows the type."""
    if get_origin(annotation) is Annotated:
        return _form_of(get_args(annotation)[0])
    if get_origin(annotation) is Literal:
        return "|".join(get_args(annotation))
    if get_origin(annotation) in (types.UnionType, typing.Union):
        for member in get_args(annotation):
            form = _form_of(member)
            if form is not None:
                return form
        return None
    return "PATH" if annotation is Path else None


def _type_of(annotation: Any) -> Any:
    """The type to which the command line converts a value.

    Only switches and numbers are converted. All other values stay texts, which the class of settings checks.
    """
    origin = get_origin(annotation)
    if origin is Annotated:
        return _type_of(get_args(annotation)[0])
    if origin in (types.UnionType, typing.Union):
        kinds = [_type_of(part) for part in get_args(annotation)]
        return next(kind for kind in kinds if kind is not type(None))
    # The type of None stays, so that the union above can leave it out.
    if origin is Literal or annotation not in (bool, int, float, type(None)):
        return str
    return annotation


def taking(*groups: Options) -> Callable[[Callable[..., R]], Callable[..., R]]:
    """Makes a decorator that adds options to a command.

    The first arguments of the command are dicts, one for each group: the values of the group's options by name.
    """

    def decorate(command: Callable[..., R]) -> Callable[..., R]:
        """Returns the function that typer calls: it collects the options of each group, and calls `command`."""

        @functools.wraps(command)
        def run(**arguments: Any) -> R:
            dicts = []
            for group in groups:
                dicts.append({parameter.name: arguments.pop(parameter.name) for parameter in group})
            return command(*dicts, **arguments)

        declared = list(inspect.signature(command, eval_str=True).parameters.values())
        own = declared[len(groups) :]  # without the dicts
        parameters = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in own]
        for group in groups:
            parameters += group
        # typer reads the options of a command from its signature and from its annotations.
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return run

    return decorate


def typed(values: Mapping[str, Any]) -> set[str]:
    """The names of the options that the person has given."""
    return {name for name, value in values.items() if value is not None}


def in_flags(message: str, names: Collection[str]) -> str:
    """`message`, with its first word as an option of the command line: `--tls-ca` for `tls_ca`.

    A first word that is not in `names` stays as it is.
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
        about = "TOML file with these options and all other settings."
        more = "Another setting as in the file; repeatable."
        self.options: Options = (
            # Eager: the file has the defaults of other options, so it is read before them.
            option(
                "config", about, Path, None, "--config", "-c", metavar="FILE", callback=self._read_file, is_eager=True
            ),
            option("set", more, list[str], metavar="NAME=VALUE"),
            option("recipe", ABOUT_RECIPE, metavar=RECIPE_CHOICES),
        )
        """The options --config, --set and --recipe of the command."""

    def resolve(self, context: typer.Context, source: Mapping[str, Any], chosen: Mapping[str, Any]) -> dict[str, Any]:
        """The settings by name. The command line overrides the file, and the file overrides the recipe.

        `source` has the values of `options` by name. `chosen` has the values of the options for single settings.
        """
        from replay_server.config import changed

        texts = pairs("--set", source["set"], self._fields)
        typed_settings = {name: json_or_word(text) for name, text in texts.items()}
        typed_settings |= {name: value for name, value in chosen.items() if value is not None}
        recipe: dict[str, Any] = {}
        if source["recipe"] is not None:
            try:
                recipe = recipe_of(source["recipe"])[str(context.info_name)]  # the part of this command, by its name
            except ValueError as error:
                misuse(error)
        settings = changed(recipe, context.meta.get(_FILE, {}))  # in a section of both, fields of the file override
        return settings | typed_settings

    def _read_file(self, context: typer.Context, path: Path | None) -> Path | None:
        """Stores the values of the file of --config (see `keep`). Raises BadParameter."""
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

        `found`: the values in the file, by name.

        Raises ValueError for a name that is neither a setting nor an option.
        """
        own = {str(parameter.name): parameter for parameter in context.command.params}  # the command's options
        known = (own.keys() | self._fields) - _NOT_IN_FILES
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
                defaults[name] = _as_option(value, multiple=getattr(own[name], "multiple", False))
        context.meta[_FILE] = settings
        context.default_map = defaults


def with_underscores(found: Mapping[str, Any]) -> dict[str, Any]:
    """Values of a file by their names in Python: `max-tokens` is `max_tokens`."""
    return {name.replace("-", "_"): value for name, value in found.items()}


def pairs(what: str, texts: Sequence[str] | None, known: Collection[str] = ()) -> dict[str, str]:
    """The values of texts NAME=VALUE by name. Ends the command if `named_values` raises ValueError."""
    try:
        return named_values(what, texts, known)
    except ValueError as error:
        misuse(error)


def named_values(what: str, texts: Sequence[str] | None, known: Collection[str] = ()) -> dict[str, str]:
    """The values of texts NAME=VALUE by name. `what`: the option that has the texts, for the message of an error.

    Raises ValueError for a text of another form, for a name that comes twice, and for a name that is not in `known`,
    unless `known` is empty.
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
    """The value of a JSON text. A text that is no JSON stays as it is."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _as_option(value: Any, *, multiple: bool) -> Any:
    """A value of a file in the form that it would have on the command line.

    A TOML table becomes JSON or, if the option is repeatable (`multiple`), a text `name=value` for each field.
    """
    if not multiple:
        return json.dumps(value) if isinstance(value, dict) else value
    if isinstance(value, dict):
        return [f"{name}={_shown(entry)}" for name, entry in value.items()]
    return value if isinstance(value, list) else [value]


# ------------------------------------------------------------------------------------------------ help


_FORMS = {"str": "TEXT", "int": "INTEGER", "float": "NUMBER", "Path": "PATH", "path": "PATH", "dir": "FOLDER"}
"""The word that stands for a value in the help, by typer's name of its type. Choices stay: `text|json`."""
_WIDEST = 40
"""The widest column of names of options. The help of a longer name begins on a line of its own."""
_TYPE = re.compile(r"<(?:list\[)?(.+?)(?: range)?\]?>")
"""The type of an option, as typer shows it: `<int>`, `<int range>` or `<list[str]>`."""
_NOTES = re.compile(r"\s*\[([^][]+)\]$")
"""The notes in brackets at the end of an option's help, as typer writes them: `[default: 20; x>=1]`."""


class _InGroups:
    """A command whose help shows its options in groups. The options without a `rich_help_panel` come first.

    The command also accepts the options of the root command behind its own name: `replay tables --address X` is
    `replay --address X tables`. If the command has an option of the same name, its own option counts.
    """

    def make_parser(self: Any, ctx: Any) -> Any:
        """Overrides click's method. Adds the root's options to the parser, and passes their values on to the root."""
        parser = super().make_parser(ctx)  # type: ignore[misc]
        root = ctx.find_root()
        further = {} if root is ctx else self._options_of_root(root)
        for parameter in further.values():
            parameter.add_to_parser(parser, ctx)
        parse = parser.parse_args

        def parse_args(args: list[str]) -> tuple[dict[str, Any], list[str], list[Any]]:
            """click calls this with the arguments of the command. Passes the root's options on to the root."""
            values, rest, order = parse(args=args)
            for name in values.keys() & further.keys():
                # Stores the value in `root.params`, as if it stood before the command.
                further[name].handle_parse_result(root, {name: values.pop(name)}, [])
            return values, rest, order

        parser.parse_args = parse_args
        return parser

    def _options_of_root(self: Any, root: Any) -> dict[str, Any]:
        """The options of the root command by name, without those that this command has too."""
        own = {parameter.name for parameter in self.params}
        options = {}
        for parameter in root.command.params:
            if not parameter.is_eager and parameter.name not in own:  # --version is eager, and stays with the root
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
        # The records of each group by its heading. The headings here come first, if they have records.
        groups: defaultdict[str, list[Any]] = defaultdict(list, {"Arguments": [], "Options": []})
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if not record:
                continue  # a hidden option
            names, text = record
            heading = getattr(parameter, "rich_help_panel", None) or f"{parameter.param_type_name.title()}s"
            groups[heading].append(in_one_form(parameter, names, text))
        for heading, records in groups.items():
            if records:
                with formatter.section(heading):
                    formatter.write_dl(records, col_max=_WIDEST)
        if isinstance(self, TyperGroup):
            self.format_commands(ctx, formatter)


def in_one_form(parameter: Any, names: str, text: str) -> tuple[str, str]:
    """The record of an option in the help, in one form: `--limit INTEGER`, `Most items. [default: 20; from 1]`."""
    if parameter.param_type_name == "argument":
        names = parameter.metavar
    else:
        names = _TYPE.sub(lambda match: _FORMS.get(match[1], match[1]), names)
    notes: list[str] = []
    while (match := _NOTES.search(text)) is not None:
        notes[:0] = match[1].split("; ")  # the last notes are found first
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
        """Adds commands to the group. `text`, or else the docstring of a command, is its help."""
        for command in commands:
            help_text = text or inspect.getdoc(command) or ""
            decorate = self.command(name, cls=_Command, **_help_of(help_text))
            decorate(command)


def _help_of(text: str) -> dict[str, Any]:
    """The arguments of typer for the help of a command. The help shows the example of `text` below the options."""
    about, _, example = text.partition("\n\nExample: ")
    # click does not wrap the lines after \b.
    epilog = f"\b\nExample: {example}" if example else None
    return {"help": about, "epilog": epilog}
