"""PrintableConsole: a rich console on which only rich itself can send commands to the terminal."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from rich.console import Console
from rich.segment import Segment

from replay_server.cli.control_characters import printable

WIDTH_WITHOUT_TERMINAL = 240
"""Columns of output that goes into a file or another program, so that nothing is cut off."""


class PrintableConsole(Console):
    """Standard output; in colours only on a terminal, and not if NO_COLOR is set.

    Texts of servers and groups lose their control characters, which could move the cursor or worse.
    """

    def __init__(self) -> None:
        width = None if sys.stdout.isatty() else WIDTH_WITHOUT_TERMINAL
        super().__init__(highlight=False, markup=False, emoji=False, width=width)

    def render(self, *args: Any, **options: Any) -> Iterator[Segment]:
        for segment in super().render(*args, **options):
            yield segment if segment.control else Segment(printable(segment.text), segment.style)
