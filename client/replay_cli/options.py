"""Options of commands: those that a class of settings declares, and what a TOML file or a recipe gives.

An option is declared once. What a command passes on to a class of settings is declared there: `options_of` makes an
option of a field, with its name and type, and with the first clause of its docstring as the help: one line. Other
fields are set in the file of --config, or by --set NAME=VALUE.
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
"""Columns of the help, where the terminal has them."""
_FILE = "replay.file"
"""Where the `meta` of a context has the settings of the file."""
_NOT_IN_FILES = {"config", "set", "recipe", "check"}
"""Options of a command that a file does not have."""


def option(name: str, text: str, kind: Any = str, default: Any = None, *flags: str, **typers: Any) -> inspect.Parameter:
    """The option `--name`, or `flags`, as a parameter of a command. A default of None means: not given.

    `typers`: further arguments of typer.Option.
    """
    if kind == list[str]:
        typers = {"metavar": "TEXT"} | typers
    # Without its name, typer gives a switch that is on or off a `--no-name` too. One that is not given has none.
    usual = () if kind is bool and default is not None else (f"--{name.replace('_', '-')}",)
    shown = typer.Option(*(flags or usual), help=text, **typers)
    annotation = Annotated[kind | None, shown] if default is None else Annotated[kind, shown]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def options_of(kind: type, panel: str, *names: str) -> Options:
    """An option for each of these fields of a class of settings. `panel`: their group in the help."""
    declared = kind.__pydantic_fields__  # type: ignore[attr-defined]  # pydantic adds it to its dataclasses
    options = []
    for name in names:
        clause = re.split(r"\.(?:\s|$)|;| \(", " ".join(declared[name].description.split()))[0].rstrip(":")
        # A switch that nobody turns on is off.
        is_plain = declared[name].default in (None, False)
        default = "" if is_plain else f" [default: {_shown(declared[name].default)}]"
        plain, flag = _type_of(declared[name].annotation), name.replace("_", "-")
        flags = (f"--{flag}",) if plain is bool else ()
        form = _form_of(declared[name].annotation)
        more = {} if form is None else {"metavar": form}
        options.append(option(name, f"{clause}.{default}", plain, None, *flags, rich_help_panel=panel, **more))
    return options


def in_panel(panel: str, text: str, *flags: str, **typers: Any) -> Any:
    """An option in this group of the help, for a parameter of a command."""
    return typer.Option(*flags, help=text, rich_help_panel=panel, **typers)


def _shown(default: Any) -> str:
    return default if isinstance(default, str) else json.dumps(default)


def _form_of(annotation: Any) -> str | None:
    """The help shows this in the place of a value: its choices, or PATH. None: the help shows the type."""
    if get_origin(annotation) is Annotated:
        return _form_of(get_args(annotation)[0])
    if get_origin(annotation) is Literal:
        return "|".join(get_args(annotation))
    if get_origin(annotation) in (types.UnionType, typing.Union):
        forms = [_form_of(part) for part in get_args(annotation)]
        return next((form for form in forms if form is not None), None)
    return "PATH" if annotation is Path else None


def _type_of(annotation: Any) -> Any:
    """What the command line makes of a value. Names and functions are texts, which the class checks."""
    origin = get_origin(annotation)
    if origin is Annotated:
        return _type_of(get_args(annotation)[0])
    if origin in (types.UnionType, typing.Union):
        return next(kind for part in get_args(annotation) if (kind := _type_of(part)) is not type(None))
    if origin is Literal or annotation not in (bool, int, float, type(None)):
        return str
    return annotation


def taking(*groups: Options) -> Callable[[Callable[..., R]], Callable[..., R]]:
    """Decorator that adds options to a command. The command gets the values of each group as a dict, first of all."""

    def decorate(command: Callable[..., R]) -> Callable[..., R]:
        @functools.wraps(command)
        def run(**arguments: Any) -> R:
            values = [{parameter.name: arguments.pop(parameter.name) for parameter in group} for group in groups]
            return command(*values, **arguments)

        own = list(inspect.signature(command, eval_str=True).parameters.values())[len(groups) :]
        parameters = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in own]
        parameters += [parameter for group in groups for parameter in group]
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return run

    return decorate


def typed(values: Mapping[str, Any]) -> set[str]:
    """The names of the options that the person has given."""
    return {name for name, value in values.items() if value is not None}


def in_flags(message: str, names: Collection[str]) -> str:
    """`message`, with the setting that it begins with as a person types it if it is in `names`: `--tls-ca`."""
    name = re.split("[ :]", message, maxsplit=1)[0]
    return f"--{name.replace('_', '-')}{message.removeprefix(name)}" if name in names else message


# ------------------------------------------------------------------------------------------------ files and recipes

ABOUT_RECIPE = "Start from the settings of a recipe; yours override them."
RECIPE_CHOICES = "|".join(RECIPES)


class CommandSettings:
    """The settings of a command, which come from --config, --set, --recipe, and options of their own."""

    def __init__(self, *kinds: type, also: Collection[str] = (), without: Collection[str] = ()) -> None:
        """A file has the fields of these classes but those in `without`, the command's options, and sections `also`."""
        self._fields = ({field.name for kind in kinds for field in fields(kind)} | {*also}) - {*without}
        about = "TOML file with these options and all other settings."
        more = "Another setting as in the file; repeatable."
        self.options: Options = (
            option(
                "config", about, Path, None, "--config", "-c", metavar="FILE", callback=self._read_file, is_eager=True
            ),
            option("set", more, list[str], metavar="NAME=VALUE"),
            option("recipe", ABOUT_RECIPE, metavar=RECIPE_CHOICES),
        )

    def resolve(self, context: typer.Context, source: Mapping[str, Any], chosen: Mapping[str, Any]) -> dict[str, Any]:
        """The settings by name: of the recipe, of the file in their place, and of the command line.

        `source` has the values of `options`, and `chosen` those of settings that have an option of their own.
        """
        from replay_server.config import changed

        typed_settings = {
            name: json_or_word(value) for name, value in pairs("--set", source["set"], self._fields).items()
        }
        typed_settings |= {name: value for name, value in chosen.items() if value is not None}
        try:
            recipe = recipe_of(source["recipe"])[str(context.info_name)] if source["recipe"] is not None else {}
        except ValueError as error:
            misuse(error)
        return changed(recipe, context.meta.get(_FILE, {})) | typed_settings

    def _read_file(self, context: typer.Context, path: Path | None) -> Path | None:
        """Keeps the settings of the file, and makes its other values the defaults of the command's options."""
        if path is None:
            return None
        try:
            self.keep(context, parse_toml(path.read_text()))
        except OSError as error:
            raise typer.BadParameter(in_words(error)) from error
        except ValueError as error:  # of text, TOML and names
            raise typer.BadParameter(f"{path}: {error}") from error
        return path

    def keep(self, context: typer.Context, found: Mapping[str, Any]) -> None:
        """Keeps the settings in `found`, as in a file, and makes its other values the defaults of the command's
        options. Raises ValueError for a name that there is not."""
        own = {str(parameter.name): parameter for parameter in context.command.params}
        known = (own.keys() | self._fields) - _NOT_IN_FILES
        values = with_underscores(found)
        for name in values:
            if name not in known:
                raise ValueError(unknown_name(name, sorted(known)))
        context.meta[_FILE] = {name: value for name, value in values.items() if name in self._fields}
        context.default_map = {
            name: _as_option(value, multiple=getattr(own[name], "multiple", False))
            for name, value in values.items()
            if name not in self._fields
        }


