"""Zero-variance replacement: informative groups of the pool replace groups that carry no gradient."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

from replay_client import ReplayClient, Sample
from replay_client.errors import DeadlineExceededError, ServerUnavailableError
from replay_client.rollout import RolloutGroup
from replay_client.scoring import Scale, carries_gradient, group_priority
from replay_trainer.description import GroupFacts, describe_replayed
from replay_trainer.inspection import Inspector

OnEmpty = Literal["keep", "drop", "wait"]
"""What happens to a zero-variance group if the pool has no replacement.
keep: train on it; it adds no gradient. drop: leave it out. wait: wait for the pool to fill."""
COUNTS = ("zero_variance", "replaced", "missing", "dropped", "added", "too_stale", "uninformative", "drifted")


@dataclass(frozen=True)
class Replacement:
    """The groups of one step, and where they come from."""

    samples: list[Sample]
    """The groups to train on, in the order of the fresh ones; each replacement stands where its group stood. Groups
    that were added to the fresh ones come last."""
    replaced: list[int]
    """Indices of the `samples` that came from the pool, ascending."""
    fresh: list[Sample]
    """All fresh groups that were taken for this step, whether it trains on them or not."""
    counts: dict[str, int]
    """groups_zero_variance: fresh groups without a gradient. groups_replaced: those that a group of the pool replaced.
    groups_missing: those that nothing replaced (with dynamic sampling: how many groups the batch lacks).
    groups_dropped: those that were left out. groups_added: groups of the pool beside the fresh ones.
    groups_too_stale, groups_uninformative, groups_drifted: groups of the pool that were not used because they lag too
    far, carry no gradient themselves, or because the policy has moved away from them."""

    @property
    def groups(self) -> list[RolloutGroup]:
        """The groups of `samples`."""
        return [sample.group for sample in self.samples]

    def without(self, left_out: Sequence[int]) -> Replacement:
        """The same without these of `samples`."""
        kept = [i for i in range(len(self.samples)) if i not in left_out]
        return replace(
            self,
            samples=[self.samples[i] for i in kept],
            replaced=[kept.index(i) for i in self.replaced if i in kept],
        )

    def counting(self, **counts: int) -> Replacement:
        """The same with these `counts`."""
        return replace(self, counts=self.counts | {f"groups_{name}": count for name, count in counts.items()})

    @property
    def stats(self) -> dict[str, float]:
        """`counts`, and of the groups from the pool: age_mean, age_max (seconds), staleness_mean, staleness_max (policy
        versions), times_sampled_mean, reward_mean, group_size_mean; NaN if there are none."""
        return {**self.counts, **describe_replayed([GroupFacts.of(self.samples[i]) for i in self.replaced])}


def new_counts(**counts: int) -> dict[str, int]:
    """Every count of `Replacement`, 0 unless given: the metrics of each step have the same names."""
    return {f"groups_{name}": counts.get(name, 0) for name in COUNTS}


class ZeroVarianceReplacer:
    """Replaces zero-variance groups by groups of a replay table.

    A group is replaced as a whole, by one of any size G. The correction then treats the replacement like every other
    group: by the log-probabilities of its own sampler and the current weights.
    """

    def __init__(
        self,
        client: ReplayClient,
        table: str = "replay",
        on_empty: OnEmpty = "keep",
        timeout: float | None = 60.0,
        max_staleness: int | None = None,
        *,
        inspector: Inspector | None = None,
        scale: Scale | None = None,
    ) -> None:
        """`on_empty`: see OnEmpty; "wait" waits up to `timeout` seconds (None: without limit).

        Groups that lag by more than `max_staleness` policy versions are not used. If one trainer alone uses the table,
        set the limit of the table instead: it also removes these groups. `inspector` removes groups that cannot be
        trained on; without it, such a group raises ValueError. `scale`: how the trainer computes advantages anew, as
        in `carries_gradient`.
        """
        if on_empty not in get_args(OnEmpty):
            raise ValueError(f"on_empty must be one of {', '.join(get_args(OnEmpty))}, not {on_empty!r}")
        self.client = client
        self.table = table
        self.on_empty = on_empty
        self.timeout = timeout
        self.max_staleness = max_staleness
        self.inspector = inspector
        self.scale = scale

    def replace(self, samples: Sequence[Sample], scope: str = "", exclude: Iterable[int] = ()) -> Replacement:
        """Replace the zero-variance groups of a batch as far as the pool has others.

        The replacements are distinct. None is in the batch already, and none has a key in `exclude` (the batches of
        the other ranks). The server gives no group twice under one `scope`: ranks that name the same scope in a step
        get different groups.

        Raises DeadlineExceededError with on_empty="wait" at the end of the timeout; it says what the table waits for.
        Another process must fill the pool then: a pool that holds only what this trainer takes stays as it is while
        this trainer waits.
        """
        zero_variance = [i for i, sample in enumerate(samples) if not carries_gradient(sample.group, self.scale)]
        counts = new_counts()
        keys = {*exclude, *(sample.info.key for sample in samples)}
        drawn = self._draw(len(zero_variance), keys, scope, counts, wait=self.on_empty == "wait")
        places, missing = zero_variance[: len(drawn)], zero_variance[len(drawn) :]
        dropped = missing if self.on_empty == "drop" else []

        source = dict(enumerate(samples)) | dict(zip(places, drawn, strict=True))
        order = [i for i in source if i not in dropped]
        counts |= {"groups_zero_variance": len(zero_variance), "groups_replaced": len(drawn)}
        counts |= {"groups_missing": len(missing), "groups_dropped": len(dropped)}
        return Replacement(
            samples=[source[i] for i in order],
            replaced=[order.index(i) for i in places],
            fresh=list(samples),
            counts=counts,
        )

    def add(self, taken: Replacement, count: int, scope: str = "", exclude: Iterable[int] = ()) -> Replacement:
        """Add up to `count` groups of the pool to those of `taken`; fewer if the pool has no more. Does not wait.

        `scope` and `exclude` are as in `replace`.
        """
        counts = dict(taken.counts)
        keys = {*exclude, *(sample.info.key for sample in taken.samples)}
        drawn = self._draw(count, keys, scope, counts, wait=False)
        counts["groups_added"] += len(drawn)
        size = len(taken.samples)
        return replace(
            taken,
            samples=[*taken.samples, *drawn],
            replaced=[*taken.replaced, *range(size, size + len(drawn))],
            counts=counts,
        )

    def update_priorities(self, trust: Mapping[int, float], samples: Sequence[Sample]) -> int:
        """Set the priority of trained groups to their score times `trust[key]`; returns how many the table still has.

        `trust`, from 0 to 1, is the mean over the tokens of a group of min(w, 1), with w the weight of the correction.
        The pool then gives groups less often that the policy has moved away from.
        """
        priorities = {
            sample.info.key: score * trust[sample.info.key]
            for sample in samples
            if (score := group_priority(sample.group.rewards, sample.group.advantages))
        }
        return self.client.update_priorities(self.table, priorities).applied if priorities else 0

    def _draw(self, count: int, exclude: set[int], scope: str, counts: dict[str, int], *, wait: bool) -> list[Sample]:
        """At most `count` informative samples; fewer only if the table has no more and we do not wait."""
        chosen: list[Sample] = []
        if self.inspector is not None:
            exclude = exclude | self.inspector.bad_keys
        while len(chosen) < count:
            try:
                drawn = self.client.sample(
                    self.table,
                    count - len(chosen),
                    min_samples=count - len(chosen) if wait else 1,
                    timeout=self.timeout if wait else 0.0,
                    scope=scope,
                    exclude=sorted(exclude),
                )
            except DeadlineExceededError:
                if wait:
                    raise
                break  # the table has no more
            except ServerUnavailableError:
                # "keep" and "drop" do not wait for groups, but they do wait for a server that restarts: this call
                # retries for as long as its client is configured to.
                self.client.policy()
                continue
            exclude |= {sample.info.key for sample in drawn}
            if self.inspector is not None:
                drawn = self.inspector.usable(drawn, self.table)
            for sample in drawn:
                # Other writers may have inserted groups that the replacer exists to remove.
                if not carries_gradient(sample.group, self.scale):
                    counts["groups_uninformative"] += 1
                elif self.max_staleness is not None and sample.info.staleness > self.max_staleness:
                    counts["groups_too_stale"] += 1
                else:
                    chosen.append(sample)
        return chosen
