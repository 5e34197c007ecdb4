"""Options that several commands share, that a dataclass declares, or that a TOML file gives.

An option is declared once. What a command passes on to a dataclass unchanged is declared there: `options_of` makes an
option of each field, with the field's name, type and default, and with the first sentence of its docstring as the help.
"""

from __future__ import annotations

import ast
import functools
import inspect
import json
import re
import tomllib
from collections.abc import Callable, Collection, Mapping, Sequence
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from replay_protos.recipes import RECIPES, recipe_of

R = TypeVar("R")
Options = Sequence[inspect.Parameter]


def option(name: str, text: str, kind: Any = str, default: Any = None, **typers: Any) -> inspect.Parameter:
    """The option `--name` as a parameter of a command. A default of None means: not given.

    `typers`: further arguments of typer.Option.
    """
    # Without its name, typer gives a switch that is on or off a `--no-name` too. One that is not given has none.
    names = () if kind is bool and default is not None else (f"--{name.replace('_', '-')}",)
    shown = typer.Option(*names, help=text, **typers)
    annotation = Annotated[kind | None, shown] if default is None else Annotated[kind, shown]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def options_of(file: str, kind: str, *, without: Collection[str]) -> Options:
    """An option for each field of the dataclass `kind`, but for those in `without`.

    Reads the source of `file`, such as "replay_client/generator/config.py", and does not import it: every call of
    `replay` makes the options of all commands, and the generator takes a second to import.
    """
    package, _, rest = file.partition("/")
    spec = find_spec(package)
    assert spec is not None
    assert spec.origin is not None
    tree = ast.parse((Path(spec.origin).parent / rest).read_text(encoding="utf-8"))
    [found] = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == kind]
    options = []
    for field, below in pairwise(found.body):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and field.target.id not in without:
            assert field.value is not None
            assert isinstance(below, ast.Expr)
            value = field.value.args[0] if isinstance(field.value, ast.Call) else field.value  # bounded(8, least=1)
            text, default = ast.literal_eval(below.value), ast.literal_eval(value)
            first_sentence = re.split(r"(?<=\.)\s", " ".join(text.split()))[0]
            options.append(option(field.target.id, first_sentence, _type_of(ast.unparse(field.annotation)), default))
    return options


def _type_of(annotation: str) -> Any:
    """What the command line makes of a value. Names and functions are texts, which the dataclass checks."""
    if "PathLike" in annotation:
        return Path
    return {"bool": bool, "int": int, "float": float}.get(annotation.removesuffix(" | None"), str)


def taking(*groups: Options) -> Callable[[Callable[..., R]], Callable[..., R]]:
    """Decorator that adds options to a command. The command gets the values of each group as a dict, first of all."""

    def decorate(command: Callable[..., R]) -> Callable[..., R]:
        @functools.wraps(command)
        def run(**given: Any) -> R:
            values = [{parameter.name: given.pop(parameter.name) for parameter in group} for group in groups]
            return command(*values, **given)

        own = list(inspect.signature(command, eval_str=True).parameters.values())[len(groups) :]
        parameters = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in own]
        parameters += [parameter for group in reversed(groups) for parameter in group]
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return run

    return decorate


def typed(values: Mapping[str, Any]) -> set[str]:
    """The names of the options that the person has given."""
    return {name for name, value in values.items() if value is not None}


def in_flags(message: str, names: Collection[str]) -> str:
    """`message`, with the setting that it begins with as a person types it if it is in `names`: `--tls-ca`."""
    name = message.partition(" ")[0]
    return f"--{name.replace('_', '-')}{message.removeprefix(name)}" if name in names else message


def _load(context: typer.Context, path: Path | None) -> Path | None:
    """Makes the values of the file the defaults of the command's options. Runs before they are looked at."""
    if path is None:
        return None
    from replay_client.settings import unknown_name

    try:
        given = tomllib.loads(path.read_text())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise typer.BadParameter(f"{path}: {error}") from error
    known = {str(parameter.name): parameter for parameter in context.command.params if parameter.name != "config"}
    defaults: dict[str, Any] = {}
    for name, value in given.items():
        field = name.replace("-", "_")
        if field not in known:
            raise typer.BadParameter(f"{path}: {unknown_name(name, known)}")
        if getattr(known[field], "multiple", False):
            value = _listed(value)
        elif isinstance(value, dict):
            value = json.dumps(value)  # what the command line takes as JSON
        defaults[field] = value
    context.default_map = {**(context.default_map or {}), **defaults}
    return path


def _listed(value: Any) -> list[Any]:
    """The values of an option that may be repeated. A table gives `name=value` for each of its fields."""
    if isinstance(value, dict):
        return [f"{name}={entry if isinstance(entry, str) else json.dumps(entry)}" for name, entry in value.items()]
    return value if isinstance(value, list) else [value]


ConfigFile = Annotated[
    Path | None,
    typer.Option(
        "--config",
        "-c",
        callback=_load,
        is_eager=True,
        help="TOML file with these options, such as max_tokens = 1024; the command line wins.",
    ),
]


# ------------------------------------------------------------------------------------------------ recipes

_HELP = f"Take settings that belong together: {' or '.join(RECIPES)}. What you set yourself wins. [none]"

RecipeOption = Annotated[str | None, typer.Option("--recipe", help=_HELP)]


def _be_defaults(context: typer.Context, name: str | None) -> str | None:
    """Makes the generator's part of the recipe the defaults of the command's options. The file's values stay."""
    if name is None:
        return None
    try:
        wanted = recipe_of(name).generator
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    # `tables` is typed as --table.
    defaults = {"table" if field == "tables" else field: value for field, value in wanted.items()}
    context.default_map = {**defaults, **(context.default_map or {})}
    return name


RecipeOfOptions = Annotated[str | None, typer.Option("--recipe", callback=_be_defaults, is_eager=True, help=_HELP)]
"""--recipe of a command whose settings are options. Declare it after --config, whose file may name the recipe."""
