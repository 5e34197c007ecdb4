"""GeneratorMetrics: counts the work of a generator. The counts are totals for a display, and JSON lines for a file."""

from __future__ import annotations

import json
import logging
import math
import time
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypedDict

import numpy as np
import numpy.typing as npt

from replay_client.rollout import RolloutGroup
from replay_client.sampling_masks import unknown_masks
from replay_client.scoring import carries_gradient
from replay_generator.errors import PromptError

logger = logging.getLogger(__name__)

_RECENT_GROUPS = 64
"""The means of GeneratorStats cover this many groups."""
RATE_SECONDS = 60.0
"""A rate covers at least this many seconds, or the whole run if the run is shorter."""
LEAST_RATE_SECONDS = 10.0
"""A rate over fewer seconds is NaN: groups end in bursts, so such a rate would mean nothing."""


class GeneratorStats(TypedDict):
    """Totals and current values of a generator, for progress displays."""

    groups: int
    """Groups that were inserted."""
    completions: int
    tokens: int
    """Tokens of completions."""
    nan_logprobs: int
    """Tokens whose log-probability the engine does not know."""
    unknown_masks: int
    """Tokens drawn with top_p, top_k or min_p whose sampling mask is not stored. For such a token the trainer assumes
    that any token of the vocabulary could have been drawn."""
    groups_in_flight: int
    """Groups that are generated or wait for their table."""
    tokens_per_second: float
    """The tokens of inserted groups a second, over the last minute, including waits; NaN in the first ten seconds."""
    reward_mean: float
    """The mean over the latest groups; NaN before the first group, and if one of these groups was not scored."""
    policy_version: int
    reloads: int
    fetched_bytes: int
    """Bytes of weights that this generator fetched over HTTP."""
    probe_max_difference: float
    """The largest difference between the engine's and the trainer's log-probabilities of the probe that came with the
    latest weights, in nats; NaN without a probe."""
    groups_skipped: int
    """Groups left out because their prompt or a reward function failed, or because no token can be trained on."""
    rollouts_failed: int
    """Rollouts whose hook raised an exception, or took too long."""
    groups_refused: int
    """Groups that the server refused for their names or numbers, such as a tag that is too long. They are skipped."""
    groups_filtered: int
    """Groups that the caller's `group_filter` rejected."""
    groups_refused_stale: int
    """Groups that were too old when they arrived."""
    groups_aborted: int
    """Groups that were given up while they were generated, because they would have been too old on arrival."""
    tokens_wasted: int
    """Tokens of groups that were too old on arrival, plus an estimate of the tokens that were drawn for groups that
    were given up."""
    tokens_saved: int
    """An estimate of the further tokens that would have been drawn for groups that were given up."""
    rollouts_stored: int
    """Finished rollouts of partial groups that the server has acknowledged."""
    groups_resumed: int
    """Partial groups that this generator drew with rollouts that another generator had finished."""
    tokens_resumed: int
    """Tokens of the rollouts that other generators had finished in the groups of `groups_resumed`. Without partial
    groups, these tokens would have been lost."""
    leases_lost: int
    """Partial groups, or items of a stage, that this process lost to another process while it worked at them."""
    stale_seconds: float
    """Seconds for which the generator started no groups, because all groups would have been too old."""
    groups_refused_full: int
    """Inserts that a full table with `when_full = "reject"` refused."""
    server_refused: int
    """Calls that the server refused because it was busy or its storage failed. Each of these calls was tried again."""
    insert_waits: int
    """The number of times that an insert waited `insert_timeout` for a full queue."""
    permit_waits: int
    """The number of times that a generator waited `permit_timeout` for a permit and got none."""
    permits_expired: int
    """Groups that took so long that their permit had expired."""
    prompts_lost: int
    """Groups left out because the lease of their prompt had ended: another generator makes a group of this prompt."""
    items_rejected: int
    """Items of `partial_groups_table` or `prompts_table` of which no group can be made. They are removed."""
    threads_left: int
    """Threads of users' functions, such as rewards, that took too long and have not ended."""
    engines_lost: int
    """The number of times that a vLLM server went away; 0 with other engines than vllm-server."""
    engines_away: int
    """vLLM servers that are away now."""


def _no_stats() -> GeneratorStats:
    """The statistics before the first group."""
    stats: Any = dict.fromkeys(GeneratorStats.__annotations__, 0)
    stats["stale_seconds"] = 0.0
    stats["tokens_per_second"] = math.nan
    stats["reward_mean"] = math.nan
    stats["probe_max_difference"] = math.nan
    result: GeneratorStats = stats
    return result


@dataclass
class GroupTimes:
    """Seconds that a group spent in each step."""

    permit: float = 0.0
    generate: float = 0.0
    reward: float = 0.0
    insert: float = 0.0


