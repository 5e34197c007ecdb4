"""Names of settings and of functions: what a name means, and an error that helps for one that means nothing."""

from __future__ import annotations

import difflib
import functools
import importlib
from collections.abc import Callable, Collection, Mapping
from dataclasses import fields
from typing import Any, TypeVar, get_args

T = TypeVar("T")


def unknown_name(name: str, known: Collection[str]) -> str:
    """The error for a name that is not in `known`: "there is no 'learning_rte'; did you mean 'learning_rate'?"."""
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(known)}"
    return f"there is no {name[:100]!r}; {hint}"


def check_choice(name: str, value: object, choices: Any) -> None:
    """Raises ValueError unless `value`, of the setting `name`, is one of a Literal type."""
    if value not in get_args(choices):
        raise ValueError(f"{name} must be one of {', '.join(get_args(choices))}, not {value!r}")


def suggests_names(kind: type[T]) -> type[T]:
    """Decorates a dataclass: its constructor raises TypeError for an unknown argument, and suggests the nearest name.

    Python's own error names the wrong argument and no other.
    """
    construct = kind.__init__
    known = [field.name for field in fields(kind) if field.init]  # type: ignore[arg-type]

    @functools.wraps(construct)
    def __init__(self: Any, *values: Any, **named: Any) -> None:
        for name in named:
            if name not in known:
                raise TypeError(f"{kind.__name__}: {unknown_name(name, known)}")
        construct(self, *values, **named)

    kind.__init__ = __init__  # type: ignore[method-assign]
    return kind


def load_function(kind: str, name: str, built_in: Mapping[str, Callable[..., Any]]) -> Callable[..., Any]:
    """The built-in function `name`, or the one that "package.module:function" names.

    `kind` says in errors what the function is for. Raises ValueError for a name that leads to no function.
    """
    if name in built_in:
        return built_in[name]
    module_name, colon, attribute = name.partition(":")
    if not (module_name and colon and attribute):
        names = ", ".join(map(repr, built_in))
        raise ValueError(f"{kind} must be {names} or 'package.module:function', not {name!r}")
    try:
        function = getattr(importlib.import_module(module_name), attribute)
    except ModuleNotFoundError as error:
        raise ValueError(f"{kind} {name!r}: {error}") from error
    except AttributeError as error:
        raise ValueError(f"{kind} {name!r}: module {module_name} has no {attribute}") from error
    if not callable(function):
        raise ValueError(f"{kind} {name!r} is a {type(function).__name__}, which cannot be called")
    loaded: Callable[..., Any] = function
    return loaded
