"""GeneratorServer: the server as a generator sees it. Whatever passes by itself is waited for and logged."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal, TypeVar

from replay_client import AsyncReplayClient, KeySequence, PermitLease, RolloutGroup, ServerInfo
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
from replay_client.waits import LAST_WORD, Patience, WaitLog, stop_signals
from replay_generator import user_code
from replay_generator.building import BuildingSite, LeaseLostError, Site, UnderConstruction
from replay_generator.config import GeneratorConfig
from replay_generator.metrics import GeneratorStats
from replay_generator.openings import encode_whole
from replay_generator.policy_follower import PolicyFollower
from replay_generator.prompts import GroupRefusedError, PromptError
from replay_generator.rewards import load_priority
from replay_generator.scoring.config import StageConfig
from replay_generator.scoring.groups import HandOn, LeftOut
from replay_generator.scoring.watch import RewardWatch
from replay_generator.weights import told_facts

logger = logging.getLogger(__name__)

T = TypeVar("T")
SECONDS_PER_LOOK = 5.0
"""Between two looks whether the server is there."""


class InsertingServer:
    """The server as one sees it that inserts groups.

    A server that is away, shuts down, is busy, or whose storage fails is waited for. Only a server that does not come
    back within the client's own timeout ends the run, with ServerUnavailableError.
    """

    def __init__(
        self, client: AsyncReplayClient, config: GeneratorConfig | StageConfig, stats: GeneratorStats, who: str
    ) -> None:
        """`who` waits, in the log."""
        self._client = client
        self._settings, self._priority = config, load_priority(config.priority)
        self._stats = stats
        self._who = who
        self._keys = KeySequence()  # of what has no key yet
        self._seen: ServerInfo | None = None
        self._is_known = False
        """Whether the server knows the settings of this process."""
        self.reward_watch: RewardWatch | None = None
        """What it tells of rewards is told the server too."""
        self._told_version = 0
        self._tells_prompts = False
        """Whether a table that groups come to indexes the tag `prompt_id`."""
        self._waiting, self._table_full = WaitLog(who), WaitLog(who)

    async def look(self, *stages: str | None) -> ServerInfo:
        """Asks the server what it is. Raises ReplayError if it lacks one of these tables, or does not count the permits
        of their groups."""
        info: ServerInfo = await self.answer(self._client.server_info)
        self._tells_prompts = _index_prompts(info, self._settings.tables)
        admission = info.admission
        for table in filter(None, stages):
            if table not in info.tables:
                raise ReplayError(
                    f"the server has no table {table!r}, only {', '.join(info.tables)}: declare it or, for groups that "
                    f"are not finished, add it to building in its [admission]"
                )
            if admission and admission.table in self._settings.tables and table not in admission.building_tables:
                raise ReplayError(
                    f"the server's [admission] has building = {[*admission.building_tables]}, without {table!r}: "
                    f"nobody counts the permits of its groups"
                )
        return info

    async def watch(self) -> None:
        """Says that the server is away, that it answers again, and whether it is a new one. Never returns.

        The client repeats calls by itself for as long as its timeout, so their errors would say so much later.
        """
        away = WaitLog(self._who)
        while True:
            await asyncio.sleep(SECONDS_PER_LOOK)
            try:
                info = await self._client.server_info(timeout=SECONDS_PER_LOOK)
            except ReplayError as error:
                away.wait(f"the server does not answer, and {self._who} tries again: {error}")
                continue
            away.go_on()
            await self.see(info)

    async def see(self, info: ServerInfo) -> None:
        """Says so if a server that answers now is another process than before: it may be empty.

        A server that does not know the settings of this process is told of them.
        """
        if self._seen is not None and restarted(self._seen, info):
            self._is_known = False
            logger.warning("the server was restarted: it holds %d items, version %d", info.items, info.policy.version)
        self._seen = info
        watch = self.reward_watch
        version = 0 if watch is None else watch.version
        if not self._is_known or version != self._told_version:
            said = await self._described()
            if watch is not None:
                said |= watch.told
            with contextlib.suppress(ReplayError):
                await self._client.describe(said, timeout=SECONDS_PER_LOOK)
                self._is_known = True
                self._told_version = version

    async def _described(self) -> dict[str, str]:
        return self._settings.described()

    def hand_on(self, group: RolloutGroup, tags: Mapping[str, str | int], key: int | None = None) -> HandOn:
        """A scored group with its priority, for its tables. Raises PromptError if it gets none."""
        try:
            priority = self._priority(group)
        except Exception as error:
            raise PromptError(f"prompt {group.prompt_id!r}: no priority: {type(error).__name__}: {error}") from error
        if self._tells_prompts:
            tags = {"prompt_id": group.prompt_id, **tags}
        return HandOn(group, dict.fromkeys(self._settings.tables, priority), tags, key)

    async def insert_into(self, name: str, handed: HandOn, **options: Any) -> None:
        """Returns when a group is in its tables. `name`: of what it is made from. `options`: of the client's insert.

        Raises LeftOut if the group will not get there: it is too old, or its table is full and `when_full` is "drop".
        Raises PromptError if it is too large for the server, GroupRefusedError if its names or numbers are none that
        the server takes, and LeaseEndedError if the lease of what it closes has ended.
        """
        # One key at each attempt: if the answer to one was lost, the item is not inserted twice.
        key = next(self._keys) if handed.key is None else handed.key
        options |= {"key": key, "timeout": self._settings.insert_timeout}
        if handed.tags is not None:
            options["tags"] = handed.tags
        try:
            await self.answer(self._client.insert, handed.group, handed.tables, counts_as="insert_waits", **options)
            self._table_full.go_on()
        except StaleItemError as error:
            raise LeftOut("stale_refused") from error
        except PayloadTooLargeError as error:
            raise PromptError(f"{name}: its group cannot be inserted: {error}") from error
        except ValueError as error:  # also InvalidRequestError
            self._stats["groups_refused"] += 1
            raise GroupRefusedError(f"{name}: its group is refused: {error}") from error

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
                    self._waiting.wait(f"the server is away, and {self._who} tries again: {error}")
                    # This waits for a server that is gone, and ends the run after the client's own timeout. A server
                    # that is on its way down, or answers but refuses, is tried again.
                    with contextlib.suppress(ServerClosedError, ServerBusyError):
                        await self._client.policy()
                case ServerBusyError() | StorageError():
                    self._stats["server_refused"] += 1
                    self._waiting.wait(f"the server refuses for now, and {self._who} tries again: {error}")
                case TableFullError():
                    self._stats["full_refused"] += 1
                    if self._settings.when_full == "drop":
                        self._table_full.wait(f"a full table refuses groups, which are dropped (when_full): {error}")
                        raise LeftOut(None) from error
                    self._table_full.wait(f"a full table refuses groups, which are tried again: {error}")
                case _:
                    raise error

        result = await Patience(failed).result(partial(call, *args, **options))
        self._waiting.go_on()
        return result


class GeneratorServer(InsertingServer):
    """Acquires permits and inserts groups."""

    def __init__(
        self, client: AsyncReplayClient, config: GeneratorConfig, stats: GeneratorStats, policy: PolicyFollower
    ) -> None:
        """`policy` is told the `max_staleness` of the tables, now and whenever somebody changes it."""
        super().__init__(client, config, stats, "the generator")
        self._policy = policy
        self._config = config
        self._leases: set[PermitLease] = set()
        self.site = Site() if config.building is None else BuildingSite(client, config, stats, self.answer)

    async def begin(self) -> bool:
        """Asks the server what it is. Returns whether groups for the configured tables need permits.

        They do if one of the tables is that of [admission]. Raises ReplayError if the server has no table for groups
        under construction, and this generator needs one.
        """
        info = await self.look(self._config.building, self._config.unscored)
        await self.see(info)
        return info.admission is not None and info.admission.table in self._config.tables

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

        Without rewards it is in the table `unscored`, with its permit. Errors: those of `insert_into`, and
        LeaseLostError if another generator may have the item by now. An ended lease of its prompt raises LeftOut.
        """
        opening, unscored = work.opening, self._config.unscored
        tags = {**self._config.tags, **opening.prompt.tags}
        closes = work.drawn.closes if work.sample is None else (work.sample,)
        options: dict[str, Any] = {"permits": work.permit, "closes": closes}
        try:
            if unscored is None:
                handed = self.hand_on(group, tags, opening.key)
            else:
                whole = encode_whole(replace(opening, failures=group.meta.get("failures", [])), work.rollouts)
                handed, options["policy_version"] = HandOn(whole, {unscored: 1.0}, tags), group.policy_version
            await self.insert_into(f"prompt {group.prompt_id!r}", handed, **options)
        except LeaseEndedError as error:
            if work.sample is not None:
                raise LeaseLostError from error
            raise LeftOut("prompts_lost") from error
        if work.permit is not None:
            self.used(work.permit)
        self.site.closed(work)
        work.settle()

    async def refused_as_old(self, error: BaseException | None) -> None:
        """The server has refused a group as too old. Looks at once whether all others would be."""
        which = f"the {self._stats['stale_refused']}th"
        self._waiting.wait(
            f"a group is too old on arrival, {which}, and is left out: {error}; {self._policy.why_old()}"
        )
        await self.see(await self.answer(self._client.server_info))

    async def see(self, info: ServerInfo) -> None:
        """Also tells the policy of the versions there, and of their bounds."""
        await self._policy.see(info.policy)
        # A group goes to all of its tables or to none.
        names = (self._config.building, self._config.unscored, *self._config.tables)
        bounds = [json.loads(info.tables[name].config)["max_staleness"] for name in names if name in info.tables]
        await self._policy.bound(min((bound for bound in bounds if bound is not None), default=None))
        await super().see(info)

    async def _described(self) -> dict[str, str]:
        return self._config.described() | {"model": told_facts(await self._policy.facts())}


def run_worker(
    connect: Callable[[], AsyncReplayClient],
    make: Callable[[AsyncReplayClient], Any],
    on_stop: Callable[[], None] | None = None,
) -> GeneratorStats:
    """Runs what `make` returns to its end, or until Ctrl-C or SIGTERM. Returns the last statistics.

    `on_stop` is called at these signals.
    """

    async def main() -> GeneratorStats:
        async with connect() as client:
            worker = make(client)

            def stop() -> None:
                if on_stop is not None:
                    on_stop()
                worker.stop()

            with contextlib.suppress(NotImplementedError, RuntimeError, ValueError):  # not in the main thread
                for number in stop_signals():
                    asyncio.get_running_loop().add_signal_handler(number, stop)
            await worker.run()
            stats: GeneratorStats = worker.stats
            return stats

    return user_code.run(main())


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
