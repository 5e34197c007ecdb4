"""RunStatus: collects the state of a run from the files that its parts write."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from replay_cli.run.parts import MOST_READ, Part
from replay_cli.run.plan import RunPlan


class LastLine:
    """The last line of a file of metrics, to which a part appends.

    Only the end of the file is read, because a run of weeks writes millions of lines.
    """

    def __init__(self, path: Path) -> None:
        """Reads nothing yet. The file need not exist."""
        self.path = path
        self.metrics: dict[str, Any] = {}
        """The values of the last line; empty: there is no line."""
        self._size = 0
        """The size of the file when it was read last, in bytes."""

    def read(self) -> None:
        """Read the last whole line, if the size of the file has changed."""
        try:
            size = self.path.stat().st_size
            if size == self._size:
                return
            with self.path.open("rb") as file:
                file.seek(max(0, size - MOST_READ))
                lines = file.read(MOST_READ).split(b"\n")
        except OSError:
            return  # the part has not made the file yet
        self._size = size
        # The text after the last newline is an unfinished line, or empty. So the last whole line is the one before it.
        if len(lines) < 2 or not lines[-2]:
            # There is no whole line. Perhaps a resume has removed the lines of all steps.
            self.metrics = {}
            return
        try:
            metrics = json.loads(lines[-2])
        except ValueError:
            return  # the line is damaged, so the metrics that were read before it stay
        self.metrics = metrics if isinstance(metrics, dict) else {}


class RunStatus:
    """The state of a run: the work of its parts, and the metrics of the trainer.

    The runner updates the state, and the display shows it.
    """

    def __init__(self, plan: RunPlan, parts: Sequence[Part]) -> None:
        """Reads nothing yet: `read` does."""
        self.plan = plan
        self.parts = list(parts)
        """The parts in the order in which they are shown."""
        self.address = ""
        """The address of the server; empty: it has not started."""
        self.doing = ""
        """The present action of the runner, in words; empty: it watches."""
        self._news: list[str] = []
        """The sentences that `take_news` has not returned yet, the oldest first."""
        self.failure = ""
        """The doctor's first failure, with its remedy; empty: the doctor found no failure."""
        self._training = LastLine(plan.train_dir / "metrics.jsonl")
        """The metrics of the trainer's last step."""
        self._generating = [LastLine(path) for path in plan.generator_metrics]
        """The newest metrics of each generator, in the order of the plan."""

    def say(self, doing: str) -> None:
        """Set what the runner does now, in words."""
        self.doing = doing

    def note(self, sentence: str) -> None:
        """Add a sentence about an event that a person should know of."""
        self._news.append(sentence)

    def take_news(self) -> list[str]:
        """The sentences about events since the last call, the oldest first."""
        news = self._news
        self._news = []
        return news

    def read(self, failure: str) -> None:
        """Read the newest lines of the files. `failure`: the doctor's first failure; empty: there is none."""
        self.failure = failure
        self._training.read()
        for file in self._generating:
            file.read()

    @property
    def step(self) -> int:
        """The last step that the trainer has made; 0: none."""
        return int(self.training("step") or 0)

    def training(self, name: str) -> float | None:
        """A metric of the trainer's last step; None: it is not known."""
        return _newest(self._training, name)

    def generating(self, number: int, name: str) -> float | None:
        """The newest value of a metric of one generator; None: it is not known."""
        return _newest(self._generating[number], name)

    def document(self) -> dict[str, Any]:
        """The state as JSON."""
        return {
            "address": self.address,
            "doing": self.doing or "watching",
            "step": self.step,
            "max_steps": self.plan.max_steps,
            "fresh_reward": self.training("fresh/reward_mean"),
            "tokens_per_second": self.training("train/tokens_per_second"),
            "staleness": self.training("fresh/staleness_mean"),
            "parts": {part.name: {"state": part.state, "starts": part.starts} for part in self.parts},
            "failure": self.failure,
        }


def _newest(file: LastLine, name: str) -> float | None:
    """A metric of the last line; None: the line has no number of this name."""
    value = file.metrics.get(name)
    return float(value) if isinstance(value, int | float) else None
