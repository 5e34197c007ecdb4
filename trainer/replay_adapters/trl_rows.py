"""Holds the rows of a generation of TRL's trainer (`GeneratedRows`), and the state of the generation
(`GenerationStep`)."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import CodeType
from typing import Any, NamedTuple

from torch import Tensor

from replay_client import RolloutGroup, Sample


@dataclass
class GeneratedRows:
    """The B rows of one generation on this rank, as TRL holds them: each field is a list with B lists, one for each
    row."""

    prompt_ids: list[list[int]]
    completion_ids: list[list[int]]
    tool_mask: list[list[int]] | None
    """1 for tokens that the policy wrote, 0 for tokens of tools; None: the policy wrote all tokens."""
    logprobs: list[list[float | None]] | None
    """The log-probabilities of the sampler; None if the trainer's own model is the sampler."""

    def copy(self) -> GeneratedRows:
        """A copy in which rows can be replaced. The rows themselves are shared, because they are never changed in
        place."""
        return GeneratedRows(
            prompt_ids=list(self.prompt_ids),
            completion_ids=list(self.completion_ids),
            tool_mask=None if self.tool_mask is None else list(self.tool_mask),
            logprobs=None if self.logprobs is None else list(self.logprobs),
        )

    def mask(self) -> list[list[int]]:
        """Returns `tool_mask`. If it is None, sets it to ones for all tokens first."""
        if self.tool_mask is None:
            self.tool_mask = [[1] * len(ids) for ids in self.completion_ids]
        return self.tool_mask

    def put(self, row: int, group: RolloutGroup, k: int) -> None:
        """Replaces the row with the number `row` by the sequence `k` of `group`."""
        if group.loss_mask is not None:
            self.mask()  # sets `tool_mask`, which gets the loss mask below
        span = group.sampled_spans()[k]
        self.prompt_ids[row] = group.prompts()[k].tolist()
        self.completion_ids[row] = group.completion_ids[span].tolist()
        if self.logprobs is not None:
            # TRL writes None, and not NaN, for a log-probability that is unknown.
            logprobs_T = group.rollout_logprobs[span].tolist()
            self.logprobs[row] = [None if math.isnan(logprob) else logprob for logprob in logprobs_T]
        if self.tool_mask is not None:
            self.tool_mask[row] = group.trained_mask[span].astype(int).tolist()


class FreshRow(NamedTuple):
    """One generated row, in the form in which it is stored."""

    prompt_ids: list[int]
    completion_ids: list[int]
    mask: list[int] | None
    """1 for tokens that the policy wrote, 0 for tokens of tools; None: the policy wrote all tokens."""
    logprobs: list[float]
    """NaN: unknown."""


