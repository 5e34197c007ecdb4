"""The groups of a step: fresh groups and groups of the pool, without groups that cannot be trained on."""

from __future__ import annotations

import inspect
import logging
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, get_args

import numpy as np
from torch import nn

from replay_client import ReplayClient, Sample
from replay_client.advantages import ADVANTAGES_BY, why_scaled_again
from replay_client.errors import DeadlineExceededError, ReplayError, TableNotFoundError
from replay_client.rollout import MAX_LOGPROB, MAX_TEMPERATURE, MAX_VALUE, MIN_TEMPERATURE, RolloutGroup
from replay_client.sampling_masks import why_no_masks
from replay_client.scoring import Scale, carries_gradient, trained_priority
from replay_client.settings import check_choice
from replay_client.words import counted
from replay_trainer.background import through_restarts
from replay_trainer.batching import why_no_teacher
from replay_trainer.config import GRPOConfig, OnEmpty
from replay_trainer.metrics import GroupFacts, describe_replayed
from replay_trainer.ranks import Ranks
from replay_trainer.stopping import Stopped, Stopping
from replay_trainer.token_staleness import is_stale, token_versions, without_stale_tokens

logger = logging.getLogger(__name__)

RECENT_GROUPS = 100
"""The share of bad groups is computed over the latest steps. It covers as few steps as possible that together drew at
least this number of groups."""


@dataclass(frozen=True)
class ModelLimits:
    """The limits that the model and the settings set for a group. If a number is None, its limit is not known, or there
    is no such limit."""

    vocabulary: int | None = None
    """Number of token embeddings."""
    positions: int | None = None
    """The most tokens of a sequence, for a model that looks up an embedding for each position. None for a model that
    computes its positions, because such a model takes longer sequences than its configuration names."""
    group_tokens: int | None = None
    """GRPOConfig.max_group_tokens."""
    teacher: str = ""
    """The column of extras that the trainer distils from, and that every group must have; empty: it does not distil."""
    inputs: frozenset[str] = frozenset()
    """The names of all parameters of the model's `forward`."""
    length: int | None = None
    """The most tokens of a sequence: GRPOConfig.max_length, or the length for which the rotary frequencies were
    chosen."""
    reads_versions: bool = False
    """True if the trainer reads the policy versions of tokens (GRPOConfig.max_token_staleness)."""

    @classmethod
    def of(
        cls,
        model: Any,
        group_tokens: int | None = None,
        teacher: str = "",
        length: int | None = None,
        reads_versions: bool = False,
    ) -> ModelLimits:
        """The limits of a language model of transformers. Each argument after `model` is the field of the same name."""
        token_table = model.get_input_embeddings()
        positions = getattr(model.config, "max_position_embeddings", None)
        # A table of position embeddings has one row for each position. The tables of OPT and BART have two rows more.
        table_sizes = [] if positions is None else range(positions, positions + 3)
        has_position_table = any(
            isinstance(module, nn.Embedding) and module is not token_table and module.num_embeddings in table_sizes
            for module in model.modules()
        )
        return cls(
            vocabulary=len(token_table.weight),
            positions=positions if has_position_table else None,
            group_tokens=group_tokens,
            teacher=teacher,
            inputs=frozenset(inspect.signature(model.forward).parameters),
            length=length,
            reads_versions=reads_versions,
        )


@dataclass(frozen=True)
class BadGroup:
    """A group that cannot be trained on."""

    key: int
    table: str
    """The table that the group was drawn from."""
    reason: str