def with_underscores(found: Mapping[str, Any]) -> dict[str, Any]:
    """Values of a file by their names in Python: `max-tokens` is `max_tokens`."""
    return {name.replace("-", "_"): value for name, value in found.items()}


def pairs(what: str, texts: Sequence[str] | None, known: Collection[str] = ()) -> dict[str, str]:
    """The values of texts NAME=VALUE by name. Ends the command where `named_values` raises ValueError."""
    try:
        return named_values(what, texts, known)
    except ValueError as error:
        misuse(error)


def named_values(what: str, texts: Sequence[str] | None, known: Collection[str] = ()) -> dict[str, str]:
    """The values of texts NAME=VALUE by name. Raises ValueError for another text, for a name that comes twice, and for
    one that is not in `known`, if that has any. `what` gave the texts: an option, for the line.
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
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _as_option(value: Any, *, multiple: bool) -> Any:
    """A value of a file as the command line takes it. A table gives `name=value` for each of its fields, or JSON."""
    if not multiple:
        return json.dumps(value) if isinstance(value, dict) else value
    if isinstance(value, dict):
        return [f"{name}={entry if isinstance(entry, str) else json.dumps(entry)}" for name, entry in value.items()]
    return value if isinstance(value, list) else [value]


# ------------------------------------------------------------------------------------------------ help


_FORMS = {"str": "TEXT", "int": "INTEGER", "float": "NUMBER", "Path": "PATH", "path": "PATH", "dir": "FOLDER"}
"""The help shows these in the place of a value, by typer's names of types, and choices as they are: `text|json`."""
_WIDEST = 40
"""Columns of the names of options, before their texts begin on a line of their own."""
_TYPE = re.compile(r"<(?:list\[)?(.+?)(?: range)?\]?>")
_NOTES = re.compile(r"\s*\[([^][]+)\]$")


