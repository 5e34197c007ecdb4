"""Recipes: settings of server, generator and trainer that belong together, under one name.

A recipe is declared here, and nowhere else. `recipe = "replay"` in a file, `--recipe replay`, `ReplayServer(recipe=)`,
`GeneratorConfig.recipe` and `GRPOConfig.recipe` take their settings from here. What a user sets himself wins. That is
said at the start (`settings_of`), and `replay doctor` compares what all parts say with the same function.

Settings stand here as a file has them: plain data by name. This module knows none of the classes that check them,
because the three parts do not import each other.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

MOST_TEXT = 256
"""Characters of one setting that a client describes itself with; the server refuses more."""
Settings = Mapping[str, Any]
"""Settings by name, as in a TOML file."""


@dataclass(frozen=True)
class Recipe:
    """The settings of each part."""

    about: str
    """What it is for, and where it is described."""
    server: Settings
    """As in replay.toml: `admission`, and `tables` by their names."""
    generator: Settings
    """Fields of GeneratorConfig."""
    trainer: Settings
    """Fields of GRPOConfig."""


RECIPES: Mapping[str, Recipe] = {
    # docs/learning.md has the figures, and says why these settings go together.
    "replay": Recipe(
        about="four fresh and four stored groups a step (docs/how-to/recipe.md)",
        server={
            "admission": {
                "groups_per_step": 4,  # the fresh groups alone
                "max_staleness": 1,
            },
            "tables": {
                "rollouts": {"rate_limiter": {"type": "queue", "max_size": 16}, "forward_to": "replay"},
                "replay": {
                    "sampler": {"type": "prioritized", "exponent": 0.6},
                    "remover": {"type": "min_heap"},
                    "max_size": 256,
                },
            },
        },
        generator={"priority": "learnability", "tables": ["rollouts"]},
        trainer={
            "rollouts_table": "rollouts",
            "replay_table": "replay",
            "groups_per_step": 8,
            "replay_share": 0.5,
            "correction": {
                "objective": "bypass_reinforce",  # no clip ...
                "clip_min": 1.0,  # ... and weight 1 for every token
                "clip_max": 1.0,
                "off_policy_mask_threshold": 0.1,  # but a wrong answer leaves the loss once it is so much less likely
            },
        },
    ),
}


@dataclass(frozen=True)
class RecipeSetting:
    """One setting of a recipe, and what a part of a run has in its place."""

    name: str
    """Its place, like "tables.replay.max_size"."""
    wanted: Any
    """What the recipe says."""
    actual: Any
    """What this part has; None: it has nothing of this name."""

    @property
    def kept(self) -> bool:
        """Whether this part has what the recipe says."""
        return bool(self.actual == self.wanted)


def recipe_of(name: object) -> Recipe:
    """The recipe of this name. Raises ValueError that names those that there are."""
    if not isinstance(name, str) or name not in RECIPES:
        raise ValueError(f"recipe must be one of {', '.join(RECIPES)}, not {name!r}")
    return RECIPES[name]


def settings_of(wanted: Settings, actual: Settings, place: str = "") -> Iterator[RecipeSetting]:
    """Each setting that a part of a recipe declares, beside that of `actual`, which has the same form."""
    for name, value in wanted.items():
        found = actual.get(name)
        if isinstance(value, Mapping):
            yield from settings_of(value, found if isinstance(found, Mapping) else {}, f"{place}{name}.")
        else:
            yield RecipeSetting(f"{place}{name}", value, list(found) if isinstance(found, tuple) else found)


def with_recipe(wanted: Settings, own: Settings) -> dict[str, Any]:
    """The settings of a part of a recipe, with the user's `own` in their place, and what else the user has set."""
    return {**wanted, **own}


def described(part: str, actual: Settings, own: Settings) -> dict[str, str]:
    """What a generator or trainer says of itself: JSON by name, of `own` and of all settings that a recipe declares.

    `actual` has the settings as `settings_of` takes them. `read_described` is the opposite.
    """
    settings = {"part": part, **own}
    for recipe in RECIPES.values():
        settings |= {each.name: each.actual for each in settings_of(getattr(recipe, part), actual)}
    texts = {name: json.dumps(value, default=_name_of) for name, value in settings.items()}
    return {name: text for name, text in texts.items() if len(text) <= MOST_TEXT}


def read_described(settings: str) -> dict[str, Any]:
    """What a client has said of itself, from the `settings` of its ClientInfo. What is no JSON is a text.

    A client may say anything. `tables` is a list of names here, or nothing.
    """
    said: dict[str, Any] = {}
    for name, text in json.loads(settings or "{}").items():
        try:
            said[name] = json.loads(text)
        except (ValueError, RecursionError):
            said[name] = text
    if not (isinstance(tables := said.get("tables"), list) and all(isinstance(each, str) for each in tables)):
        said.pop("tables", None)
    return said


def _name_of(value: object) -> str:
    """Of what JSON cannot have, such as a function."""
    return str(getattr(value, "__qualname__", value))


def server_settings(wanted: Settings, own: Settings) -> dict[str, Any]:
    """As `with_recipe`, of a configuration of a server: field by field of [admission] and of each table.

    `own["tables"]` is a list, as in a file. A table of the recipe's keeps what the user's of that name does not set.
    """
    tables: dict[Any, dict[str, Any]] = {name: {"name": name, **table} for name, table in wanted["tables"].items()}
    others: list[Any] = []
    given: Sequence[Any] = own.get("tables") or ()
    for table in given:
        if isinstance(table, Mapping) and table.get("name") in tables:
            tables[table["name"]].update(table)
        else:
            others.append(table)
    admission = own.get("admission")
    if admission is None or isinstance(admission, Mapping):
        admission = {**wanted["admission"], **(admission or {})}
    return {**own, "admission": admission, "tables": [*tables.values(), *others]}