@dataclass
class Inspector:
    """Checks the groups that one rank draws, so that a bad group is deleted and does not end the run.

    A bad group is a group that cannot be trained on. Without this class, every step that draws a bad group would fail.
    A resume would not help, because the server has copied the group into the pool by then (`forward_to` of the table),
    so a later step would draw the copy.

    * A bad group is counted, named in a warning, and deleted from its table and the pool; no step draws it again.
    * A group that makes a step fail is bad as well. The trainer calls `reject` for such a group.
    * If too many of the recent groups are bad, every rank stops at the same step with the same error.
    * Every rank also stops if the trainer would scale advantages that a function of the user has computed. This is a
      fault of the settings and not of the group, so the group stays in its table.
    """

    client: ReplayClient
    ranks: Ranks
    limits: ModelLimits
    pool: str
    """The replay table."""
    max_share: float
    """The largest share of bad groups among the recent ones: from 0 to 1."""
    scale: Scale | None = field(default=None, kw_only=True)
    """GRPOConfig.scale_rewards."""
    bad_keys: set[int] = field(default_factory=set, init=False)
    """Keys of all bad groups so far. A draw from the pool excludes them."""

    def __post_init__(self) -> None:
        self._undeleted: dict[int, str] = {}
        """Key of each bad group that is still to be deleted -> the table to delete it from. The group is deleted from
        the pool as well, whatever this table is."""
        self._drawn = 0
        """The number of groups that this rank has drawn since the last `end_draws`."""
        self._unusable: list[BadGroup] = []
        """The bad groups that this rank has found since the last `end_draws`."""
        self._recent: deque[tuple[int, int]] = deque()
        """(groups drawn, bad groups) of each call of `end_draws`, over all ranks, oldest call first."""
        self._refusal = ""
        """The message of the error that the next `end_draws` raises; "": it raises none."""
        self._ignored: set[str] = set()
        """The extras that `_warn_of_ignored` has named in a warning."""

    def usable(self, samples: Sequence[Sample], table: str) -> list[Sample]:
        """Returns the samples from `table` that can be trained on, and rejects the others. Counts all as drawn."""
        good = []
        self._drawn += len(samples)
        for sample in samples:
            reason = why_unusable(sample, self.limits)
            if reason:
                self.reject(sample.info.key, table, reason)
            else:
                self._warn_of_ignored(sample.group)
                self._refuse_scaling(sample, table)
                good.append(sample)
        return good

    def _refuse_scaling(self, sample: Sample, table: str) -> None:
        """If the trainer would scale advantages that a user's function has computed, notes the error that the next
        `end_draws` raises."""
        function_name = sample.group.meta.get(ADVANTAGES_BY)
        if not isinstance(function_name, str):  # no function of the user computed the advantages
            return
        reason = why_scaled_again(self.scale, function_name)
        if reason and not self._refusal:
            self._refusal = f"key {sample.info.key} of table {table!r}: {reason}"

    def reject(self, key: int, table: str, reason: str) -> None:
        """Rejects the group with this key, drawn from `table`. The next `end_draws` counts and deletes it."""
        self.bad_keys.add(key)
        self._undeleted[key] = table
        self._unusable.append(BadGroup(key, table, reason))
        logger.warning("group rejected, it cannot be trained on: key %d of table %r: %s", key, table, reason)

    def requeued(self, keys: Iterable[int], table: str) -> None:
        """Deletes the bad groups among the groups that were requeued to `table`, so that no later run draws them.

        `keys`: the keys of the requeued groups.
        """
        bad = sorted(self.bad_keys.intersection(keys))
        if not bad:
            return
        try:
            self.client.delete(table, bad)
        except ReplayError as error:
            logger.warning("groups that cannot be trained on are in table %r again: %s", table, error)

    def end_draws(self) -> list[BadGroup]:
        """Deletes the bad groups of this step from the server. Returns the bad groups of all ranks.

        All ranks call this method together. Raises RuntimeError on every rank if this step has bad groups and their
        share among the recent groups is too high, or if the trainer would scale advantages of a user's function.
        """
        self.delete()
        # For each rank: (number of groups drawn, bad groups, error to raise or "").
        parts = self.ranks.all((self._drawn, self._unusable, self._refusal))
        for _, _, refusal in parts:
            if refusal:
                raise RuntimeError(refusal)
        self._drawn = 0
        self._unusable = []
        unusable = [group for _, groups, _ in parts for group in groups]
        self._recent.append((sum(drawn for drawn, _, _ in parts), len(unusable)))
        drawn = sum(drawn for drawn, _ in self._recent)
        # Forget the oldest call as long as the later calls together drew at least RECENT_GROUPS groups.
        while True:
            oldest_drawn, _ = self._recent[0]
            if drawn - oldest_drawn < RECENT_GROUPS:
                break
            self._recent.popleft()
            drawn -= oldest_drawn
        bad = sum(bad for _, bad in self._recent)
        # At the start of a run a single bad group would be a large share of the few groups so far.
        is_too_high = bad > self.max_share * max(drawn, RECENT_GROUPS)
        # The share also rises when an older step is forgotten. A step without bad groups is no reason to stop.
        if unusable and is_too_high:
            raise RuntimeError(
                f"{bad} of the last {counted(drawn, 'group')} could not be trained on, more than max_unusable_fraction="
                f"{self.max_share:g}. The last: key {unusable[-1].key} of table {unusable[-1].table!r}: "
                f"{unusable[-1].reason}. They are deleted: mend what generates them, and resume with resume=True"
            )
        return unusable

    def _warn_of_ignored(self, group: RolloutGroup) -> None:
        """Warns once of each extra that the model has as an input, because the trainer passes no extras to the
        model."""
        new = sorted(self.limits.inputs.intersection(group.extras) - self._ignored)
        if not new:
            return
        self._ignored.update(new)
        logger.warning(
            "groups have %s among their extras, which the model takes and this trainer does not give (said once)",
            ", ".join(new),
        )

    def delete(self) -> None:
        """Deletes the bad groups in `_undeleted` from the tables that they were drawn from, and from the pool."""
        # A bad fresh group may enter the pool after this call, because the server copies a group into the pool only
        # when the client confirms its batch. So the next call deletes such groups from the pool once more.
        # Until then, `bad_keys` keeps the step from drawing them.
        for_next_call = {key: self.pool for key, table in self._undeleted.items() if table != self.pool}
        tables = set(self._undeleted.values())
        if self._undeleted:
            tables.add(self.pool)
        for table in tables:
            if table == self.pool:  # the pool may have a copy of each bad group
                keys = list(self._undeleted)
            else:
                keys = [key for key, source in self._undeleted.items() if source == table]
            try:
                self.client.delete(table, keys)
            except TableNotFoundError:
                # A run that replaces nothing needs no pool. Without a pool, nothing is left for the next call.
                for_next_call = {}
        self._undeleted = for_next_call


