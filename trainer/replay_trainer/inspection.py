"""Inspection: groups that cannot be trained on leave the run instead of ending it.

Such a group would stop every step that draws it, also after a resume: `forward_to` has put it into the pool by then.

* A bad group is counted, named in a warning, and deleted from its table and the pool; no step draws it again.
* A group that makes a step fail is bad as well: `put_aside`.
* If too many of the recent groups are bad, every rank stops at the same step with the same error.
"""

from __future__ import annotations

import inspect
import logging
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import nn

from replay_client import ReplayClient, Sample
from replay_client.errors import ReplayError, TableNotFoundError
from replay_client.rollout import MAX_LOGPROB, MAX_TEMPERATURE, MAX_VALUE, MIN_TEMPERATURE, RolloutGroup
from replay_trainer.ranks import Ranks

logger = logging.getLogger(__name__)

RECENT_GROUPS = 100
"""The share of bad groups is that of the last steps that together drew at least this many groups."""


@dataclass(frozen=True)
class Limits:
    """What one model can take. None: not known, or no limit."""

    vocabulary: int | None = None
    """Number of token embeddings."""
    positions: int | None = None
    """The most tokens of a sequence, for a model that looks up an embedding for each position. A model that computes
    its positions takes longer sequences than its configuration names."""
    group_tokens: int | None = None
    """GRPOConfig.max_group_tokens."""
    inputs: frozenset[str] = frozenset()
    """Names of all inputs of the model."""

    @classmethod
    def of(cls, model: Any, group_tokens: int | None = None) -> Limits:
        """Those of a language model of transformers."""
        tokens = model.get_input_embeddings()
        positions = getattr(model.config, "max_position_embeddings", None)
        # OPT and BART keep two rows beside those of the positions.
        tables = [] if positions is None else range(positions, positions + 3)
        looked_up = any(
            isinstance(module, nn.Embedding) and module is not tokens and module.num_embeddings in tables
            for module in model.modules()
        )
        inputs = frozenset(inspect.signature(model.forward).parameters)
        return cls(len(tokens.weight), positions if looked_up else None, group_tokens, inputs)


class Inspector:
    """Checks what one rank draws, before anything looks at the groups."""

    def __init__(self, client: ReplayClient, ranks: Ranks, limits: Limits, pool: str, max_share: float) -> None:
        """limits: of the model. pool: the replay table. max_share: from 0 to 1."""
        self.bad_keys: set[int] = set()
        """Keys of all bad groups so far. A draw from the pool excludes them."""
        self._client = client
        self._ranks = ranks
        self._limits = limits
        self._pool = pool
        self._max_share = max_share
        self._undeleted: dict[int, str] = {}
        self._drawn = 0
        self._reasons: list[str] = []
        self._recent: deque[tuple[int, int]] = deque()
        self._ignored: set[str] = set()
        """Extras that a warning has named."""

    def usable(self, samples: Sequence[Sample], table: str) -> list[Sample]:
        """The samples from `table` that can be trained on."""
        good = []
        self._drawn += len(samples)
        for sample in samples:
            if reason := why_unusable(sample, self._limits):
                self.put_aside(sample.info.key, table, reason)
            else:
                self._warn_of_ignored(sample.group)
                good.append(sample)
        return good

    def put_aside(self, key: int, table: str, reason: str) -> None:
        """The group with this key, drawn from `table`, is bad. The next `end_draws` counts and deletes it."""
        self.bad_keys.add(key)
        self._undeleted[key] = table
        self._reasons.append(f"key {key} of table {table!r}: {reason}")
        logger.warning("group put aside, it cannot be trained on: %s", self._reasons[-1])

    def stream(self, batches: Iterator[list[Sample]], table: str) -> Iterator[list[Sample]]:
        """The batches without bad groups."""
        for batch in batches:
            yield self.usable(batch, table)

    def returned(self, keys: Iterable[int], table: str) -> None:
        """These groups have gone back to `table`. Deletes the bad ones among them, so that no later run draws them."""
        if bad := sorted(self.bad_keys.intersection(keys)):
            try:
                self._client.delete(table, bad)
            except ReplayError as error:
                logger.warning("groups that cannot be trained on are in table %r again: %s", table, error)

    def end_draws(self) -> int:
        """Delete the bad groups of this step from the server; returns how many all ranks drew. Every rank calls it.

        Raises RuntimeError on every rank if the share of bad groups among the recent ones is too high.
        """
        self._delete()
        parts = self._ranks.all((self._drawn, self._reasons))
        self._drawn, self._reasons = 0, []
        reasons = [reason for _, reasons in parts for reason in reasons]
        self._recent.append((sum(drawn for drawn, _ in parts), len(reasons)))
        while sum(drawn for drawn, _ in self._recent) - self._recent[0][0] >= RECENT_GROUPS:
            self._recent.popleft()
        drawn, bad = (sum(counts) for counts in zip(*self._recent, strict=True))
        # At the start of a run a single bad group would be a large share of the few groups so far.
        if bad > self._max_share * max(drawn, RECENT_GROUPS):
            raise RuntimeError(
                f"{bad} of the last {drawn} groups could not be trained on, more than max_bad_share="
                f"{self._max_share:g}. The last: {reasons[-1]}. They are deleted: mend what generates them, and "
                f"resume with resume=True"
            )
        return len(reasons)

    def _warn_of_ignored(self, group: RolloutGroup) -> None:
        if new := sorted(self._limits.inputs.intersection(group.extras) - self._ignored):
            self._ignored.update(new)
            logger.warning(
                "groups have %s among their extras, which the model takes as inputs. This trainer gives it tokens "
                "alone, so its log-probabilities are not those of the sampler (said once)",
                ", ".join(new),
            )

    def _delete(self) -> None:
        """Delete bad groups from the tables that they were drawn from, and from the pool."""
        # A fresh group may join the pool only after this call, when the server learns that its batch arrived. It is
        # therefore deleted again in the next step; until then `bad_keys` keeps it from being drawn.
        again = {key: self._pool for key, table in self._undeleted.items() if table != self._pool}
        for table in {*self._undeleted.values(), *([self._pool] if self._undeleted else [])}:
            keys = [key for key, source in self._undeleted.items() if table in (source, self._pool)]
            try:
                self._client.delete(table, keys)
            except TableNotFoundError:
                # A run that replaces nothing needs no pool.
                again = {}
        self._undeleted = again


