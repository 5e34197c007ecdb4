"""GeneratorServer: the server, as seen by a generator: permits, partial groups, and inserts of groups."""

from __future__ import annotations

import asyncio
import contextlib
import json
from dataclasses import replace
from typing import Any

from replay_client import AsyncReplayClient, PermitGrant, RolloutGroup, ServerInfo
from replay_client.errors import LeaseEndedError, ReplayError
from replay_client.waits import LAST_WORD
from replay_generator.config import GeneratorConfig
from replay_generator.engines.weights import told_facts
from replay_generator.groups.codec import encode_whole
from replay_generator.groups.inserting import Handoff, InsertingServer, LeftOut
from replay_generator.groups.partial_groups import LeaseLostError, PartialGroup, PartialGroups, StoredPartialGroups
from replay_generator.metrics import GeneratorStats
from replay_generator.policy.follower import PolicyFollower


class GeneratorServer(InsertingServer):
    """Acquires permits and inserts groups."""

    def __init__(
        self, client: AsyncReplayClient, config: GeneratorConfig, stats: GeneratorStats, policy: PolicyFollower
    ) -> None:
        """`policy`: gets the `max_staleness` of the tables from this object, at the beginning and after each change."""
        super().__init__(client, config, stats, "the generator")
        self._policy = policy
        self._config = config
        self._grants: set[PermitGrant] = set()
        """The permits that were neither used nor released yet."""
        self.partial_groups: PartialGroups
        if config.partial_groups_table is None:
            self.partial_groups = PartialGroups()
        else:
            self.partial_groups = StoredPartialGroups(client, config, stats, self.answer)

    async def begin(self) -> bool:
        """Checks the server as `look` does. Returns True if groups for the configured tables need permits.

        Groups need permits if one of the configured tables is the table of [admission]. Raises ReplayError as `look`
        does, for example if the server lacks the table of partial groups.
        """
        info = await self.look(self._config.partial_groups_table, self._config.unscored_table)
        await self.observe(info)
        return info.admission is not None and info.admission.table in self._config.tables

    async def acquire(self) -> PermitGrant:
        """Waits for one permit, and returns it."""
        timeout = self._config.permit_timeout
        grant = await self.answer(self._client.acquire_permits, 1, timeout=timeout, counts_as="permit_waits")
        self._grants.add(grant)
        return grant

    async def release(self, grant: PermitGrant) -> None:
        """Releases a permit, if the server can be reached soon."""
        self._grants.discard(grant)
        with contextlib.suppress(ReplayError, TimeoutError):
            async with asyncio.timeout(LAST_WORD):
                await self._client.release_permits(grant)

    def used(self, grant: PermitGrant) -> None:
        """Notes that an insert has used the permit up."""
        self._grants.discard(grant)

    async def release_all(self) -> None:
        """Requeues every partial group, and releases every permit that was not used."""
        await self.partial_groups.requeue_all()
        # The loop may go over `_grants`: `release` removes a grant from the set, but only once it is awaited.
        releases = [self.release(grant) for grant in self._grants]
        await asyncio.gather(*releases)

    async def leave(self) -> None:
        """Tells the server that this generator ends on purpose, if the server can be reached soon."""
        await self._client.leave(timeout=LAST_WORD)

    def tags_of(self, work: PartialGroup) -> dict[str, str | int]:
        """The tags of the group: the generator's tags and the prompt's tags. The prompt's tags win."""
        return {**self._config.tags, **work.spec.prompt.tags}

    async def insert(self, group: RolloutGroup, work: PartialGroup) -> None:
        """Inserts a group. The insert uses up the group's permit, and closes its prompt or its partial group.

        If the config has an `unscored_table`, the group is inserted into that table, to be scored elsewhere. Raises the
        errors of `insert_into`, LeaseLostError if another generator may have the partial group by now, and LeftOut if
        the lease of the prompt has ended.
        """
        spec = work.spec
        unscored_table = self._config.unscored_table
        tags = self.tags_of(work)
        if work.sample is None:
            closes = work.drawn.closes  # the prompt
        else:
            closes = (work.sample,)  # the partial group
        options: dict[str, Any] = {"permits": work.permit, "closes": closes}
        if unscored_table is None:
            handoff = self.hand_on(group, tags, spec.key)
        else:
            failures = group.meta.get("failures", [])
            payload = encode_whole(replace(spec, failures=failures), work.rollouts)
            handoff = Handoff(payload, {unscored_table: 1.0}, tags)
            options["policy_version"] = group.policy_version  # the client cannot read it from bytes
        try:
            await self.insert_into(f"prompt {group.prompt_id!r}", handoff, **options)
        except LeaseEndedError as error:
            if work.sample is not None:  # the ended lease was that of the partial group, and not that of the prompt
                raise LeaseLostError from error
            raise LeftOut("prompts_lost") from error
        if work.permit is not None:
            self.used(work.permit)
        self.partial_groups.closed(work)
        work.settle()

    async def refused_as_old(self, error: BaseException | None) -> None:
        """Logs that the server has refused a group as too old, and asks the server at once for its newest version.

        `PolicyFollower.hold` needs that version to delay the next groups until the engine has newer weights.
        """
        which = f"the {self._stats['groups_refused_stale']}th"
        self._waiting.wait(
            f"a group is too old on arrival, {which}, and is left out: {error}; {self._policy.why_old()}"
        )
        info = await self.answer(self._client.server_info)
        await self.observe(info)

    async def observe(self, info: ServerInfo) -> None:
        """Does the same as in `InsertingServer`. Before that, tells the PolicyFollower the server's newest version, and
        the smallest `max_staleness` of the tables."""
        await self._policy.observe(info.policy)
        # The smallest bound counts: the server inserts a group into all of its tables or into none.
        names = (self._config.partial_groups_table, self._config.unscored_table, *self._config.tables)
        bounds = []
        for name in names:
            if name not in info.tables:  # a setting is None, or the server lacks the table
                continue
            table_config = json.loads(info.tables[name].config)
            if table_config["max_staleness"] is not None:
                bounds.append(table_config["max_staleness"])
        await self._policy.bound(min(bounds, default=None))
        await super().observe(info)

    async def _described(self) -> dict[str, str]:
        """The settings of the generator, and the facts of its engine's model."""
        settings = self._config.described()
        facts = await self._policy.facts()
        return settings | {"model": told_facts(facts)}