UNSCORED = "it is a group without rewards: `replay score` is to draw from this table"
"""The reason why a group without rewards cannot be trained on."""
_UNSCORED_MAGIC = b"RPLYOPN"
"""The first bytes of a payload of a group without rewards, in each version of the format. See PARTIAL_GROUP_MAGIC in
replay_generator's groups/codec.py."""


def why_unusable(sample: Sample, limits: ModelLimits = ModelLimits()) -> str:  # noqa: B008, it is frozen
    """The reason why no step can train on this group; "": a step can.

    `limits`: the limits of the model, if they are known.
    """
    try:
        group = sample.group
    except ValueError as error:  # the payload is no group
        is_unscored = bytes(sample.payload[: len(_UNSCORED_MAGIC)]) == _UNSCORED_MAGIC
        return UNSCORED if is_unscored else str(error)
    if not group.prompt_lengths.all():
        return "prompt_ids is empty, so nothing predicts the first token"
    if group.num_tokens == 0:
        return "all its completions are empty"
    for name, ids in (("prompt_ids", group.prompt_ids), ("completion_ids", group.completion_ids)):
        # numpy computes no minimum and no maximum of an empty array, unless `initial` is given.
        lowest = int(ids.min(initial=0))
        highest = int(ids.max(initial=0))
        if lowest < 0:
            return f"{name} holds the token {lowest}"
        if limits.vocabulary is not None and highest >= limits.vocabulary:
            return f"{name} holds the token {highest}, and the model has the tokens 0 to {limits.vocabulary - 1}"
    longest = group.prompt_ids.size + int(group.completion_lengths.max())
    if limits.positions is not None and longest > limits.positions:
        positions = counted(limits.positions, "position")
        return f"prompt and completion have {counted(longest, 'token')}, and the model has {positions}"
    if limits.length is not None and longest > limits.length:
        return (
            f"prompt and completion have {counted(longest, 'token')}, and the trainer's max_length is {limits.length}: "
            "give trainer and engines the same one"
        )
    tokens = group.prompt_ids.size + group.num_tokens
    if limits.group_tokens is not None and tokens > limits.group_tokens:
        return f"it has {counted(tokens, 'token')}, more than max_group_tokens={limits.group_tokens}"
    for name in ("rewards", "advantages", "token_advantages"):
        values = getattr(group, name)
        if values is None:
            continue
        # A comparison with NaN is False, so NaN is beyond the limit too.
        beyond = ~(np.abs(values) <= MAX_VALUE)
        if beyond.any():
            return f"{name} holds {values[beyond][0]:g}, beyond ±{MAX_VALUE:g}"
    # An unknown log-probability is NaN. It passes this check, because a comparison with NaN is False.
    if (group.rollout_logprobs > MAX_LOGPROB).any():
        return f"rollout_logprobs holds {np.nanmax(group.rollout_logprobs):.3g}, above 0"
    temperature = group.sampling.get("temperature", 1.0)
    if not isinstance(temperature, int | float) or not MIN_TEMPERATURE <= temperature <= MAX_TEMPERATURE:
        return f"it was sampled at temperature {temperature!r}, not from {MIN_TEMPERATURE:g} to {MAX_TEMPERATURE:g}"
    if limits.reads_versions:
        try:
            token_versions(group)
        except ValueError as error:
            return str(error)
    reason = why_no_masks(group, limits.vocabulary)
    if reason:
        return reason
    if limits.teacher:
        return why_no_teacher(group, limits.teacher)
    return ""


