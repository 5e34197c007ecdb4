"""Settings: dataclasses whose fields have choices and bounds, and the names of settings and of functions."""

from __future__ import annotations

import difflib
import functools
import importlib
import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import Field, field, fields
from numbers import Integral, Real
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from replay_client.units import listed
from replay_protos.recipes import RecipeSetting, described, recipe_of, settings_of, with_recipe

__all__ = [
    "RecipeSetting",
    "bounded",
    "check_choice",
    "check_fields",
    "described",
    "load_function",
    "recipe_of",
    "settings_of",
    "suggests_names",
    "unknown_name",
    "with_recipe",
]

T = TypeVar("T")

_MOST_NAMES = 12
"""Names of settings in one error."""


def bounded(
    default: Any,
    *,
    least: float | None = None,
    above: float | None = None,
    most: float | None = None,
    below: float | None = None,
) -> Any:
    """A field of numbers from `least` or above `above`, to `most` or below `below`; inf: finite numbers."""
    return field(default=default, metadata={"least": least, "above": above, "most": most, "below": below})


def check_fields(settings: Any) -> None:
    """Raises ValueError for a field that is not one of the choices of its Literal, no bool, or out of its bounds."""
    hints = _hints(settings.__class__)
    for each in fields(settings):
        _check(each, hints[each.name], getattr(settings, each.name))


@functools.cache
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)


def _check(each: Field[Any], hint: Any, value: Any) -> None:
    name, kinds = each.name, set(get_args(hint)) or {hint}
    may_be_none = type(None) in kinds
    if hint is bool and not isinstance(value, bool):
        raise ValueError(f"{name} must be true or false, not {value!r}")
    choices = [choice for kind in {hint, *kinds} if get_origin(kind) is Literal for choice in get_args(kind)]
    choices += [None] * (may_be_none and bool(choices))
    if choices:
        check_choice(name, value, choices)
    if not each.metadata or (value is None and may_be_none):
        return
    whole = float not in kinds
    if isinstance(value, bool) or not isinstance(value, Integral if whole else Real):
        raise ValueError(f"{name} must be a {'whole ' if whole else ''}number, not {value!r}")
    least, above, most, below = (each.metadata[bound] for bound in ("least", "above", "most", "below"))
    if least is not None and not value >= least:
        raise ValueError(f"{name} must be at least {least:g}, not {value}")
    if above is not None and not value > above:
        raise ValueError(f"{name} must be above {above:g}, not {value}")
    if most is not None and value > most:
        raise ValueError(f"{name} must be at most {most:g}, not {value}")
    if below is not None and not value < below:
        raise ValueError(f"{name} must be {'finite' if below == math.inf else f'below {below:g}'}, not {value}")


def unknown_name(name: str, known: Collection[str]) -> str:
    """The error for a name that is not in `known`: "there is no 'learning_rte'; did you mean 'learning_rate'?"."""
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"there are {listed(list(known), _MOST_NAMES)}"
    return f"there is no {name[:100]!r}; {hint}"


def check_choice(name: str, value: object, choices: Collection[object]) -> None:
    """Raises ValueError unless `value`, of the setting `name`, is one of the choices."""
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(map(str, choices))}, not {value!r}")


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
        names = "".join(f"{each!r} or " for each in built_in)
        raise ValueError(f"{kind} must be {names}'package.module:function', not {name!r}")
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
