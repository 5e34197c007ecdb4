"""What commands write: tables and lines for people, JSON for programs, and one clear line where something fails.

Exit status: 0 all is well, 1 it failed, 2 it was used wrongly, 130 interrupted (Ctrl-C), 143 ended by SIGTERM.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

if TYPE_CHECKING:
    from rich.console import Console

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]

_WIDE = 240
"""Columns of output that goes into a file or another program, so that nothing is cut off."""


def say(text: object) -> None:
    """A line on standard output, for people."""
    print(printable(str(text)), flush=True)


def complain(message: object) -> None:
    """The line that says what is wrong."""
    print(printable(f"replay: {message}"), file=sys.stderr)


def fail(message: object) -> NoReturn:
    """Ends the command: what it was to do did not work."""
    complain(message)
    raise typer.Exit(1)


def misuse(message: object) -> NoReturn:
    """Ends the command: it cannot be meant like this."""
    complain(message)
    raise typer.Exit(2)


def console() -> Console:
    """Standard output; in colours only on a terminal, and not if NO_COLOR is set. What servers and groups say comes out
    as `printable`: only rich itself may send the terminal commands."""
    from rich.console import Console
    from rich.segment import Segment

    class Printable(Console):
        def render(self, *args: Any, **options: Any) -> Iterator[Segment]:
            for segment in super().render(*args, **options):
                yield segment if segment.control else Segment(printable(segment.text), segment.style)

    return Printable(highlight=False, markup=False, emoji=False, width=None if sys.stdout.isatty() else _WIDE)


def print_json(value: object, *, indent: int | None = 2) -> None:
    """One JSON document; with `indent=None` it is one line. NaN and infinities become null."""
    text = json.dumps(_finite(value), indent=indent, ensure_ascii=False, allow_nan=False)
    # JSON escapes the control characters below a space only, and a lone surrogate cannot be written.
    print(re.sub("[\x7f-\x9f\ud800-\udfff]", lambda match: f"\\u{ord(match[0]):04x}", text), flush=True)


def confirm(question: str, yes: bool) -> None:
    """Goes on if `yes` or the person at the terminal says so."""
    if yes:
        return
    if not sys.stdin.isatty():
        misuse(f"{question} Nobody is there to ask: say --yes to do it")
    if not typer.confirm(question, err=True):
        fail("nothing was changed")


def printable(text: str) -> str:
    """`text` without the control characters that could move the cursor or worse; lines and tabs stay."""
    return "".join(
        character if character.isprintable() or character in "\n\t" else repr(character)[1:-1] for character in text
    )


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(name): _finite(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
