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
    """A group of S completions, each given as one array of tokens and one of log-probabilities.

    `prompt_ids` (P,), `rewards` (G,) and `advantages` (G,) are arrays; `fields` are the other fields of RolloutGroup.
    Each completion is a rollout, G = S, unless `sequence_counts` says how many make one. Raises ValueError that names
    the field or completion.
    """
    tokens_S = [vector("completions", np.asarray(ids).reshape(-1), np.int32) for ids in completions]
    logprobs_S = [np.asarray(lps, dtype=np.float32).reshape(-1) for lps in logprobs]
    for index, (tokens, lps) in enumerate(zip(tokens_S, logprobs_S, strict=True)):
        if tokens.size != lps.size:
            raise ValueError(f"completion {index} has {tokens.size} tokens and {lps.size} log-probabilities")
    return RolloutGroup(
        prompt_ids=np.asarray(prompt_ids),
        completion_ids=np.concatenate(tokens_S) if tokens_S else np.zeros(0, np.int32),
        completion_lengths=np.array([tokens.size for tokens in tokens_S], dtype=np.int32),
        rollout_logprobs=np.concatenate(logprobs_S) if logprobs_S else np.zeros(0, np.float32),
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
    token_advantages: Iterable[npt.ArrayLike] | None = None,
    **fields: Any,
) -> RolloutGroup:
    """A group of S rows that each have their own prompt, completion, log-probabilities and, if given, loss mask and
    advantages of tokens: one value for each token of the completion.

    The common beginning of the prompts becomes `prompt_ids`, and the rest of each prompt the context of its row.
    `RolloutGroup.prompts` and `sampled_spans` give the rows back. An extra with the axis "token" or "whole" must have
    rows for the contexts too. Other arguments and errors: `group_from_completions`.
    """
    prompts_S = [vector("prompts", np.asarray(ids).reshape(-1), np.int32) for ids in prompts]
    shared = _common_beginning(prompts_S)
    contexts_S = [ids[shared:] for ids in prompts_S]
    completions_S = [np.asarray(ids).reshape(-1) for ids in completions]
    logprobs_S = [np.asarray(lps, dtype=np.float32).reshape(-1) for lps in logprobs]
    if any(ids.size for ids in contexts_S):
        fields["context_lengths"] = np.array([ids.size for ids in contexts_S], np.int32)
    if loss_masks is not None:
        fields["loss_mask"] = _behind(contexts_S, loss_masks, np.bool_)
    if token_advantages is not None:
        fields["token_advantages"] = _behind(contexts_S, token_advantages, np.float32)
    return group_from_completions(
        prompt_ids=prompts_S[0][:shared] if prompts_S else (),
        completions=[_joined(*pair) for pair in zip(contexts_S, completions_S, strict=True)],
        logprobs=[_joined(np.full(c.size, np.nan), x) for c, x in zip(contexts_S, logprobs_S, strict=True)],
        rewards=rewards,
        advantages=advantages,
        **fields,
    )


def _behind(contexts_S: list[Int32], rows: Iterable[npt.ArrayLike], dtype: type[np.generic]) -> npt.NDArray[Any]:
    """(T,) the values of all rows, with 0 for the tokens of their contexts."""
    rows_S = [np.asarray(row, dtype=dtype).reshape(-1) for row in rows]
    return _joined(
        *(part for c, row in zip(contexts_S, rows_S, strict=True) for part in (np.zeros(c.size, dtype), row))
    )


def _common_beginning(rows: list[Int32]) -> int:
    """Number of tokens with which all rows begin."""
    shortest = min((row.size for row in rows), default=0)
    differs = [np.flatnonzero(row[:shortest] != rows[0][:shortest]) for row in rows]
    return min((int(places[0]) for places in differs if places.size), default=shortest)


def _joined(*arrays: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """The arrays one after the other. Empty ones count for nothing: NumPy makes them floats."""
    return np.concatenate([array for array in arrays if array.size] or [np.zeros(0, np.int32)])
