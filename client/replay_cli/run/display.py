"""Display: shows the state of a run. A terminal has a line for each part. A file gets a line every ten seconds."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Self

from rich.live import Live
from rich.text import Text

from replay_cli.output import console, ignore_stdout, one_line, print_json, say
from replay_cli.run.parts import Part
from replay_cli.run.status import RunStatus
from replay_protos.words import counted

logger = logging.getLogger(__name__)

LINE_SECONDS = 10.0
"""Seconds between two lines if the output is no terminal."""
_NAME_WIDTH = 12
"""The width, in characters, of the column with the names of the parts."""
_STYLES = {"running": "green", "died": "red"}
"""State of a part -> colour of the word for it. The other states have no colour."""


class Display:
    """Shows the state of a run. Use it in a `with` block."""

    def __init__(self, as_json: bool) -> None:
        """`as_json`: show the state as lines of JSON, for programs."""
        self._as_json = as_json
        self._console = console()
        self._live: Live | None = None
        if self._console.is_terminal and not as_json:
            self._live = Live(console=self._console, auto_refresh=False)
        self._is_gone = False
        """True once the output cannot be written any more."""
        self._next_line_at = 0.0
        """The time of the next line, by the monotonic clock."""
        self._shown_doing = ""
        """The action of the runner that the last line showed."""

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if self._live is not None:
            try:
                self._live.stop()
            except OSError:  # the terminal was closed
                ignore_stdout()

    def show(self, status: RunStatus) -> None:
        """Show the state of the run now. If the output cannot be written any more, the run goes on without it."""
        news = status.take_news()  # even if the output is gone, because otherwise the news would pile up
        if self._is_gone:
            return
        try:
            self._show(status, news)
        except OSError:  # the terminal was closed, or the reader of the pipe has ended
            self._is_gone = True
            ignore_stdout()
        except Exception as error:  # no error of the display may end the run: perhaps the terminal lacks a character
            self._is_gone = True
            logger.error("the run goes on without a display: %s: %s", type(error).__name__, error)

    def _show(self, status: RunStatus, news: Sequence[str]) -> None:
        """Shows the state, and the sentences `news` about events: on the terminal, as JSON, or as lines of text."""
        if self._live is not None:
            self._show_live(self._live, status, news)
        elif self._as_json:
            self._show_line(status, news)
        else:
            for note in news:
                say(note)
            self._show_line(status, news=())

    def _show_live(self, live: Live, status: RunStatus, news: Sequence[str]) -> None:
        """Replaces the lines on the terminal, and prints `news` above them."""
        for note in news:
            live.console.print(one_line(note))
        width = self._console.width - 1  # because a line that is as wide as the terminal could wrap
        lines = list(terminal_lines(status))
        for line in lines:
            line.truncate(width, overflow="ellipsis")
        if status.failure:
            lines.append(Text(one_line(status.failure), style="red"))
        live.update(Text("\n").join(lines), refresh=True)

    def _show_line(self, status: RunStatus, news: Sequence[str]) -> None:
        """Prints a line if the last line is LINE_SECONDS old, if there are `news`, or if the runner's action is new."""
        now = time.monotonic()
        is_due = now >= self._next_line_at
        has_new_action = status.doing != self._shown_doing
        if not (is_due or has_new_action or news):
            return
        self._next_line_at = now + LINE_SECONDS
        self._shown_doing = status.doing
        if self._as_json:
            record = status.document() | {"notes": list(news)}
            print_json(record, indent=None)
        else:
            say(line_of(status))


def terminal_lines(status: RunStatus) -> Iterator[Text]:
    """The lines on a terminal: one for each part, one for the learning, and one for what the runner does."""
    for part in status.parts:
        state = part.state
        line = Text(f"{part.name:<{_NAME_WIDTH}}")
        line.append(state, style=_STYLES.get(state, ""))
        description = words_of(status, part)
        if description:
            line.append(f", {description}")
        yield line
    yield Text(f"{'learning':<{_NAME_WIDTH}}{learning_of(status)}")
    if status.doing:
        yield Text(one_line(status.doing), style="bold")


def line_of(status: RunStatus) -> str:
    """The state of the run as one line, for a file."""
    pieces = [status.doing] if status.doing else []
    for part in status.parts:
        description = words_of(status, part)
        state = part.state
        if state == "ended" and not description:
            continue  # this part prepared the run, and has done its work
        if state != "running":
            description = f"{state}, {description}" if description else state
        pieces.append(f"{part.name} {description}".rstrip())
    pieces.append(learning_of(status))
    if status.failure:
        pieces.append(status.failure)
    return " | ".join(pieces)


def words_of(status: RunStatus, part: Part) -> str:
    """Describes a part: the server's address, the trainer's step, or a generator's groups. Empty: nothing is known."""
    restarted = f", start {part.starts}" if part.starts > 1 else ""
    if part.name == "server":
        return f"{status.address}{restarted}" if status.address else ""
    if part.name == "trainer":
        return f"step {status.step} of {status.plan.max_steps}{restarted}"
    names = [generator.name for generator in status.plan.generators]
    if part.name not in names:  # this part prepares the run, and there is nothing to say about it
        return ""
    number = names.index(part.name)
    groups = status.generating(number, "groups")
    if groups is None:
        return f"no groups yet{restarted}"
    speed = status.generating(number, "tokens_per_second")
    rate = "" if speed is None else f", {speed:.0f} tokens/s"
    version = status.generating(number, "policy_version") or 0.0
    return f"{counted(int(groups), 'group')}{rate}, policy version {version:.0f}{restarted}"


def learning_of(status: RunStatus) -> str:
    """Describes the trainer's last step: its reward, speed and staleness."""
    if not status.step:
        return "no step yet"
    reward = status.training("fresh/reward_mean")
    speed = status.training("train/tokens_per_second")
    staleness = status.training("fresh/staleness_mean")
    pieces = []
    if reward is not None:
        pieces.append(f"fresh reward {reward:.3f}")
    if speed is not None:
        pieces.append(f"{speed:.0f} tokens/s trained")
    if staleness is not None:
        pieces.append(f"staleness {staleness:.1f}")
    return ", ".join(pieces)
