"""Probe: a token sequence with the trainer's log-probabilities, to check an engine's new weights."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np


@dataclass(frozen=True)
class Probe:
    """A token sequence with the trainer's log-probabilities, in `probe.json` beside the weights."""

    token_ids: list[int]
    logprobs: list[float]
    """(T - 1,) of each token but the first, at temperature 1, in nats."""

    @classmethod
    def read(cls, folder: str) -> Probe | None:
        """The probe in a folder of weights; None if there is none. Raises ValueError if it is damaged."""
        path = Path(folder) / "probe.json"
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        try:
            probe = cls([int(token) for token in content["token_ids"]], [float(lp) for lp in content["logprobs"]])
        except (KeyError, TypeError) as error:
            raise ValueError(f"{path} must hold token_ids and logprobs: {error!r}") from error
        if len(probe.token_ids) < 2 or len(probe.logprobs) != len(probe.token_ids) - 1:
            raise ValueError(
                f"{path} has {len(probe.token_ids)} token_ids and {len(probe.logprobs)} logprobs; "
                "it needs at least two tokens and a log-probability for each but the first"
            )
        return probe

    def max_difference(self, scores: list[float]) -> float:
        """Largest absolute difference between an engine's scores (T - 1,) and the trainer's, in nats; may be NaN."""
        return float(np.abs(np.asarray(scores) - np.asarray(self.logprobs)).max())
