"""Makes the rows that files have for items, and declares the columns of these rows.

A row is one item, or one sequence of its group. `replay table export` and the archive write the same rows, and
`replay table import` reads the files of both.
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
"""The values of a row, by the names of the columns."""

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
"""Name of each column that an export reads from a group -> its type, and the function that reads its value.

A type is int, float, str, or a list of one of them. The lists `context_tokens`, `completion_tokens` and `mean_logprobs`
have one value for each sequence of each rollout. All other lists have one value for each rollout. All columns are null
if the item is not a group."""
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
"""Name of each column with a fact of the server about an item -> its type.

A value of type json is an object, which Parquet stores as JSON text. Keys are strings, because they have 64 bits, and
many readers of numbers support only 53."""
TEXT_COLUMNS = {"prompt": "str", "contexts": "list of str", "completions": "list of str"}
"""Name -> type of the further columns of a group if the export has a tokenizer."""
PAYLOAD = "payload"
"""The column with the bytes of the item, which `import` needs. In JSON lines they are in base64."""


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
"""Name of each column that an export with `--rows sequences` reads from a sequence -> its type.

`rollouts` is the number of rollouts of the group, and `rollout` is the rollout of this row, from 0. `sequences` is the
number of sequences of this rollout, and `sequence` is the sequence of this row, from 0.

The tokens of the sequence are `prompt_ids`, which all sequences of the group share, then `context_ids`, and then
`completion_ids`. The lists of float and bool have an entry for each token of `completion_ids`. `loss_mask` is true for
tokens that are trained on. An unknown log-probability is NaN, and null in JSON lines. `token_advantages` is null if the
group has no advantages of tokens. All columns are null if the item is not a group."""
SEQUENCE_TEXTS = {"prompt": "str", "context": "str", "completion": "str"}
"""Name -> type of the further columns of a sequence if the export has a tokenizer."""


@dataclass
class Form:
    """The kind of rows and columns that an export writes."""

    sequences: bool
    """True: the export writes a row for each sequence of a group. False: a row for each item."""
    text: TokenText
    """The tokenizer. Without one, the rows have no texts."""
    payloads: bool
    """True: rows of items have the column PAYLOAD. Rows of sequences never have it."""
    items: int = field(default=0, init=False)
    """The number of items of which `rows` has made rows so far."""

    def columns(self) -> dict[str, str]:
        """Name of each column of the file -> its type, in the order of the file."""
        if self.sequences:
            columns = ITEM_COLUMNS | SEQUENCE_COLUMNS
            texts = SEQUENCE_TEXTS
        else:
            columns = ITEM_COLUMNS | {name: kind for name, (kind, _) in GROUP_COLUMNS.items()}
            texts = TEXT_COLUMNS
        if self.text.source:
            columns |= texts
        if self.payloads and not self.sequences:
            columns[PAYLOAD] = "bytes"
        return columns

    def rows(self, facts: Row, payload: Buffer) -> Iterator[Row]:
        """Yields the rows of an item. `facts`: the server's facts about the item, by the names of ITEM_COLUMNS."""
        self.items += 1
        columns = self.columns()
        group = group_of(payload)
        if group is None:
            rows: list[Row] = [{}]  # only the facts about the item
        elif self.sequences:
            rows = sequence_rows(group, self.text)
        else:
            rows = [group_row(group, self.text)]
        item = {name: facts[name] for name in ITEM_COLUMNS}
        if PAYLOAD in columns:
            item[PAYLOAD] = bytes(payload)
        nothing = dict.fromkeys(columns)  # None for each column
        for row in rows:
            yield nothing | item | row


def group_row(group: RolloutGroup, text: TokenText) -> Row:
    """The values of a group for GROUP_COLUMNS and, if there is a tokenizer, for TEXT_COLUMNS."""
    row = {name: read(group) for name, (_, read) in GROUP_COLUMNS.items()}
    if text.source:
        row |= _texts(group, text)
    return row


def sequence_rows(group: RolloutGroup, text: TokenText) -> list[Row]:
    """The values of each sequence of a group for SEQUENCE_COLUMNS and, if there is a tokenizer, for SEQUENCE_TEXTS."""
    shared_prompt_length = group.prompt_ids.size
    trained_T = group.trained_mask
    counts_G = counts_of(group)
    numbers_S: list[tuple[int, int]] = []  # (number of the rollout, number of the sequence in the rollout)
    for rollout, count in enumerate(counts_G):
        numbers_S += [(rollout, sequence) for sequence in range(count)]
    prompts_S = group.prompts()
    spans_S = group.sampled_spans()  # the slices of the group's arrays of tokens that hold the completions
    turns_S = turns_of(group)
    meta = {name: value for name, value in group.meta.items() if name != "turns"}  # `turns` has its own column
    rows = []
    for (rollout, sequence), prompt_ids, span, turns in zip(numbers_S, prompts_S, spans_S, turns_S, strict=True):
        token_advantages = None
        if group.token_advantages is not None:
            token_advantages = group.token_advantages[span]
        row: Row = {
            "prompt_id": group.prompt_id,
            "rollouts": group.group_size,
            "rollout": rollout,
            "sequences": counts_G[rollout],
            "sequence": sequence,
            "policy_version_end": None if group.policy_version_end is None else int(group.policy_version_end),
            "prompt_ids": group.prompt_ids,
            "context_ids": prompt_ids[shared_prompt_length:],  # `prompt_ids` is the shared prompt and the context
            "completion_ids": group.completion_ids[span],
            "loss_mask": trained_T[span],
            "logprobs": group.rollout_logprobs[span],
            "token_advantages": token_advantages,
            "reward": float(group.rewards[rollout]),
            "advantage": float(group.advantages[rollout]),
            "finish_reason": None if group.finish_reasons is None else str(group.finish_reasons[rollout]),
            "turns": [turn.document() for turn in turns],
            "sampling": group.sampling,
            "meta": meta,
        }
        if text.source:
            for name in SEQUENCE_TEXTS:  # the column `prompt` gets the text of `prompt_ids`, and so on
                token_ids = row[f"{name}_ids"]
                row[name] = text.text(token_ids.tolist())
        rows.append(row)
    return rows


def group_of(payload: Buffer) -> RolloutGroup | None:
    """The group that a payload holds; None: the payload is not a group."""
    try:
        return RolloutGroup.decode(payload)
    except ValueError:
        return None


def _texts(group: RolloutGroup, text: TokenText) -> Row:
    """The values of a group for TEXT_COLUMNS."""
    shared_prompt_length = group.prompt_ids.size
    contexts = [prompt_ids[shared_prompt_length:] for prompt_ids in group.prompts()]
    completions = [group.completion_ids[span] for span in group.sampled_spans()]
    return {
        "prompt": text.text(group.prompt_ids.tolist()),
        "contexts": [text.text(context.tolist()) for context in contexts],
        "completions": [text.text(completion.tolist()) for completion in completions],
    }


def counts_of(group: RolloutGroup) -> list[int]:
    """The number of sequences of each rollout."""
    if group.sequence_counts is None:
        return [1] * group.group_size
    counts: list[int] = group.sequence_counts.tolist()
    return counts


def _mean_logprobs(group: RolloutGroup) -> list[float | None]:
    """The mean of the known log-probabilities of each sequence; None if all of them are unknown."""
    return [facts["mean_logprob"] for facts in completion_facts(group)]
