"""Settings: frozen dataclasses whose fields pydantic checks, what a process says of its own, and functions by name.

A module of settings imports nothing heavy, so that the command line makes its options of them.
"""

from __future__ import annotations

import functools
import importlib
import json
import traceback
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Annotated, Any, TypeVar, dataclass_transform

from pydantic import AfterValidator, ConfigDict, Field, ValidationError
from pydantic.dataclasses import dataclass

from replay_protos.settings import explain, unknown_name

T = TypeVar("T")

Count = Annotated[int, Field(ge=1)]
Whole = Annotated[int, Field(ge=0)]
Seconds = Annotated[float, Field(gt=0)]
Finite = Annotated[float, Field(ge=0, allow_inf_nan=False)]
"""From 0."""
Share = Annotated[float, Field(ge=0, le=1)]
FixedPath = Annotated[str | Path, AfterValidator(lambda path: _absolute(path))]
"""A relative path counts from the folder in which the process makes its settings: users' code may leave that later. An
address stays what it is."""
Names = Annotated[tuple[str, ...], Field(strict=False)]
"""Also from a list, as files have it."""

SETTINGS_FILE = "settings.json"
"""The file of a trainer's settings, beside its metrics. `config.json` is the name of a model's file, which may stand
there."""
MOST_TEXT = 256
"""Characters of one setting that a process describes itself with: the server takes 4 kB of all."""


@dataclass_transform(frozen_default=True)
def settings(*, kw_only: bool = False) -> Callable[[type[T]], type[T]]:
    """Decorates a class: a frozen dataclass whose fields pydantic checks, each with its docstring as description.

    A text is no number, and true is no 1; a list is a tuple where a field says so (`Names`). Its constructor raises
    ValueError in one line for what pydantic refuses, and suggests the nearest name for one that
    there is not.
    """

    def decorate(kind: type[T]) -> type[T]:
        config = ConfigDict(strict=True, arbitrary_types_allowed=True, use_attribute_docstrings=True)
        checked: type[Any] = dataclass(frozen=True, kw_only=kw_only, config=config)(kind)
        construct, known = checked.__init__, [each.name for each in fields(checked)]

        @functools.wraps(construct)
        def __init__(self: Any, *values: Any, **named: Any) -> None:
            for name in named:
                if name not in known:
                    raise ValueError(f"{kind.__name__}: {unknown_name(name, known)}")
            try:
                construct(self, *values, **named)
            except ValidationError as error:
                raise ValueError(explain(error)) from None

        checked.__init__ = __init__
        return checked

    return decorate


def _absolute(path: str | Path) -> str | Path:
    if isinstance(path, Path):
        return path.absolute()
    return path if "://" in path else str(Path(path).absolute())


def check_choice(name: str, value: object, choices: Collection[object]) -> None:
    """Raises ValueError unless `value`, of the setting `name`, is one of the choices."""
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(map(str, choices))}, not {value!r}")


def described(part: str, own: Mapping[str, Any]) -> dict[str, str]:
    """What a generator or trainer says of itself (`describe`): JSON by name.

    `records.read_described` is the opposite. Leaves out a value that is too long.
    """
    texts = {name: json.dumps(value, default=_name_of) for name, value in {"part": part, **own}.items()}
    return {name: text for name, text in texts.items() if len(text) <= MOST_TEXT}


def as_json(own: Any) -> str:
    """All settings of an object that `settings` decorates, as JSON for people and the dashboard."""
    return json.dumps(asdict(own), indent=1, default=_name_of) + "\n"


def _name_of(value: object) -> str:
    """Of what JSON cannot have, such as a function."""
    return str(getattr(value, "__qualname__", value))


def load_function(kind: str, name: str, built_in: Mapping[str, Callable[..., Any]]) -> Callable[..., Any]:
    """The built-in function `name`, or the one that "package.module:function" names.

    `kind` says in errors what the function is for. Raises ValueError for a name that leads to no function.
    """
    if name in built_in:
        return built_in[name]
    module_name, colon, attribute = name.partition(":")
    if not (module_name and colon and attribute):
        names = "".join(f"{each!r} or " for each in built_in)
        raise ValueError(f"{kind} must be {names}'package.module:function', not {name!r}")
    try:
        function = getattr(importlib.import_module(module_name), attribute)
    except (ModuleNotFoundError, AttributeError) as error:
        raise ValueError(f"{kind} {name!r}: {error}") from error
    except (Exception, SystemExit) as error:
        raised = f"{type(error).__name__}: {error}{raised_in(error, skip=1)}"
        raise ValueError(f"{kind} {name!r}: its module cannot be imported, for it raised {raised}") from error
    if not callable(function):
        raise ValueError(f"{kind} {name!r} is a {type(function).__name__}, which cannot be called")
    loaded: Callable[..., Any] = function
    return loaded


def raised_in(error: BaseException, *, skip: int) -> str:
    """The file and line that raised an error, in brackets after a space; empty if only the caller did.

    `skip`: the innermost frames of the caller, which are not the user's. Lines of Python that import a module do not
    count.
    """
    frames = traceback.extract_tb(error.__traceback__)[skip:]
    lines = [frame for frame in frames if not frame.filename.startswith("<frozen ")]
    return f" ({lines[-1].filename}, line {lines[-1].lineno})" if lines else ""