def why_unusable(sample: Sample, limits: Limits | None = None) -> str:
    """Why no step can train on this group; empty: it can. limits: of the model, if they are known."""
    limits = limits or Limits()
    try:
        group = sample.group
    except ValueError as error:
        return str(error)
    if not group.prompt_lengths.all():
        return "prompt_ids is empty, so nothing predicts the first token"
    if group.num_tokens == 0:
        return "all its completions are empty"
    for name, ids in (("prompt_ids", group.prompt_ids), ("completion_ids", group.completion_ids)):
        least, most = int(ids.min(initial=0)), int(ids.max(initial=0))
        if least < 0:
            return f"{name} holds the token {least}"
        if limits.vocabulary is not None and most >= limits.vocabulary:
            return f"{name} holds the token {most}, and the model has the tokens 0 to {limits.vocabulary - 1}"
    longest = group.prompt_ids.size + int(group.completion_lengths.max())
    if limits.positions is not None and longest > limits.positions:
        return f"prompt and completion have {longest} tokens, and the model has {limits.positions} positions"
    if limits.group_tokens is not None and (tokens := group.prompt_ids.size + group.num_tokens) > limits.group_tokens:
        return f"it has {tokens} tokens, more than max_group_tokens={limits.group_tokens}"
    for name, values_G in (("rewards", group.rewards), ("advantages", group.advantages)):
        # NaN is not at most anything.
        if (beyond_G := ~(np.abs(values_G) <= MAX_VALUE)).any():
            return f"{name} holds {values_G[beyond_G][0]:g}, beyond ±{MAX_VALUE:g}"
    # A comparison with NaN, an unknown log-probability, is False.
    if (group.rollout_logprobs > MAX_LOGPROB).any():
        return f"rollout_logprobs holds {np.nanmax(group.rollout_logprobs):.3g}, above 0"
    temperature = group.sampling.get("temperature", 1.0)
    if not isinstance(temperature, int | float) or not MIN_TEMPERATURE <= temperature <= MAX_TEMPERATURE:
        return f"it was sampled at temperature {temperature!r}, not from {MIN_TEMPERATURE:g} to {MAX_TEMPERATURE:g}"
    return ""
