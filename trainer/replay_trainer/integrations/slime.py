"""slime's rollout with a replay server: stored groups replace groups whose rewards are all equal.

    --rollout-function-path replay_trainer.integrations.slime.generate_rollout

slime then corrects by the log-probabilities that came with the samples: `--use-tis --tis-clip 2.0`.
"""

from __future__ import annotations

import math
import uuid
from dataclasses import replace
from functools import cache
from typing import Any

import msgpack
import numpy as np
from slime.rollout.base_types import RolloutFnTrainOutput, call_rollout_fn
from slime.utils.types import Sample

from replay_client import ReplayClient, RolloutGroup, group_from_rows
from replay_client.scoring import group_advantages
from replay_trainer.integrations.pool import GroupPool, OnUnavailable

NOT_STORED = ("rollout_top_p_token_ids", "rollout_routed_experts", "teacher_log_probs")
"""Fields of a sample that a stored group does not have, and that slime expects of all samples alike."""
IMAGES = ("multimodal_inputs", "multimodal_train_inputs")
KEPT = ("prompt", "label", "response", "reward", "weight_versions", "remove_sample", "train_metadata")
"""Fields of each sample that slime's logs, rewards and loss read, and that are stored as they are."""
_KEPT_AS = "slime"
"""The array in which they are, packed by msgpack: texts may be too long for the header of a group."""
_ENDED = (Sample.Status.COMPLETED, Sample.Status.TRUNCATED)
"""The status of a sample that did not fail."""
_RUN = uuid.uuid4().hex


@cache
def _pool(address: str | None, table: str, max_staleness: int | None, on_unavailable: OnUnavailable) -> GroupPool:
    client = ReplayClient.from_env(address=address)
    return GroupPool(client, table, max_staleness=max_staleness, on_unavailable=on_unavailable)


