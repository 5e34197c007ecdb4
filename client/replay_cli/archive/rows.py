"""Rows of items, as files have them: which columns there are, and what an item has in them.

A row is one item, or one sequence of its group. `replay table export` and the archive write the same rows, and
`replay table import` takes both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from replay_client.columns import Buffer
from replay_client.rollout import RolloutGroup
from replay_dashboard.group import TokenText, completion_facts
from replay_dashboard.turns import turns_of

Row = dict[str, Any]

GROUP_COLUMNS: dict[str, tuple[str, Callable[[RolloutGroup], Any]]] = {
    "prompt_id": ("str", lambda group: group.prompt_id),
    "group_size": ("int", lambda group: group.group_size),
    "sequence_counts": ("list of int", lambda group: counts_of(group)),
    "prompt_tokens": ("int", lambda group: int(group.prompt_ids.size)),
    "context_tokens": ("list of int", lambda group: (group.prompt_lengths - group.prompt_ids.size).tolist()),
    "completion_tokens": ("list of int", lambda group: group.sampled_lengths.tolist()),
    "rewards": ("list of float", lambda group: group.rewards.tolist()),
    "advantages": ("list of float", lambda group: group.advantages.tolist()),
    "mean_logprobs": ("list of float", lambda group: _mean_logprobs(group)),
    "finish_reasons": ("list of str", lambda group: list(group.finish_reasons or ())),
    "reward_mean": ("float", lambda group: float(group.rewards.mean()) if group.rewards.size else None),
    "reward_std": ("float", lambda group: float(group.rewards.std()) if group.rewards.size else None),
}
"""The columns that an export reads from a group: by name the type (int, float, str, or list of one of them), and the
function that reads it.

A list has one value for each rollout; `context_tokens`, `completion_tokens` and `mean_logprobs` have one for each of
its sequences. Null where an item is not a group."""
ITEM_COLUMNS = {
    "key": "str",
    "table": "str",
    "priority": "float",
    "age": "float",
    "policy_version": "int",
    "staleness": "int",
    "times_sampled": "int",
    "bytes": "int",
    "tags": "json",
}
"""The columns that the server keeps of an item; of type json is an object, in parquet as text. Keys are strings: they
have 64 bits, and many readers keep only 53."""
TEXT_COLUMNS = {"prompt": "str", "contexts": "list of str", "completions": "list of str"}
"""With a tokenizer."""
PAYLOAD = "payload"
"""The bytes of the item, which `import` needs. In JSON lines they are in base64."""


SEQUENCE_COLUMNS = {
    "prompt_id": "str",
    "rollouts": "int",
    "rollout": "int",
    "sequences": "int",
    "sequence": "int",
    "policy_version_end": "int",
    "prompt_ids": "list of int32",
    "context_ids": "list of int32",
    "completion_ids": "list of int32",
    "loss_mask": "list of bool",
    "logprobs": "list of float32",
    "token_advantages": "list of float32",
    "reward": "float",
    "advantage": "float",
    "finish_reason": "str",
    "turns": "json",
    "sampling": "json",
    "meta": "json",
}
"""The columns that an export reads from a sequence, with `--rows sequences`. Null where an item is not a group.

