"""Converts the output of SkyRL's generator for one prompt to a group, and back to the same output, bit by bit.

SkyRL has no class for a row: its output is a dict of lists, which have an entry for each row. So each row becomes a
SkyRLRow here, and SampleStore, which also converts slime's and Miles' samples, makes the group. A trajectory of several
rows (`step_wise_trajectories`) is a rollout of several sequences, whose reward is that of its last row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import fsum
from typing import Any

from skyrl.train.generators.base import TrajectoryID  # noqa: F401  # SampleStore looks it up here

from replay_adapters.samples import SampleStore, samples_of
from replay_client import RolloutGroup

_TOKENS = ("prompt_token_ids", "response_ids")
"""The lists of SkyRL's output whose entries, joined, are the `tokens` of a row."""
_NAMES = {
    "loss_masks": "loss_mask",
    "rollout_logprobs": "rollout_log_probs",
    "rollout_expert_indices": "rollout_routed_experts",
}
"""Name of a list of SkyRL's output -> the name that SampleStore has for an entry of the list."""


@dataclass
class StopReason:
    """The reason why a row ended, in the form that SampleStore reads."""

    value: str


@dataclass
class SkyRLRow:
    """A row of SkyRL's output, in the form that SampleStore reads.

    If the output has further lists, the row has the entry of each as an attribute with the name of the list.
    """

    tokens: Any = None
    response_length: Any = None
    loss_mask: Any = None
    rollout_log_probs: Any = None
    rollout_routed_experts: Any = None
    rewards: Any = None
    stop_reasons: Any = None
    is_last_step: Any = None

    remove_sample = False
    """SampleStore reads this attribute. SkyRL removes no samples."""

    @property
    def reward(self) -> float | None:
        """The reward of the trajectory; None: the last row of the trajectory has the reward."""
        if self.is_last_step is False:
            return None
        if isinstance(self.rewards, list):  # a reward for each token
            return fsum(self.rewards)
        return self.rewards  # type: ignore[no-any-return]

    @property
    def status(self) -> StopReason:
        """SkyRL's stop reason."""
        return StopReason(str(self.stop_reasons or "stop"))


_STORE = SampleStore(SkyRLRow)


def group_of(output: Mapping[str, Any], version: int, prompts: Any = None) -> RolloutGroup:
    """Converts SkyRL's output for one prompt to a group.

    `prompts`: the messages of the prompt, which are only stored, so that `output_of` can return them. Raises
    ValueError for an output without log-probabilities, or with a value that cannot be stored.
    """
    if output.get("rollout_logprobs") is None:
        raise ValueError("SkyRL's output has no rollout_logprobs: set generator.sampling_params.logprobs=1")
    count = len(output["response_ids"])
    # The names of the lists that have an entry for each row.
    columns = [name for name, value in output.items() if isinstance(value, list) and len(value) == count]
    rollouts: list[Any] = []
    next_begins_rollout = True  # True if the next row is the first one of a rollout
    for k in range(count):
        prompt = output["prompt_token_ids"][k]
        response = output["response_ids"][k]
        row = SkyRLRow(tokens=[*prompt, *response], response_length=len(response))
        attributes = vars(row)  # not setattr, which would refuse the name of a property
        for name in columns:
            if name not in _TOKENS:
                attributes[_NAMES.get(name, name)] = output[name][k]
        if row.is_last_step is None:  # not step-wise: each row is a rollout
            rollouts.append(row)
            continue
        if next_begins_rollout:
            rollouts.append([])
        rollouts[-1].append(row)
        next_begins_rollout = row.is_last_step
    rest = {name: value for name, value in output.items() if name not in columns}
    # The rows hold only the lists in `columns`. `output_of` needs these further values to make the same output again.
    more = {"names": list(output), "columns": sorted(columns), "rest": rest, "prompts": prompts}
    return _STORE.group_of(rollouts, version, more)


def columns_of(group: RolloutGroup) -> list[str] | None:
    """The names of the lists in a group's output that have an entry for each row; None: another program's group."""
    read = _STORE.read(group)
    if read is None:
        return None
    _, more = read
    columns: list[str] | None = more.get("columns")
    return columns


def output_of(group: RolloutGroup) -> tuple[dict[str, Any], dict[str, Any]] | None:
    """(output, more): the output that was passed to `group_of`, and the values that were stored with it.

    `more` has `columns`, the names of the lists in the output that have an entry for each row, and `prompts`. None:
    another program's group.
    """
    read = _STORE.read(group)
    if read is None:
        return None
    rollouts, more = read
    if "columns" not in more:
        return None
    rows: list[Any] = []
    for rollout in rollouts:
        rows += samples_of(rollout)
    columns: dict[str, list[Any]] = {}
    for name in more["columns"]:
        if name not in _TOKENS:
            columns[name] = [getattr(row, _NAMES.get(name, name)) for row in rows]
    columns["prompt_token_ids"] = [row.tokens[: len(row.tokens) - row.response_length] for row in rows]
    columns["response_ids"] = [row.tokens[len(row.tokens) - row.response_length :] for row in rows]
    # The output gets its entries in the order in which SkyRL's output had them.
    output: dict[str, Any] = {}
    for name in more["names"]:
        output[name] = more["rest"][name] if name in more["rest"] else columns[name]
    return output, more
