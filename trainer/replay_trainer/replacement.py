"""Zero-variance replacement: groups that teach nothing give their place to informative ones from the pool."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

from replay_client.errors import DeadlineExceededError
from replay_client.rollout import RolloutGroup
from replay_client.scoring import is_zero_variance

if TYPE_CHECKING:
    from replay_client import ReplayClient, Sample

OnEmpty = Literal["keep", "drop", "wait"]


@dataclass(frozen=True)
class Replacement:
    """The batch after replacement."""

    samples: list[Sample]
    """In the order they were given, each replaced one in the place of the one that left."""
    replaced: list[int]
    """Which of `samples` came from the pool, ascending."""
    stats: dict[str, float]
    """groups_zero_variance: found; groups_replaced: of them; groups_missing: found and not replaced, because
    the pool had too few; groups_dropped: of the missing, those left out. Means over what came from the pool
    (NaN if nothing did): age_mean (seconds), staleness_mean (policy versions), times_sampled_mean,
    reward_mean."""

    @property
    def groups(self) -> list[RolloutGroup]:
        """The groups of `samples`, each with the tokens, advantages and log-probabilities of one rollout."""
        return [sample.group for sample in self.samples]


class ZeroVarianceReplacer:
    """Puts groups of a replay table in the place of groups whose completions all have one reward.

    A group is replaced as a whole. Its correction is computed afterwards, from its own sampler's
    log-probabilities and the current weights, like that of any other group.
    """

    def __init__(
        self,
        client: ReplayClient,
        table: str = "replay",
        on_empty: OnEmpty = "keep",
        timeout: float | None = 60.0,
    ) -> None:
        """`on_empty` says what becomes of a zero-variance group for which the pool has nothing: "keep" trains
        on it (it adds no gradient), "drop" leaves it out, "wait" waits up to `timeout` seconds (None: for
        ever) for the pool to fill.
        """
        if on_empty not in get_args(OnEmpty):
            raise ValueError(f"on_empty must be one of {', '.join(get_args(OnEmpty))}, not {on_empty!r}")
        self.client = client
        self.table = table
        self.on_empty = on_empty
        self.timeout = timeout

    def replace(self, samples: Sequence[Sample], scope: str = "") -> Replacement:
        """The batch with its zero-variance groups replaced as far as the pool goes.

        What comes from the pool is distinct, is not in the batch already, and is not given out again under
        the same `scope`: ranks of one step that name it alike get different groups.

        Raises DeadlineExceededError with on_empty="wait" when the time is up, saying what the table waits
        for. There must then be somebody else who fills it: a pool fed only by what this trainer takes never
        fills while it waits.
        """
        barren = [i for i, sample in enumerate(samples) if is_zero_variance(sample.group.rewards)]
        drawn = self._draw(len(barren), exclude=[sample.info.key for sample in samples], scope=scope)
        places, missing = barren[: len(drawn)], barren[len(drawn) :]
        dropped = missing if self.on_empty == "drop" else []

        source = dict(enumerate(samples)) | dict(zip(places, drawn, strict=True))
        order = [i for i in source if i not in dropped]
        stats = {
            "groups_zero_variance": float(len(barren)),
            "groups_replaced": float(len(drawn)),
            "groups_missing": float(len(missing)),
            "groups_dropped": float(len(dropped)),
            "age_mean": _mean([sample.info.age for sample in drawn]),
            "staleness_mean": _mean([sample.info.staleness for sample in drawn]),
            "times_sampled_mean": _mean([sample.info.times_sampled for sample in drawn]),
            "reward_mean": _mean([float(reward) for sample in drawn for reward in sample.group.rewards]),
        }
        return Replacement(samples=[source[i] for i in order], replaced=[order.index(i) for i in places], stats=stats)

    def _draw(self, count: int, exclude: list[int], scope: str) -> list[Sample]:
        """At most `count` informative samples; fewer only if the table holds no more and we do not wait."""
        if count == 0:
            return []
        waits = self.on_empty == "wait"
        try:
            drawn = self.client.sample(
                self.table,
                count,
                min_samples=count if waits else 1,
                timeout=self.timeout if waits else 0.0,
                scope=scope,
                exclude=exclude,
            )
        except DeadlineExceededError:
            if waits:
                raise
            return []  # there is not one
        # Whoever fills the table may have put in what this class takes out.
        return [sample for sample in drawn if not is_zero_variance(sample.group.rewards)]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else math.nan
