"""Prompts of a table: all generators draw from it under leases, and the insert of a group closes its prompt.

One request inserts a group and closes its prompt (`closes`). So a kill leaves either the prompt or the group, and never
both or neither. A generator that dies loses its leases. Its prompts return to their places, and other generators draw
them.

`EpochPrompts` makes a group of each prompt once an epoch, in an order that depends on a seed. The table is a queue,
which need not hold a whole epoch. Behind the loaded prompts lies a PromptCursor, which has the position of the next
prompt. The generator that draws the cursor loads the next WINDOW prompts. It then inserts the next cursor, and the same
request closes the cursor that it has drawn:

    p1 p2 p3 cursor(3)  ──▶  cursor(3) drawn  ──▶  p4 p5 p6 cursor(6)

So only the generator that has the lease of the cursor loads prompts. If it is killed, this depends on its last step:

    the cursor is drawn             its lease ends, and another generator loads the prompts
    some prompts are loaded         the same. Keys follow from run, epoch and position, so the server refuses duplicates
    the next cursor is inserted     nothing is left to do: the same request has closed the old cursor

The server must remember the keys of one window until the next cursor is inserted, and need not remember them after
that. So epochs may have any length. The table is empty, with no item drawn, only before the first cursor and after a
reset.

`CurriculumPrompts` draws by priority, and prompts stay in the table. It remembers only the priority of a prompt.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import secrets
from abc import abstractmethod
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

import numpy.typing as npt

from replay_client import AsyncReplayClient, Sample, ServerInfo
from replay_client.errors import DeadlineExceededError, LeaseEndedError, PayloadTooLargeError, ReplayError
from replay_client.scoring import group_learnability
from replay_client.waits import in_daemon_thread
from replay_generator.config import GeneratorConfig
from replay_generator.errors import PromptError
from replay_generator.metrics import GeneratorStats
from replay_generator.prompts.files import place_of
from replay_generator.prompts.prompt import (
    Prompt,
    PromptRows,
    PromptSource,
    epoch_order,
    prompt_at,
    prompt_rows,
    rows_in_turn,
)
from replay_generator.prompts.queue import Answer, DrawnPrompt, IteratedPrompts, LeasedItems, PromptItem, PromptQueue
from replay_generator.prompts.stored import (
    CURSOR_TAG,
    PromptCursor,
    StoredPrompt,
    decode_item,
    key_of,
    names_of,
)
from replay_protos.labels import TagValue
from replay_protos.words import counted

logger = logging.getLogger(__name__)

WINDOW = 1024
"""The number of prompts of an epoch that are loaded at once."""
LEAST_ROOM = 16 * WINDOW
"""The least `max_size` of a table of epochs: a window, and the prompts that are requeued when generators die."""
LEAST_BOUND = 1_000_000
"""The least `max_staleness` of a table of partial groups that replace prompts. No run has a million versions, so
the server drops none of these groups."""
FIRST_PRIORITY = 0.25
"""The priority of a prompt of a curriculum before its first group: the maximum of p (1 - p)."""
LEARNING_RATE = 0.5
"""The weight of the newest group of a prompt in the prompt's priority."""
LEAST_PRIORITY = 0.02
"""The priority of a prompt that was always solved, or never. It is drawn again, but less often."""
_PAUSE = 1.0
"""Seconds to wait for a prompt before the state of the table is checked again."""
MOST_BAD = 100
"""The number of successive rows that are no prompts after which the run ends: the cause is not a single row."""
_MOST_BEGINNINGS = 64
"""The number of keys that are tried for the first cursor. As long as the server remembers such a key, the table cannot
begin with it again."""


