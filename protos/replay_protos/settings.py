"""Says what is wrong with a setting, in one line, for server, client and trainer alike.

pydantic checks settings, and its errors have several lines. They do not name what there is instead.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pydantic import ValidationError


_MOST_NAMES = 12
"""Names of settings in one error."""


def unknown_name(name: object, known: Collection[str]) -> str:
    """The error for a name that is not in `known`: "there is no 'learning_rte'; did you mean 'learning_rate'?"."""
    near = difflib.get_close_matches(str(name), known, n=1)
    more = f" and {len(known) - _MOST_NAMES} more" if len(known) > _MOST_NAMES else ""
    hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join([*known][:_MOST_NAMES])}{more}"
    return f"there is no {str(name)[:100]!r}; {hint}"


def explain(error: ValidationError) -> str:
    """All that is wrong, a clause each: `tables.1.max_size: Input should be greater than or equal to 1, not 0`.

    Values of [security] are not shown.
    """
    clauses = []
    for problem in error.errors():
        place = ".".join(str(part) for part in problem["loc"])
        message = problem["msg"].removeprefix("Value error, ")
        value = problem["input"][:100] if isinstance(problem["input"], str) else problem["input"]
        shown = isinstance(value, str | float) or _is_small(value)
        # A secret written where the name of its file belongs must not come out in a log.
        given = f", not {value!r}" if shown and "security" not in problem["loc"] else ""
        if repr(value) in message:
            given = ""
        clauses.append(f"{place}: {message}{given}" if place else f"{message}{given}")
    return "; ".join(clauses)


def _is_small(value: object) -> bool:
    """Whether a value is a number that is worth showing (Python refuses to print very long ones)."""
    return isinstance(value, int) and abs(value) < 10**20
