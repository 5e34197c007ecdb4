"""Every public name has a docstring: what a package exports, and what the reference pages show of its modules."""

from __future__ import annotations

import ast
import importlib
import inspect
import textwrap
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
from pydantic import BaseModel

import replay_server
from docs.generate_reference import PYTHON

PACKAGES = ("replay_client", "replay_server", "replay_trainer")


def documented_modules() -> list[str]:
    """The modules that a reference page shows as a whole."""
    shown = {name for page in PYTHON.values() for names in page.values() for name in names}
    return sorted(name for name in shown if name.rpartition(".")[2].islower())


def public_names(module: ModuleType) -> Iterator[tuple[str, Any]]:
    for name, value in vars(module).items():
        defined_here = not name.startswith("_") and getattr(value, "__module__", None) == module.__name__
        if defined_here or name in getattr(module, "__all__", ()):
            yield name, value


def without_docstring(name: str, value: Any) -> Iterator[str]:
    """`name`, and those public members of a class, that say nothing about themselves."""
    if not (inspect.isclass(value) or inspect.isroutine(value)):
        return
    if not inspect.getdoc(value):
        yield name
    if inspect.isclass(value):
        for member, entry in vars(value).items():
            is_routine = inspect.isroutine(entry) or isinstance(entry, property | classmethod | staticmethod)
            if not member.startswith("_") and is_routine and not inspect.getdoc(getattr(value, member)):
                yield f"{name}.{member}"


@pytest.mark.parametrize("module", [*PACKAGES, *documented_modules()])
def test_every_public_name_says_what_it_is(module):
    loaded = importlib.import_module(module)
    assert inspect.getdoc(loaded), f"{module} has no docstring"
    missing = [line for name, value in public_names(loaded) for line in without_docstring(f"{module}.{name}", value)]
    assert not missing, f"without a docstring: {', '.join(missing)}"


def models() -> list[type[BaseModel]]:
    """Those with fields of their own; Config only names their sections."""
    exported = [getattr(replay_server, name) for name in replay_server.__all__]
    sections = [value for value in exported if inspect.isclass(value) and issubclass(value, BaseModel)]
    return [value for value in sections if value is not replay_server.Config]


@pytest.mark.parametrize("model", models(), ids=lambda model: model.__name__)
def test_every_field_of_the_configuration_says_what_it_means(model):
    (source,) = ast.parse(textwrap.dedent(inspect.getsource(model))).body
    assert isinstance(source, ast.ClassDef)
    missing = [
        node.target.id
        for node, after in zip(source.body, [*source.body[1:], None], strict=True)
        if isinstance(node, ast.AnnAssign)
        and isinstance(node.target, ast.Name)
        and not (isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant))
    ]
    assert not missing, f"{model.__name__}: no docstring under {', '.join(missing)}"
