"""Recipes: settings of server, generator and trainer that belong together, in a file of this folder for each.

A command with --recipe takes its part of the file as if the user had written it into the file of --config. What a user
sets wins. Nobody else knows of recipes.
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


def recipe_of(name: str) -> dict[str, Any]:
    """What the file of this recipe holds: `about`, and the settings of the commands by their names.

    Raises ValueError that names the recipes that there are.
    """
    if name not in RECIPES:
        raise ValueError(f"recipe must be one of {', '.join(RECIPES)}, not {name!r}")
    return tomllib.loads((_FOLDER / f"{name}.toml").read_text(encoding="utf-8"))


def show_recipe(name: str, command: str, actual: Settings) -> None:
    """Logs each setting of the recipe, with what the user has set in its place. Call it when the log is set up."""
    recipe = recipe_of(name)
    lines = [f"recipe {name}: {recipe['about']}"]
    for place, wanted, found in _pairs(recipe[command], actual):
        line = f"    {place} = {json.dumps(found)}"
        lines.append(line if found == wanted else f"{line}  (yours; the recipe has {json.dumps(wanted)})")
    log = logging.getLogger("replay_server.recipe")
    log.setLevel(logging.INFO)  # a command whose log begins at warnings says this all the same
    log.info("\n".join(lines), extra={"has_lines": True})  # JSON, with all control characters written out


def _pairs(wanted: Settings, actual: Settings, place: str = "") -> Iterator[tuple[str, Any, Any]]:
    """The place of each setting of the recipe, what it has there, and what is there."""
    for name, value in wanted.items():
        found = actual[name]
        if name == "tables" and isinstance(value[0], Mapping):
            value, found = _by_name(value), _by_name(found)
        if isinstance(value, Mapping) and isinstance(found, Mapping):
            yield from _pairs(value, {**dict.fromkeys(value), **found}, f"{place}{name}.")
        else:
            yield f"{place}{name}", value, found


def _by_name(tables: list[Settings]) -> Settings:
    return {table["name"]: {name: value for name, value in table.items() if name != "name"} for table in tables}
