"""Says what is wrong with a setting, in one line, for server, client and trainer alike.

pydantic checks settings, but its errors have several lines, and do not list the names that exist.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pydantic import ValidationError


_MOST_NAMES = 12
"""The most names of settings that one error lists."""


def parse_toml(text: str) -> dict[str, Any]:
    """Parses the text of a TOML file into settings.

    Raises TOMLDecodeError if the text is not TOML, or if its lists and tables are nested too deeply.
    """
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise tomllib.TOMLDecodeError("its lists or tables are nested too deeply") from None


def unknown_name(name: object, known: Collection[str]) -> str:
    """The error for a name that is not in `known`: "there is no 'learning_rte'; did you mean 'learning_rate'?"."""
    near = difflib.get_close_matches(str(name), known, n=1)  # the most similar known name, or an empty list
    more = f" and {len(known) - _MOST_NAMES} more" if len(known) > _MOST_NAMES else ""
    hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join([*known][:_MOST_NAMES])}{more}"
    return f"there is no {str(name)[:100]!r}; {hint}"


_IN_OUR_WORDS = (
    (r"^Field required$", "is needed"),
    (r"^Input should be ", "must be "),
    (r"^Input is not a valid path.*", "must be a path"),
    (r"^(String|Tuple|List|Dictionary|Set) should have ", "must have "),
    (r"^Extra inputs are not permitted$", "is no setting"),
    (r"^String should match pattern ", "must match the pattern "),
    (r"^('.*') is not one of (.*)\.$", r"must be one of \2, not \1"),
    ("greater than or equal to", "at least"),
    ("less than or equal to", "at most"),
    ("a valid integer.*", "a whole number"),
    ("a valid number.*", "a number"),
    ("a valid boolean.*", "true or false"),
    ("a valid string.*", "a text"),
    ("a valid (tuple|list|array).*", "a list"),
    (" after validation", ""),
    ("a valid dictionary.*", "an object of names and values"),
)
"""Pairs: a regular expression for words of pydantic or click, and our words in their place."""
_VALUE_ERROR = "Value error, "
"""The words that pydantic puts before the message of a ValueError that a check of ours raised."""
_VERBS = ("must ", "is needed", "is no setting")
"""Messages that begin with one of these follow the name of a setting without a colon."""


def in_our_words(message: str) -> str:
    """A message of pydantic or click as the end of a sentence about a setting: `must be a whole number`."""
    if message.startswith(_VALUE_ERROR):
        return message.removeprefix(_VALUE_ERROR)
    for theirs, ours in _IN_OUR_WORDS:
        message = re.sub(theirs, ours, message)
    return message


def about(name: str, message: str) -> str:
    """The fault of a setting, in words: `max_size must be at least 1`, `weights_url: there is no host in it`."""
    connector = " " if message.startswith(_VERBS) else ": "
    return f"{name}{connector}{message}"


def explain(error: ValidationError, sections: str | None = None) -> str:
    """All errors in one line, with a clause for each: `max_size must be at least 1, not 0`.

    Pass `sections` if the settings are those of a TOML file. It is the prefix of the names of the sections, `"serve."`
    or `""`. The clauses then name the sections: `[serve.server] fsync must be ...`,
    `[[serve.tables]] number 2: max_size must be ...`. Values of the section [security] are not shown.
    """
    clauses = []
    for problem in error.errors():
        message = in_our_words(problem["msg"])
        if problem["type"] not in ("missing", "extra_forbidden"):  # these errors are about the name, not the value
            value = problem["input"]
            if isinstance(value, str):
                value = value[:100]
            is_short = isinstance(value, str | float) or _is_small(value)  # lists and objects would be too long
            # A user may write a secret where the name of its file belongs. The secret must not come out in a log.
            may_be_secret = "security" in problem["loc"]
            # Some messages of our own checks name the value already.
            if is_short and not may_be_secret and repr(value) not in message:
                message += f", not {value!r}"
        section, name = _place(problem["loc"], sections)
        if name:
            message = about(name, message)
        clauses.append(f"{section} {message}" if section else message)
    return "; ".join(clauses)


def _place(location: Sequence[int | str], sections: str | None) -> tuple[str, str]:
    """(the section of a setting in a file, the setting's name in this section), from pydantic's `location`.

    `location` has the names and indexes that lead to the setting. The section is "" if `sections` is None. The name is
    "" if the error is about the section as a whole.
    """
    rest = [str(part) for part in location]
    section = ""
    if sections is not None and rest:
        section = f"[{sections}{rest.pop(0)}]"
        if rest and isinstance(location[1], int):  # the section is an entry of a list, such as `[[tables]]`
            index = int(rest.pop(0))  # counts from 0
            section = f"[{section}] number {index + 1}:"
    elif sections:  # the error is about the file as a whole, or about the section that holds all others
        section = f"[{sections.rstrip('.')}]"
    return section, ".".join(rest)


def _is_small(value: object) -> bool:
    """True if a value is an integer short enough to be shown. Python refuses to print very long integers."""
    return isinstance(value, int) and abs(value) < 10**20
