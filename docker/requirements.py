"""Prints what a pyproject.toml asks for, with the extras that are named: images install it before the code.

Usage: requirements.py PYPROJECT [EXTRA ...]
"""

import sys
import tomllib
from pathlib import Path


def requirements(project: dict, extras: list[str]) -> list[str]:
    """The dependencies of the project and of these extras, and of the extras that those name."""
    found = list(project["dependencies"])
    own = f"{project['name']}["
    for extra in extras:
        if extra not in project["optional-dependencies"]:
            raise SystemExit(f"no extra {extra!r}: {', '.join(project['optional-dependencies'])} are there")
        for line in project["optional-dependencies"][extra]:
            if line.startswith(own):
                found += requirements(project | {"dependencies": []}, line[len(own) : -1].split(","))
            else:
                found.append(line)
    return list(dict.fromkeys(found))


if __name__ == "__main__":
    path, *extras = " ".join(sys.argv[1:]).split()
    print("\n".join(requirements(tomllib.loads(Path(path).read_text())["project"], extras)))