class InsertRate:
    """The groups and tokens a second over the last minute, or over a longer time if groups come less often."""

    def __init__(self) -> None:
        self._marks: deque[tuple[float, int, int]] = deque()
        """Points in time, the oldest first: the time, and the total number of groups and of tokens until then.

        The rate covers the time from the first point to now."""

    def add(self, tokens: int, seconds: float, now: float) -> None:
        """Counts a group. `tokens`: its size; `seconds`: the time that it took; `now`: the time at which it ended."""
        if not self._marks:  # the first group: the rate begins when this group began
            self._marks.append((now - seconds, 0, 0))
        _, groups, all_tokens = self._marks[-1]
        self._marks.append((now, groups + 1, all_tokens + tokens))
        # The first mark is not needed once the second one is RATE_SECONDS old. The mark of this group always stays.
        while now - self._marks[1][0] >= RATE_SECONDS:
            self._marks.popleft()

    def per_second(self, now: float) -> tuple[float, float]:
        """Groups per second, and tokens per second. NaN: no group was counted, or the time is too short for a rate."""
        if not self._marks:
            return math.nan, math.nan
        began, first_groups, first_tokens = self._marks[0]
        _, groups, tokens = self._marks[-1]
        seconds = now - began
        if seconds < LEAST_RATE_SECONDS:
            return math.nan, math.nan
        return (groups - first_groups) / seconds, (tokens - first_tokens) / seconds


_MEANS = (
    "reward_mean",
    "solve_rate",
    "zero_variance_share",
    "completion_tokens_mean",
    "truncated_share",
    "empty_share",
    "staleness_mean",
    "version_spanning_share",
    "permit_seconds_mean",
    "generate_seconds_mean",
    "reward_seconds_mean",
    "insert_seconds_mean",
    "reload_seconds_mean",
)
"""The names of the means that are in each line. A mean is null if it had no value since the line before."""


def _new_values() -> defaultdict[str, list[float]]:
    """A dict with an empty list for each name in _MEANS. It adds an empty list when another name is looked up."""
    values = defaultdict[str, list[float]](list)
    for name in _MEANS:
        values[name] = []
    return values


