"""slime's rollout with a replay server: stored groups replace groups whose rewards are all equal.

    --rollout-function-path replay_adapters.slime.generate_rollout

With `--use-tis --tis-clip 2.0`, slime then corrects by the log-probabilities that are stored with the samples.
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
"""Fields that a stored sample takes from the sample that it replaces: slime orders and groups samples by them."""
_MEASURED = ("spec_info", "prefix_cache_info", "non_generation_time")
"""Fields with measurements of this step, which a stored sample takes from the sample that it replaces. slime sums them
over samples."""
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

    Settings are attributes of `args`, from slime's --custom-config-path: `replay_address` (host:port; left out:
    REPLAY_ADDRESS), `replay_table` ("replay"), `replay_max_staleness` (rollouts), `replay_on_unavailable`, and
    `replay_rollout_function`, the path of the function that generates (default: slime's own). `replay_on_unavailable`
    is "continue" (the default: while the server is away, train on the generated groups) or "raise".
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
    """`output`, with its zero-variance groups replaced as far as `pool` has replacements.

    Stores the groups with variance in `pool`. Groups with a failed sample or with images stay as they are, because they
    cannot be trained on again. Raises ValueError if the samples have no log-probabilities, or a field that cannot be
    stored.
    """
    version = pool.advance(rollout_id)
    store = SampleStore(Sample, reward_key)
    # By place, which is the position of a group in the output.
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
    has_only_rollouts = isinstance(group, list) and bool(group) and all(group)
    if not has_only_rollouts:
        return False
    for rollout in group:
        for sample in samples_of(rollout):
            if not _can_be_stored(sample, store):
                return False
    return True


def _can_be_stored(sample: Any, store: SampleStore) -> bool:
    """True if a sample can be trained on at another time. Raises ValueError if it ended without log-probabilities."""
    has_logprobs = len(sample.rollout_log_probs or ()) == sample.response_length
    if not has_logprobs and sample.status in _ENDED:
        raise ValueError("slime's samples lack rollout_log_probs: use a rollout function that returns them")
    if not has_logprobs:
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
    """A stored group as rollouts, with the indices of the rollouts that it replaces.

    A stored rollout that is a list may have more samples than the rollout that it replaces. Each further sample has the
    index of the last replaced sample.
    """
    read = store.read(group)
    assert read is not None  # only groups that can be read are drawn
    rollouts, _ = read
    for replaced_rollout, rollout in zip(replaced_rollouts, rollouts, strict=True):
        replaced_samples = samples_of(replaced_rollout)
        samples = samples_of(rollout)
        first = replaced_samples[0]
        for k, sample in enumerate(samples):
            if k < len(replaced_samples):
                _copy_fields(sample, replaced_samples[k], _OF_PLACE)
                _copy_fields(sample, replaced_samples[k], _MEASURED)
            else:
                _copy_fields(sample, replaced_samples[-1], _OF_PLACE)
                # slime measured nothing for a further sample, so its measurements get their defaults.
                _copy_fields(sample, Sample(), _MEASURED)
            if len(samples) > 1:  # slime wants one name for all samples of a rollout
                sample.rollout_id = first.index if first.rollout_id is None else first.rollout_id
    return rollouts


def _copy_fields(sample: Any, other: Any, names: Sequence[str]) -> None:
    """Copies the fields `names` of `other` to `sample`. Skips fields that this version of slime lacks."""
    for name in names:
        if hasattr(other, name):
            setattr(sample, name, getattr(other, name))
