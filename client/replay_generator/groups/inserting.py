"""InsertingServer: the server, as seen by a process that inserts groups. Waits out temporary failures, and logs them.

Generators (`server.py`) and stages (`stages/`) are built on this class.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from replay_client import AsyncReplayClient, KeySequence, RolloutGroup, ServerInfo
from replay_client.advantages import why_scaled_again
from replay_client.columns import Buffer
from replay_client.errors import (
    DeadlineExceededError,
    InvalidRequestError,
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
from replay_client.waits import Patience, WaitLog, stop_signals
from replay_generator.errors import GroupRefusedError, PromptError
from replay_generator.metrics import GeneratorStats
from replay_generator.notices import Watch, say_once
from replay_generator.priorities import Priority, load_priority
from replay_generator.user_code import calls as user_code
from replay_protos.words import counted

logger = logging.getLogger(__name__)

T = TypeVar("T")
SECONDS_PER_LOOK = 5.0
"""Seconds between two checks that the server is there, and also the time limit of each check."""


class InsertSettings(Protocol):
    """The settings for inserts, which GeneratorConfig and StageConfig share."""

    @property
    def tables(self) -> Sequence[str]: ...

    @property
    def priority(self) -> str | Priority: ...

    @property
    def insert_timeout(self) -> float: ...

    @property
    def on_full(self) -> Literal["wait", "skip"]: ...

    def described(self) -> dict[str, str]: ...


@dataclass(frozen=True)
class Handoff:
    """A finished group, with the tables into which it is inserted.

    The item of the finished group replaces the item from which the group was made.
    """

    group: RolloutGroup | Buffer
    tables: Mapping[str, float]
    """The priorities of the new item, by table."""
    tags: Mapping[str, str | int] | None = None
    """The tags of the new item; None: the tags of the replaced item."""
    key: int | None = None
    """The key of the new item; None: the insert chooses a new key."""


class LeftOut(Exception):
    """The group is not inserted. Its permit is released."""

    def __init__(
        self,
        counts_as: Literal[
            "groups_skipped", "groups_filtered", "groups_refused_stale", "prompts_lost", "items_rejected"
        ]
        | None,
        rewards: npt.NDArray[np.float32] | None = None,
    ) -> None:
        """`counts_as`: the field of GeneratorStats that counts the group; None: the group is counted already.

        `rewards` (G,): the rewards of a group that the group filter has left out; None: the group was left out for
        another reason.
        """
        self.counts_as = counts_as
        self.rewards = rewards


class InsertingServer:
    """The server, as seen by a process that inserts groups.

    Calls wait while the server is away, shuts down or is busy, or while its storage fails. The run ends with
    ServerUnavailableError only if the server does not come back within the client's own timeout.
    """

    def __init__(self, client: AsyncReplayClient, config: InsertSettings, stats: GeneratorStats, who: str) -> None:
        """`who`: the name of this process in the log."""
        self._client = client
        self._settings = config
        self._priority = load_priority(config.priority)
        self._stats = stats
        self._who = who
        self._keys = KeySequence()  # for groups that have no key yet
        self._last_info: ServerInfo | None = None
        """The state of the server that `observe` got last, to notice a restart; None: `observe` was not called yet."""
        self._settings_are_known = False
        """True while the server knows the settings of this process."""
        self.watches: Sequence[Watch] = ()
        """The watches whose descriptions are sent to the server, with the settings."""
        self._last_report: dict[str, str] = {}
        """The descriptions of the watches that were last sent to the server."""
        self._needs_prompt_tag = False
        """True if a table of these groups needs the tag `prompt_id`; see `_tables_need_prompt_tag`."""
        self._waiting = WaitLog(who)
        """Logs the waits of calls that are repeated, except the waits for a full table that refuses groups."""
        self._table_full = WaitLog(who)
        """Logs the waits for a full table that refuses groups (`when_full`)."""

    async def look(self, *stages: str | None) -> ServerInfo:
        """Asks the server for its tables and settings, and checks that they suit this process.

        `stages`: tables through which the groups of this process go before they are finished; None: no table. Raises
        ReplayError if the server lacks one of these tables, or does not count the permits of their groups. Also raises
        ReplayError if a connected trainer would change the advantages of this process.
        """
        info: ServerInfo = await self.answer(self._client.server_info)
        self._check_trainers(info)
        self._needs_prompt_tag = _tables_need_prompt_tag(info, self._settings.tables)
        admission = info.admission
        for table in stages:
            if not table:
                continue
            if table not in info.tables:
                raise ReplayError(
                    f"the server has no table {table!r}, only {', '.join(info.tables)}: declare it or, for groups that "
                    f"are not finished, add it to permit_tables in its [admission]"
                )
            # Groups for `admission.table` need permits. A group keeps its permit while it is in one of `stages`.
            if admission and admission.table in self._settings.tables and table not in admission.permit_tables:
                raise ReplayError(
                    f"the server's [admission] has permit_tables = {[*admission.permit_tables]}, without {table!r}: "
                    f"nobody counts the permits of its groups"
                )
        return info

    def _check_trainers(self, info: ServerInfo) -> None:
        """Raises ReplayError if a connected trainer would scale the advantages of a user's own function again."""
        own_settings = self._settings.described()
        function_name = json.loads(own_settings.get("advantages", '""'))  # "": the user has given no function
        for name, settings in info.settings_of("trainer"):  # of each connected trainer
            why = why_scaled_again(settings.get("scale_rewards"), function_name)
            if why:
                raise ReplayError(f"trainer {name}: {why}")

    async def watch(self) -> None:
        """Logs that the server is away, that it answers again, and that it was restarted. Never returns.

        Other calls would report an absence much later, because the client repeats them until its timeout, which is
        longer than SECONDS_PER_LOOK.
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
            await self.observe(info)

    async def observe(self, info: ServerInfo) -> None:
        """Logs if the server was restarted since the last call. A restarted server may be empty.

        Also sends the settings of this process if the server does not know them, and the descriptions of the watches if
        they have changed. `info`: the state of the server now.
        """
        if self._last_info is not None and restarted(self._last_info, info):
            self._settings_are_known = False
            items = counted(info.items, "item")
            logger.warning("the server was restarted: it holds %s, version %d", items, info.policy.version)
        self._last_info = info
        report: dict[str, str] = {}
        for watch in self.watches:
            report |= watch.description
        if self._settings_are_known and report == self._last_report:
            return
        settings = await self._described()
        with contextlib.suppress(ReplayError):  # after such an error, the next call of `observe` tries again
            accepted = await self._send_description(settings | report)
            if not accepted:  # the server may refuse only the report, and accept the settings alone
                accepted = await self._send_description(settings)
            if accepted:
                self._settings_are_known = True
                self._last_report = report

    async def _send_description(self, settings: Mapping[str, str]) -> bool:
        """Sends a description of this process. If the server refuses it, logs the reason once, and returns False."""
        try:
            await self._client.describe(settings, timeout=SECONDS_PER_LOOK)
        except InvalidRequestError as error:
            say_once(f"the server refuses what {self._who} says of itself: {error}", "refused description")
            return False
        return True

    async def _described(self) -> dict[str, str]:
        return self._settings.described()

    def hand_on(self, group: RolloutGroup, tags: Mapping[str, str | int], key: int | None = None) -> Handoff:
        """Makes the Handoff of a scored group to the configured tables, with its priority. Inserts nothing yet.

        `key`: the key of the new item; None: the insert chooses one. Raises PromptError if the priority function fails.
        """
        try:
            priority = self._priority(group)
        except Exception as error:
            raise PromptError(f"prompt {group.prompt_id!r}: no priority: {type(error).__name__}: {error}") from error
        if self._needs_prompt_tag:
            tags = {"prompt_id": group.prompt_id, **tags}
        priorities = dict.fromkeys(self._settings.tables, priority)
        return Handoff(group, priorities, tags, key)

    async def insert_into(self, name: str, handoff: Handoff, **options: Any) -> None:
        """Inserts a group into its tables, and returns when it is there.

        `name`: the prompt or item from which the group was made, for errors. `options`: further arguments of the
        client's `insert`. Raises LeftOut if the group is too old, or if its table is full and `on_full` is "skip".
        Raises PromptError if the group is too large for the server, GroupRefusedError if the server does not accept its
        names or numbers, and LeaseEndedError if the lease of an item that the insert closes has ended.
        """
        # All attempts have the same key, so the item is not inserted twice if an answer was lost.
        key = next(self._keys) if handoff.key is None else handoff.key
        options |= {"key": key, "timeout": self._settings.insert_timeout}
        if handoff.tags is not None:
            options["tags"] = handoff.tags
        try:
            await self.answer(self._client.insert, handoff.group, handoff.tables, counts_as="insert_waits", **options)
            self._table_full.go_on()
        except StaleItemError as error:
            raise LeftOut("groups_refused_stale") from error
        except PayloadTooLargeError as error:
            raise PromptError(f"{name}: its group cannot be inserted: {error}") from error
        except ValueError as error:  # this catches InvalidRequestError too
            self._stats["groups_refused"] += 1
            raise GroupRefusedError(f"{name}: its group is refused: {error}") from error

    async def answer(
        self,
        call: Callable[..., Awaitable[T]],
        *args: Any,
        counts_as: Literal["insert_waits", "permit_waits"] | None = None,
        **options: Any,
    ) -> T:
        """Makes a call, and repeats it while the server cannot execute it. Returns the result.

        With `counts_as`, the call is also repeated after it has exceeded its deadline. `counts_as` is the field of
        GeneratorStats that counts how often this happens. None: an exceeded deadline is an error.
        """

        # Patience calls this function after each failed attempt. If the function returns, Patience pauses and tries
        # again. The second argument is always False: it would be True at the end of a timeout, and none is set here.
        async def judge(error: Exception, _: bool) -> None:
            await self._before_retry(error, counts_as)

        attempt = partial(call, *args, **options)
        result = await Patience(judge).result(attempt)
        self._waiting.go_on()  # logs the end of a wait, if there was one
        return result

    async def _before_retry(self, error: Exception, counts_as: Literal["insert_waits", "permit_waits"] | None) -> None:
        """Counts and logs a failure after which a call is repeated. Raises the error if a repetition would not help.

        If a full table refuses an insert and `on_full` is "skip", raises LeftOut.
        """
        match error:
            case DeadlineExceededError() if counts_as is not None:
                self._stats[counts_as] += 1
                missing = "a permit" if counts_as == "permit_waits" else "room in its table"
                self._waiting.wait(f"a group waits for {missing}: {error}")
            case ServerUnavailableError() | ServerClosedError():
                self._waiting.wait(f"the server is away, and {self._who} tries again: {error}")
                # `policy` waits until the server is back. If that takes longer than the client's own timeout, it raises
                # ServerUnavailableError, which ends the run. The errors of a server that shuts down or is busy are
                # dropped here, because the failed call is then repeated.
                with contextlib.suppress(ServerClosedError, ServerBusyError):
                    await self._client.policy()
            case ServerBusyError() | StorageError():
                self._stats["server_refused"] += 1
                self._waiting.wait(f"the server refuses for now, and {self._who} tries again: {error}")
            case TableFullError():
                self._stats["groups_refused_full"] += 1
                if self._settings.on_full == "skip":
                    self._table_full.wait(f"a full table refuses groups, which are dropped (on_full): {error}")
                    raise LeftOut(None) from error
                self._table_full.wait(f"a full table refuses groups, which are tried again: {error}")
            case _:
                raise error


def run_worker(
    connect: Callable[[], AsyncReplayClient],
    make: Callable[[AsyncReplayClient], Any],
    on_stop: Callable[[], None] | None = None,
) -> GeneratorStats:
    """Runs the worker that `make` returns. The run ends by itself, or at a signal such as Ctrl-C (`stop_signals`).

    Returns the last statistics. `make` gets the client that `connect` returns. A worker has `run`, `stop` and `stats`:
    it is a RolloutGenerator or a Stage. `on_stop` is called at each of these signals.
    """

    async def main() -> GeneratorStats:
        """Makes the client and the worker on the event loop, and runs the worker."""
        async with connect() as client:
            worker = make(client)

            def stop() -> None:  # the event loop calls it at each signal
                if on_stop is not None:
                    on_stop()
                worker.stop()

            # Outside of the main thread, no handler can be added. The caller then stops the worker itself.
            with contextlib.suppress(NotImplementedError, RuntimeError, ValueError):
                for number in stop_signals():
                    asyncio.get_running_loop().add_signal_handler(number, stop)
            await worker.run()
            stats: GeneratorStats = worker.stats
            return stats

    return user_code.run(main())  # like `asyncio.run`, but a SystemExit of a user's callback becomes UserCodeError


def _tables_need_prompt_tag(info: ServerInfo, tables: Sequence[str]) -> bool:
    """True if one of these tables, or a table to which they forward items, needs the tag `prompt_id`.

    A table needs the tag if it indexes the tag, or balances its draws by the tag.
    """
    names = list(tables)
    for name in names:  # the loop also visits the names that it appends
        table = info.tables.get(name)
        if table is None:
            continue
        config = json.loads(table.config)
        if "prompt_id" in config["index"]:
            return True
        balance = config["balance"]
        if balance and balance.get("tag") == "prompt_id":
            return True
        target = config["forward_to"]
        if target is not None and target not in names:
            names.append(target)
    return False
