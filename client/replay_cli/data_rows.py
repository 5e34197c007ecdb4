"""Groups from the rows of a data set that others made, in the columns of `replay table export --rows sequences`.

    prompt_ids  completion_ids  reward                a row is one sequence
    [3, 4]      [5, 6]          1.0   \\
    [3, 4]      [7]             0.0   /  one group    rows of one prompt, one after the other, are one group
    [8]         [5]             1.0      the next

`prompt_ids`, `completion_ids` and `reward` are needed. A data set has no bytes of groups, so what it does not say is
what RolloutGroup says by itself: a log-probability is unknown, every token of a completion is trained on. Advantages
follow from the rewards.
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

NEEDED = ("prompt_ids", "completion_ids", "reward")
"""Columns without which a row is no sequence."""


def items_of(rows: Iterable[Numbered], table: str | None) -> Iterator[tuple[int, dict[str, Any]]]:
    """Rows of items as `replay table import` takes them, each with the number of its last row. Others stay as they are.

    The key of a group follows from its bytes and its place, so a second import of the same rows inserts nothing.
    `table`: where groups go whose rows name none. Raises ValueError that names the row.
    """
    count = 0
    for identity, some in groupby(rows, key=lambda each: _identity(each[1])):
        if identity is None:
            yield from ((number, dict(row)) for number, row in some)
            continue
        part = list(some)
        number, first = part[-1][0], part[0][1]
        try:
            if not (name := first.get("table") or table):
                raise ValueError("there is no column table: say with --table where the groups go")
            group = group_of([row for _, row in part])
        except (TypeError, ValueError, OverflowError) as error:
            raise ValueError(f"rows {part[0][0]} to {number}: {error}") from None
        payload = group.encode()
        digest = blake2b(count.to_bytes(8, "little") + payload, digest_size=8).digest()
        priority = first.get("priority")
        yield (
            number,
            {
                "key": str(int.from_bytes(digest, "little")),
                "table": name,
                "priority": group_priority(group.rewards, group.advantages) if priority is None else priority,
                "policy_version": group.policy_version,
                "tags": first.get("tags"),
                "payload": payload,
            },
        )
        count += 1


def group_of(rows: Sequence[Row]) -> RolloutGroup:
    """The group of these rows. Those with the same `rollout` make one rollout; without the column, each row is one.

    Raises ValueError, and TypeError for what is no number.
    """
    for row in rows:
        if missing := [name for name in NEEDED if row.get(name) is None]:
            raise ValueError(f"there is no {', '.join(missing)}; a row needs {', '.join(NEEDED)}")
    numbers = [index if row.get("rollout") is None else row["rollout"] for index, row in enumerate(rows)]
    rollouts = [[row for _, row in part] for _, part in groupby(zip(numbers, rows, strict=True), key=itemgetter(0))]
    for name in ("reward", "advantage"):
        if any(len({row.get(name) for row in part}) > 1 for part in rollouts):
            raise ValueError(f"{name} differs in the rows of one rollout: give all of them one")
    firsts = [part[0] for part in rollouts]
    rewards = np.array([row["reward"] for row in firsts], np.float32)
    advantages, reasons = ([row.get(name) for row in firsts] for name in ("advantage", "finish_reason"))
    masks: list[Any] = [row.get("loss_mask") for row in rows]
    values: list[Any] = [row.get("token_advantages") for row in rows]
    counts, first = [len(part) for part in rollouts], firsts[0]
    return group_from_rows(
        prompts=[[*row["prompt_ids"], *(row.get("context_ids") or ())] for row in rows],
        completions=[row["completion_ids"] for row in rows],
        logprobs=[_floats(row.get("logprobs"), len(row["completion_ids"])) for row in rows],
        rewards=rewards,
        advantages=group_advantages(rewards) if None in advantages else np.array(advantages, np.float32),
        loss_masks=None if None in masks or all(map(all, masks)) else masks,
        token_advantages=None if None in values else values,
        sequence_counts=None if max(counts) == 1 else np.array(counts, np.int32),
        finish_reasons=None if None in reasons else tuple(map(str, reasons)),
        policy_version=int(first.get("policy_version") or 0),
        policy_version_end=first.get("policy_version_end"),
        prompt_id=str(first.get("prompt_id") or ""),
        sampling=_dict(first.get("sampling")),
        meta=_dict(first.get("meta")),
    )


def _identity(row: Row) -> tuple[Any, ...] | None:
    """What the rows of one group have in common. None: the row is none of a data set, which has tokens of a sequence,
    and neither key nor bytes of an item."""
    if row.get("key") is not None or row.get("payload") is not None or row.get("completion_ids") is None:
        return None
    name = row.get("prompt_id")
    return ("", *(row.get("prompt_ids") or ())) if name is None else (name,)


def _floats(values: Any, count: int) -> npt.NDArray[np.float32]:
    """null is unknown, and so are all of them if there is no list."""
    return np.full(count, np.nan, np.float32) if values is None else np.array(values, np.float32)


def _dict(value: Any) -> dict[str, Any]:
    """A file of Parquet has it as JSON."""
    try:
        return dict(json.loads(value) if isinstance(value, str) else value or {})
    except RecursionError:
        raise ValueError("an object of a row is nested too deeply") from None