It is sequence number `sequence` of the `sequences` of rollout number `rollout` of `rollouts`. Its tokens are those of
`prompt_ids`, which all sequences of the group share, of `context_ids` and of `completion_ids`. The lists below have an
entry for each of `completion_ids`: `loss_mask` says which are trained on, and an unknown log-probability is NaN, in
JSON lines null. Without advantages of tokens, `token_advantages` is null."""
SEQUENCE_TEXTS = {"prompt": "str", "context": "str", "completion": "str"}
"""With a tokenizer."""


@dataclass
class Form:
    """Which rows and columns an export writes."""

    sequences: bool
    """The export writes a row for each sequence of a group; if False, a row for each item."""
    text: TokenText
    """Without a tokenizer: no texts."""
    payloads: bool
    """The rows of items have their bytes."""
    items: int = field(default=0, init=False)
    """Items that this export has written so far."""

    def columns(self) -> dict[str, str]:
        """The type of each column of the file, in their order."""
        if self.sequences:
            kinds, texts = ITEM_COLUMNS | SEQUENCE_COLUMNS, SEQUENCE_TEXTS
        else:
            kinds, texts = ITEM_COLUMNS | {name: kind for name, (kind, _) in GROUP_COLUMNS.items()}, TEXT_COLUMNS
        kinds |= texts if self.text.source else {}
        return kinds | ({PAYLOAD: "bytes"} if self.payloads and not self.sequences else {})

    def rows(self, facts: Row, payload: Buffer) -> Iterator[Row]:
        """The rows of an item. `facts`: what the server says of it."""
        self.items += 1
        group, columns = group_of(payload), self.columns()
        if self.sequences:
            found = [{}] if group is None else sequence_rows(group, self.text)
        else:
            found = [{} if group is None else {name: of(group) for name, (_, of) in GROUP_COLUMNS.items()}]
            if group is not None and self.text.source:
                found[0] |= _texts(group, self.text)
        known = {name: facts[name] for name in ITEM_COLUMNS}
        if PAYLOAD in columns:
            known[PAYLOAD] = bytes(payload)
        for row in found:
            yield dict.fromkeys(columns) | known | row


def sequence_rows(group: RolloutGroup, text: TokenText) -> list[Row]:
    """The columns of each sequence of a group, by SEQUENCE_COLUMNS, and its texts if there is a tokenizer."""
    shared, trained_T, rows = group.prompt_ids.size, group.trained_mask, list[Row]()
    places = ((rollout, part) for rollout, parts in enumerate(counts_of(group)) for part in range(parts))
    prompts, spans, counts = group.prompts(), group.sampled_spans(), counts_of(group)
    meta = {name: value for name, value in group.meta.items() if name != "turns"}
    for (rollout, part), before, span, turns in zip(places, prompts, spans, turns_of(group), strict=True):
        row: Row = {
            "prompt_id": group.prompt_id,
            "rollouts": group.group_size,
            "rollout": rollout,
            "sequences": counts[rollout],
            "sequence": part,
            "policy_version_end": None if group.policy_version_end is None else int(group.policy_version_end),
            "prompt_ids": group.prompt_ids,
            "context_ids": before[shared:],
            "completion_ids": group.completion_ids[span],
            "loss_mask": trained_T[span],
            "logprobs": group.rollout_logprobs[span],
            "token_advantages": None if group.token_advantages is None else group.token_advantages[span],
            "reward": float(group.rewards[rollout]),
            "advantage": float(group.advantages[rollout]),
            "finish_reason": None if group.finish_reasons is None else str(group.finish_reasons[rollout]),
            "turns": [turn.document() for turn in turns],
            "sampling": group.sampling,
            "meta": meta,
        }
        if text.source:
            row |= {name: text.text(row[f"{name}_ids"].tolist()) for name in ("prompt", "context", "completion")}
        rows.append(row)
    return rows


def group_of(payload: Buffer) -> RolloutGroup | None:
    """The group that the payload of an item is; None: it is something else."""
    try:
        return RolloutGroup.decode(payload)
    except ValueError:
        return None


def _texts(group: RolloutGroup, text: TokenText) -> Row:
    shared = group.prompt_ids.size
    return {
        "prompt": text.text(group.prompt_ids.tolist()),
        "contexts": [text.text(ids[shared:].tolist()) for ids in group.prompts()],
        "completions": [text.text(group.completion_ids[span].tolist()) for span in group.sampled_spans()],
    }


def counts_of(group: RolloutGroup) -> list[int]:
    """The number of sequences of each rollout."""
    return [1] * group.group_size if group.sequence_counts is None else group.sequence_counts.tolist()


def _mean_logprobs(group: RolloutGroup) -> list[float | None]:
    """The mean of the known log-probabilities of each sequence; null where none is known."""
    return [facts["mean_logprob"] for facts in completion_facts(group)]
