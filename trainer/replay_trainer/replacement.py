"""Zero-variance replacement: groups that teach nothing give their place to informative ones from the pool."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

from replay_client.errors import DeadlineExceededError, ServerUnavailableError
from replay_client.rollout import RolloutGroup
from replay_client.scoring import group_priority, is_zero_variance
from replay_trainer.description import GroupFacts, describe_replayed

if TYPE_CHECKING:
    from replay_client import ReplayClient, Sample

OnEmpty = Literal["keep", "drop", "wait"]


@dataclass(frozen=True)
class Replacement:
    """The batch to train on, and where it comes from."""

    samples: list[Sample]
    """In the order they were given, each replaced one in the place of the one that left."""
    replaced: list[int]
    """Which of `samples` came from the pool, ascending."""
    fresh: list[Sample]
    """All fresh groups that were taken for it, in the batch or not."""
    counts: dict[str, int]
    """groups_zero_variance: found among the fresh; groups_replaced: of them, by groups of the pool; groups_missing:
    found and not replaced (with dynamic sampling, how short the batch is); groups_dropped: of those found, the ones
    left out of the batch; groups_too_stale: from the pool, older than wanted; groups_uninformative: from the pool,
    without variance themselves."""

    @property
    def groups(self) -> list[RolloutGroup]:
        """The groups of `samples`, each with the tokens, advantages and log-probabilities of one rollout."""
        return [sample.group for sample in self.samples]

    @property
    def stats(self) -> dict[str, float]:
        """`counts`, and over what came from the pool age_mean, age_max (seconds), staleness_mean, staleness_max (policy
        versions), times_sampled_mean, reward_mean, group_size_mean; NaN if nothing did."""
        return {**self.counts, **describe_replayed([GroupFacts.of(self.samples[i]) for i in self.replaced])}


def unreplaced(samples: Sequence[Sample]) -> Replacement:
    """The batch as it came."""
    barren = sum(is_zero_variance(sample.group.rewards) for sample in samples)
    counts = _counts() | {"groups_zero_variance": barren, "groups_missing": barren}
    return Replacement(samples=list(samples), replaced=[], fresh=list(samples), counts=counts)


def refilled(samples: Sequence[Sample], fresh: Sequence[Sample], size: int) -> Replacement:
    """A batch of informative groups out of `fresh` and those that were left before; `size` had been wanted."""
    barren = sum(is_zero_variance(sample.group.rewards) for sample in fresh)
    counts = _counts() | {"groups_zero_variance": barren, "groups_dropped": barren}
    counts["groups_missing"] = size - len(samples)
    return Replacement(samples=list(samples), replaced=[], fresh=list(fresh), counts=counts)


def _counts() -> dict[str, int]:
    names = ("zero_variance", "replaced", "missing", "dropped", "too_stale", "uninformative")
    return {f"groups_{name}": 0 for name in names}


class ZeroVarianceReplacer:
    """Puts groups of a replay table in the place of groups whose completions all have one reward.

    A group is replaced as a whole, by one of any size G. Its correction is computed afterwards, from its own sampler's
    log-probabilities and the current weights, like that of any other group.
    """

    def __init__(
        self,
        client: ReplayClient,
        table: str = "replay",
        on_empty: OnEmpty = "keep",
        timeout: float | None = 60.0,
        max_staleness: int | None = None,
    ) -> None:
        """`on_empty` says what becomes of a zero-variance group for which the pool has nothing: "keep" trains
        on it (it adds no gradient), "drop" leaves it out, "wait" waits up to `timeout` seconds (None: for
        ever) for the pool to fill. Groups that lag by more than `max_staleness` policy versions do not come;
        the table's own limit, which also removes them, is the better place where it serves one trainer.
        """
        if on_empty not in get_args(OnEmpty):
            raise ValueError(f"on_empty must be one of {', '.join(get_args(OnEmpty))}, not {on_empty!r}")
        self.client = client
        self.table = table
        self.on_empty = on_empty
        self.timeout = timeout
        self.max_staleness = max_staleness

    def replace(self, samples: Sequence[Sample], scope: str = "", exclude: Iterable[int] = ()) -> Replacement:
        """The batch with its zero-variance groups replaced as far as the pool goes.

        What comes from the pool is distinct, is not in the batch already, has none of the keys in `exclude` (the
        batches of the other ranks), and is not given out again under the same `scope`: ranks of one step that name it
        alike get different groups.

        Raises DeadlineExceededError with on_empty="wait" when the time is up, saying what the table waits
        for. There must then be somebody else who fills it: a pool fed only by what this trainer takes never
        fills while it waits.
        """
        barren = [i for i, sample in enumerate(samples) if is_zero_variance(sample.group.rewards)]
        counts = _counts()
        drawn = self._draw(len(barren), {*exclude, *(sample.info.key for sample in samples)}, scope, counts)
        places, missing = barren[: len(drawn)], barren[len(drawn) :]
        dropped = missing if self.on_empty == "drop" else []

        source = dict(enumerate(samples)) | dict(zip(places, drawn, strict=True))
        order = [i for i in source if i not in dropped]
        counts |= {"groups_zero_variance": len(barren), "groups_replaced": len(drawn)}
        counts |= {"groups_missing": len(missing), "groups_dropped": len(dropped)}
        return Replacement(
            samples=[source[i] for i in order],
            replaced=[order.index(i) for i in places],
            fresh=list(samples),
            counts=counts,
        )

    def update_priorities(self, trust: Mapping[int, float], samples: Sequence[Sample]) -> int:
        """Gives groups that were trained on their score times `trust[key]` as priority; returns how many were there.

        `trust`, from 0 to 1, is the mean over a group's tokens of min(w, 1), w being its correction's weight: what the
        policy has moved away from is drawn less often.
        """
        priorities = {
            sample.info.key: group_priority(sample.group.rewards, sample.group.advantages) * trust[sample.info.key]
            for sample in samples
            if not is_zero_variance(sample.group.rewards)
        }
        return self.client.update_priorities(self.table, priorities).applied if priorities else 0

    def _draw(self, count: int, exclude: set[int], scope: str, counts: dict[str, int]) -> list[Sample]:
        """At most `count` informative samples; fewer only if the table holds no more and we do not wait."""
        chosen: list[Sample] = []
        waits = self.on_empty == "wait"
        while len(chosen) < count:
            try:
                drawn = self.client.sample(
                    self.table,
                    count - len(chosen),
                    min_samples=count - len(chosen) if waits else 1,
                    timeout=self.timeout if waits else 0.0,
                    scope=scope,
                    exclude=sorted(exclude),
                )
            except DeadlineExceededError:
                if waits:
                    raise
                break  # there is not one more
            except ServerUnavailableError:
                # Not to wait for groups does not mean not to wait for a server that is starting again: this call does,
                # for as long as its client was told to.
                self.client.policy()
                continue
            exclude |= {sample.info.key for sample in drawn}
            for sample in drawn:
                # Whoever fills the table may have put in what this class takes out.
                if is_zero_variance(sample.group.rewards):
                    counts["groups_uninformative"] += 1
                elif self.max_staleness is not None and sample.info.staleness > self.max_staleness:
                    counts["groups_too_stale"] += 1
                else:
                    chosen.append(sample)
        return chosen
