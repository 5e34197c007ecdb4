"""How often a policy answers right, and in how many ways, computed exactly from the probabilities of right answers.

p_a    probability of the right answer a of a prompt, at temperature 1
p      sum of p_a: the solve rate of the prompt

pass@8      1 - (1 - p)^8              at least one of eight answers is right
distinct@8  sum_a 1 - (1 - p_a)^8      different right answers among eight
entropy     -sum_a q_a log q_a         of a right answer, q_a = p_a / p; nats
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from examples.demo.task import supervised_batch
from experiments.learning.tasks import Row, right_texts

DRAWS = 8
_ANSWERS = 512
"""Right answers of one forward pass."""
_MOST = 1200
"""Right answers that are measured: where each prompt has several, those of its first prompts."""


@dataclass(frozen=True)
class Variety:
    """Means over the held-out prompts."""

    pass_at_8: float
    distinct_at_8: float
    answer_entropy: float


class HeldOut:
    """Every right answer of some rows, ready for a model."""

    def __init__(self, rows: Sequence[Row]) -> None:
        most = max(1, _MOST // len(right_texts(rows[0])))
        texts = [(i, row | {"answer": text}) for i, row in enumerate(rows[:most]) for text in right_texts(row)]
        self._ids, self._labels = supervised_batch([row for _, row in texts])
        self._row = torch.tensor([i for i, _ in texts])
        self._rows = len(rows[:most])

    @torch.no_grad()
    def measure(self, model: Any) -> tuple[float, Variety]:
        """The solve rate, and the variety of the answers."""
        p_A = torch.cat(
            [
                _probabilities(model, ids, labels)
                for ids, labels in zip(self._ids.split(_ANSWERS), self._labels.split(_ANSWERS), strict=True)
            ]
        )
        p_R = self._sum(p_A)
        share_A = p_A / p_R.clamp_min(1e-30)[self._row]
        at_least_once_A = 1 - (1 - p_A.clamp_max(1)) ** DRAWS
        return float(p_R.mean()), Variety(
            pass_at_8=float((1 - (1 - p_R.clamp_max(1)) ** DRAWS).mean()),
            distinct_at_8=float(self._sum(at_least_once_A).mean()),
            answer_entropy=float(self._sum(-torch.xlogy(share_A, share_A)).mean()),
        )

    def _sum(self, values_A: Tensor) -> Tensor:
        """(R,) sums over the answers of each row."""
        return torch.zeros(self._rows).index_add_(0, self._row, values_A)


def _probabilities(model: Any, ids: Tensor, labels: Tensor) -> Tensor:
    """(A,) the probability of sampling exactly the labelled answers."""
    logprobs = model(input_ids=ids, use_cache=False).logits[:, :-1].log_softmax(-1)
    wanted = labels[:, 1:]
    chosen = logprobs.gather(-1, wanted.clamp_min(0)[..., None])[..., 0]
    return torch.where(wanted >= 0, chosen, 0.0).sum(1).exp()
