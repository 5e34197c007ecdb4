"""Prints the output of commands: text for people, JSON for programs, and one clear line if something fails.

The exit status of a command is 0 for success, 1 for a failure, 2 for invalid usage, 130 after Ctrl-C, and 143 after
SIGTERM.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Collection, Iterable, Iterator, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn, TextIO

import typer

from replay_protos.state import plain

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

_WIDTH_WITHOUT_TERMINAL = 240
"""The width, in characters, of output into a file or a pipe. It is large enough that no row is cut off."""
_stdout_copies: list[TextIO] = []
"""The one copy of standard output that `claim_stdout` makes for `print_json`. The list is empty until then."""
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")]


def say(text: object) -> None:
    """Prints a line on standard output, for people."""
    print(one_line(str(text)), flush=True)


def complain(message: object) -> None:
    """Prints a line on standard error that says what is wrong."""
    print(one_line(f"replay: {in_words(message)}"), file=sys.stderr)


def in_words(error: object) -> str:
    """The message of an error. For an OSError about a file, it consists of the file's name and the reason."""
    if isinstance(error, OSError) and error.filename is not None and error.strerror is not None:
        return f"{error.filename}: {error.strerror}"
    return str(error)


def fail(message: object) -> NoReturn:
    """Prints the message on standard error, and ends the command with status 1, because the command failed."""
    complain(message)
    raise typer.Exit(1)


def misuse(message: object) -> NoReturn:
    """Prints the message on standard error, and ends the command with status 2, because its usage is invalid."""
    complain(message)
    raise typer.Exit(2)


def need(what: str, extra: str, *modules: str) -> None:
    """Ends the command unless all `modules` are installed. Imports no module.

    The error says that `what` needs the modules, and that the package's `extra` installs them.
    """
    missing = [name for name in modules if find_spec(name) is None]
    if missing:
        verb = "is" if len(missing) == 1 else "are"
        fail(
            f"{what} needs {' and '.join(missing)}, which {verb} not installed: pip install '.[{extra}]' in a clone "
            f"of the repository"
        )


def printable(text: str) -> str:
    """`text` with control characters as escapes, because a terminal would obey them. Newlines and tabs stay."""
    characters = []
    for character in text:
        if character.isprintable() or character in "\n\t":
            characters.append(character)
        else:
            characters.append(repr(character)[1:-1])  # without the quotes, such as \x1b
    return "".join(characters)


def one_line(text: str) -> str:
    """`text` with all its control characters as escapes, so that a name chosen by a user cannot start a new line."""
    return printable(text).replace("\n", "\\n").replace("\t", "\\t")


def console() -> Console:
    """Standard output for tables and colours. There are colours only on a terminal, and not if NO_COLOR is set.

    Only rich itself can send control characters to the terminal. All texts are made `printable`, because servers and
    groups may contain any characters.
    """
    from rich.console import Console
    from rich.segment import Segment

    class PrintableConsole(Console):
        def render(self, *args: Any, **options: Any) -> Iterator[Segment]:
            """Overrides rich's method: makes all texts printable, and keeps the control characters of rich itself."""
            for segment in super().render(*args, **options):
                if segment.control:
                    yield segment
                else:
                    yield Segment(printable(segment.text), segment.style)

    width = None if sys.stdout.isatty() else _WIDTH_WITHOUT_TERMINAL  # None: the width of the terminal
    return PrintableConsole(highlight=False, markup=False, emoji=False, width=width)


def plain_table(columns: Sequence[str], rows: Iterable[Sequence[str]], left: Collection[str] = ()) -> Table:
    """A table without borders, with one line for each row.

    `left` names the columns that are aligned to the left. The others are aligned to the right, as numbers are.
    """
    from rich.table import Table

    view = Table(box=None, header_style="bold", pad_edge=False)
    for column in columns:
        side: Literal["left", "right"] = "left" if column in left else "right"
        view.add_column(column, justify=side, no_wrap=True)
    for row in rows:
        view.add_row(*map(one_line, row))
    return view


def claim_stdout() -> None:
    """Makes `print_json` the only function that writes to standard output.

    All other output of this process, and of the processes that it starts, goes to standard error from now on. Otherwise
    a user's function that prints something would break the JSON.
    """
    sys.stdout.flush()
    copied_descriptor = os.dup(sys.stdout.fileno())
    stdout_copy = open(copied_descriptor, "w", encoding="utf-8")  # noqa: SIM115  it stays open until the command ends
    _stdout_copies.append(stdout_copy)
    # Child processes inherit the file descriptor of standard output. It now leads to standard error.
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    sys.stdout = sys.stderr


def ignore_stdout() -> None:
    """Discards further output. Call this when standard output cannot be written any more.

    Otherwise Python would write the buffered output when it exits, and print an error.
    """
    null_device = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.__stdout__, *_stdout_copies):
        if stream is not None:
            os.dup2(null_device, stream.fileno())


def print_json(value: object, *, indent: int | None = 2) -> None:
    """Prints a JSON document. With `indent=None`, the document has one line. NaN and infinities become null."""
    text = json.dumps(plain(value), indent=indent, ensure_ascii=False, allow_nan=False)
    # `json` escapes only control characters below U+0020. The others could control the terminal, and a lone surrogate
    # cannot be encoded as UTF-8.
    text = re.sub("[\x7f-\x9f\ud800-\udfff]", _escape, text)
    output = _stdout_copies[-1] if _stdout_copies else sys.stdout
    print(text, file=output, flush=True)


def _escape(match: re.Match[str]) -> str:
    """The matched character as an escape sequence of JSON."""
    return f"\\u{ord(match[0]):04x}"


def print_result(as_json: bool, result: object, *lines: str) -> None:
    """Prints the result of a command: `result` as JSON for programs, or `lines` for people."""
    if as_json:
        print_json(result)
        return
    for line in lines:
        say(line)


def confirm(question: str, yes: bool) -> None:
    """Asks the person at the terminal for confirmation, unless `yes` is set.

    Ends the command if the answer is no, or if there is no terminal.
    """
    if yes:
        return
    if not sys.stdin.isatty():
        misuse(f"{question} There is no terminal to ask on: say --yes to do it")
    if not typer.confirm(question, err=True):
        fail("nothing was changed")
