"""Assembly: the one place where rollouts become a group.

    rollout ──read once, and checked (played.py)──▶ arrays ──▶ a group of those that have a reward

Groups that a generator plays alone, those that several have played, and those that a scorer is handed go this way.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from replay_client import RolloutGroup, group_from_rows
from replay_generator.rollouts.played_sequence import PlayedSequence, columns_of
from replay_generator.rollouts.rollout import PlayedRollout


def assemble(played: Sequence[PlayedRollout], version: int, **fields: Any) -> RolloutGroup:
    """The group of these rollouts; `fields` are its rewards, its advantages, and others of RolloutGroup.

    What all sequences begin with becomes the shared prompt. `version`: of the policy before the generation; it counts
    if no token was drawn. Raises ValueError as RolloutGroup does.
    """
    sequences = [sequence for rollout in played for sequence in rollout.sequences]
    masks = [each.sampled_mask[each.head :] for each in sequences]
    unknown = 0
    if len(sequences) > len(played):
        fields["sequence_counts"] = np.array([len(rollout.sequences) for rollout in played], np.int32)
        sampled = sum(int(mask.sum()) for mask in masks)
        masks = [_known(sequence) for sequence in sequences]
        unknown = sampled - sum(int(mask.sum()) for mask in masks)
    columns = columns_of(sequences)
    versions = [each.policy_versions[each.head :] for each in sequences]
    known = np.concatenate([drawn[drawn >= 0] for drawn in versions])
    first = last = version
    if known.size:
        first = int(known.min())
        last = int(known.max())
    if last != first:
        columns["policy_versions"] = "token", versions
    group = group_from_rows(
        prompts=[each.token_ids[: each.head] for each in sequences],
        completions=[each.token_ids[each.head :] for each in sequences],
        logprobs=[each.logprobs[each.head :] for each in sequences],
        loss_masks=None if all(mask.all() for mask in masks) else masks,
        columns=columns,
        policy_version=first,
        policy_version_end=last if last != first else None,
        **fields,
    )
    if unknown:
        group.meta["unknown_logprobs"] = unknown
    if any(len(each.turns) > 2 for each in sequences):
        group.meta["turns"] = [[[turn.role, turn.tokens] for turn in each.turns] for each in sequences]
    return group


def _known(sequence: PlayedSequence) -> npt.NDArray[np.bool_]:
    """The mask of the completion without tokens whose log-probability the engine does not know, if it knows others.

    RolloutGroup refuses such tokens in rollouts of several sequences: it cannot tell them from those of tools.
    """
    mask = sequence.sampled_mask[sequence.head :]
    known = mask & ~np.isnan(sequence.logprobs[sequence.head :])
    return known if known.any() else mask
