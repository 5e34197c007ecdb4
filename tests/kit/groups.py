"""Groups, samples of them, and the items of a table."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from replay_client import ItemInfo, ReplayClient, RolloutGroup, Sample, SampleInfo
from replay_client.columns import RAGGED
from replay_client.sampling_masks import SAMPLING_MASK, mask_column
from replay_client.scoring import group_advantages
from replay_client.testing import make_group


def make_sequences(**fields: Any) -> RolloutGroup:
    """A group of two rollouts: one of two sequences of 1 and 2 tokens, and one of one sequence, of 2 tokens behind a
    context of one."""
    group = make_group(lengths=(1, 2, 3), logprobs=(-1.0, -1.0, -1.0, np.nan, -1.0, -1.0), context_lengths=(0, 0, 1))
    return replace(
        group,
        **{
            "sequence_counts": [2, 1],
            "rewards": [1.0, 0.0],
            "advantages": group_advantages([1.0, 0.0]),
            "finish_reasons": ("stop", "length"),
            **fields,
        },
    )


def every_item(client: ReplayClient, table: str) -> list[ItemInfo]:
    """The items of a table, page after page."""
    items, page = [], ""
    while True:
        found = client.list_items(table, limit=5000, page=page)
        items += found.items
        if not (page := found.next_page):
            return items


def keys_in(client: ReplayClient, table: str) -> list[int]:
    return sorted(item.key for item in every_item(client, table))


def keys_of(samples: Iterable[Sample]) -> list[int]:
    return [sample.info.key for sample in samples]


def make_sample(group: RolloutGroup, *, key: int = 0, age: float = 0.0, staleness: int = 0) -> Sample:
    info = SampleInfo(
        key=key,
        priority=1.0,
        probability=1.0,
        age=age,
        policy_version=0,
        staleness=staleness,
        times_sampled=1,
        table_size=1,
    )
    return Sample(info, group.encode())


def in_pieces(group: RolloutGroup, cuts: Sequence[Sequence[int]]) -> RolloutGroup:
    """The group with each rollout cut into sequences: at these tokens of its only sequence, ascending.

    A later sequence has what comes before it as its context, so every token is sampled and trained on once, after the
    same tokens as before.
    """
    ids, logprobs, masks, advantages = [], [], [], []
    lengths, contexts = [], []
    sets: list[list[int]] = []
    for sequence, (span, places) in enumerate(zip(group.sequence_spans(), cuts, strict=True)):
        length = span.stop - span.start
        for start, end in itertools.pairwise([0, *places, length]):
            known = slice(span.start + start, span.start + end)
            lengths.append(end)
            contexts.append(start)
            ids.append(group.completion_ids[span.start : known.stop])
            logprobs += [np.full(start, np.nan, np.float32), group.rollout_logprobs[known]]
            masks += [np.zeros(start, np.bool_), group.trained_mask[known]]
            if group.token_advantages is not None:
                advantages += [np.zeros(start, np.float32), group.token_advantages[known]]
            if SAMPLING_MASK in group.extras:
                offsets, values = group.offsets_of(SAMPLING_MASK, sequence), group.extra_of(SAMPLING_MASK, sequence)
                sets += [[]] * start + [values[offsets[t] : offsets[t + 1]].tolist() for t in range(start, end)]
    return replace(
        group,
        completion_ids=np.concatenate(ids),
        completion_lengths=np.array(lengths, np.int32),
        context_lengths=np.array(contexts, np.int32),
        sequence_counts=np.array([len(places) + 1 for places in cuts], np.int32),
        rollout_logprobs=np.concatenate(logprobs),
        loss_mask=np.concatenate(masks),
        token_advantages=np.concatenate(advantages) if advantages else None,
        extras=mask_column(sets) if sets else {},
        axes={SAMPLING_MASK: RAGGED} if sets else {},
        validate=False,
    )


def with_versions(group: RolloutGroup, versions: Sequence[int]) -> RolloutGroup:
    """The group as a generator makes it of rollouts that went on with new weights."""
    return replace(
        group,
        policy_version=min(versions),
        policy_version_end=max(versions),
        extras=group.extras | {"policy_versions": np.array(versions, np.int64)},
        axes=group.axes | {"policy_versions": "token"},
    )


def of_last_versions(group: RolloutGroup, version: int, lag: int) -> RolloutGroup:
    """The group with tokens of the versions `version`, `version - 1`, ... `version - lag`, again and again."""
    ages = np.arange(group.num_tokens) % (lag + 1)
    return with_versions(group, np.maximum(version - ages, 0).tolist())
