"""The parts of one run in this process: servers, and the clients, generators and scorers that use them, by keyword."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from replay_client import AsyncReplayClient
from replay_client.records import ServerInfo
from replay_client.testing import PATIENCE, async_until
from replay_generator import GroupScorer, ScorerConfig
from replay_generator.rollouts.rollout import single_turn
from replay_server import AdmissionConfig, TableConfig
from tests.kit.generators import make_generator
from tests.kit.servers import Servers

FIFO = TableConfig(name="rollouts", sampler="fifo")
GENERATOR = {"group_size": 3, "max_concurrent_groups": 4, "stop_grace": 0.5, "permit_timeout": 5.0}
"""The settings of generators, unless a test has others."""


@dataclass(frozen=True)
class Counts:
    """The permits of a run, as its servers count them."""

    accepted: int = 0
    running: int = 0
    partial_groups: int = 0
    expired: int = 0


class Worker:
    """A generator or a scorer at work, until `stop`."""

    def __init__(self, worker: Any, client: AsyncReplayClient) -> None:
        self.worker = worker
        self.client = client
        self.task = asyncio.create_task(worker.run())

    @property
    def stats(self) -> Mapping[str, Any]:
        return self.worker.stats  # type: ignore[no-any-return]

    async def counted(self, name: str, count: int = 1) -> None:
        """Waits until the worker has counted this many."""
        await async_until(lambda: self.stats[name] >= count)

    async def stop(self) -> None:
        """Stops the worker. Its task has ended then, and keeps the error that may have ended it."""
        self.worker.stop()
        await asyncio.gather(self.task, return_exceptions=True)
        await self.client.close()


class Stack(Servers):
    """A run. Its workers end with the block, and its servers after them."""

    def __init__(
        self,
        *,
        tables: Sequence[TableConfig] = (FIFO,),
        groups: int | None = None,
        permit_tables: Any = None,
        admission: Mapping[str, Any] | None = None,
        servers: int = 1,
        addresses: Sequence[str] = (),
        options: Mapping[str, Any] | None = None,
        generator: Mapping[str, Any] | None = None,
        timeout: float = 10.0,
    ) -> None:
        """`groups`: fresh groups per step; None: there is no [admission]. `admission`: more of its settings.

        `addresses`: servers that the test starts itself, in the place of `servers` of this process. `options`: of each
        ReplayServer. `generator`: options of all calls of `generate`. A server that is killed comes back on its port.
        """
        settings = dict(options or {})
        if groups is not None:
            permits = {"max_staleness": 0, "permit_tables": permit_tables} | dict(admission or {})
            settings["admission"] = AdmissionConfig(table="rollouts", fresh_groups_per_step=groups, **permits)
        super().__init__(tables, count=0 if addresses else servers, **settings)
        self.addresses += addresses
        self.address = ",".join(self.addresses)
        self._generator = GENERATOR | dict(generator or {})
        self._timeout = timeout
        self._exits = AsyncExitStack()

    async def __aenter__(self) -> Self:
        self._exits.callback(self.close)
        self.client = await self.connect()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._exits.aclose()

    async def connect(self, address: str = "", timeout: float | None = None) -> AsyncReplayClient:
        """Another client, of all servers or of the one at this address, until the end of the block."""
        client = AsyncReplayClient(address or self.address, self._timeout if timeout is None else timeout)
        return await self._exits.enter_async_context(client)

    async def generate(self, rollout: Any = single_turn, *, timeout: float | None = None, **options: Any) -> Worker:
        """Starts a generator. `options`: of `make_generator`; they count before those of the stack."""
        client = await self.connect(timeout=timeout)
        return self._started(make_generator(client, rollout=rollout, **self._generator | options), client)

    async def score(self, reward: Any, *, group_filter: Any = None, **config: Any) -> Worker:
        """Starts a scorer of the table "unscored". `config`: fields of ScorerConfig."""
        client = await self.connect()
        scorer = GroupScorer(client, reward, ScorerConfig("unscored", **config), group_filter=group_filter)
        return self._started(scorer, client)

    def _started(self, worker: Any, client: AsyncReplayClient) -> Worker:
        started = Worker(worker, client)
        self._exits.push_async_callback(started.stop)
        return started

    async def at(self, version: int, weights: Path | str = "") -> None:
        """Publishes a version of the policy."""
        await self.client.set_policy_version(version, weights=str(weights))

    async def info(self) -> ServerInfo:
        return await self.client.server_info()

    async def counts(self) -> Counts:
        """Needs servers with [admission]."""
        admission: Any = (await self.info()).admission
        return Counts(admission.accepted, admission.running, admission.partial_groups, admission.expired)

    async def holds(self, table: str = "rollouts") -> int:
        """How many items a table has."""
        return (await self.info()).tables[table].size

    async def inserted(self, count: int = 1) -> None:
        """Waits until so many groups are in the table "rollouts"."""
        async with asyncio.timeout(PATIENCE):
            while await self.holds() < count:
                await asyncio.sleep(0.01)

    async def permit_is_awaited(self) -> None:
        """Waits until a generator waits for a permit."""
        async with asyncio.timeout(PATIENCE):
            while not (await self.info()).admission.acquiring.count:  # type: ignore[union-attr]
                await asyncio.sleep(0.01)
