"""Reads recipes: files of this folder, each with settings of server, generator and trainer that belong together.

A command with --recipe reads its part of the file as if the user had written it into the file of --config. A setting of
the user overrides that of the recipe. Servers, generators and trainers do not know recipes, because the command passes
only settings to them.
"""

from __future__ import annotations

import json
import logging
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

Settings = Mapping[str, Any]
"""Settings by name, as in a TOML file."""
_FOLDER = Path(__file__).parent
RECIPES = tuple(sorted(path.stem for path in _FOLDER.glob("*.toml")))
"""The names of all recipes."""


def recipe_of(name: str) -> dict[str, Any]:
    """The contents of a recipe's file: the text `about`, and the settings of each command by the command's name.

    Raises a ValueError that lists the recipes if there is no recipe `name`.
    """
    if name not in RECIPES:
        raise ValueError(f"recipe must be one of {', '.join(RECIPES)}, not {name!r}")
    return tomllib.loads((_FOLDER / f"{name}.toml").read_text(encoding="utf-8"))


def show_recipe(name: str, command: str, actual: Settings) -> None:
    """Logs the actual value of each setting of the recipe, and also the recipe's value if that differs.

    `actual`: the settings with which the command runs. Call this function after the log is set up.
    """
    recipe = recipe_of(name)
    lines = [f"recipe {name}: {recipe['about']}"]
    for setting, recommended, value in _compare(recipe[command], actual):
        line = f"    {setting} = {json.dumps(value)}"
        if value != recommended:
            line += f"  (yours; the recipe has {json.dumps(recommended)})"
        lines.append(line)
    log = logging.getLogger("replay_server.recipe")
    log.setLevel(logging.INFO)  # some commands log only warnings, but the recipe must be shown
    # `has_lines` makes the formatter keep the line breaks. No value adds a line break, because JSON escapes them.
    log.info("\n".join(lines), extra={"has_lines": True})


def _compare(recipe: Settings, actual: Settings, section: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yields the full name (`section.name`), the recipe's value and the actual value of each setting of the recipe.

    `section`: the beginning of the full names, with a dot at its end.
    """
    for name, recommended in recipe.items():
        value = actual[name]
        if name == "tables" and isinstance(recommended[0], Mapping):  # the tables of a server, not names of tables
            recommended = _tables_by_name(recommended)
            value = _tables_by_name(value)
        if isinstance(recommended, Mapping) and isinstance(value, Mapping):
            # A setting that only the recipe has gets the actual value None.
            complete = {**dict.fromkeys(recommended), **value}
            yield from _compare(recommended, complete, f"{section}{name}.")
        else:
            yield f"{section}{name}", recommended, value


def _tables_by_name(tables: list[Settings]) -> Settings:
    """The settings of each table, by the table's name, which is left out of the settings."""
    settings_by_table: dict[str, Settings] = {}
    for table in tables:
        settings_by_table[table["name"]] = {name: value for name, value in table.items() if name != "name"}
    return settings_by_table