def generate_rollout(args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> Any:
    """slime's own rollout, then replacement. Metrics are `replay/*`; evaluation is slime's own.

    Settings are attributes of `args`, from slime's --custom-config-path: `replay_address` (host:port; left out:
    REPLAY_ADDRESS), `replay_table` ("replay"), `replay_max_staleness` (rollouts), `replay_on_unavailable` ("continue":
    without the server train on what was generated; "raise"), and `replay_rollout_function`, the path of the function
    that generates (slime's default).
    """
    from slime.utils.misc import load_function

    path = getattr(args, "replay_rollout_function", "slime.rollout.sglang_rollout.generate_rollout")
    output = call_rollout_fn(load_function(path), args, rollout_id, data_source, evaluation=evaluation)
    if evaluation:
        return output
    address, table = getattr(args, "replay_address", None), getattr(args, "replay_table", "replay")
    on_unavailable = getattr(args, "replay_on_unavailable", "continue")
    pool = _pool(address, table, getattr(args, "replay_max_staleness", None), on_unavailable)
    return replaced(output, pool, rollout_id, getattr(args, "reward_key", None))


def replaced(output: Any, pool: GroupPool, rollout_id: int, reward_key: str | None = None) -> RolloutFnTrainOutput:
    """`output` with its zero-variance groups replaced as far as `pool` has others, and its other groups stored.

    Groups that cannot be stored as they are stay as they are: those with a sample that failed, with a rollout of
    several samples, or with images. Raises ValueError if the samples have no log-probabilities, or fields that stored
    groups do not have.
    """
    version = pool.advance(rollout_id)
    whole = {place: samples for place, each in enumerate(output.samples) if (samples := _whole(each, reward_key))}
    groups = {place: _stored(samples, version, reward_key) for place, samples in whole.items()}
    drawn, metrics = pool.replace(groups, f"{_RUN}/{rollout_id}", lambda group: _kept_of(group) is not None)
    samples = list(output.samples)
    for place, sample in drawn.items():
        restored = _restored(whole[place], sample.group)
        nested = isinstance(samples[place][0], list)
        samples[place] = [[each] for each in restored] if nested else restored
    metrics["replay/groups_left_alone"] = len(output.samples) - len(groups)
    return RolloutFnTrainOutput(samples=samples, metrics=(output.metrics or {}) | metrics)


def _whole(group: Any, reward_key: str | None) -> list[Sample]:
    """The samples of a group that can be stored as it is, one of each rollout; none of another group."""
    if not isinstance(group, list):
        return []
    # A rollout that may fan out into several samples is a list, also if it has only one.
    rollouts = [each if isinstance(each, list) else [each] for each in group]
    samples = [sample for rollout in rollouts for sample in rollout]
    for sample in samples:
        if foreign := [name for name in NOT_STORED if getattr(sample, name, None) is not None]:
            raise ValueError(f"slime's samples have {', '.join(foreign)}, which stored groups do not have: turn it off")
        known = len(sample.rollout_log_probs or ()) == sample.response_length
        if not known and sample.status in _ENDED:
            raise ValueError("slime's samples lack rollout_log_probs: use a rollout function that returns them")
        images = any(getattr(sample, name, None) is not None for name in IMAGES)
        scored = math.isfinite(_reward(sample, reward_key))
        if not known or images or not scored or len(sample.tokens) <= sample.response_length:
            return []
    return samples if all(len(rollout) == 1 for rollout in rollouts) else []


def _reward(sample: Sample, reward_key: str | None) -> float:
    """The reward that slime trains on; NaN if the sample has none, because it failed."""
    reward = sample.reward
    if reward_key:
        reward = reward.get(reward_key) if isinstance(reward, dict) else None
    try:
        return float(reward)
    except (TypeError, ValueError):
        return math.nan


def _stored(samples: list[Sample], version: int, reward_key: str | None) -> RolloutGroup:
    """The samples of one prompt as a group."""
    rewards = [_reward(sample, reward_key) for sample in samples]
    prompts = [len(sample.tokens) - sample.response_length for sample in samples]
    return group_from_rows(
        prompts=[sample.tokens[:prompt] for sample, prompt in zip(samples, prompts, strict=True)],
        completions=[sample.tokens[prompt:] for sample, prompt in zip(samples, prompts, strict=True)],
        logprobs=[sample.rollout_log_probs or [] for sample in samples],
        rewards=rewards,
        advantages=group_advantages(rewards),
        loss_masks=[_mask(sample) for sample in samples],
        policy_version=version,
        finish_reasons=tuple("length" if sample.status is Sample.Status.TRUNCATED else "stop" for sample in samples),
        extras={_KEPT_AS: np.frombuffer(msgpack.packb([_kept(sample) for sample in samples]), np.uint8)},
    )


def _mask(sample: Sample) -> list[int]:
    """The tokens that slime trains on."""
    if sample.remove_sample:
        return [0] * sample.response_length
    return [1] * sample.response_length if sample.loss_mask is None else sample.loss_mask


def _kept(sample: Sample) -> dict[str, Any]:
    """The fields that are stored as they are. Raises ValueError that names a field that msgpack cannot hold."""
    kept: dict[str, Any] = {}
    for name in KEPT:
        value = getattr(sample, name)
        try:
            # NumPy's and torch's numbers become Python's.
            kept[name] = msgpack.unpackb(msgpack.packb(value, default=lambda each: each.item()))
        except (AttributeError, TypeError, ValueError, OverflowError, RuntimeError) as error:
            raise ValueError(
                f"slime's samples have a {name} that cannot be stored, {value!r:.200}: put numbers, texts, lists "
                f"and dicts of them into it"
            ) from error
    return kept | {"status": sample.status.value}


def _kept_of(group: RolloutGroup) -> list[dict[str, Any]] | None:
    """The same of a stored group, for each sample; None if this function did not store the group."""
    try:
        kept = msgpack.unpackb(group.extras[_KEPT_AS].tobytes())
        sound = len(kept) == group.group_size and all({*each} == {*KEPT, "status"} for each in kept)
    except (KeyError, TypeError, ValueError, msgpack.UnpackException):
        return None
    return kept if sound else None


def _restored(places: list[Sample], group: RolloutGroup) -> list[Sample]:
    """A stored group as samples with the indices of the samples that stood there."""
    kept = _kept_of(group)
    assert kept is not None
    assert group.loss_mask is not None
    samples = []
    for place, fields, prompt, span in zip(places, kept, group.prompts(), group.sampled_spans(), strict=True):
        samples.append(
            replace(
                place,
                **(fields | {"status": Sample.Status(fields["status"])}),
                tokens=[*prompt.tolist(), *group.completion_ids[span].tolist()],
                response_length=span.stop - span.start,
                loss_mask=group.loss_mask[span].astype(int).tolist(),
                rollout_log_probs=group.rollout_logprobs[span].tolist(),
            )
        )
    return samples
