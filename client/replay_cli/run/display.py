"""Display: shows the state of a run, as a line for each part on a terminal, or a line every ten seconds in a file."""

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
_STYLES = {"running": "green", "died": "red"}
"""The colour of a part's state. The other states have none."""


class Display:
    """Shows the state of a run. Use it in a `with` block."""

    def __init__(self, as_json: bool) -> None:
        """`as_json`: lines of JSON for programs."""
        self._as_json = as_json
        self._console = console()
        self._live: Live | None = None
        if self._console.is_terminal and not as_json:
            self._live = Live(console=self._console, auto_refresh=False)
        self._is_gone = False
        """True once the output cannot be written any more."""
        self._line_at = 0.0
        """The time of the next line, by the monotonic clock."""
        self._last_doing = ""
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
        news = status.take_news()  # before the check, so that the news of a run without a display do not pile up
        if self._is_gone:
            return
        try:
            self._show(status, news)
        except OSError:  # the terminal was closed, or the reader of the pipe has ended
            self._is_gone = True
            ignore_stdout()
        except Exception as error:  # such as a character that the terminal does not have; it must not end the run
            self._is_gone = True
            logger.error("the run goes on without a display: %s: %s", type(error).__name__, error)

    def _show(self, status: RunStatus, news: Sequence[str]) -> None:
        """Shows the state, and the sentences `news` about events, in the form that the output needs."""
        if self._live is not None:
            self._show_live(self._live, status, news)
        elif self._as_json:
            self._show_line(status, news)
        else:
            for note in news:
                say(note)
            self._show_line(status, ())

    def _show_live(self, live: Live, status: RunStatus, news: Sequence[str]) -> None:
        """Replaces the lines on the terminal, and prints `news` above them."""
        for note in news:
            live.console.print(one_line(note))
        width = self._console.width - 1  # a line that is as wide as the terminal could wrap
        lines = [*terminal_lines(status)]
        for line in lines:
            line.truncate(width, overflow="ellipsis")
        if status.failure:
            lines.append(Text(one_line(status.failure), style="red"))
        live.update(Text("\n").join(lines), refresh=True)

    def _show_line(self, status: RunStatus, news: Sequence[str]) -> None:
        """Prints a line, at most every LINE_SECONDS unless there are `news` or the runner does something else."""
        now = time.monotonic()
        if now < self._line_at and status.doing == self._last_doing and not news:
            return
        self._line_at = now + LINE_SECONDS
        self._last_doing = status.doing
        if self._as_json:
            print_json(status.document() | {"notes": [*news]}, indent=None)
        else:
            say(line_of(status))


def terminal_lines(status: RunStatus) -> Iterator[Text]:
    """The lines on a terminal: one for each part, one for the learning, and one for what the runner does."""
    for part in status.parts:
        state = part.state
        line = Text(f"{part.name:<{_NAME_WIDTH}}")
        line.append(state, style=_STYLES.get(state, ""))
        words = words_of(status, part)
        if words:
            line.append(f", {words}")
        yield line
    yield Text(f"{'learning':<{_NAME_WIDTH}}{learning_of(status)}")
    if status.doing:
        yield Text(one_line(status.doing), style="bold")


def line_of(status: RunStatus) -> str:
    """The state of the run as one line, for a file."""
    words = [status.doing] if status.doing else []
    for part in status.parts:
        more = words_of(status, part)
        state = part.state
        if state == "ended" and not more:
            continue  # the part that prepared the run, whose end is no news
        if state != "running":
            more = f"{state}, {more}" if more else state
        words.append(f"{part.name} {more}".rstrip())
    words.append(learning_of(status))
    if status.failure:
        words.append(status.failure)
    return " | ".join(words)


def words_of(status: RunStatus, part: Part) -> str:
    """Describes a part: the server's address, the trainer's step, or a generator's groups. Empty: nothing is known."""
    again = "" if part.starts < 2 else f", start {part.starts}"  # the part was started again
    if part.name == "server":
        return f"{status.address}{again}" if status.address else ""
    if part.name == "trainer":
        return f"step {status.step} of {status.plan.max_steps}{again}"
    names = [generator.name for generator in status.plan.generators]
    if part.name not in names:  # the part that prepares the run
        return ""
    number = names.index(part.name)
    groups = status.generating(number, "groups")
    if groups is None:
        return f"no groups yet{again}"
    speed = status.generating(number, "tokens_per_second")
    rate = "" if speed is None else f", {speed:.0f} tokens/s"
    version = status.generating(number, "policy_version") or 0.0
    return f"{counted(int(groups), 'group')}{rate}, policy version {version:.0f}{again}"


def learning_of(status: RunStatus) -> str:
    """Reward, speed and staleness of the trainer's last step."""
    if not status.step:
        return "no step yet"
    reward = status.training("fresh/reward_mean")
    speed = status.training("train/tokens_per_second")
    staleness = status.training("fresh/staleness_mean")
    words = []
    if reward is not None:
        words.append(f"fresh reward {reward:.3f}")
    if speed is not None:
        words.append(f"{speed:.0f} tokens/s trained")
    if staleness is not None:
        words.append(f"staleness {staleness:.1f}")
    return ", ".join(words)
