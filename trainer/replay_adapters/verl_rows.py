"""Converts the rows that verl puts into TransferQueue for one prompt to a group, and back to the same rows, bit by bit.

verl's rows are dicts of columns, and agent loops add columns of their own. So each row becomes a VerlRow here, and
SampleStore, which also converts slime's and Miles' samples, makes the group. A session of several rows is a rollout of
several sequences, whose reward is that of its last row.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from replay_adapters.samples import SampleStore
from replay_client import RolloutGroup

_IDS = ("prompts", "responses", "response_mask")
"""Columns of token ids and masks. verl makes them of int64."""
_ROUTING = "routed_experts"
_PREFIX = "column "
"""The beginning of the names of all other columns as attributes of a VerlRow."""
Row = dict[str, Any]
"""A row of verl, by name of the column."""


@dataclass
class RowStatus:
    """The reason why a row ended, in the form that SampleStore reads. verl's rows do not tell it."""

    value: str = "stop"


@dataclass
class VerlRow:
    """A row of verl, in the form that SampleStore reads. Each further column is an attribute."""

    tokens: Any = None
    response_length: Any = None
    loss_mask: Any = None
    rollout_log_probs: Any = None
    rollout_routed_experts: Any = None
    reward: Any = None

    remove_sample = False
    """SampleStore reads this attribute. verl leaves no rows out of the loss."""
    status = RowStatus()


@dataclass
class StoredRows:
    """The rows of one prompt, as verl put them."""

    rows: dict[str, Row]
    """By key without the uid, such as "0_1" for the second row of session 0: the columns of a row."""
    tags: dict[str, dict[str, Any]]
    """By the same keys: the tags of a row."""
    step: int
    """The step at which the prompt was given to the agent loop."""
    prompt: str = ""
    """The digest of the prompt: see `digest`."""

    def usable(self, prompt: str, step: int, bound: int | None) -> bool:
        """True if the rows may stand for a prompt with this digest at a step. `bound`: the most steps between the two
        steps; None: any number.

        A run that resumed may be at an earlier step than the rows, which counts like a later one.
        """
        if self.prompt != prompt:
            return False
        return bound is None or abs(step - self.step) <= bound


_STORE = SampleStore(VerlRow, framework="verl")


def digest(prompt: Any, reward_model: Any = None) -> str:
    """A text that differs for different prompts, and for different values from which rewards are computed.

    `prompt`, `reward_model`: the columns raw_prompt and reward_model of verl. Raises ValueError for a value that cannot
    be stored.
    """
    packed = _STORE.pack("prompts", "raw_prompt", prompt)
    packed += _STORE.pack("prompts", "reward_model", reward_model)
    return hashlib.sha256(packed).hexdigest()[:32]


def group_of(stored: StoredRows, version: int) -> RolloutGroup:
    """The rows of a prompt as a group that was generated under a policy version.

    Raises ValueError for columns that cannot be stored, which the error names, and for a prompt without rows.
    """
    sessions: dict[str, list[str]] = {}
    for key in sorted(stored.rows, key=_place):
        sessions.setdefault(key.partition("_")[0], []).append(key)
    keys: list[str] = []
    rollouts: list[list[VerlRow]] = []
    derived: list[list[str]] = []
    for members in sessions.values():
        rollout = []
        for key in members:
            names = _derived(stored.rows[key])
            row = _row_of(stored.rows[key], leave_out=names)
            derived.append(names)
            rollout.append(row)
        scores = stored.rows[members[-1]].get("rm_scores")
        if scores is not None:  # as in verl, the reward of a session is that of its last row
            rollout[-1].reward = float(scores.sum())
        keys += members
        rollouts.append(rollout)
    more = {
        "keys": keys,
        "derived": derived,
        "columns": [list(stored.rows[key]) for key in keys],
        "tags": [stored.tags[key] for key in keys],
        "step": stored.step,
        "prompt": stored.prompt,
    }
    return _STORE.group_of(rollouts, version, more)


