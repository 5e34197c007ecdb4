"""slime's rollout with a replay server: stored groups replace groups whose rewards are all equal.

    --rollout-function-path replay_adapters.slime.generate_rollout

The stored samples come from an older policy. With `--use-tis --tis-clip 2.0`, slime corrects for this by the
log-probabilities that are stored with the samples.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from functools import cache
from math import isfinite
from typing import Any

from replay_adapters.group_pool import GroupPool, OnUnavailable
from replay_adapters.hooks import hooks_of
from replay_adapters.samples import SampleStore, samples_of
from replay_client import ReplayClient, RolloutGroup

with hooks_of("slime"):
    from slime.rollout.base_types import RolloutFnTrainOutput, call_rollout_fn
    from slime.utils.types import Sample

IMAGES = ("multimodal_inputs", "multimodal_train_inputs")
"""Fields of a sample with images. Such a sample is not stored."""
_ENDED = (Sample.Status.COMPLETED, Sample.Status.TRUNCATED)
"""The statuses of a sample that did not fail."""
_OF_PLACE = ("group_index", "index", "rollout_id", "metadata", "session_id")
"""Fields that a stored sample takes from the sample that it replaces, because slime orders and groups samples by
them."""
_MEASURED = ("spec_info", "prefix_cache_info", "non_generation_time")
"""Fields with measurements of this step, which a stored sample takes from the sample that it replaces, because slime
sums them over the samples of the step."""
_RUN = uuid.uuid4().hex
"""A random name of this run, for the scopes of its draws."""


@cache
def _pool(address: str | None, table: str, max_staleness: int | None, on_unavailable: OnUnavailable) -> GroupPool:
    """The pool with these settings. Each process makes it once, at the first rollout."""
    client = ReplayClient.from_env(address=address)
    return GroupPool(client, table, max_staleness=max_staleness, sequences=True, on_unavailable=on_unavailable)


def generate_rollout(args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> Any:
    """The output of slime's own rollout, with groups from the pool in the place of zero-variance groups.

    Adds metrics `replay/*`. In evaluation nothing is replaced.

    The settings are attributes of `args`, which come from the file of slime's --custom-config-path:

    * `replay_address`: host:port of the server. Default: REPLAY_ADDRESS.
    * `replay_table`: the table of the pool. Default: "replay".
    * `replay_max_staleness`: the most rollouts that a stored group may lag. Default: only the limit of the table holds.
    * `replay_on_unavailable`: "continue" trains on the generated groups while the server is away, "raise" ends the run.
      Default: "continue".
    * `replay_rollout_function`: the path of the function that generates. Default: slime's own.
    """
    from slime.utils.misc import load_function

    path = getattr(args, "replay_rollout_function", "slime.rollout.sglang_rollout.generate_rollout")
    output = call_rollout_fn(load_function(path), args, rollout_id, data_source, evaluation=evaluation)
    if evaluation:
        return output
    pool = _pool(
        getattr(args, "replay_address", None),
        getattr(args, "replay_table", "replay"),
        getattr(args, "replay_max_staleness", None),
        getattr(args, "replay_on_unavailable", "continue"),
    )
    return replaced(output, pool, rollout_id, getattr(args, "reward_key", None))


def replaced(output: Any, pool: GroupPool, rollout_id: int, reward_key: str | None = None) -> RolloutFnTrainOutput:
    """`output`, with its zero-variance groups replaced by groups of `pool`, as far as `pool` has enough of them.

    Stores the groups with variance in `pool`. Groups with a failed sample or with images stay as they are, because they
    cannot be trained on again. Raises ValueError if the samples have no log-probabilities, or a field that cannot be
    stored.
    """
    version = pool.advance(rollout_id)
    store = SampleStore(Sample, reward_key)
    # The keys of these two dicts are the positions of the groups in the output.
    storable = {place: rollouts for place, rollouts in enumerate(output.samples) if _is_storable(rollouts, store)}
    groups = {place: store.group_of(rollouts, version) for place, rollouts in storable.items()}
    drawn, metrics = pool.replace(groups, f"{_RUN}/{rollout_id}", lambda group: store.read(group) is not None)
    samples = list(output.samples)
    for place, sample in drawn.items():
        samples[place] = _restored(storable[place], sample.group, store)
    metrics["replay/groups_left_alone"] = len(output.samples) - len(groups)
    return RolloutFnTrainOutput(samples=samples, metrics=(output.metrics or {}) | metrics)


def _is_storable(group: Any, store: SampleStore) -> bool:
    """True if every sample of a group can be trained on at another time."""
    if not isinstance(group, list) or not group:
        return False
    if not all(group):  # a rollout has no samples
        return False
    for rollout in group:
        for sample in samples_of(rollout):
            if not _can_be_stored(sample, store):
                return False
    return True


def _can_be_stored(sample: Any, store: SampleStore) -> bool:
    """True if a sample can be trained on at another time.

    Raises ValueError for a sample that lacks log-probabilities although it did not fail.
    """
    has_logprobs = len(sample.rollout_log_probs or ()) == sample.response_length
    if not has_logprobs:
        if sample.status in _ENDED:
            raise ValueError("slime's samples lack rollout_log_probs: use a rollout function that returns them")
        return False
    if any(getattr(sample, name, None) is not None for name in IMAGES):
        return False
    if not isfinite(store.reward(sample)):
        return False
    # An aborted answer is incomplete, even if it has a reward.
    if sample.status == Sample.Status.ABORTED:
        return False
    has_prompt = len(sample.tokens) > sample.response_length
    return bool(has_prompt)


def _restored(replaced_rollouts: Sequence[Any], group: RolloutGroup, store: SampleStore) -> list[Any]:
    """The rollouts of a stored group, with the fields _OF_PLACE and _MEASURED of the rollouts that they replace.

    A stored rollout that is a list may have more samples than the rollout that it replaces. Each further sample gets
    the fields _OF_PLACE of the last replaced sample.
    """
    read = store.read(group)
    assert read is not None  # only groups that can be read are drawn
    rollouts, _ = read
    for replaced_rollout, rollout in zip(replaced_rollouts, rollouts, strict=True):
        replaced_samples = samples_of(replaced_rollout)
        samples = samples_of(rollout)
        for k, sample in enumerate(samples):
            if k < len(replaced_samples):
                _copy_fields(sample, replaced_samples[k], _OF_PLACE)
                _copy_fields(sample, replaced_samples[k], _MEASURED)
            else:
                _copy_fields(sample, replaced_samples[-1], _OF_PLACE)
                # slime measured nothing for a further sample, so its measurements get their defaults.
                _copy_fields(sample, Sample(), _MEASURED)
        if len(samples) > 1:  # slime wants the same rollout_id in all samples of a rollout
            first_replaced = replaced_samples[0]
            rollout_id = first_replaced.index if first_replaced.rollout_id is None else first_replaced.rollout_id
            for sample in samples:
                sample.rollout_id = rollout_id
    return rollouts


def _copy_fields(sample: Any, other: Any, names: Sequence[str]) -> None:
    """Copies the fields `names` of `other` to `sample`. Skips fields that this version of slime lacks."""
    for name in names:
        if hasattr(other, name):
            setattr(sample, name, getattr(other, name))