COUNTS = ("zero_variance", "stale", "replaced", "missing", "dropped", "added", "too_stale", "uninformative", "drifted")
"""The names of the counts in `Replacement.counts`, without their common prefix "groups_"."""


@dataclass(frozen=True)
class Replacement:
    """The groups of one step on one rank, and their origin: fresh or from the pool."""

    samples: list[Sample]
    """The groups to train on, in the order of the fresh groups. A replacement stands in the place of the group that it
    replaces. Groups of the pool that were added to the fresh groups come last."""
    replaced: list[int]
    """Indices of the `samples` that came from the pool, ascending."""
    fresh: list[Sample]
    """All fresh groups that were taken for this step, whether it trains on them or not."""
    counts: dict[str, int]
    """The counts of the step by name.

    groups_zero_variance: fresh groups without a gradient. groups_stale: fresh groups whose tokens are all older than
    max_token_staleness allows. groups_replaced: zero-variance groups that a group of the pool replaced. groups_missing:
    zero-variance groups that nothing replaced; with dynamic sampling, the number of groups that the batch lacks.
    groups_dropped: fresh groups that were left out, whether this step or an earlier step drew them. groups_added:
    groups of the pool that were added to the fresh groups. Three counts tell why groups that were drawn from the pool
    were not used: groups_too_stale (they lag too far, or all their tokens are stale), groups_uninformative (they carry
    no gradient) and groups_drifted (the policy has moved away from them).
    """

    def __post_init__(self) -> None:
        assert self.replaced == sorted(set(self.replaced)), self.replaced
        assert all(0 <= place < len(self.samples) for place in self.replaced), (self.replaced, len(self.samples))
        assert self.counts.keys() == new_counts().keys(), "the metrics of each step have the same names"

    @property
    def groups(self) -> list[RolloutGroup]:
        """The groups of `samples`."""
        return [sample.group for sample in self.samples]

    def without(self, left_out: Sequence[int], **counts: int) -> Replacement:
        """Returns a copy without the samples at the indices `left_out`.

        Each of `counts` replaces a count of the copy. Its name here lacks the prefix: `drifted` is "groups_drifted".
        """
        kept = [i for i in range(len(self.samples)) if i not in left_out]
        return replace(
            self,
            samples=[self.samples[i] for i in kept],
            replaced=[kept.index(i) for i in self.replaced if i in kept],  # their indices among the kept samples
            counts=self.counts | {f"groups_{name}": count for name, count in counts.items()},
        )

    @property
    def stats(self) -> dict[str, float]:
        """`counts`, and for the groups from the pool: age_mean, age_max (seconds), staleness_mean, staleness_max
        (policy versions), times_sampled_mean, reward_mean, group_size_mean. These are NaN if no group is from the
        pool."""
        return {**self.counts, **describe_replayed([GroupFacts.of(self.samples[i]) for i in self.replaced])}


def new_counts(**counts: int) -> dict[str, int]:
    """Returns `Replacement.counts` with every name. A count that is not passed is 0, so that all steps have metrics of
    the same names."""
    return {f"groups_{name}": counts.get(name, 0) for name in COUNTS}


