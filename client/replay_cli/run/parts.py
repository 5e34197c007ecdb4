"""Part: runs one command of a run as a process that can be started again, and keeps its output in a file."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from subprocess import DEVNULL, STDOUT

from replay_client import supervisor

MOST_READ = 1 << 16
"""The most bytes that are read from the end of a file."""


class Part:
    """One command of a run: the server, the trainer or a generator.

    A supervisor runs the command. When the command ends, the supervisor kills all descendants of the command. When the
    process that made the part ends, the supervisor kills the command and all its descendants. The part must be started
    from the main thread of that process, because the supervisor notices only the end of the thread that started it.
    """

    def __init__(self, name: str, command: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        """`environment`: all variables of the process. `log`: the file to which its output is appended."""
        self.name = name
        self.log = log
        self.starts = 0
        """The number of times that the command has been started."""
        self.status: int | None = None
        """The exit status of the last process, as shells report it; None: the process runs, or none was started."""
        self.finished = False
        """True once the part has done all of its work. The runner then does not start the part again."""
        self.is_stopping = False
        """True once the runner has told the part to end."""
        self._command = list(command)
        self._environment = dict(environment)
        self._process: subprocess.Popen[bytes] | None = None
        self._log_begin = 0
        """The size that the log had when the command was started last, in bytes. The command's output begins there."""

    @property
    def pid(self) -> int | None:
        """The process id of the supervisor; None: the supervisor does not run."""
        return None if self._process is None else self._process.pid

    @property
    def runs(self) -> bool:
        """True while the part has a process, as the last `poll` found."""
        return self._process is not None

    @property
    def state(self) -> str:
        """The state in a word: waiting, running, stopping, stopped, ended (its work is done) or died."""
        if self.runs:
            return "stopping" if self.is_stopping else "running"
        if not self.starts:
            return "waiting"
        if self.is_stopping:
            return "stopped"
        return "ended" if self.finished or self.status == 0 else "died"

    def start(self, *arguments: str, **variables: str) -> None:
        """Start the command, with further arguments and variables of the environment.

        Raises OSError if the process cannot be started, or if the log cannot be opened.
        """
        assert not self.runs, f"{self.name} runs already"
        # With `forward`, the supervisor passes its signals on to the command, and waits for the command to end.
        command = supervisor.supervised([*self._command, *arguments], forward=True)
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as log:
            self._log_begin = log.tell()
            # `start_new_session` keeps the SIGINT of Ctrl-C away from the part. Only `replay run` gets this signal, and
            # it stops its parts in order.
            self._process = subprocess.Popen(
                command,
                stdin=DEVNULL,
                stdout=log,
                stderr=STDOUT,
                start_new_session=True,
                env=self._environment | variables,
            )
        self.starts += 1
        self.status = None

    def poll(self) -> bool:
        """Check if the process has ended. If so, set `status` and return True, once for each start."""
        if self._process is None:
            return False
        status = self._process.poll()
        if status is None:
            return False
        # Popen gives the number of a signal as a negative status; shells report 128 plus the number.
        self.status = 128 - status if status < 0 else status
        self._process = None
        return True

    def signal(self, number: int) -> None:
        """Tell the command to end, by the signal `number`. Does nothing if the command does not run."""
        if self._process is not None:
            self.is_stopping = True
            self._process.send_signal(number)

    def kill(self) -> None:
        """Kill the command with all its descendants at once, if it runs. The next `poll` then returns True."""
        if self._process is not None:
            supervisor.kill_all_below(self._process.pid)
            self._process.wait()

    def output(self) -> str:
        """The output of the command since its last start. If it is longer than MOST_READ bytes, only the end of it."""
        try:
            with self.log.open("rb") as log:
                end = log.seek(0, os.SEEK_END)
                log.seek(max(self._log_begin, end - MOST_READ))
                return log.read().decode(errors="replace")
        except OSError:
            return ""

    def last_words(self) -> str:
        """The last line of `output` that is not empty; "it wrote nothing" if there is no such line."""
        lines = [line.strip() for line in self.output().splitlines() if line.strip()]
        return lines[-1] if lines else "it wrote nothing"

    def ending(self) -> str:
        """The end of a sentence that says how the process ended, such as "ended with status 1"."""
        assert self.status is not None, f"{self.name} has not ended"
        if self.status > 128:
            try:
                return f"was ended by {signal.Signals(self.status - 128).name}"
            except ValueError:
                pass  # no signal has this number
        return f"ended with status {self.status}"