@dataclass
class GenerationStep:
    """The state of one generation of a rank, from its inputs to its report.

    Rows and groups are numbered over all ranks, because a group may have rows on two ranks. The rank with the first row
    of a group owns the group: that rank draws the replacement of the group, or stores the group in the pool.
    """

    inputs: list[dict[str, Any]]
    size: int
    """G, the number of rows of a group."""
    first: int
    """The number of the first row of this rank."""
    version: int
    """The policy version of the groups that are generated now."""
    away: bool = False
    """True if all ranks do without the server in this step."""
    fresh: GeneratedRows | None = None
    """The rows as they were generated; None before the generation, and if the rows have images."""
    rewards: Tensor | None = None
    """(rows of all ranks, F): the rewards of the fresh rows by F reward functions; NaN if a function returned none."""
    trained: list[bool] = field(default_factory=list)
    """True for each fresh row of all ranks that has a token which the policy wrote."""
    final_rewards: Tensor | None = None
    """The rewards of the rows of all ranks after the replacement; None before it, and after TRL has asked for them."""
    fresh_logprobs: Tensor | None = None
    """(B, T) log-probabilities of the fresh rows under the current weights. Only set if replaced rows may have to be
    stored."""
    replaced: dict[int, Sample] = field(default_factory=dict)
    """Number of a replaced group that this rank owns -> the sample that replaces it."""
    stored: dict[int, RolloutGroup] = field(default_factory=dict)
    """Number of a replaced group that has rows on this rank -> the stored group that replaces it."""
    other_rewards: int = 0
    """The number of groups drawn from the pool that other reward functions scored."""
    missing: int = 0
    """The number of groups that this rank owns, whose rewards are all equal, and for which the pool had no
    replacement."""
    zero_variance: int = 0
    """The number of groups that this rank owns and whose rewards are all equal."""
    ratio: tuple[float, float] = (0.0, 0.0)
    """(sum of the importance ratios of the replayed tokens, number of these tokens)."""
    seconds: float = 0.0
    """Seconds of this generation that were spent on replay."""

    @property
    def rewards_BF(self) -> Tensor:
        """The rewards of the fresh rows of this rank."""
        assert self.rewards is not None
        return self.rewards[self.first : self.first + len(self.inputs)]

    @property
    def owned(self) -> range:
        """The groups whose first row is on this rank."""
        return range(_groups_before(self.first, self.size), _groups_before(self._end, self.size))

    @property
    def present(self) -> range:
        """The groups that have rows on this rank."""
        return range(self.first // self.size, _groups_before(self._end, self.size))

    @property
    def _end(self) -> int:
        """The number of the first row after the rows of this rank."""
        return self.first + len(self.inputs)

    def rows_of(self, group: int) -> slice:
        """The slice that takes the rows of a group from the rows of all ranks."""
        return slice(group * self.size, (group + 1) * self.size)

    def places(self, group: int) -> list[tuple[int, int]]:
        """For each row of the group on this rank: its number among the rows of this rank, and its number in the
        group."""
        places = []
        for k in range(self.size):
            row = group * self.size + k - self.first
            if 0 <= row < len(self.inputs):
                places.append((row, k))
        return places

    def take_rewards(self, *_: Any) -> Tensor:
        """Returns `final_rewards`, and sets the attribute to None.

        TRL calls this once in place of its `_calculate_rewards`, because the rewards are computed already.
        """
        assert self.final_rewards is not None
        rewards = self.final_rewards
        self.final_rewards = None
        return rewards

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Adds the time of the block to `seconds`."""
        started = time.perf_counter()
        yield
        self.seconds += time.perf_counter() - started


def _groups_before(row: int, size: int) -> int:
    """The number of groups of `size` rows whose first row is before `row`."""
    return -(-row // size)  # row / size, rounded up


_DEEPEST = 8
"""The number of levels of nested functions and values that a fingerprint covers."""


def fingerprint(names: Iterable[str], functions: Iterable[Any]) -> str:
    """Returns 16 hexadecimal digits that identify reward functions, with their names and their order.

    Runs that share a pool compare their fingerprints to see whether they have the same objective. The fingerprint
    covers the code of a function, its defaults, and the plain values in its closure. It does not cover data that the
    function reads when it runs, such as a file or a model.
    """
    described = [_describe(function, _DEEPEST) for function in functions]
    text = repr((list(names), described))
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def _describe(value: Any, levels: int) -> Any:
    """Describes a function or value by plain values, whose repr is the same in every process.

    The description covers `levels` levels of nested functions and values.
    """
    if value is None or value is ... or isinstance(value, bool | int | float | complex | str | bytes):
        return repr(value)
    if not levels:
        return type(value).__qualname__
    if isinstance(value, list | tuple):
        return [_describe(element, levels - 1) for element in value]
    if isinstance(value, set | frozenset):
        # Sorted, because the order of a set differs between processes.
        return sorted(str(_describe(element, levels - 1)) for element in value)
    if isinstance(value, CodeType):
        return [value.co_code.hex(), value.co_names, _describe(value.co_consts, levels - 1)]
    if isinstance(value, partial):
        return _describe((value.func, value.args, sorted(value.keywords.items())), levels - 1)
    if isinstance(value, type):
        methods = sorted((name, member) for name, member in vars(value).items() if hasattr(member, "__code__"))
        return [value.__qualname__, *(_describe(method, levels - 1) for _, method in methods)]
    code = getattr(value, "__code__", None)
    if code is None:  # an object, which can be called if its class has a method `__call__`
        call_method = vars(type(value)).get("__call__")
        return [type(value).__qualname__, _describe(call_method, levels - 1)]
    cells = value.__closure__ or ()
    closure_values = [cell.cell_contents for cell in cells if _has_value(cell)]
    keyword_defaults = value.__kwdefaults__ or {}
    defaults = (value.__defaults__, sorted(keyword_defaults.items()))
    return _describe((code, closure_values, defaults), levels - 1)


def _has_value(cell: Any) -> bool:
    """True if the variable of a closure has a value."""
    try:
        _ = cell.cell_contents
    except ValueError:  # the variable is assigned later, or never
        return False
    return True
