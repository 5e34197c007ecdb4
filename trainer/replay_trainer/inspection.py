"""Inspection: groups that cannot be trained on leave the run instead of ending it.

Such a group would stop every step that draws it, also after a resume: `forward_to` has put it into the pool by then.

* A bad group is counted, named in a warning, and deleted from its table and the pool; no step draws it again.
* If too many of the recent groups are bad, every rank stops at the same step with the same error.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from replay_client import ReplayClient, Sample
from replay_client.errors import ReplayError, TableNotFoundError
from replay_client.rollout import MAX_LOGPROB
from replay_trainer.ranks import Ranks

logger = logging.getLogger(__name__)

RECENT_GROUPS = 100
"""The share of bad groups is that of the last steps that together drew at least this many groups."""


class Inspector:
    """Checks what one rank draws, before anything looks at the groups."""

    def __init__(self, client: ReplayClient, ranks: Ranks, vocabulary: int, pool: str, max_share: float) -> None:
        """vocabulary: number of token embeddings of the model. pool: the replay table. max_share: from 0 to 1."""
        self.bad_keys: set[int] = set()
        """Keys of all bad groups so far. A draw from the pool excludes them."""
        self._client = client
        self._ranks = ranks
        self._vocabulary = vocabulary
        self._pool = pool
        self._max_share = max_share
        self._undeleted: dict[int, str] = {}
        self._drawn = 0
        self._reasons: list[str] = []
        self._recent: deque[tuple[int, int]] = deque()

    def usable(self, samples: Sequence[Sample], table: str) -> list[Sample]:
        """The samples from `table` that can be trained on."""
        good = []
        self._drawn += len(samples)
        for sample in samples:
            if reason := why_unusable(sample, self._vocabulary):
                self.bad_keys.add(sample.info.key)
                self._undeleted[sample.info.key] = table
                self._reasons.append(f"key {sample.info.key} of table {table!r}: {reason}")
                logger.warning("group put aside, it cannot be trained on: %s", self._reasons[-1])
            else:
                good.append(sample)
        return good

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


def why_unusable(sample: Sample, vocabulary: int | None = None) -> str:
    """Why no step can train on this group; empty: it can. vocabulary: number of token embeddings, if known."""
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
        if vocabulary is not None and most >= vocabulary:
            return f"{name} holds the token {most}, and the model has the tokens 0 to {vocabulary - 1}"
    for name, values_G in (("rewards", group.rewards), ("advantages", group.advantages)):
        if not np.isfinite(values_G).all():
            return f"{name} holds {values_G[~np.isfinite(values_G)][0]}"
    # A comparison with NaN, an unknown log-probability, is False.
    if (group.rollout_logprobs > MAX_LOGPROB).any():
        return f"rollout_logprobs holds {np.nanmax(group.rollout_logprobs):.3g}, above 0"
    temperature = group.sampling.get("temperature", 1.0)
    if not isinstance(temperature, int | float) or not 0 < temperature < math.inf:
        return f"it was sampled at temperature {temperature!r}"
    return ""
