"""The compose files and Dockerfiles as compose reads them: merged and interpolated."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parent.parent.parent
DOCKER = ROOT / "docker"


def instructions(dockerfile: Path) -> list[tuple[str, str]]:
    """(instruction, arguments) of all stages, continued lines joined, comments left out."""
    lines = [line for line in dockerfile.read_text().splitlines() if line.strip() and not line.lstrip().startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ").splitlines()
    return [(word.upper(), rest.strip()) for word, _, rest in (line.partition(" ") for line in joined)]


def last_stage(dockerfile: Path) -> list[tuple[str, str]]:
    found = instructions(dockerfile)
    start = max(number for number, (word, _) in enumerate(found) if word == "FROM")
    return found[start:]


def interpolate(value: Any, variables: Mapping[str, str]) -> Any:
    """`${NAME}` and `${NAME:-default}` in all strings."""
    if isinstance(value, str):

        def replace(match: re.Match[str]) -> str:
            name, _, default = match[1].partition(":-")
            return variables.get(name) or default

        return re.sub(r"\$\{([^}]+)\}", replace, value)
    if isinstance(value, dict):
        return {name: interpolate(entry, variables) for name, entry in value.items()}
    if isinstance(value, list):
        return [interpolate(entry, variables) for entry in value]
    return value


def merge(base: Any, over: Any, name: str = "") -> Any:
    """As compose merges files: maps by key, lists one after the other, commands and all else replaced."""
    if isinstance(base, dict) and isinstance(over, dict):
        return base | {key: merge(base[key], value, key) if key in base else value for key, value in over.items()}
    if isinstance(base, list) and isinstance(over, list) and name not in ("command", "entrypoint", "test"):
        return base + over
    return over


def load(*names: str, variables: Mapping[str, str] | None = None) -> dict[str, Any]:
    """The compose files of these names as one."""
    merged: Any = {}
    for name in names or ("compose.yaml",):
        merged = merge(merged, yaml.safe_load((DOCKER / name).read_text()))
    loaded: dict[str, Any] = interpolate(merged, variables or {})
    return loaded


def dockerfile_of(service: Mapping[str, Any]) -> Path | None:
    build = service.get("build")
    return None if build is None else DOCKER / build["context"] / build["dockerfile"]


def config_files(compose: Mapping[str, Any], service: Mapping[str, Any]) -> dict[str, Path]:
    """The files that compose mounts, by their path in the container."""
    mounted = {}
    for entry in service.get("configs", []):
        mounted[entry["target"]] = DOCKER / compose["configs"][entry["source"]]["file"]
    return mounted
