"""slime's rollout with a replay server: stored groups replace groups whose rewards are all equal.

    --rollout-function-path replay_trainer.integrations.slime.generate_rollout

slime then corrects by the log-probabilities that came with the samples: `--use-tis --tis-clip 2.0`.
"""

from __future__ import annotations

import uuid
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
from slime.rollout.base_types import RolloutFnTrainOutput, call_rollout_fn
from slime.utils.types import Sample

from replay_client import ReplayClient, RolloutGroup, group_from_completions
from replay_client.scoring import carries_gradient, group_advantages
from replay_trainer.integrations.pool import GroupPool

NOT_STORED = ("multimodal_inputs", "rollout_top_p_token_ids", "rollout_routed_experts", "teacher_log_probs")
"""Fields of a sample that a stored group does not have."""
_RUN = uuid.uuid4().hex


@cache
def _pool(address: str | None, table: str, max_staleness: int | None) -> GroupPool:
    return GroupPool(ReplayClient.from_env(address=address), table, max_staleness=max_staleness)


def generate_rollout(args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> Any:
    """slime's own rollout, then replacement. Metrics are `replay/*`; evaluation is slime's own.

    Settings are attributes of `args`, from slime's --custom-config-path: `replay_address` (host:port; left out:
    REPLAY_ADDRESS), `replay_table` ("replay"), `replay_max_staleness` (rollouts), and `replay_rollout_function`, the
    path of the function that generates (slime's default).
    """
    from slime.utils.misc import load_function

    path = getattr(args, "replay_rollout_function", "slime.rollout.sglang_rollout.generate_rollout")
    output = call_rollout_fn(load_function(path), args, rollout_id, data_source, evaluation=evaluation)
    if evaluation:
        return output
    address, table = getattr(args, "replay_address", None), getattr(args, "replay_table", "replay")
    pool = _pool(address, table, getattr(args, "replay_max_staleness", None))
    return replaced(output, pool, rollout_id, getattr(args, "reward_key", None))


def replaced(output: Any, pool: GroupPool, rollout_id: int, reward_key: str | None = None) -> RolloutFnTrainOutput:
    """`output` with its zero-variance groups replaced as far as `pool` has others, and its other groups stored.

    Raises ValueError if the samples have no log-probabilities, or fields that stored groups do not have.
    """
    version = pool.advance(rollout_id)
    groups = [_stored(samples, version, reward_key) for samples in output.samples]
    zero_variance = [place for place, group in enumerate(groups) if not carries_gradient(group)]
    size = max((group.group_size for group in groups), default=0)
    places = [place for place in zero_variance if groups[place].group_size == size]
    drawn = pool.draw(
        len(places), f"{_RUN}/{rollout_id}", lambda group: group.group_size == size and "status" in group.meta
    )
    samples = list(output.samples)
    for place, sample in zip(places, drawn, strict=False):
        samples[place] = _restored(samples[place], sample.group, reward_key)
    pool.insert(group for place, group in enumerate(groups) if place not in zero_variance)
    rewards = [float(group.rewards.mean()) for group in groups]
    staleness = [sample.info.staleness for sample in drawn]
    metrics = {
        "replay/fresh_reward": float(np.mean(rewards)) if rewards else 0.0,
        "replay/fresh_zero_variance": len(zero_variance) / max(1, len(groups)),
        "replay/groups_replaced": len(drawn),
        "replay/groups_missing": len(zero_variance) - len(drawn),
        "replay/staleness": float(np.mean(staleness)) if staleness else 0.0,
    }
    return RolloutFnTrainOutput(samples=samples, metrics=(output.metrics or {}) | metrics)


def _stored(samples: list[Sample], version: int, reward_key: str | None) -> RolloutGroup:
    """The samples of one prompt as a group."""
    for sample in samples:
        if foreign := [name for name in NOT_STORED if getattr(sample, name, None) is not None]:
            raise ValueError(f"slime's samples have {', '.join(foreign)}, which stored groups do not have: turn it off")
        if sample.rollout_log_probs is None or len(sample.rollout_log_probs) != sample.response_length:
            raise ValueError("slime's samples lack rollout_log_probs: use a rollout function that returns them")
    rewards = [sample.reward if reward_key is None else sample.reward[reward_key] for sample in samples]
    first = samples[0]
    masks = [sample.loss_mask or [1] * sample.response_length for sample in samples]
    return group_from_completions(
        prompt_ids=first.tokens[: len(first.tokens) - first.response_length],
        completions=[sample.tokens[len(sample.tokens) - sample.response_length :] for sample in samples],
        logprobs=[sample.rollout_log_probs for sample in samples],
        rewards=rewards,
        advantages=group_advantages(rewards),
        loss_mask=np.concatenate(masks).astype(bool),
        policy_version=version,
        # What slime's logs and rewards show of a sample.
        meta={
            "prompt": first.prompt,
            "label": first.label,
            "response": [sample.response for sample in samples],
            "status": [sample.status.value for sample in samples],
            "weight_versions": [list(sample.weight_versions) for sample in samples],
        },
    )


def _restored(places: list[Sample], group: RolloutGroup, reward_key: str | None) -> list[Sample]:
    """A stored group as samples with the indices of the samples that stood there."""
    assert group.loss_mask is not None
    ends, meta, samples = np.cumsum(group.completion_lengths), group.meta, []
    for k, (place, end) in enumerate(zip(places, ends, strict=True)):
        length, reward = int(group.completion_lengths[k]), float(group.rewards[k])
        tokens = slice(end - length, end)
        samples.append(
            replace(
                place,
                prompt=meta["prompt"],
                label=meta["label"],
                tokens=[*group.prompt_ids.tolist(), *group.completion_ids[tokens].tolist()],
                response=meta["response"][k],
                response_length=length,
                reward=reward if reward_key is None else {**place.reward, reward_key: reward},
                loss_mask=group.loss_mask[tokens].astype(int).tolist(),
                rollout_log_probs=group.rollout_logprobs[tokens].tolist(),
                weight_versions=meta["weight_versions"][k],
                status=Sample.Status(meta["status"][k]),
            )
        )
    return samples
