"""GeneratorServer: the server as a generator sees it. Whatever passes by itself is waited for and logged."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, Literal, TypeVar

from replay_client import AsyncReplayClient, PermitLease, RolloutGroup, ServerInfo
from replay_client.errors import (
    DeadlineExceededError,
    LeaseEndedError,
    PayloadTooLargeError,
    ReplayError,
    ServerBusyError,
    ServerClosedError,
    ServerUnavailableError,
    StaleItemError,
    StorageError,
    TableFullError,
)
from replay_client.records import restarted
from replay_client.waits import LAST_WORD, Patience, WaitLog
from replay_generator.building import BuildingSite, LeaseLostError, Site, UnderConstruction
from replay_generator.config import GeneratorConfig
from replay_generator.group_maker import LeftOut
from replay_generator.metrics import GeneratorStats
from replay_generator.policy_follower import PolicyFollower
from replay_generator.prompts import PromptError
from replay_generator.rewards import load_priority

logger = logging.getLogger(__name__)

T = TypeVar("T")
SECONDS_PER_LOOK = 5.0
"""Between two looks whether the server is there."""


class GeneratorServer:
    """Acquires permits and inserts groups.

    A server that is away, shuts down, is busy, or whose storage fails is waited for. Only a server that does not come
    back within the client's own timeout ends the run, with ServerUnavailableError.
    """

    def __init__(
        self, client: AsyncReplayClient, config: GeneratorConfig, stats: GeneratorStats, policy: PolicyFollower
    ) -> None:
        """`policy` is told the `max_staleness` of the tables, now and whenever somebody changes it."""
        self._client = client
        self._policy = policy
        self._config = config
        self._stats = stats
        self._priority = load_priority(config.priority)
        self._seen: ServerInfo | None = None
        self._is_known = False
        """Whether the server knows the settings of this generator."""
        self._tells_prompts = False
        """Whether a table that groups come to indexes the tag `prompt_id`."""
        self._leases: set[PermitLease] = set()
        self._waiting = WaitLog()
        self._table_full = WaitLog()
        self.site = Site() if config.building is None else BuildingSite(client, config, stats, self.answer)

    async def begin(self) -> bool:
        """Asks the server what it is. Returns whether groups for the configured tables need permits.

        They do if one of the tables is that of [admission]. Raises ReplayError if the server has no table for groups
        under construction, and this generator needs one.
        """
        info = await self.answer(self._client.server_info)
        await self._see(info)
        self._tells_prompts = _index_prompts(info, self._config.tables)
        needs_permits = (admission := info.admission) is not None and admission.table in self._config.tables
        self.site.check(info, needs_permits)
        return needs_permits

    async def acquire(self) -> PermitLease:
        """One permit, as soon as there is one."""
        timeout = self._config.permit_timeout
        lease = await self.answer(self._client.acquire_permits, 1, timeout=timeout, counts_as="permit_waits")
        self._leases.add(lease)
        return lease

    async def release(self, lease: PermitLease) -> None:
        """Gives a permit back, if the server can be reached soon."""
        self._leases.discard(lease)
        with contextlib.suppress(ReplayError, TimeoutError):
            async with asyncio.timeout(LAST_WORD):
                await self._client.release_permits(lease)

    def used(self, lease: PermitLease) -> None:
        """An insert has used the permit up."""
        self._leases.discard(lease)

    async def release_all(self) -> None:
        """Gives back every permit, and every group under construction, that was neither used nor given back."""
        await self.site.let_go_of_all()
        await asyncio.gather(*map(self.release, [*self._leases]))

    async def leave(self) -> None:
        """Says that this generator ends on purpose, if the server can be reached soon."""
        await self._client.leave(timeout=LAST_WORD)

    async def insert(self, group: RolloutGroup, work: UnderConstruction) -> None:
        """Returns when the group is in its tables, and its permit, its prompt and its item under construction are gone.

        Raises LeaseLostError if another generator may have the item by now.
        Raises LeftOut if the group will not get there: it is too old, its table is full and `when_full` is "drop", or
        the lease of its prompt has ended.
        Raises PromptError if the group is too large for the server, or its priority function fails.
        """
        try:
            priority = self._priority(group)
        except Exception as error:
            raise PromptError(f"prompt {group.prompt_id!r}: no priority: {type(error).__name__}: {error}") from error
        priorities = dict.fromkeys(self._config.tables, priority)
        tags = {**self._config.tags, **work.opening.prompt.tags}
        if self._tells_prompts:
            tags.setdefault("prompt_id", group.prompt_id)
        try:
            await self.answer(
                self._client.insert,
                group,
                priorities,
                # One key for all attempts: if the answer to an earlier one was lost, the item is not inserted twice.
                key=work.opening.key,
                permits=work.permit,
                timeout=self._config.insert_timeout,
                tags=tags,
                closes=work.drawn.closes if work.sample is None else (work.sample,),
                counts_as="insert_waits",
            )
            self._table_full.go_on()
        except StaleItemError as error:
            raise LeftOut("stale_refused") from error
        except LeaseEndedError as error:
            if work.sample is not None:
                raise LeaseLostError from error
            raise LeftOut("prompts_lost") from error
        except PayloadTooLargeError as error:
            raise PromptError(f"prompt {group.prompt_id!r}: its group cannot be inserted: {error}") from error
        if work.permit is not None:
            self.used(work.permit)
        self.site.closed(work)

    async def refused_as_old(self, error: BaseException | None) -> None:
        """The server has refused a group as too old. Looks at once whether all others would be."""
        which = f"the {self._stats['stale_refused']}th"
        self._waiting.wait(
            f"a group is too old on arrival, {which}, and is left out: {error}; {self._policy.why_old()}"
        )
        await self._see(await self.answer(self._client.server_info))

    async def answer(
        self,
        call: Callable[..., Awaitable[T]],
        *args: Any,
        counts_as: Literal["insert_waits", "permit_waits"] | None = None,
        **options: Any,
    ) -> T:
        """The result of a call, made again while the server cannot do it. `counts_as` counts deadlines."""

        async def failed(error: Exception, _: bool) -> None:
            match error:
                case DeadlineExceededError() if counts_as is not None:
                    self._stats[counts_as] += 1
                    what = "a permit" if counts_as == "permit_waits" else "room in its table"
                    self._waiting.wait(f"a group waits for {what}: {error}")
                case ServerUnavailableError() | ServerClosedError():
                    self._waiting.wait(f"the server is away, and the generator tries again: {error}")
                    # This waits for a server that is gone, and ends the run after the client's own timeout. A server
                    # that is on its way down, or answers but refuses, is tried again.
                    with contextlib.suppress(ServerClosedError, ServerBusyError):
                        await self._client.policy()
                case ServerBusyError() | StorageError():
                    self._stats["server_refused"] += 1
                    self._waiting.wait(f"the server refuses for now, and the generator tries again: {error}")
                case TableFullError():
                    self._stats["full_refused"] += 1
                    if self._config.when_full == "drop":
                        self._table_full.wait(f"a full table refuses groups, which are dropped (when_full): {error}")
                        raise LeftOut(None) from error
                    self._table_full.wait(f"a full table refuses groups, which are tried again: {error}")
                case _:
                    raise error

        result = await Patience(failed).result(partial(call, *args, **options))
        self._waiting.go_on()
        return result

    async def watch(self) -> None:
        """Says that the server is away, that it answers again, and whether it is a new one. Never returns.

        The client repeats calls by itself for as long as its timeout, so their errors would say so much later.
        """
        away = WaitLog()
        while True:
            await asyncio.sleep(SECONDS_PER_LOOK)
            try:
                info = await self._client.server_info(timeout=SECONDS_PER_LOOK)
            except ReplayError as error:
                away.wait(f"the server does not answer, and the generator tries again: {error}")
                continue
            away.go_on()
            await self._see(info)

    async def _see(self, info: ServerInfo) -> None:
        """Says so if a server that answers now is another process than before: it may be empty.

        A server that does not know the settings of this generator is told of them.
        """
        if self._seen is not None and restarted(self._seen, info):
            self._is_known = False
            logger.warning("the server was restarted: it holds %d items, version %d", info.items, info.policy.version)
        self._seen = info
        await self._policy.see(info.policy)
        # A group goes to all of its tables or to none.
        tables = [info.tables[name] for name in (self._config.building, *self._config.tables) if name in info.tables]
        bounds = [json.loads(table.config)["max_staleness"] for table in tables]
        await self._policy.bound(min((bound for bound in bounds if bound is not None), default=None))
        if not self._is_known:
            with contextlib.suppress(ReplayError):
                said = self._config.described() | {"model": json.dumps(await self._policy.facts())}
                await self._client.describe(said, timeout=SECONDS_PER_LOOK)
                self._is_known = True


def _index_prompts(info: ServerInfo, tables: Sequence[str]) -> bool:
    """Whether one of these tables, or one that they forward to, indexes the tag `prompt_id`."""
    names = list(tables)
    for name in names:
        if (table := info.tables.get(name)) is None:
            continue
        config = json.loads(table.config)
        if "prompt_id" in config["index"] or (config["balance"] or {}).get("tag") == "prompt_id":
            return True
        if (target := config["forward_to"]) is not None and target not in names:
            names.append(target)
    return False