class PromptsTable(PromptQueue):
    """Draws prompts under leases, and renews the leases until the prompts are finished or requeued."""

    def __init__(
        self,
        client: AsyncReplayClient,
        answer: Answer,
        rows: PromptRows,
        config: GeneratorConfig,
        stats: GeneratorStats,
    ) -> None:
        """`rows`: all prompts, in the order of their file."""
        assert config.prompts_table is not None
        self.table = config.prompts_table
        self._client = client
        self._answer = answer
        self._rows = rows
        self._config = config
        self._seed = config.sampling.seed or 0
        self._stats = stats
        self._bad_in_a_row = 0
        self._names = ""
        """A hash of the names of some prompts (`names_of`). A cursor with another hash is of other prompts."""
        self._items = LeasedItems(
            client,
            answer,
            self.table,
            lease=config.prompts_lease,
            what="prompts",
            decode=_decoded,
            on_lost=_lose,
            stats=stats,
        )

    async def begin(self) -> None:
        """Checks that the table can hold prompts. Raises ReplayError, with the remedy, if it cannot.

        The subclasses then insert the first cursor, unless another generator has done so.
        """
        if not len(self._rows):
            raise ReplayError("there are no prompts to load: the file has no rows")
        self._names = await in_daemon_thread(lambda: names_of(self._rows))
        info = await self._info()
        # Only the information from several servers has `shards`.
        if info.admission is not None and len(getattr(info, "shards", ())) > 1:
            raise ReplayError(
                "a table of prompts over several servers does not go together with [admission]: use one server"
            )
        table = info.tables.get(self.table)
        if table is None:
            names = ", ".join(info.tables)
            raise ReplayError(f"prompts_table {self.table!r} does not exist; there are {names}: add it in [[tables]]")
        fault = next(self._faults(json.loads(table.config)), None)  # the first fault
        if fault is not None:
            raise ReplayError(f"table {self.table!r} cannot hold the prompts of {self._what}: {fault}")

    async def next(self) -> DrawnPrompt | None:
        """The next prompt, under a lease.

        None: there is none now, or the cursor was drawn, and perhaps further prompts were loaded. Call `next` again.
        """
        self.has_loaded = False
        exclude: list[int] = []
        is_drawn_again = not self._times  # drawn prompts stay in the table, which could return one of them now
        if is_drawn_again:
            exclude = [sample.info.key for sample, _ in self._items.held.values()]
        try:
            sample, item = await self._items.draw(_PAUSE, exclude)
        except DeadlineExceededError:
            await self._table_is_idle()
            return None
        if isinstance(item, PromptCursor):
            await self._cursor_drawn(sample, item)
            return None
        prompt_item = PromptItem(sample.info.key, sample.info.priority, item.epoch, item.position)
        return DrawnPrompt(item.prompt, closes=(sample,), item=prompt_item)

    async def finished(self, drawn: DrawnPrompt, rewards: npt.ArrayLike | None, *, inserted: bool) -> None:
        """Forgets a prompt that an insert has closed. If the group was left out, acknowledges the prompt."""
        if inserted:
            self.opened(drawn)
        else:
            await self._items.end(drawn.closes)

    def opened(self, drawn: DrawnPrompt) -> None:
        self._items.forget(drawn.closes)

    async def requeued(self, drawn: DrawnPrompt, partial: Sample | None = None) -> None:
        await self._items.end(drawn.closes, requeue=True)

    async def reject(self, sample: Sample, why: Exception) -> None:
        await self._items.reject(sample, why)

    async def close(self) -> None:
        await self._items.close()

    # ------------------------------------------------------------------------------- the differences of the modes

    _what = ""
    """The name of the mode, for errors."""
    _sampler = ""
    """The `sampler` that the table must have."""
    _times = 0
    """The `max_times_sampled` that the table must have; 0: prompts are drawn any number of times."""

    @abstractmethod
    async def _cursor_drawn(self, sample: Sample, cursor: PromptCursor) -> None:
        """Is called when the cursor has been drawn, as `sample`."""

    async def _table_is_idle(self) -> None:
        """Is called when no item could be drawn for _PAUSE seconds."""

    # ---------------------------------------------------------------------------------------------- for both modes

    def _faults(self, config: Mapping[str, Any]) -> Iterator[str]:
        """Yields the settings of a table that make the table unfit for prompts, in words, with the remedy."""
        sampler = config["sampler"]["type"]
        times = config["max_times_sampled"]
        limiter = config["rate_limiter"]
        # A curriculum, for which `_times` is 0, needs room for all prompts and for two cursors.
        room = LEAST_ROOM if self._times else len(self._rows) + 2
        if sampler != self._sampler:
            yield f'its sampler is {sampler!r}; write sampler = "{self._sampler}"'
        if times != self._times:
            yield f"its max_times_sampled is {times}; write {self._times}"
        if config["max_staleness"] is not None:
            yield f"its max_staleness {config['max_staleness']} would drop prompts; leave it out"
        if limiter["type"] not in ("min_size", "queue") or limiter["min_size"] > 1:
            yield f"its rate_limiter {limiter['type']!r} may hold prompts back; leave it out"
        capacity = config["max_size"]
        if limiter["max_size"]:
            capacity = min(capacity, limiter["max_size"])
        if capacity < room:
            yield f"it holds {capacity} items; write max_size = {room} or more, so that no prompt is evicted"
        if config["requires"]:
            yield f"it requires {', '.join(config['requires'])}, which prompts lack; leave that out"

    async def _info(self) -> ServerInfo:
        info: ServerInfo = await self._answer(self._client.server_info)
        return info

    async def _is_empty(self) -> bool:
        """True if the table holds no items, and no drawn item can return to it."""
        info = await self._info()
        if getattr(info, "gone", ()):  # one of several servers does not answer, and may hold items
            return False
        table = info.tables[self.table]
        return not table.size and not table.reserved

    async def _first_cursor(self, priority: float) -> None:
        """Inserts the first cursor if the table is empty.

        Generators that begin at the same time use the same key, so that only one cursor is inserted. After a reset the
        server may still know that key, and not insert the cursor. Then the table stays empty, and the next key is
        tried.
        """
        cursor = PromptCursor(run=secrets.randbits(63), seed=self._seed, rows=len(self._rows), names=self._names)
        for beginning in range(_MOST_BEGINNINGS):
            if not await self._is_empty():
                return
            await self._insert_cursor(cursor, key_of("begin", self.table, beginning), priority)
        raise ReplayError(f"table {self.table!r} was emptied {_MOST_BEGINNINGS} times: use one of another name")

    async def _insert_cursor(
        self, cursor: PromptCursor, key: int, priority: float = 1.0, closes: Sequence[Sample] = ()
    ) -> None:
        """Inserts a cursor, with a tag that shows a user how far the prompts are loaded."""
        await self._answer(
            self._client.insert,
            cursor.encode(),
            {self.table: priority},
            key=key,
            tags={CURSOR_TAG: f"epoch {cursor.epoch}, {cursor.position} of {cursor.rows}"},
            closes=closes,
        )

    async def _load(self, cursor: PromptCursor, rows: Sequence[int], priority: float = 1.0) -> None:
        """Inserts the prompts of these rows. The first prompt has the position of `cursor`.

        `rows`: the numbers of the rows. Prompts that the table has already are not inserted again. A row that is no
        prompt, or whose prompt no table can hold, is left out. Otherwise such a row would end one generator after the
        other.
        """

        def encoded() -> list[tuple[bytes, dict[str, TagValue]] | PromptError]:  # is called in a thread
            return [self._stored(row, cursor, position) for position, row in enumerate(rows, cursor.position)]

        prompts = await in_daemon_thread(encoded)
        indices: dict[int, int] = {}  # the index of each prompt in `prompts` and `rows`, by its key
        for index in range(len(prompts)):
            key = key_of(cursor.run, cursor.epoch, cursor.position + index)
            indices[key] = index

        async def attempt() -> dict[int, ReplayError]:
            """Inserts all prompts. Returns the errors of the prompts that are too large, by their keys.

            `_answer` repeats this if the server goes away. The keys are the same then, so nothing is inserted twice.
            """
            async with self._client.writer(max_in_flight=WINDOW) as writer:
                for key, index in indices.items():
                    stored = prompts[index]
                    if isinstance(stored, PromptError):
                        continue
                    payload, tags = stored
                    insert = partial(writer.insert, payload, {self.table: priority}, key=key, tags=tags)
                    await _beside_too_large(insert)
                await _beside_too_large(writer.flush)
                for error in writer.refused.values():
                    if not isinstance(error, PayloadTooLargeError):
                        raise error
                return dict(writer.refused)

        refused = await self._answer(attempt)
        for key, error in refused.items():
            index = indices[key]
            row = place_of(self._rows, rows[index])
            prompts[index] = PromptError(f"{row}: the prompt cannot be stored in a table: {error}")
        for prompt in prompts:
            self._count_bad(prompt)

    def _stored(self, row: int, cursor: PromptCursor, position: int) -> tuple[bytes, dict[str, TagValue]] | PromptError:
        """The bytes and the tags of the prompt in a row, for its item. If the row is no prompt, returns the error."""
        try:
            stored = StoredPrompt(prompt_at(self._rows, row), cursor.epoch, position)
            return stored.encode(), stored.item_tags()
        except PromptError as error:
            return error

    def _count_bad(self, prompt: object) -> None:
        """Counts successive rows that are no prompts. Raises ReplayError after MOST_BAD, or if all rows are like that.

        `prompt`: the PromptError of such a row. Any other value is a prompt, and resets the count.
        """
        if not isinstance(prompt, PromptError):
            self._bad_in_a_row = 0
            return
        self._stats["groups_skipped"] += 1
        self._bad_in_a_row += 1
        if self._bad_in_a_row >= min(MOST_BAD, len(self._rows)):
            raise ReplayError(f"{self._bad_in_a_row} rows in a row are no prompts, the last because of: {prompt}")
        logger.warning("left out of table %r: %s", self.table, prompt)

    def _check(self, cursor: PromptCursor) -> None:
        """Raises ReplayError if the table was loaded from other prompts: another number of them, or other names."""
        if (cursor.rows, cursor.names) != (len(self._rows), self._names):
            loaded = counted(cursor.rows, "prompt")
            has = "others" if cursor.rows == len(self._rows) else str(len(self._rows))
            raise ReplayError(
                f"table {self.table!r} was loaded from {loaded}, and this generator has {has}: "
                f"give all generators the same prompts, or empty the table with `replay table reset {self.table}`"
            )