class _InGroups:
    """A command whose help has its options in groups: those without a `rich_help_panel` first.

    It understands the options of the whole command, `replay --address X tables`, also where it stands before them:
    `replay tables --address X`. An option of its own that has the same name is its own.
    """

    def make_parser(self: Any, ctx: Any) -> Any:
        parser = super().make_parser(ctx)  # type: ignore[misc]
        root = ctx.find_root()
        further = {} if root is ctx else self._of_the_whole(root)
        for parameter in further.values():
            parameter.add_to_parser(parser, ctx)
        parse = parser.parse_args

        def parse_args(args: list[str]) -> tuple[dict[str, Any], list[str], list[Any]]:
            found, rest, order = parse(args=args)
            for name in found.keys() & further.keys():
                further[name].handle_parse_result(root, {name: found.pop(name)}, [])
            return found, rest, order

        parser.parse_args = parse_args
        return parser

    def _of_the_whole(self: Any, root: Any) -> dict[str, Any]:
        """The options of the whole command that this one has none of its own for, by name."""
        own = {parameter.name for parameter in self.params}
        return {each.name: each for each in root.command.params if not each.is_eager and each.name not in own}

    def collect_usage_pieces(self: Any, ctx: Any) -> list[str]:
        pieces = ["[OPTIONS]"]
        for parameter in self.get_params(ctx):
            if parameter.param_type_name == "argument":
                piece = f"{parameter.metavar}..." if parameter.nargs == -1 else str(parameter.metavar)
                pieces.append(piece if parameter.required else f"[{piece}]")
        if isinstance(self, TyperGroup):
            pieces.append("COMMAND ...")
        return pieces

    def format_options(self: Any, ctx: Any, formatter: Any) -> None:
        groups: defaultdict[str, list[Any]] = defaultdict(list, {"Arguments": [], "Options": []})
        for parameter in self.get_params(ctx):
            if record := parameter.get_help_record(ctx):
                usual = f"{parameter.param_type_name.title()}s"
                groups[getattr(parameter, "rich_help_panel", None) or usual].append(in_one_form(parameter, *record))
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
    while (found := _NOTES.search(text)) is not None:
        notes[:0] = found[1].split("; ")
        text = text[: found.start()]
    shown = []
    for note in notes:
        note = re.sub("^env var: ", "env: ", note)
        note = re.sub(r"^x>=(.*)$", r"from \1", note)
        shown.append(re.sub(r"^(.*)<=x<=(.*)$", r"\1 to \2", note))
    return names, f"{text} [{'; '.join(shown)}]" if shown else text


class _Command(_InGroups, TyperCommand):
    """One command."""


class _CommandGroup(_InGroups, TyperGroup):
    """A group of commands."""


class Commands(typer.Typer):
    """A group of commands, in the order in which they are added."""

    def __init__(self, text: str, **further: Any) -> None:
        wide = {"max_content_width": HELP_WIDTH}
        further = {"no_args_is_help": True, "rich_markup_mode": None, "context_settings": wide} | further
        super().__init__(cls=_CommandGroup, **(_help_of(text) | further))

    def add(self, *commands: Callable[..., Any], name: str | None = None, text: str | None = None) -> None:
        """`text`, or else the docstring of a command, is its help."""
        for command in commands:
            self.command(name, cls=_Command, **_help_of(text or inspect.getdoc(command) or ""))(command)


def _help_of(text: str) -> dict[str, Any]:
    """The help of a command. What follows "Example: " in its text stands below the options, as it is written."""
    about, _, example = text.partition("\n\nExample: ")
    return {"help": about, "epilog": f"\b\nExample: {example}" if example else None}
