"""`--recipe`: the option of `serve`, `generate` and `train`, and the block in which each of them shows its settings."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer

from replay_protos.recipes import RECIPES, RecipeSetting, recipe_of

log = logging.getLogger("replay_server.recipe")

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


def show_recipe(name: str, settings: Iterable[RecipeSetting]) -> None:
    """Logs each setting of the recipe, with what the user has set in its place. Call it when the log is set up."""
    lines = [f"recipe {name}: {recipe_of(name).about}"]
    for setting in settings:
        line = f"    {setting.name} = {_shown(setting.actual)}"
        lines.append(line if setting.kept else f"{line}  (yours; the recipe has {_shown(setting.wanted)})")
    log.setLevel(logging.INFO)  # a command whose log begins at warnings says this all the same
    log.info("\n".join(lines))


def _shown(value: object) -> str:
    """As a file has it, on one line."""
    return json.dumps(value, default=_named)


def _named(value: object) -> str:
    """What no file can have: a path, or a function."""
    return str(value) if isinstance(value, Path) else getattr(value, "__name__", repr(value))