async def _beside_too_large(call: Callable[[], Awaitable[object]]) -> None:
    """Calls a method of a writer, and repeats the call after each error about a prompt that is too large.

    The writer records such a prompt in `refused`. A later call of any method raises the error, once, and does nothing
    else, so that call must be repeated.
    """
    while True:
        try:
            await call()
        except PayloadTooLargeError:
            continue
        return


def _decoded(sample: Sample) -> StoredPrompt | PromptCursor:
    return decode_item(sample.payload)


def _lose(_: Sample, __: StoredPrompt | PromptCursor) -> None:
    logger.warning("the lease of a prompt has ended: another generator gets it")


class EpochPrompts(PromptsTable):
    """Returns each prompt once an epoch, with any number of generators, also after restarts."""

    _what = "an epoch"
    _sampler = "fifo"
    _times = 1

    async def begin(self) -> None:
        """Also checks the table of partial groups, and inserts the first cursor.

        A stored partial group replaces its prompt. Raises ReplayError if the table may drop such groups as too old: the
        prompts would then be missing in their epoch.
        """
        await super().begin()
        info = await self._info()
        name = self._config.partial_groups_table or ""
        partial_groups = info.tables.get(name)
        bound = None
        if partial_groups is not None:
            bound = json.loads(partial_groups.config)["max_staleness"]
        if bound is not None and bound < LEAST_BOUND:
            raise ReplayError(
                f"table {name!r} has max_staleness {bound}: the server would drop partial groups "
                f"whose prompts are missing then; declare it in [[tables]] with max_staleness = {LEAST_BOUND}, and "
                "generators make prompts again of groups that are too old"
            )
        await self._first_cursor(1.0)

    async def requeued(self, drawn: DrawnPrompt, partial: Sample | None = None) -> None:
        """Requeues a prompt. A prompt that replaces a partial group is inserted anew, behind the loaded prompts."""
        await super().requeued(drawn)
        if partial is None or drawn.item is None:  # the prompt replaces no partial group, or is of no table
            return
        prompt = StoredPrompt(Prompt.of(drawn.source), drawn.item.epoch, drawn.item.position)
        # The key follows from the key of the partial group, so the prompt is not inserted twice if an answer was lost.
        key = key_of("again", partial.info.key)
        tags = prompt.item_tags()
        table = {self.table: 1.0}
        with contextlib.suppress(LeaseEndedError):  # another generator has drawn the group, and continues it
            await self._answer(self._client.insert, prompt.encode(), table, key=key, tags=tags, closes=[partial])

    async def _table_is_idle(self) -> None:
        await self._first_cursor(1.0)  # does nothing, unless somebody has emptied the table

    async def _cursor_drawn(self, sample: Sample, cursor: PromptCursor) -> None:
        """Loads the next WINDOW prompts of the epoch, and inserts the next cursor, which closes this one.

        After the last epoch, requeues the cursor for the other generators, and may set `ended`.
        """
        self._check(cursor)
        epochs = self._config.prompts_epochs
        if epochs is not None and cursor.epoch >= epochs:
            await self._wait_for_others()
            await self._items.end([sample], requeue=True)
            return
        # The order is computed in a thread: for millions of rows, this would hold up the event loop.
        order = await in_daemon_thread(lambda: epoch_order(cursor.rows, cursor.seed, cursor.epoch))
        rows = order[cursor.position : cursor.position + WINDOW].tolist()
        epoch = cursor.epoch
        position = cursor.position + len(rows)
        if position >= cursor.rows:  # the next cursor begins the next epoch
            epoch += 1
            position = 0
        assert (epoch, position) > (cursor.epoch, cursor.position), "a cursor goes forward"
        assert len(rows) <= WINDOW, len(rows)
        self.has_loaded = True  # also if another generator turns out to load these prompts
        try:
            # A generator that was suspended for longer than the lease must stop, as another one loads these prompts.
            async with asyncio.timeout(self._config.prompts_lease):
                await self._load(cursor, rows)
                key = key_of(cursor.run, epoch, position, "cursor")
                next_cursor = replace(cursor, epoch=epoch, position=position)
                await self._insert_cursor(next_cursor, key, closes=[sample])
        except (LeaseEndedError, TimeoutError):
            logger.warning("loading prompts took longer than their lease, and another generator does it")
        self._items.forget([sample])

    async def _wait_for_others(self) -> None:
        """Sets `ended` if no prompt can return and no partial group is left. Otherwise waits for _PAUSE seconds.

        All prompts of all epochs have been drawn before.
        """
        info = await self._info()
        table = info.tables[self.table]
        partial_groups = info.tables.get(self._config.partial_groups_table or "")
        self.ended = table.size == 0 and table.reserved == 1  # the one drawn item is this cursor
        if partial_groups is not None and partial_groups.size + partial_groups.reserved:
            self.ended = False
        if not self.ended:
            await asyncio.sleep(_PAUSE)


