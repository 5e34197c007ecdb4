"""TRL's AsyncGRPOTrainer with a replay server as its rollout queue, so that generators run anywhere and survive it.

replay generate ──insert──▶ rollouts ──sample──▶ ServerRollouts.rollout_buffer ──▶ AsyncGRPOTrainer
      ▲                        └──forward──▶ replay ──replaces zero variance──┘            │
      └────────────── policy version, folder of weights ◀── update_model_version ◀─────────┘
"""

from __future__ import annotations

import logging
import queue
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor
from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

from replay_client import ReplayClient, RolloutGroup, Sample
from replay_client.errors import DeadlineExceededError, ReplayError, ServerClosedError, ServerUnavailableError
from replay_client.scoring import carries_gradient
from replay_trainer.integrations.pool import GroupPool
from replay_trainer.weights import publish_weights, remove

logger = logging.getLogger(__name__)
_PAUSE = 0.5
"""Seconds between two questions whether a server is back."""


class ServerRollouts:
    """Both `rollout_worker` and `weight_transfer` of an AsyncGRPOTrainer.

    The trainer takes groups one at a time from the server, when it needs them: one that dies loses one group.
    """

    def __init__(
        self,
        address: str | None,
        model: Any,
        tokenizer: Any,
        output_dir: str | Path,
        *,
        table: str = "rollouts",
        pool: str | None = "replay",
        max_staleness: int | None = None,
        keep_weights: int = 2,
    ) -> None:
        """`address`: host:port; None: REPLAY_ADDRESS. `model`: the trainer's, whose configuration is written with the
        weights. `output_dir`: where generators find the weights; it keeps the `keep_weights` newest.

        `pool`: table whose groups replace groups whose rewards are all equal; None: they are trained on.
        `max_staleness`: that of AsyncGRPOConfig, which throws away older samples.
        Raises TableNotFoundError if the server lacks a table.
        """
        self.client = ReplayClient.from_env(address=address)
        self.client.server_info(tables=[table])
        self.rollout_buffer = _ServerQueue(self._draw)
        self.metrics_queue: queue.Queue[dict[str, Any]] = queue.Queue()
        self._pool = GroupPool(self.client, pool, max_staleness=max_staleness) if pool else None
        self._table = table
        self._model, self._tokenizer = model, tokenizer
        self._output_dir, self._keep_weights = Path(output_dir), keep_weights
        self._run = uuid.uuid4().hex
        self._weights: dict[str, Tensor] = {}
        self._version: int | None = None
        self._last_sample = time.monotonic()

    # ------------------------------------------------------------------------------------------- the rollout worker

    def start(self) -> None:
        """Generators run elsewhere: only the time without samples begins to count."""
        self._last_sample = time.monotonic()

    def stop(self) -> None:
        """Close the connection. The generators and the server go on."""
        self.client.close()

    def check_health(self, stale_after_s: float) -> None:
        """Raises RuntimeError, with what the server says, if no group came for `stale_after_s` seconds."""
        waited = time.monotonic() - self._last_sample
        if waited <= stale_after_s:
            return
        try:
            info = self.client.server_info(tables=[self._table], timeout=5.0).tables[self._table]
            reason = f"{info.inserts} groups were inserted into {self._table}, and it holds {info.size}"
        except ReplayError as error:
            reason = str(error)
        raise RuntimeError(
            f"no rollout came for {waited:.0f} s: {reason}. Are generators running? `replay doctor` says more"
        )

    def update_model_version(self, model_version: int) -> None:
        """Publish the weights that were sent last as this version."""
        stale = self._output_dir / f"step-{model_version}"
        if stale.exists():  # of this run, before it went back to a checkpoint
            remove(stale)
        folder = publish_weights(
            self._model,
            self._tokenizer,
            self._output_dir,
            model_version,
            self._keep_weights,
            None,  # a probe needs a forward pass, which a trainer whose weights are sharded cannot make here
            weights=self._weights,
        )
        # The first version may be lower than that of an earlier run, or of this one before it was started again.
        self.client.set_policy_version(model_version, weights=str(folder), rollback=self._version is None)
        self._version = model_version
        self._weights = {}

    # ------------------------------------------------------------------------------------------ the weight transfer

    def init_weight_transfer(self) -> None:
        """Nothing: weights travel through the folder."""

    def pause(self) -> None:
        """Nothing: each generator pauses when it loads a version."""

    def send_weights(self, iterator: Iterator[tuple[str, Tensor]]) -> None:
        """Keep a copy of the weights until their version is known."""
        self._weights = {name: tensor.detach().cpu().clone() for name, tensor in iterator}

    def resume(self) -> None:
        """Nothing, as `pause`."""

    def destroy(self) -> None:
        """Nothing: `stop` closes the connection."""

    # ------------------------------------------------------------------------------------------------------- groups

    def _draw(self, timeout: float | None) -> list[RolloutSample]:
        """The samples of the next group; none if no group came in time, or the server is away."""
        try:
            sample = self.client.sample(self._table, 1, timeout=timeout)[0]
        except DeadlineExceededError:
            return []
        except (ServerUnavailableError, ServerClosedError) as error:
            logger.warning("the rollouts are away: %s", error)
            time.sleep(_PAUSE)
            return []
        self._last_sample = time.monotonic()
        zero_variance = not carries_gradient(sample.group)
        replacement: list[Sample] = []
        if zero_variance and self._pool is not None:
            size = sample.group.group_size
            scope = f"{self._run}/{self._version}"
            replacement = self._pool.draw(1, scope, lambda group: group.group_size == size)
        self.metrics_queue.put(
            {
                "replay/fresh_reward": float(sample.group.rewards.mean()),
                "replay/fresh_zero_variance": (float(zero_variance), 1.0),
                "replay/groups_replaced_total": float(len(replacement)),
            }
        )
        return self._samples(replacement[0] if replacement else sample)

    def _samples(self, sample: Sample) -> list[RolloutSample]:
        """The completions of a group, as TRL's worker would queue them."""
        group = sample.group
        prompt = np.asarray(group.prompt_ids, dtype=np.int64)
        zeros = np.zeros(len(prompt))
        # A token without a log-probability has no ratio, so the loss leaves it out.
        known = np.isfinite(group.rollout_logprobs)
        mask = known if group.loss_mask is None else known & group.loss_mask
        logprobs = np.where(known, group.rollout_logprobs, 0.0)
        samples, end = [], 0
        for k, completion in enumerate(group.completions()):
            tokens = slice(end, end := end + len(completion))
            samples.append(
                RolloutSample(
                    prompt=[{"role": "user", "content": self._text(group.prompt_ids)}],
                    completion=[{"role": "assistant", "content": self._text(completion)}],
                    input_ids=np.concatenate([prompt, completion]).astype(np.int64),
                    completion_mask=np.concatenate([zeros, mask[tokens]]).astype(np.int64),
                    old_log_probs=np.concatenate([zeros, logprobs[tokens]]).astype(np.float32),
                    advantage=float(group.advantages[k]),
                    model_version=group.policy_version,
                    group_id=sample.info.key % 2**62,
                    metrics=_metrics(group, k),
                    enqueued_at=time.time() - sample.info.age,
                )
            )
        return samples

    def _text(self, token_ids: Any) -> str:
        return str(self._tokenizer.decode(token_ids.tolist(), skip_special_tokens=True))


class _ServerQueue:
    """As much of `queue.Queue` as TRL's trainer uses: what is left of the last group, then the next group."""

    def __init__(self, draw: Callable[[float | None], list[RolloutSample]]) -> None:
        self._draw = draw
        self._samples: deque[RolloutSample] = deque()

    def get(self, block: bool = True, timeout: float | None = None) -> RolloutSample:
        """The next sample. Raises queue.Empty after `timeout` seconds (None: waits as long as the client does)."""
        if not self._samples:
            self._samples.extend(self._draw(timeout if block else 0.0))
        if not self._samples:
            raise queue.Empty
        return self._samples.popleft()

    def qsize(self) -> int:
        """Samples that are here already."""
        return len(self._samples)


def _metrics(group: RolloutGroup, k: int) -> dict[str, float]:
    return {
        "reward": float(group.rewards[k]),
        "reward_std": float(group.rewards.std(ddof=1)) if group.group_size > 1 else 0.0,
    }
