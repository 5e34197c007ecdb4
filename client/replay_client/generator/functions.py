"""Functions of the user's own, by the name "package.module:function"."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any


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
