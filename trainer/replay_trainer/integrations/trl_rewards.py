"""Fingerprint of a run's reward functions. Runs that share a pool compare it, to see whether they share an objective.

It covers what Python can see of a function: its code, its defaults, and the plain values that it was made with. It
does not cover what the function reads when it runs, such as a file or a model.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from functools import partial
from types import CodeType
from typing import Any

_DEEPEST = 8
"""Levels of functions within functions that count."""


def fingerprint(names: Iterable[str], functions: Iterable[Any]) -> str:
    """16 hexadecimal digits for reward functions with their names, in their order."""
    description = repr((list(names), [_describe(function, _DEEPEST) for function in functions]))
    return hashlib.blake2b(description.encode(), digest_size=8).hexdigest()


def _describe(value: Any, levels: int) -> Any:
    if value is None or value is ... or isinstance(value, bool | int | float | complex | str | bytes):
        return repr(value)
    if not levels:
        return type(value).__qualname__
    if isinstance(value, list | tuple):
        return [_describe(each, levels - 1) for each in value]
    if isinstance(value, set | frozenset):
        return sorted(str(_describe(each, levels - 1)) for each in value)
    if isinstance(value, CodeType):
        return [value.co_code.hex(), value.co_names, _describe(value.co_consts, levels - 1)]
    if isinstance(value, partial):
        return _describe((value.func, value.args, sorted(value.keywords.items())), levels - 1)
    if isinstance(value, type):
        functions = sorted((name, each) for name, each in vars(value).items() if hasattr(each, "__code__"))
        return [value.__qualname__, *(_describe(each, levels - 1) for _, each in functions)]
    if (code := getattr(value, "__code__", None)) is None:
        return [type(value).__qualname__, _describe(vars(type(value)).get("__call__"), levels - 1)]
    made_with = [cell.cell_contents for cell in value.__closure__ or () if _filled(cell)]
    defaults = (value.__defaults__, sorted((value.__kwdefaults__ or {}).items()))
    return _describe((code, made_with, defaults), levels - 1)


def _filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:  # assigned later, or never
        return False
