"""Makes groups of completions: of one shared prompt, or of rows that each have a prompt of their own."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from replay_client.rollout import Int32, RolloutGroup, vector


def group_from_completions(
    *,
    prompt_ids: npt.ArrayLike,
    completions: Iterable[npt.ArrayLike],
    logprobs: Iterable[npt.ArrayLike],
    rewards: npt.ArrayLike,
    advantages: npt.ArrayLike,
    **fields: Any,
) -> RolloutGroup:
    """A group of G completions, each given as one array of tokens and one of log-probabilities.

    `prompt_ids` (P,), `rewards` (G,) and `advantages` (G,) are arrays; `fields` are the other fields of RolloutGroup.
    Raises ValueError that names the field or completion.
    """
    tokens_G = [vector("completions", np.asarray(ids).reshape(-1), np.int32) for ids in completions]
    logprobs_G = [np.asarray(lps, dtype=np.float32).reshape(-1) for lps in logprobs]
    for index, (tokens, lps) in enumerate(zip(tokens_G, logprobs_G, strict=True)):
        if tokens.size != lps.size:
            raise ValueError(f"completion {index} has {tokens.size} tokens and {lps.size} log-probabilities")
    return RolloutGroup(
        prompt_ids=np.asarray(prompt_ids),
        completion_ids=np.concatenate(tokens_G) if tokens_G else np.zeros(0, np.int32),
        completion_lengths=np.array([tokens.size for tokens in tokens_G], dtype=np.int32),
        rollout_logprobs=np.concatenate(logprobs_G) if logprobs_G else np.zeros(0, np.float32),
        rewards=np.asarray(rewards, dtype=np.float32),
        advantages=np.asarray(advantages, dtype=np.float32),
        **fields,
    )


def group_from_rows(
    *,
    prompts: Iterable[npt.ArrayLike],
    completions: Iterable[npt.ArrayLike],
    logprobs: Iterable[npt.ArrayLike],
    rewards: npt.ArrayLike,
    advantages: npt.ArrayLike,
    loss_masks: Iterable[npt.ArrayLike] | None = None,
    **fields: Any,
) -> RolloutGroup:
    """A group of G rows that each have their own prompt, completion, log-probabilities and, if given, loss mask.

    The common beginning of the prompts becomes `prompt_ids`, and the rest of each prompt the context of its row.
    `RolloutGroup.prompts` and `sampled_spans` give the rows back. Other arguments and errors: `group_from_completions`.
    """
    prompts_G = [vector("prompts", np.asarray(ids).reshape(-1), np.int32) for ids in prompts]
    shared = _common_beginning(prompts_G)
    contexts_G = [ids[shared:] for ids in prompts_G]
    completions_G = [np.asarray(ids).reshape(-1) for ids in completions]
    logprobs_G = [np.asarray(lps, dtype=np.float32).reshape(-1) for lps in logprobs]
    masks_G = None if loss_masks is None else [np.asarray(mask, dtype=np.bool_).reshape(-1) for mask in loss_masks]
    if any(ids.size for ids in contexts_G):
        fields["context_lengths"] = np.array([ids.size for ids in contexts_G], np.int32)
        completions_G = [_joined(*pair) for pair in zip(contexts_G, completions_G, strict=True)]
        logprobs_G = [_joined(np.full(c.size, np.nan), x) for c, x in zip(contexts_G, logprobs_G, strict=True)]
        if masks_G is not None:
            masks_G = [_joined(np.zeros(c.size, np.bool_), x) for c, x in zip(contexts_G, masks_G, strict=True)]
    return group_from_completions(
        prompt_ids=prompts_G[0][:shared] if prompts_G else (),
        completions=completions_G,
        logprobs=logprobs_G,
        rewards=rewards,
        advantages=advantages,
        loss_mask=None if masks_G is None else _joined(*masks_G),
        **fields,
    )


def _common_beginning(rows: list[Int32]) -> int:
    """Number of tokens with which all rows begin."""
    shortest = min((row.size for row in rows), default=0)
    differs = [np.flatnonzero(row[:shortest] != rows[0][:shortest]) for row in rows]
    return min((int(places[0]) for places in differs if places.size), default=shortest)


def _joined(*arrays: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """The arrays one after the other. Empty ones count for nothing: NumPy makes them floats."""
    return np.concatenate([array for array in arrays if array.size] or [np.zeros(0, np.int32)])