class CurriculumPrompts(PromptsTable):
    """Returns prompts again and again, and more often if their groups have a higher learnability.

    The priority of a prompt is a running mean of p (1 - p), with p the share of its completions that are right
    (learnability, arXiv 2502.12272; `scoring.group_learnability`):

        priority = (1 - LEARNING_RATE) * priority + LEARNING_RATE * max(p (1 - p), LEAST_PRIORITY)

    So the weight of a group halves with each further group of its prompt, and no prompt is forgotten. The priority is
    the only state of a prompt. The generator that makes the next group of the prompt updates this priority, also after
    a restart.
    """

    _what = "a curriculum"
    _sampler = "prioritized"

    async def begin(self) -> None:
        """Also loads all prompts, unless a second cursor records that some generator has done so."""
        await super().begin()
        await self._first_cursor(0.0)  # an item of priority 0 is never drawn
        run = await self._run()
        loaded = key_of(run, "loaded")  # the key of the second cursor
        if await self._answer(self._client.get, [loaded], payloads=False):  # the server has the second cursor
            return
        cursor = PromptCursor(run=run, seed=self._seed, rows=len(self._rows), names=self._names)
        for start in range(0, cursor.rows, WINDOW):
            rows = range(start, min(start + WINDOW, cursor.rows))
            await self._load(replace(cursor, position=start), rows, FIRST_PRIORITY)
        # From now on no generator loads: prompts that a user deletes stay deleted.
        await self._insert_cursor(replace(cursor, position=cursor.rows), loaded, 0.0)

    async def finished(self, drawn: DrawnPrompt, rewards: npt.ArrayLike | None, *, inserted: bool) -> None:
        """Also updates the priority of the prompt. A kill before the update loses only the effect of this group."""
        await super().finished(drawn, rewards, inserted=inserted)
        item = drawn.item
        if item is None:  # the prompt of a partial group that some generator has opened without this table
            return
        learnability = 0.0 if rewards is None else group_learnability(rewards)
        mean = (1 - LEARNING_RATE) * item.priority + LEARNING_RATE * max(learnability, LEAST_PRIORITY)
        await self._answer(self._client.update_priorities, self.table, {item.key: mean})

    async def _run(self) -> int:
        """The number `run` of the first cursor. Raises ReplayError if the table has no first cursor, or if it was
        loaded from other prompts."""
        keys = [key_of("begin", self.table, beginning) for beginning in range(_MOST_BEGINNINGS)]
        for item in await self._answer(self._client.get, keys):  # returns only the items that the server has
            with contextlib.suppress(ValueError):  # a damaged item is no cursor
                cursor = decode_item(item.payload)
                if isinstance(cursor, PromptCursor) and self.table in item.tables:
                    self._check(cursor)
                    return cursor.run
        raise ReplayError(
            f"table {self.table!r} holds items, and not the cursor of its prompts: empty it with `replay table reset "
            f"{self.table}`, or use another one"
        )

    async def _cursor_drawn(self, sample: Sample, cursor: PromptCursor) -> None:
        await self._items.end([sample], requeue=True)  # its priority was 0, so a user must have raised it