@dataclass
class ZeroVarianceReplacer:
    """Replaces zero-variance groups by groups of a replay table.

    A group is replaced as a whole, by a group of any size G. The off-policy correction treats the replacement like
    every other group: it compares the log-probabilities of the policy that sampled the replacement with those of the
    current weights.
    """

    client: ReplayClient
    table: str = "replay"
    on_empty: OnEmpty = "keep"
    """The treatment of a group if the pool has no replacement: see OnEmpty."""
    timeout: float | None = 60.0
    """Seconds that on_empty="wait" waits for the pool. None: without limit."""
    max_staleness: int | None = None
    """Groups that lag by more policy versions are not used. If only one trainer uses the table, set the max_staleness
    of the table instead, which also removes these groups."""
    inspector: Inspector | None = field(default=None, kw_only=True)
    """Removes groups that cannot be trained on. None: such a group raises ValueError."""
    scale: Scale | None = field(default=None, kw_only=True)
    """The scaling with which the trainer computes advantages anew, as in `carries_gradient`."""
    teacher: str = field(default="", kw_only=True)
    """The column that the trainer distils from, as in `carries_gradient`."""
    oldest_version: int | None = field(default=None, kw_only=True)
    """The oldest policy version whose tokens are trained on; None: the tokens of all versions. The trainer sets it
    before each step."""

    def __post_init__(self) -> None:
        check_choice("on_empty", self.on_empty, get_args(OnEmpty))

    def informs(self, sample: Sample) -> bool:
        """True if the group carries a gradient although its stale tokens are left out."""
        group = without_stale_tokens(sample.group, self.oldest_version)
        return carries_gradient(group, self.scale, self.teacher)

    def count_stale(self, samples: Sequence[Sample]) -> int:
        """The number of groups whose tokens are all stale."""
        return sum(is_stale(sample.group, self.oldest_version) for sample in samples)

    def replace(self, samples: Sequence[Sample], scope: str = "", exclude: Iterable[int] = ()) -> Replacement:
        """Replaces the zero-variance groups of a batch as far as the pool has replacements.

        The replacements are distinct. No replacement is in the batch already, and no replacement has a key in `exclude`
        (the keys of the batches of the other ranks). The server returns no group twice under one `scope`, so ranks
        that name the same scope in a step get different groups.

        With on_empty="wait", raises DeadlineExceededError at the end of the timeout; the error says what the table
        waits for. Such a wait needs another process that fills the pool, because this trainer adds no groups to the
        pool while it waits.
        """
        zero_variance = [i for i, sample in enumerate(samples) if not self.informs(sample)]
        counts = new_counts()
        excluded = {*exclude, *(sample.info.key for sample in samples)}
        drawn = self._draw(len(zero_variance), excluded, scope, counts, wait=self.on_empty == "wait")
        assert len(drawn) <= len(zero_variance), (len(drawn), len(zero_variance))
        replaced = zero_variance[: len(drawn)]
        missing = zero_variance[len(drawn) :]
        dropped = missing if self.on_empty == "drop" else []

        batch = list(samples)
        for i, replacement in zip(replaced, drawn, strict=True):
            batch[i] = replacement
        kept = [i for i in range(len(batch)) if i not in dropped]
        counts["groups_zero_variance"] = len(zero_variance)
        counts["groups_replaced"] = len(drawn)
        counts["groups_stale"] = self.count_stale(samples)
        counts["groups_missing"] = len(missing)
        counts["groups_dropped"] = len(dropped)
        return Replacement(
            samples=[batch[i] for i in kept],
            replaced=[kept.index(i) for i in replaced],  # their indices among the kept samples
            fresh=list(samples),
            counts=counts,
        )

    def add(self, taken: Replacement, count: int, scope: str = "", exclude: Iterable[int] = ()) -> Replacement:
        """Adds up to `count` groups of the pool to `taken`, the groups that the step has so far. Does not wait if the
        pool has too few.

        `scope` and `exclude` are those of the method `replace`.
        """
        counts = dict(taken.counts)
        excluded = {*exclude, *(sample.info.key for sample in taken.samples)}
        drawn = self._draw(count, excluded, scope, counts, wait=False)
        counts["groups_added"] += len(drawn)
        samples = [*taken.samples, *drawn]
        replaced = [*taken.replaced, *range(len(taken.samples), len(samples))]
        # `replace` is here the function of dataclasses, and not the method above.
        return replace(taken, samples=samples, replaced=replaced, counts=counts)

    def update_priorities(self, trust: Mapping[int, float], samples: Sequence[Sample]) -> int:
        """Sets the priority of each trained group to its score (`trained_priority`) times `trust[key]`. Returns the
        number of these groups that the table still has.

        `trust` has a number from 0 to 1 for the key of each group: the mean of min(w, 1) over the tokens of the group,
        where w is the weight of a token in the off-policy correction. So the pool returns a group less often if the
        policy has moved away from it.
        """
        priorities: dict[int, float] = {}
        for sample in samples:
            score = trained_priority(sample.group)
            if score:  # a group with the score 0 carries no gradient, and the pool is not meant to hold it
                priorities[sample.info.key] = score * trust[sample.info.key]
        if not priorities:
            return 0
        return self.client.update_priorities(self.table, priorities).applied

    def _draw(self, count: int, exclude: set[int], scope: str, counts: dict[str, int], *, wait: bool) -> list[Sample]:
        """Draws `count` samples that carry a gradient. Returns fewer only if the table has no more and `wait` is False.

        Some groups are drawn but not used: adds their numbers to `counts`.
        """
        chosen: list[Sample] = []
        if self.inspector is not None:
            exclude = exclude | self.inspector.bad_keys
        # If drawn samples cannot be used, the loop draws other samples in their place. It draws no key twice.
        while (missing := count - len(chosen)) > 0:
            if wait:  # the draw waits for all missing samples
                min_samples, timeout = missing, self.timeout
            else:  # the draw takes the samples that the table has now, and fails if there are none
                min_samples, timeout = 1, 0.0
            draw = partial(
                self.client.sample,
                self.table,
                missing,
                min_samples=min_samples,
                timeout=timeout,
                scope=scope,
                exclude=sorted(exclude),
            )
            try:
                # "keep" and "drop" do not wait for groups, but they do wait for a server that restarts.
                drawn = through_restarts(self.client, draw)
            except DeadlineExceededError:
                if wait:
                    raise
                break  # the table has no more
            exclude |= {sample.info.key for sample in drawn}
            if self.inspector is not None:
                drawn = self.inspector.usable(drawn, self.table)
            for sample in drawn:
                # Not every group of the pool can be used: other writers may have inserted groups without a gradient,
                # and groups grow stale in the pool.
                if is_stale(sample.group, self.oldest_version):
                    counts["groups_too_stale"] += 1
                elif not self.informs(sample):
                    counts["groups_uninformative"] += 1
                elif self.max_staleness is not None and sample.info.staleness > self.max_staleness:
                    counts["groups_too_stale"] += 1
                else:
                    chosen.append(sample)
        return chosen