def rows_of(group: RolloutGroup) -> StoredRows | None:
    """The rows from which `group_of` made the group. None: another program's group."""
    read = _STORE.read(group)
    if read is None:
        return None
    rollouts, more = read
    if not {"keys", "derived", "columns", "tags", "step", "prompt"} <= more.keys():
        return None
    samples: list[VerlRow] = []
    for rollout in rollouts:
        samples += rollout
    rows: dict[str, Row] = {}
    for key, sample, names, columns in zip(more["keys"], samples, more["derived"], more["columns"], strict=True):
        row = _columns_of(sample)
        for name in names:
            row[name] = _DERIVATIONS[name](row)
        rows[key] = {name: row[name] for name in columns}
    tags = dict(zip(more["keys"], more["tags"], strict=True))
    return StoredRows(rows, tags, more["step"], more["prompt"])


def _row_of(row: Row, leave_out: Sequence[str]) -> VerlRow:
    """A row of verl as a VerlRow. Raises ValueError for ids that are not a row of int64."""
    for name in _IDS:
        value = row.get(name)
        if not isinstance(value, Tensor) or value.dim() != 1 or value.dtype != torch.int64:
            shown = (
                f"{value.dtype} of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            )
            raise ValueError(f"verl's rows have a column {name} of {shown}, which is no row of torch.int64")
    responses = row["responses"].tolist()
    sample = VerlRow(
        tokens=[*row["prompts"].tolist(), *responses],
        response_length=len(responses),
        loss_mask=row["response_mask"].tolist(),
    )
    attributes = vars(sample)
    for name, value in row.items():
        if name in _IDS or name in leave_out:
            continue
        if name == "rollout_log_probs" and _is_plain(value, torch.float32):
            sample.rollout_log_probs = value.tolist()
        elif name == _ROUTING:
            sample.rollout_routed_experts = value
        else:
            attributes[_PREFIX + name] = value
    return sample


def _columns_of(sample: VerlRow) -> Row:
    """The columns of verl that a VerlRow was made of, in no order."""
    prompt_length = len(sample.tokens) - sample.response_length
    row: Row = {
        "prompts": torch.tensor(sample.tokens[:prompt_length], dtype=torch.int64),
        "responses": torch.tensor(sample.tokens[prompt_length:], dtype=torch.int64),
        "response_mask": torch.tensor(sample.loss_mask, dtype=torch.int64),
    }
    if sample.rollout_log_probs is not None:
        row["rollout_log_probs"] = torch.tensor(sample.rollout_log_probs, dtype=torch.float32)
    if sample.rollout_routed_experts is not None:
        row[_ROUTING] = sample.rollout_routed_experts
    for name, value in vars(sample).items():
        if name.startswith(_PREFIX):
            row[name.removeprefix(_PREFIX)] = value
    return row


_DERIVATIONS: dict[str, Callable[[Row], Tensor]] = {
    "input_ids": lambda row: torch.cat([row["prompts"], row["responses"]]),
    "position_ids": lambda row: torch.arange(len(row["prompts"]) + len(row["responses"])),
    "loss_mask": lambda row: row["response_mask"].clone(),
}
"""The columns that usually follow from others, so that they need not be stored: name -> its value for a row."""


def _derived(row: Row) -> list[str]:
    """The names of the columns of a row that follow from others."""
    names = []
    for name, derivation in _DERIVATIONS.items():
        value = row.get(name)
        if isinstance(value, Tensor) and all(_is_plain(row.get(column), torch.int64) for column in _IDS):
            expected = derivation(row)
            if value.dtype == expected.dtype and torch.equal(value, expected):
                names.append(name)
    return names


def _is_plain(value: Any, dtype: torch.dtype) -> bool:
    """True for a tensor of one dimension and this dtype."""
    return isinstance(value, Tensor) and value.dim() == 1 and value.dtype == dtype


def _place(key: str) -> tuple[int, int]:
    """The sort key of a row: session and index."""
    session, index = key.split("_")
    return int(session), int(index)
