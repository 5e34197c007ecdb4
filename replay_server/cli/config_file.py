"""Lets a TOML file give the options of a command; the command line wins."""

from __future__ import annotations

import difflib
import json
import tomllib
from pathlib import Path
from typing import Annotated, Any

import typer


def _load(context: typer.Context, path: Path | None) -> Path | None:
    """Makes the values of the file the defaults of the command's options. Runs before they are looked at."""
    if path is None:
        return None
    try:
        given = tomllib.loads(path.read_text())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise typer.BadParameter(f"{path}: {error}") from error
    known = {parameter.name: parameter for parameter in context.command.params if parameter.name != "config"}
    defaults: dict[str, Any] = {}
    for name, value in given.items():
        field = name.replace("-", "_")
        if field not in known:
            near = difflib.get_close_matches(field, [str(other) for other in known], n=1)
            hint = f"did you mean {near[0]!r}?" if near else "`--help` lists the options"
            raise typer.BadParameter(f"{path}: there is no {name!r}; {hint}")
        defaults[field] = _listed(value) if getattr(known[field], "multiple", False) else value
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
