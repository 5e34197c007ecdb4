"""Clients without a server: one that records what a generator asks, and two that a trainer samples from."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from replay_client import MutationResult
from replay_client.errors import DeadlineExceededError
from replay_client.records import AdmissionInfo, PermitGrant, Policy, Sample
from replay_client.rollout import RolloutGroup
from replay_client.scoring import is_zero_variance
from replay_client.testing import make_group
from tests.kit.groups import make_sample


@dataclass
class RecordingClient:
    """Stands where an AsyncReplayClient does, and remembers what it was asked."""

    admission: bool = False
    inserts: list[tuple[RolloutGroup, dict[str, float]]] = field(default_factory=list)
    leases: list[PermitGrant] = field(default_factory=list)
    """Granted, and neither used nor released."""
    granted: int = 0
    released: int = 0
    refuse: list[Exception] = field(default_factory=list)
    """Errors that the next inserts raise, one error for each insert."""
    left: bool = False
    """It said that it ends."""
    insert_keys: list[int] = field(default_factory=list)
    settings: Mapping[str, str] = field(default_factory=dict)
    """What it was told to describe itself with."""
    current: Policy = field(default_factory=Policy)
    changed: asyncio.Condition = field(default_factory=asyncio.Condition)

    async def publish(self, version: int, weights: Path | str) -> None:
        async with self.changed:
            self.current = Policy(version=version, weights=str(weights))
            self.changed.notify_all()

    async def inserted(self, count: int) -> None:
        async with self.changed:
            await self.changed.wait_for(lambda: len(self.inserts) >= count)

    async def insert(
        self,
        group: RolloutGroup,
        priorities: Mapping[str, float],
        *,
        key: int,
        permits: PermitGrant | None,
        timeout: float | None,
        tags: Mapping[str, str | int],
        closes: Sequence[Sample],
    ) -> int:
        await asyncio.sleep(0)
        self.insert_keys.append(key)
        if self.refuse:
            raise self.refuse.pop(0)
        if permits is not None:
            self.leases.remove(permits)
        async with self.changed:
            self.inserts.append((group, dict(priorities)))
            self.changed.notify_all()
        return key

    async def policy(self) -> Policy:
        return self.current

    async def watch_policy(self) -> AsyncIterator[Policy]:
        yield (last := self.current)
        while True:
            async with self.changed:
                while self.current == last:
                    await self.changed.wait()
                last = self.current
            yield last

    async def server_info(self, *, timeout: float | None = None) -> Any:
        admission = AdmissionInfo(table="rollouts") if self.admission else None
        return SimpleNamespace(
            admission=admission, policy=self.current, server_id=1, tables={}, settings_of=lambda part: ()
        )

    async def describe(self, settings: Mapping[str, str], *, timeout: float | None = None) -> None:
        self.settings = dict(settings)

    async def acquire_permits(self, count: int, *, timeout: float | None) -> PermitGrant:
        self.granted += count
        self.leases.append(PermitGrant(self.granted, count, 600.0))
        return self.leases[-1]

    async def release_permits(self, grant: PermitGrant) -> int:
        self.leases.remove(grant)
        self.released += grant.count
        return grant.count

    async def leave(self, *, timeout: float) -> None:
        self.left = True

    async def __aenter__(self) -> RecordingClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        pass


class FakeClient:
    """As much of ReplayClient as the trainer uses: a pool, and batches of fresh groups, of which the last repeats."""

    def __init__(self, batches: Sequence[Sequence[Sample]] = (), pool: Sequence[Sample] = (), version: int = 0) -> None:
        self.batches = batches
        self.pool = list(pool)
        self.version = version
        self.weights = ""
        self.given: dict[str, set[int]] = {}
        self.checkpoints: list[str] = []
        self.priorities: dict[int, float] = {}
        self.deleted: list[tuple[str, int]] = []
        self.admitted: int | None = None
        """[admission] fresh_groups_per_step; None: there is no [admission]."""

    def server_info(self, **_: Any) -> Any:
        admission = None if self.admitted is None else AdmissionInfo(fresh_groups_per_step=self.admitted)
        return SimpleNamespace(admission=admission, tables={}, clients=())

    def policy(self, **_: Any) -> Policy:
        return Policy(version=self.version, weights=self.weights)

    def set_policy_version(self, version: int, weights: str = "", rollback: bool = False, **_: Any) -> None:
        self.version, self.weights = version, weights

    def auto_renew(self, *_: Any) -> Any:
        """Nothing is leased here."""
        return SimpleNamespace(add=lambda _: None, forget=lambda _: None, close=lambda: None)

    def leave(self) -> None:
        """Nobody looks at this server."""

    def describe(self, settings: dict[str, str]) -> None:
        """Nobody compares anything here."""

    def create_checkpoint(self, name: str = "", *, timeout: float | None = 30.0) -> str:
        self.checkpoints.append(name or f"auto-{len(self.checkpoints)}")
        return self.checkpoints[-1]

    def update_priorities(self, table: str, priorities: Mapping[int, float]) -> MutationResult:
        keys = {sample.info.key for sample in self.pool}
        self.priorities |= {key: priority for key, priority in priorities.items() if key in keys}
        missing = tuple(key for key in priorities if key not in keys)
        return MutationResult(len(priorities) - len(missing), missing)

    def delete(self, table: str, keys: Sequence[int]) -> MutationResult:
        self.deleted += [(table, key) for key in keys]
        there = {sample.info.key for sample in self.pool} & set(keys)
        if table == "replay":
            self.pool = [sample for sample in self.pool if sample.info.key not in keys]
        return MutationResult(len(there), tuple(set(keys) - there))

    @contextmanager
    def sampler(
        self, table: str, *, batch_size: int, prefetch: int, timeout: float | None, lease: float, on_lease: Any
    ) -> Iterator[Iterator[list[Sample]]]:
        yield (list(self.batches[min(i, len(self.batches) - 1)]) for i in itertools.count(self.version))

    def sample(
        self,
        table: str,
        num_samples: int = 1,
        *,
        min_samples: int | None = None,
        timeout: float | None = 5.0,
        scope: str = "",
        exclude: Sequence[int] = (),
    ) -> list[Sample]:
        least = num_samples if min_samples is None else min_samples
        assert 1 <= least <= num_samples  # the server refuses anything else
        given = self.given.setdefault(scope, set()) if scope else set()
        drawn = [s for s in self.pool if s.info.key not in given and s.info.key not in exclude][:num_samples]
        if len(drawn) < least:
            raise DeadlineExceededError(f"{table}: sampling blocked: size {len(drawn)} < {least}")
        given.update(s.info.key for s in drawn)
        return drawn


class OnlineClient(FakeClient):
    """Fresh groups written by the model itself: one token after each prompt, rewarded if it is the prompt's first."""

    def __init__(self, model: Any, *, prompts: Sequence[Sequence[int]], group_size: int) -> None:
        super().__init__()
        self.model, self.prompts, self.group_size = model, prompts, group_size
        self.random = torch.Generator().manual_seed(0)
        self.key = 0

    @contextmanager
    def sampler(
        self, table: str, *, batch_size: int, prefetch: int, timeout: float | None, lease: float, on_lease: Any
    ) -> Iterator[Iterator[list[Sample]]]:
        yield (self.write(batch_size) for _ in itertools.count())

    @torch.no_grad()
    def write(self, batch_size: int) -> list[Sample]:
        samples = []
        for i in range(batch_size):
            prompt = self.prompts[i % len(self.prompts)]
            logprobs_V = self.model(torch.tensor([list(prompt)])).logits[0, -1].log_softmax(-1)
            tokens_G = torch.multinomial(logprobs_V.exp(), self.group_size, replacement=True, generator=self.random)
            group = make_group(
                prompt=prompt,
                rewards=[float(token == prompt[0]) for token in tokens_G],
                completions=[[int(token)] for token in tokens_G],
                logprobs=logprobs_V[tokens_G].tolist(),
            )
            self.key += 1
            samples.append(make_sample(group, key=self.key))
        self.pool += [sample for sample in samples if not is_zero_variance(sample.group.rewards)]
        return samples
