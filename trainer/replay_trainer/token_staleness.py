"""Stale tokens: tokens that are too old, which `max_token_staleness` leaves out of the loss.

A rollout that an engine continued with new weights has tokens of several policy versions. A token is stale if the
version that wrote it is older than the oldest version that counts. A stale token is masked like a token of a truncated
rollout: nothing trains on it, and no denominator that counts tokens counts it.

The axis T has the tokens of all sequences of a group.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from replay_client.rollout import RolloutGroup

VERSIONS = "policy_versions"
"""The column of a group's extras with the policy version of each token. Generators write this column if a group has
tokens of several versions."""


def token_versions(group: RolloutGroup) -> npt.NDArray[np.int64]:
    """(T,) the policy version of each token, from the column VERSIONS.

    If the group does not have this column, all tokens have the policy version of the group. So have tokens whose
    version in the column is negative. Raises ValueError for a column that does not have one whole number for each
    token.
    """
    values = group.extras.get(VERSIONS)
    if values is None:
        return np.full(group.num_tokens, group.policy_version, np.int64)
    axis = group.axes.get(VERSIONS)
    is_integer = values.dtype.kind in "iu"  # the kinds of integers with a sign and without
    if axis != "token" or values.shape != (group.num_tokens,) or not is_integer:
        raise ValueError(
            f"its column {VERSIONS!r} has the shape {values.shape}, the dtype {values.dtype} and the axis {axis!r}: "
            f"max_token_staleness needs one whole number for each of the {group.num_tokens} tokens of completion_ids, "
            f"with the axis 'token'"
        )
    versions_T = values.astype(np.int64)
    return np.where(versions_T < 0, group.policy_version, versions_T)


def without_stale_tokens(group: RolloutGroup, oldest_version: int | None) -> RolloutGroup:
    """The group with a `loss_mask` that leaves out the tokens of versions before `oldest_version`. `oldest_version`
    None: all tokens count.

    Returns the group itself if none of its trained tokens is stale. Raises ValueError as `token_versions` does.
    """
    if oldest_version is None:
        return group
    live_T = token_versions(group) >= oldest_version
    if live_T[group.trained_mask].all():
        return group
    mask_T = live_T if group.loss_mask is None else group.loss_mask & live_T
    return replace(group, loss_mask=mask_T, validate=False)


def is_stale(group: RolloutGroup, oldest_version: int | None) -> bool:
    """True if the group has tokens to train on, and all of these tokens are stale."""
    if not group.trained_mask.any():
        return False
    return not without_stale_tokens(group, oldest_version).trained_mask.any()


def count_stale(groups: Iterable[RolloutGroup], oldest_version: int | None) -> tuple[int, int]:
    """(tokens, rollouts): the number of tokens that are left out because they are stale, and the number of rollouts
    that have no token to train on for this reason."""
    tokens = 0
    rollouts = 0
    for group in groups:
        live = without_stale_tokens(group, oldest_version)
        if live is group:  # no token is stale
            continue
        before_T = group.trained_mask
        after_T = live.trained_mask
        tokens += int(before_T.sum()) - int(after_T.sum())
        for span in group.rollout_spans():
            if before_T[span].any() and not after_T[span].any():
                rollouts += 1
    return tokens, rollouts