@dataclass
class GeneratorMetrics:
    """Counts groups, and writes a line of JSON when `write` is called.

    A line covers the time since the line before, except for its totals, which count from the start of this process.
    """

    solved_reward: float
    """A completion with at least this reward counts as solved."""
    path: Path | None = None
    """The file to which `write` appends lines. A restarted generator appends to the same file. None: there is no file.
    """
    stats: GeneratorStats = field(default_factory=_no_stats)

    def __post_init__(self) -> None:
        self._recent: deque[tuple[int, float, float]] = deque(maxlen=_RECENT_GROUPS)
        """The tokens, the mean reward, and the seconds of generation of the latest groups."""
        self._rate = InsertRate()
        self._values = _new_values()
        """The values since the line before, by the name of their mean in the next line."""
        self._nan_logprobs = 0
        """The number of unknown log-probabilities since the line before."""
        self._skipped_in_a_row = 0
        self._since = time.monotonic()
        """The time of the line before."""

    def count_inserted(
        self,
        group: RolloutGroup,
        by_function: Mapping[str, npt.NDArray[np.float32]],
        staleness: int,
        times: GroupTimes,
    ) -> None:
        """Counts a group that was inserted.

        `by_function`: the rewards (G,) of each function, by its name; empty: the group was not scored. `staleness`: by
        how many versions the group was behind the trainer on arrival.
        """
        # Tokens that the policy did not write have no log-probability either, but `trained_mask` leaves them out.
        unknown = int((np.isnan(group.rollout_logprobs) & group.trained_mask).sum())
        unknown += group.meta.get("unknown_logprobs", 0)  # tokens that `assemble` has excluded from training
        reward_mean = math.nan
        if by_function:
            reward_mean = float(group.rewards.mean())
        self._recent.append((group.num_tokens, reward_mean, times.generate))
        now = time.monotonic()
        self._rate.add(group.num_tokens, times.generate + times.reward + times.insert, now)
        self._skipped_in_a_row = 0
        self.stats["groups"] += 1
        self.stats["completions"] += group.group_size
        self.stats["tokens"] += group.num_tokens
        self.stats["nan_logprobs"] += unknown
        self.stats["unknown_masks"] += unknown_masks(group)
        _, self.stats["tokens_per_second"] = self._rate.per_second(now)
        self.stats["reward_mean"] = sum(reward for _, reward, _ in self._recent) / len(self._recent)
        if self.path is not None:  # without a file, no line would ever clear these values
            self._nan_logprobs += unknown
            self._add_values(group, by_function, staleness, times)

    def _add_values(
        self,
        group: RolloutGroup,
        by_function: Mapping[str, npt.NDArray[np.float32]],
        staleness: int,
        times: GroupTimes,
    ) -> None:
        """Adds the values of a group to the values of the next line. Arguments: see `count_inserted`.

        A share is the mean of values that are 0 or 1. All names are in _MEANS, except those that begin with "reward/".
        """
        lengths_G = group.rollout_lengths
        if by_function:
            self._add("reward_mean", group.rewards)
            self._add("solve_rate", group.rewards >= self.solved_reward)
            self._add("zero_variance_share", [not carries_gradient(group)])
        self._add("completion_tokens_mean", lengths_G)
        self._add("truncated_share", [reason == "length" for reason in group.finish_reasons or ()])
        self._add("empty_share", lengths_G == 0)
        self._add("staleness_mean", [staleness])
        self._add("version_spanning_share", [group.policy_version_end is not None])
        for stage, seconds in vars(times).items():
            self._add(f"{stage}_seconds_mean", [seconds])
        # The names in `by_function` may differ from group to group, because environments have metrics of their own.
        for name, rewards_G in by_function.items():
            self._add(f"reward/{name}", rewards_G)

    def _add(self, name: str, values: Iterable[Any]) -> None:
        """Adds values to the values of the next line. Leaves out NaN, the reward of a function that abstained."""
        self._values[name] += [float(value) for value in values if not math.isnan(value)]

    def count_given_up(self, times: GroupTimes) -> None:
        """Counts a group that was given up. Estimates how many tokens were drawn for the group, and how many further
        tokens would have been drawn.

        The estimate assumes that the group would have become as long as the mean of the latest groups, and that its
        tokens came as fast. The exact number is not known, because an engine does not say how many tokens it has drawn
        for a cancelled request: vLLM answers only once, at the end.
        """
        self.stats["groups_aborted"] += 1
        if not self._recent:  # no group was inserted yet, so nothing is known about lengths
            return
        mean_tokens = sum(tokens for tokens, _, _ in self._recent) / len(self._recent)
        mean_seconds = sum(seconds for _, _, seconds in self._recent) / len(self._recent)
        share = 1.0  # the share of the tokens that was drawn, if they come at a steady rate
        if times.generate < mean_seconds:
            share = times.generate / mean_seconds
        drawn = mean_tokens * share
        self.stats["tokens_wasted"] += round(drawn)
        self.stats["tokens_saved"] += round(mean_tokens - drawn)

    def count_reload(self, version: int, seconds: float) -> None:
        """Counts new weights. `seconds`: the time in which the weights were loaded and checked. The wait for the groups
        under way before the load is not a part of this time."""
        self.stats["reloads"] += 1
        self.stats["policy_version"] = version
        if self.path is not None:  # without a file, no line would ever clear these values
            self._values["reload_seconds_mean"].append(seconds)

    def count_skipped(self, error: Exception, most: int) -> None:
        """Counts a group that is left out. Raises PromptError if this is the last of `most` such groups in a row."""
        self.stats["groups_skipped"] += 1
        self._skipped_in_a_row += 1
        if self._skipped_in_a_row >= most:
            raise PromptError(f"{most} groups in a row were skipped, the last because of: {error}")
        logger.warning("skipped: %s", error)

    def create_file(self) -> None:
        """Creates the file, if there is a `path`. Call it before the run, so that an OSError comes at once."""
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.touch()

    def write(self) -> None:
        """Appends a line to the file, if there is one. The next line covers the time from now on."""
        if self.path is not None:
            with self.path.open("a", encoding="utf-8") as file:
                text = json.dumps(self._line(), allow_nan=False)
                print(text, file=file)

    def _line(self) -> dict[str, float | int | None]:
        """Returns the metrics since the line before, by name, and the totals. Empties the values for the next line.

        A metric without a value is None. docs/metrics.md lists the names.
        """
        now = time.monotonic()
        seconds = max(now - self._since, 1e-9)  # never 0, so that a reader of the file may divide by it
        values = self._values
        unknown = self._nan_logprobs
        self._since = now
        self._values = _new_values()
        self._nan_logprobs = 0
        groups_per_second, tokens_per_second = self._rate.per_second(now)
        line: dict[str, float | int | None] = {
            "time": time.time(),
            "seconds": seconds,
            "groups_per_second": groups_per_second,
            "tokens_per_second": tokens_per_second,
        }
        for name, numbers in values.items():
            line[name] = float(np.mean(numbers)) if numbers else None
        rewards = values["reward_mean"]
        lengths = values["completion_tokens_mean"]
        stalenesses = values["staleness_mean"]
        line["reward_std"] = float(np.std(rewards)) if rewards else None
        line["completion_tokens_max"] = int(max(lengths)) if lengths else None
        line["nan_logprob_share"] = unknown / sum(lengths) if any(lengths) else None  # None: there were no tokens
        line["staleness_max"] = int(max(stalenesses)) if stalenesses else None
        line["generate_seconds_max"] = max(values["generate_seconds_mean"], default=None)
        for name in self.stats:
            # Some names are in the line already, with other values: its `reward_mean` covers only the groups since the
            # line before.
            if name not in line:
                # mypy knows only literal keys of a TypedDict, and not the names from a loop over it.
                line[name] = self.stats[name]  # type: ignore[literal-required]
        for name, value in line.items():
            if value is not None and math.isnan(value):
                line[name] = None  # JSON has no NaN
        return line