def prompt_queue_of(
    client: AsyncReplayClient,
    answer: Answer,
    prompts: Iterable[PromptSource] | PromptRows,
    config: GeneratorConfig,
    stats: GeneratorStats,
) -> PromptQueue:
    """The queue for these prompts. Raises ValueError if `config` has a prompts_table and `prompts` cannot be indexed.

    Also raises ValueError if `config` has prompts_epochs, and its other settings allow no epochs.
    """
    if config.prompts_table is None:
        if config.prompts_epochs is not None:
            raise ValueError("prompts_epochs needs a prompts_table: without one, `prompts` says how many there are")
        return IteratedPrompts(cast("Iterable[PromptSource]", rows_in_turn(prompts)))
    if not hasattr(prompts, "__len__") or not hasattr(prompts, "__getitem__"):
        raise ValueError(f"prompts_table needs all prompts as rows by number, not {type(prompts).__name__}")
    if config.prompts_mode == "curriculum" and config.prompts_epochs is not None:
        raise ValueError("prompts_epochs does not go together with prompts_mode = 'curriculum', which has no epochs")
    queue_class = EpochPrompts if config.prompts_mode == "epoch" else CurriculumPrompts
    rows = prompt_rows(cast("PromptRows", prompts))
    return queue_class(client, answer, rows, config, stats)
