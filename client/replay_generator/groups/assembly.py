"""Assembly: the one place where rollouts become a group.

    rollout ──read once, and checked (played_sequence.py)──▶ arrays ──▶ a group of the rollouts that have a reward

All groups are assembled here: groups that one generator or several generators have played, and groups of a scorer.
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
    """The group of these rollouts. `fields`: further fields of RolloutGroup, such as rewards and advantages.

    The tokens with which the prompts of all sequences begin become the shared prompt of the group. `version`: the
    policy version before the generation, which becomes the group's version if no token was drawn. Raises ValueError as
    RolloutGroup does.
    """
    # The first `head` tokens of a sequence are its prompt, and the others are its completion. `masks` and `versions`
    # have one array for each sequence, with one value for each token of its completion.
    sequences = [sequence for rollout in played for sequence in rollout.sequences]
    masks = [sequence.sampled_mask[sequence.head :] for sequence in sequences]
    num_unknown = 0  # tokens of the policy that are left out of the masks, because their log-probability is unknown
    has_several_sequences = len(sequences) > len(played)
    if has_several_sequences:
        fields["sequence_counts"] = np.array([len(rollout.sequences) for rollout in played], np.int32)
        num_sampled = sum(int(mask.sum()) for mask in masks)
        masks = [_known_mask(sequence) for sequence in sequences]
        num_trained = sum(int(mask.sum()) for mask in masks)
        num_unknown = num_sampled - num_trained
    columns = columns_of(sequences)  # by name, the extras that the engine returned with its completions
    versions = [sequence.policy_versions[sequence.head :] for sequence in sequences]
    # A token before the first drawn token has the version -1. A group without drawn tokens gets `version`.
    drawn_versions = np.concatenate([values[values >= 0] for values in versions])
    first_version = version
    last_version = version
    if drawn_versions.size:
        first_version = int(drawn_versions.min())
        last_version = int(drawn_versions.max())
    version_end = None  # all tokens have the same version
    if last_version != first_version:
        version_end = last_version
        columns["policy_versions"] = ("token", versions)  # the axis, and an array for each sequence
    all_are_trained = all(mask.all() for mask in masks)
    group = group_from_rows(
        prompts=[sequence.token_ids[: sequence.head] for sequence in sequences],
        completions=[sequence.token_ids[sequence.head :] for sequence in sequences],
        logprobs=[sequence.logprobs[sequence.head :] for sequence in sequences],
        loss_masks=None if all_are_trained else masks,
        columns=columns,
        policy_version=first_version,
        policy_version_end=version_end,
        **fields,
    )
    if num_unknown:
        group.meta["unknown_logprobs"] = num_unknown
    # A sequence of one or two turns is a plain completion, with or without its prompt. So the roles of its turns tell
    # nothing new.
    if any(len(sequence.turns) > 2 for sequence in sequences):
        group.meta["turns"] = [_described_turns(sequence) for sequence in sequences]
    return group


def _described_turns(sequence: PlayedSequence) -> list[list[Any]]:
    """The role and the number of tokens of each turn."""
    return [[turn.role, turn.tokens] for turn in sequence.turns]


def _known_mask(sequence: PlayedSequence) -> npt.NDArray[np.bool_]:
    """The `sampled_mask` of the completion, without the tokens whose log-probability the engine does not know.

    If a rollout has several sequences, RolloutGroup refuses such tokens, because it cannot tell them from the tokens
    that tools wrote. If the engine knows no log-probability of the completion, the mask keeps all sampled tokens.
    """
    sampled_mask = sequence.sampled_mask[sequence.head :]
    is_unknown = np.isnan(sequence.logprobs[sequence.head :])
    known_mask: npt.NDArray[np.bool_] = sampled_mask & ~is_unknown
    if not known_mask.any():
        return sampled_mask
    return known_mask