@dataclass
class GroupSource:
    """The groups of each step: fresh groups, and groups of the pool that replace fresh groups or are added to them.

    `zero_variance` of the configuration says what happens to fresh groups without variance, which carry no gradient
    (`carries_gradient`):

    * replace: groups of the pool replace them.
    * none: they stay.
    * dynamic: the step leaves them out, and draws fresh batches until it has enough groups with variance (DAPO, arXiv
      2503.14476). Such a step takes more fresh groups than it trains on, and GRPOConfig.check_admission checks that
      the server admits so many.
    """

    batches: Iterator[list[Sample]]
    """The fresh groups of this rank."""
    replacer: ZeroVarianceReplacer
    ranks: Ranks
    run: str
    """A name of this run, the same on every rank, that no earlier run had."""
    config: GRPOConfig
    stopping: Stopping
    left: list[Sample] = field(default_factory=list, init=False)
    """Fresh groups that are drawn, and that no step has trained on yet."""
    _drawn: list[Sample] = field(default_factory=list, init=False)
    """The groups that were `left` when the current step began, and the groups that this step has drawn."""

    def collect(self) -> Replacement:
        """Draws the fresh groups of a step. All ranks call this method together.

        Raises the errors of the fresh batches, such as DeadlineExceededError, and Stopped if a stop ends the wait of
        any rank. After Stopped, the groups that this rank drew are in `left`.
        """
        self._drawn = list(self.left)
        with self._leaving_drawn_if_stopped():
            return self.stopping.together(self._collect)

    def _collect(self) -> Replacement:
        """Draws this rank's fresh groups of a step, and counts them."""
        if self.config.zero_variance == "dynamic":
            return self._dynamic()
        fresh = self._draw()
        zero_variance = self._count_without_gradient(fresh)
        stale = self.replacer.count_stale(fresh)
        # Nothing has replaced the groups without a gradient so far, so all of them are missing.
        counts = new_counts(zero_variance=zero_variance, stale=stale, missing=zero_variance)
        return Replacement(samples=fresh, replaced=[], fresh=fresh, counts=counts)

    def replace(self, step: int, taken: Replacement) -> Replacement:
        """Replaces groups of `taken`, which `collect` returned, by groups of the pool, or adds groups of the pool.

        Does neither up to `replay_start_step`. Raises Stopped as `collect` does.
        """
        assert not taken.replaced, "groups of the pool come once in a step"
        if step <= self.config.replay_start_step:
            return taken
        # All ranks use the same scope for all draws of a step, so that the server gives no two ranks the same group.
        scope = f"{self.run}/step-{step}"
        with self._leaving_drawn_if_stopped():
            # All ranks reach each `stopping.wait`. A stop ends this wait on every rank.
            if self.config.zero_variance == "replace":
                keys = self._keys_of_all_ranks(taken)
                # `taken.fresh` and `taken.samples` are the same groups here, because `collect` leaves out fresh groups
                # only with "dynamic".
                taken = self.stopping.wait(partial(self.replacer.replace, taken.fresh, scope, keys))
            added = self.config.replayed_groups_per_step // self.ranks.size
            if added:
                keys = self._keys_of_all_ranks(taken)
                taken = self.stopping.wait(partial(self.replacer.add, taken, added, scope, keys))
        return taken

    def _draw(self) -> list[Sample]:
        """Draws the next batch of fresh groups, and notes them in `_drawn`, in case a stop ends the step."""
        batch = next(self.batches)
        self._drawn += batch
        return batch

    @contextmanager
    def _leaving_drawn_if_stopped(self) -> Iterator[None]:
        """If a stop ends the block, puts the groups that were drawn into `left`. No step trains on them then, and the
        trainer requeues them."""
        try:
            yield
        except Stopped:
            self.left = self._drawn
            raise

    def _dynamic(self) -> Replacement:
        """Collects the groups of a step with dynamic sampling. All of them carry a gradient.

        They come from `left`, and from as few fresh batches as possible. They are fewer than a step needs if
        max_dynamic_batches batches have too few.
        """
        size = self.config.fresh_groups_per_step // self.ranks.size
        # All tokens of a group that an earlier step left may have become stale since then.
        chosen = [sample for sample in self.left if self.replacer.informs(sample)]
        outdated = len(self.left) - len(chosen)  # they count as stale, and as dropped
        fresh: list[Sample] = []
        for _ in range(self.config.max_dynamic_batches):
            if len(chosen) >= size:
                break
            batch = self._draw()
            fresh += batch
            chosen = chosen + [sample for sample in batch if self.replacer.informs(sample)]
        # The next step begins with the groups that are more than this step needs.
        self.left = chosen[size:]
        chosen = chosen[:size]
        zero_variance = self._count_without_gradient(fresh)
        missing = size - len(chosen)
        assert missing >= 0, (len(chosen), size)
        counts = new_counts(
            zero_variance=zero_variance,
            stale=self.replacer.count_stale(fresh) + outdated,
            dropped=zero_variance + outdated,
            missing=missing,
        )
        return Replacement(samples=chosen, replaced=[], fresh=fresh, counts=counts)

    def _count_without_gradient(self, samples: Sequence[Sample]) -> int:
        """The number of samples that carry no gradient."""
        return sum(not self.replacer.informs(sample) for sample in samples)

    def _keys_of_all_ranks(self, taken: Replacement) -> list[int]:
        """The keys of the groups that the ranks have taken so far. A draw from the pool must exclude them, because the
        pool may already hold copies of these groups."""
        own_keys = [sample.info.key for sample in (*taken.samples, *taken.fresh)]
        return [key for keys in self.ranks.all(own_keys) for key in keys]
