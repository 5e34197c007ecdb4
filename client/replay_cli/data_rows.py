"""Makes groups from the rows of a foreign data set, which has the columns of `replay table export --rows sequences`.

    prompt_ids  completion_ids  reward                a row is one sequence
    [3, 4]      [5, 6]          1.0   \\
    [3, 4]      [7]             0.0   /  one group    rows of one prompt, one after the other, are one group
    [8]         [5]             1.0      the next group

`prompt_ids`, `completion_ids` and `reward` are needed. For any other column that the data set lacks, the groups get the
default of RolloutGroup: log-probabilities are unknown, and every token of a completion is trained on. Without a column
`advantage`, the advantages are computed from the rewards. A row with a `key` or a `payload` does not belong to a data
set: it is an item, and stays as it is.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from hashlib import blake2b
from itertools import groupby
from operator import itemgetter
from typing import Any

import numpy as np
import numpy.typing as npt

from replay_client import group_from_rows
from replay_client.rollout import RolloutGroup
from replay_client.scoring import group_advantages, group_priority

Row = Mapping[str, Any]
Numbered = tuple[int, Row]
"""The number of a row in its file, and the row."""

NEEDED = ("prompt_ids", "completion_ids", "reward")
"""The columns that every row of a data set needs."""


def items_of(rows: Iterable[Numbered], table: str | None) -> Iterator[tuple[int, dict[str, Any]]]:
    """Makes the rows of items that `replay table import` inserts.

    Yields pairs: the number of the last row from which an item was made, and the row of the item. Rows of a data set
    become groups, and rows of items stay as they are. The key of a group is computed from its bytes and its position
    among the groups. So a second import of the same rows makes the same keys, and inserts nothing. `table`: the table
    of groups whose rows name no table. Raises a ValueError that names the rows.
    """
    group_index = 0
    for identity, consecutive in groupby(rows, key=_identity):
        if identity is None:  # rows of items
            for number, row in consecutive:
                yield number, dict(row)
            continue
        numbered = list(consecutive)
        first_number, first = numbered[0]
        last_number, _ = numbered[-1]
        try:
            table_of_group = first.get("table") or table
            if not table_of_group:
                raise ValueError("there is no column table: say with --table where the groups go")
            group = group_of([row for _, row in numbered])
        except (TypeError, ValueError, OverflowError) as error:
            raise ValueError(f"rows {first_number} to {last_number}: {error}") from None
        yield last_number, _item_row(group, group_index, table_of_group, first)
        group_index += 1


def _item_row(group: RolloutGroup, index: int, table: str, first: Row) -> dict[str, Any]:
    """The row of an item that holds this group.

    `index`: the position of the group among the groups of its file, from 0. `first`: the first row of the group.
    """
    payload = group.encode()
    # `index` is hashed too, so that two equal groups of a file have different keys.
    digest = blake2b(index.to_bytes(8, "little") + payload, digest_size=8).digest()
    priority = first.get("priority")
    if priority is None:
        priority = group_priority(group.rewards, group.advantages)
    return {
        "key": str(int.from_bytes(digest, "little")),
        "table": table,
        "priority": priority,
        "policy_version": group.policy_version,
        "tags": first.get("tags"),
        "payload": payload,
    }


def group_of(rows: Sequence[Row]) -> RolloutGroup:
    """Makes one group from these rows. Consecutive rows with the same `rollout` are one rollout.

    Without the column `rollout`, each row is a rollout. Raises ValueError for rows that cannot be a group, and
    TypeError for a value that is no number.
    """
    for row in rows:
        missing = [name for name in NEEDED if row.get(name) is None]
        if missing:
            raise ValueError(f"there is no {', '.join(missing)}; a row needs {', '.join(NEEDED)}")
    rollouts = _rollouts_of(rows)
    for name in ("reward", "advantage"):
        for rollout in rollouts:
            values = {row.get(name) for row in rollout}
            if len(values) > 1:
                raise ValueError(f"{name} differs in the rows of one rollout: give all of them one")
    # The values of a rollout are read from its first row, and the values of the group from the first of all rows.
    firsts = [rollout[0] for rollout in rollouts]
    first = firsts[0]
    rewards_G = np.array([row["reward"] for row in firsts], np.float32)
    return group_from_rows(
        # Each sequence has its whole prompt here. `group_from_rows` finds the beginning that all prompts share.
        prompts=[[*row["prompt_ids"], *(row.get("context_ids") or ())] for row in rows],
        completions=[row["completion_ids"] for row in rows],
        logprobs=[_logprobs_of(row) for row in rows],
        rewards=rewards_G,
        advantages=_advantages_of(firsts, rewards_G),
        loss_masks=_loss_masks_of(rows),
        token_advantages=_column(rows, "token_advantages"),
        sequence_counts=_counts_of(rollouts),
        finish_reasons=_finish_reasons_of(firsts),
        policy_version=int(first.get("policy_version") or 0),
        policy_version_end=first.get("policy_version_end"),
        prompt_id=str(first.get("prompt_id") or ""),
        sampling=_object(first.get("sampling")),
        meta=_object(first.get("meta")),
    )


def _rollouts_of(rows: Sequence[Row]) -> list[list[Row]]:
    """The rows of each rollout. Consecutive rows with the same `rollout` are one rollout. A row without `rollout` is a
    rollout of its own."""
    names: list[tuple[Any, int]] = []  # equal for two consecutive rows if they are in one rollout
    for index, row in enumerate(rows):
        number = row.get("rollout")
        if number is None:
            names.append((None, index))  # no other row has this name
        else:
            names.append((number, 0))
    rollouts = []
    for _, named_rows in groupby(zip(names, rows, strict=True), key=itemgetter(0)):
        rollouts.append([row for _, row in named_rows])
    return rollouts


def _column(rows: Sequence[Row], name: str) -> list[Any] | None:
    """The values of a column, one for each row; None if a row lacks a value."""
    values = [row.get(name) for row in rows]
    return None if None in values else values


def _logprobs_of(row: Row) -> npt.NDArray[np.float32]:
    """The log-probabilities (T,) of a row. NaN: unknown. Without the column `logprobs`, all of them are unknown."""
    logprobs = row.get("logprobs")
    if logprobs is None:
        return np.full(len(row["completion_ids"]), np.nan, np.float32)
    return np.array(logprobs, np.float32)


def _advantages_of(firsts: Sequence[Row], rewards_G: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """The advantages (G,) of the rollouts. If a row has no `advantage`, all are computed from the rewards.

    `firsts`: the first row of each rollout.
    """
    advantages = _column(firsts, "advantage")
    if advantages is None:
        return group_advantages(rewards_G)
    return np.array(advantages, np.float32)


def _loss_masks_of(rows: Sequence[Row]) -> list[Any] | None:
    """The loss mask of each sequence; None if every token is trained on, or if a row has no mask."""
    masks = _column(rows, "loss_mask")
    if masks is None or all(all(mask) for mask in masks):
        return None
    return masks


def _counts_of(rollouts: Sequence[Sequence[Row]]) -> npt.NDArray[np.int32] | None:
    """The number of sequences (G,) of each rollout; None if each rollout is one sequence."""
    counts = [len(rollout) for rollout in rollouts]
    return None if max(counts) == 1 else np.array(counts, np.int32)


def _finish_reasons_of(firsts: Sequence[Row]) -> tuple[str, ...] | None:
    """The finish reason of each rollout; None if a rollout has no known reason."""
    reasons = _column(firsts, "finish_reason")
    return None if reasons is None else tuple(map(str, reasons))


def _identity(numbered: Numbered) -> tuple[Any, ...] | None:
    """The value that consecutive rows of one group share: their prompt_id or, without it, their prompt.

    None: the row is an item. A row of a data set has the tokens of a sequence, and neither key nor payload.
    """
    _, row = numbered
    is_item = row.get("key") is not None or row.get("payload") is not None
    if is_item or row.get("completion_ids") is None:
        return None
    name = row.get("prompt_id")
    if name is not None:
        return (name,)
    # Because of the empty text, a prompt that is the single token 7 differs from the prompt_id 7.
    return ("", *(row.get("prompt_ids") or ()))


def _object(value: Any) -> dict[str, Any]:
    """Returns the object in `value`. In Parquet, `value` is the JSON text of an object. None becomes an empty object.

    Raises ValueError or TypeError for any other value.
    """
    try:
        if isinstance(value, str):
            return dict(json.loads(value))
        return dict(value or {})
    except RecursionError:
        raise ValueError("an object of a row is nested too deeply") from None
