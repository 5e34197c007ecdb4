"""Prompts in a table of the server: all generators draw prompts from the table, each prompt under a lease.

One request inserts a group and closes its prompt (`closes`). So a kill leaves either the prompt or the group, and never
both or neither. A generator that dies loses its leases. Its prompts return to their places, and other generators draw
them.

`EpochPrompts` draws each prompt once an epoch, in an order that depends on a seed. The table is a queue, which need not
hold a whole epoch. The last item of the queue is a PromptCursor, which has the position of the next prompt to load. The
generator that draws the cursor loads the next WINDOW prompts. It then inserts the next cursor, and the same request
closes the cursor that it has drawn:

    p1 p2 p3 cursor(3)  ──▶  cursor(3) drawn  ──▶  p4 p5 p6 cursor(6)

So only the generator that has the lease of the cursor loads prompts. If this generator is killed, what happens next
depends on its last step:

    it has drawn the cursor             the lease ends, and another generator draws the cursor and loads the prompts
    it has loaded some prompts          the same; the server refuses the prompts that were loaded already, because
                                        their keys follow from run, epoch and position
    it has inserted the next cursor     nothing is left to do, because the same request has closed the old cursor

So the server must remember the keys of the prompts of one window until the next cursor is inserted, but no longer.
Epochs may therefore have any length. The table is empty, with no item drawn, only before the first cursor is inserted
and after a reset.

`CurriculumPrompts` draws prompts by priority, and the prompts stay in the table. The only thing that it remembers about
the groups of a prompt is the priority of the prompt.
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
"""The least `max_size` of a table of epochs. It must hold one window, and all prompts that may be requeued when
generators die."""
LEAST_BOUND = 1_000_000
"""The least `max_staleness` of a table of partial groups that replace prompts. No run has a million versions, so
the server drops none of these groups."""
FIRST_PRIORITY = 0.25
"""The priority of a prompt of a curriculum before its first group. It is the maximum of p (1 - p), where p is the share
of right completions (see CurriculumPrompts)."""
LEARNING_RATE = 0.5
"""The weight of the newest group of a prompt in the priority of the prompt."""
LEAST_PRIORITY = 0.02
"""The least priority of a prompt after its first group, for prompts that were always solved or never. It is above 0, so
that such a prompt is still drawn, but less often."""
_PAUSE = 1.0
"""The seconds for which a generator waits for a prompt before it checks the state of the table."""
MOST_BAD = 100
"""After this many successive rows that are no prompts, the run ends, because the cause is then not a single bad row."""
_MOST_BEGINNINGS = 64
"""The number of keys that are tried for the first cursor. A key that the server still remembers, from before a reset of
the table, cannot be used for a new first cursor."""


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
        """How many rows without a prompt have come one after the other, up to the last row."""
        self._names = ""
        """A hash of the names of some prompts (`names_of`). A cursor with another hash belongs to other prompts."""
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

        The subclasses extend this method: they also insert the first cursor, unless another generator has done so.
        """
        if not len(self._rows):
            raise ReplayError("there are no prompts to load: the file has no rows")
        self._names = await in_daemon_thread(lambda: names_of(self._rows))
        info = await self._info()
        # Only the ServerInfo of a client of several servers has the attribute `shards`.
        if info.admission is not None and len(getattr(info, "shards", ())) > 1:
            raise ReplayError(
                "a table of prompts over several servers does not go together with [admission]: use one server"
            )
        table = info.tables.get(self.table)
        if table is None:
            names = ", ".join(info.tables)
            raise ReplayError(f"prompts_table {self.table!r} does not exist; there are {names}: add it in [[tables]]")
        config = json.loads(table.config)
        fault = next(self._faults(config), None)  # the first fault; None: there is none
        if fault is not None:
            raise ReplayError(f"table {self.table!r} cannot hold the prompts of {self._what}: {fault}")

    async def next(self) -> DrawnPrompt | None:
        """The next prompt, under a lease.

        None: the table has no prompt now, or this call has drawn the cursor and handled it. After None, call `next`
        again, unless `ended`.
        """
        self.is_loading = False
        exclude: list[int] = []
        drawn_prompts_stay = not self._times
        if drawn_prompts_stay:  # the table could give this generator a prompt that it holds already
            exclude = [sample.info.key for sample, _ in self._items.held.values()]
        try:
            sample, stored = await self._items.draw(timeout=_PAUSE, exclude=exclude)
        except DeadlineExceededError:
            await self._table_is_idle()
            return None
        if isinstance(stored, PromptCursor):
            await self._cursor_drawn(sample, stored)
            return None
        item = PromptItem(sample.info.key, sample.info.priority, stored.epoch, stored.position)
        return DrawnPrompt(stored.prompt, closes=(sample,), item=item)

    async def finished(self, drawn: DrawnPrompt, rewards: npt.ArrayLike | None, *, inserted: bool) -> None:
        """Forgets the prompt if it was closed when its group was `inserted`. Otherwise acknowledges the prompt, whose
        group was left out."""
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
    """What has these prompts, for errors: "an epoch" or "a curriculum"."""
    _sampler = ""
    """The `sampler` that the table must have."""
    _times = 0
    """The `max_times_sampled` that the table must have; 0: prompts are drawn any number of times."""

    @abstractmethod
    async def _cursor_drawn(self, sample: Sample, cursor: PromptCursor) -> None:
        """Handles a cursor that was drawn. `sample`: its item, under its lease."""

    async def _table_is_idle(self) -> None:
        """Is called when no item could be drawn within _PAUSE seconds."""

    # ---------------------------------------------------------------------------------------------- for both modes

    def _faults(self, config: Mapping[str, Any]) -> Iterator[str]:
        """Yields, in words, each setting that makes a table with this `config` unfit for prompts, and its remedy."""
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
        if getattr(info, "gone", ()):  # at least one of several servers does not answer, and may hold items
            return False
        table = info.tables[self.table]
        return not table.size and not table.reserved

    async def _first_cursor(self, priority: float) -> None:
        """Inserts the first cursor if the table is empty.

        Generators that begin at the same time use the same key, so that only one cursor is inserted. After a reset of
        the table, the server may still remember this key, and then does not insert the cursor. The table stays empty,
        and the next key is tried.
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
        """Inserts a cursor, with a tag that tells users how far the prompts are loaded."""
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

        `rows`: the numbers of the rows. Prompts that the table has already are not inserted again. A row is left out if
        it is no prompt, or if its prompt cannot be stored in a table. Otherwise such a row would end one generator
        after the other.
        """

        def encoded() -> list[tuple[bytes, dict[str, TagValue]] | PromptError]:  # is called in a thread
            return [self._stored(row, cursor, position) for position, row in enumerate(rows, cursor.position)]

        prompts = await in_daemon_thread(encoded)
        index_of: dict[int, int] = {}  # the key of each prompt -> its index in `prompts` and `rows`
        for index in range(len(prompts)):
            key = key_of(cursor.run, cursor.epoch, cursor.position + index)
            index_of[key] = index

        async def insert_all() -> dict[int, ReplayError]:
            """Inserts all prompts. Returns the errors of the prompts that are too large, by their keys.

            `_answer` calls this function again if the server goes away. The keys are the same in each call, so no
            prompt is inserted twice.
            """
            async with self._client.writer(max_in_flight=WINDOW) as writer:
                for key, index in index_of.items():
                    encoded_prompt = prompts[index]
                    if isinstance(encoded_prompt, PromptError):
                        continue
                    payload, tags = encoded_prompt
                    insert = partial(writer.insert, payload, {self.table: priority}, key=key, tags=tags)
                    await _despite_too_large(insert)
                await _despite_too_large(writer.flush)
                for error in writer.refused.values():
                    if not isinstance(error, PayloadTooLargeError):
                        raise error
                return dict(writer.refused)

        too_large = await self._answer(insert_all)
        for key, error in too_large.items():
            index = index_of[key]
            place = place_of(self._rows, rows[index])
            prompts[index] = PromptError(f"{place}: the prompt cannot be stored in a table: {error}")
        for prompt in prompts:
            self._count_bad(prompt)

    def _stored(self, row: int, cursor: PromptCursor, position: int) -> tuple[bytes, dict[str, TagValue]] | PromptError:
        """The bytes and the tags of the item for the prompt in a row. If the row is no prompt, returns the error."""
        try:
            stored = StoredPrompt(prompt_at(self._rows, row), cursor.epoch, position)
            return stored.encode(), stored.item_tags()
        except PromptError as error:
            return error

    def _count_bad(self, prompt: object) -> None:
        """Counts successive rows that are no prompts. Raises ReplayError if there are MOST_BAD of them, or as many as
        there are rows.

        `prompt`: the PromptError of a row that is no prompt. Any other value is a prompt, and resets the count.
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
        """Raises ReplayError if `cursor` belongs to other prompts: to another number of them, or to other names."""
        if (cursor.rows, cursor.names) != (len(self._rows), self._names):
            loaded = counted(cursor.rows, "prompt")
            has = "others" if cursor.rows == len(self._rows) else str(len(self._rows))
            raise ReplayError(
                f"table {self.table!r} was loaded from {loaded}, and this generator has {has}: "
                f"give all generators the same prompts, or empty the table with `replay table reset {self.table}`"
            )


async def _despite_too_large(call: Callable[[], Awaitable[object]]) -> None:
    """Calls a method of a writer, and repeats the call after each error about a prompt that is too large.

    Such an error is about a prompt of an earlier call, and the writer has recorded it in `refused`. The writer raises
    the error once, in its next call, which then does nothing else. So that call must be repeated.
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
    """Draws each prompt once an epoch, also if there are several generators, and if generators or servers restart."""

    _what = "an epoch"
    _sampler = "fifo"
    _times = 1

    async def begin(self) -> None:
        """Checks both the table of prompts and the table of partial groups, and inserts the first cursor.

        Raises ReplayError if the table of partial groups may drop groups as too old. A stored partial group replaces
        its prompt, so the prompt of a dropped group would be missing in its epoch.
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
        await self._first_cursor(priority=1.0)

    async def requeued(self, drawn: DrawnPrompt, partial: Sample | None = None) -> None:
        """Requeues a prompt. If the prompt replaces a partial group, inserts it anew, behind the loaded prompts."""
        await super().requeued(drawn)
        if partial is None or drawn.item is None:  # the prompt replaces no partial group, or did not come from a table
            return
        prompt = StoredPrompt(Prompt.of(drawn.source), drawn.item.epoch, drawn.item.position)
        # The key follows from the key of the partial group. So if an answer is lost and the request is sent again, the
        # prompt is not inserted twice.
        key = key_of("again", partial.info.key)
        tags = prompt.item_tags()
        priorities = {self.table: 1.0}
        with contextlib.suppress(LeaseEndedError):  # another generator has drawn the group, and continues it
            await self._answer(self._client.insert, prompt.encode(), priorities, key=key, tags=tags, closes=[partial])

    async def _table_is_idle(self) -> None:
        # Another generator has drawn the cursor, and loads prompts. Or all groups are begun, and it puts the cursor
        # back soon. Then this generator draws the cursor, and sees that no prompt is left to load.
        self.is_loading = True
        await self._first_cursor(priority=1.0)  # does nothing, unless somebody has emptied the table

    async def _cursor_drawn(self, sample: Sample, cursor: PromptCursor) -> None:
        """Loads the next WINDOW prompts of the epoch, and inserts the next cursor. This insert closes the drawn cursor.

        After the last epoch, requeues the cursor for the other generators, and sets `ended` if no group is missing.
        """
        self._check(cursor)
        epochs = self._config.prompts_epochs
        if epochs is not None and cursor.epoch >= epochs:
            await self._wait_for_others()
            await self._items.end([sample], requeue=True)
            return
        # The order is computed in a thread, because millions of rows would block the event loop.
        order = await in_daemon_thread(lambda: epoch_order(cursor.rows, cursor.seed, cursor.epoch))
        rows = order[cursor.position : cursor.position + WINDOW].tolist()
        epoch = cursor.epoch
        position = cursor.position + len(rows)
        if position >= cursor.rows:  # the next cursor begins the next epoch
            epoch += 1
            position = 0
        assert (epoch, position) > (cursor.epoch, cursor.position), "a cursor goes forward"
        assert len(rows) <= WINDOW, len(rows)
        self.is_loading = True  # also if another generator turns out to load these prompts
        try:
            # If this generator was suspended for longer than the lease, another one loads these prompts. So it stops.
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

        Call it when the last cursor was drawn, so that all prompts of all epochs have been drawn before.
        """
        info = await self._info()
        table = info.tables[self.table]
        only_cursor_left = table.size == 0 and table.reserved == 1  # the reserved item is the cursor
        partial_groups = info.tables.get(self._config.partial_groups_table or "")
        groups_left = partial_groups is not None and partial_groups.size + partial_groups.reserved > 0
        self.ended = only_cursor_left and not groups_left
        if not self.ended:
            await asyncio.sleep(_PAUSE)


class CurriculumPrompts(PromptsTable):
    """Draws prompts again and again, and draws those more often whose groups have a higher learnability.

    The learnability of a group is p (1 - p), where p is the share of completions that are right (arXiv 2502.12272;
    `scoring.group_learnability`). The priority of a prompt is a running mean of the learnability of its groups:

        priority = (1 - LEARNING_RATE) * priority + LEARNING_RATE * max(p (1 - p), LEAST_PRIORITY)

    So the weight of a group halves with each further group of its prompt. The priority never falls to 0, so each prompt
    is drawn again at some time.

    The priority is the only state of a prompt, and the server stores it. So any generator can make the next group of
    the prompt and update the priority, also after a restart.
    """

    _what = "a curriculum"
    _sampler = "prioritized"

    async def begin(self) -> None:
        """Checks the table, inserts the first cursor and loads all prompts.

        After the last prompt comes a second cursor. If the table has it, some generator has loaded all prompts already,
        and they are not loaded again.
        """
        await super().begin()
        await self._first_cursor(priority=0.0)  # an item of priority 0 is never drawn
        run = await self._run_of_first_cursor()
        second_key = key_of(run, "loaded")  # the key of the second cursor
        if await self._answer(self._client.get, [second_key], payloads=False):  # the server has the second cursor
            return
        cursor = PromptCursor(run=run, seed=self._seed, rows=len(self._rows), names=self._names)
        for start in range(0, cursor.rows, WINDOW):
            rows = range(start, min(start + WINDOW, cursor.rows))
            await self._load(replace(cursor, position=start), rows, FIRST_PRIORITY)
        # After this insert, no generator loads prompts any more. So prompts that a user deletes stay deleted.
        second_cursor = replace(cursor, position=cursor.rows)
        await self._insert_cursor(second_cursor, second_key, priority=0.0)

    async def finished(self, drawn: DrawnPrompt, rewards: npt.ArrayLike | None, *, inserted: bool) -> None:
        """Ends the prompt as in `PromptsTable`, and then updates its priority.

        If the generator is killed before the update, only the effect of this group on the priority is lost.
        """
        await super().finished(drawn, rewards, inserted=inserted)
        item = drawn.item
        if item is None:  # a generator without this table has opened the group, as a partial group
            return
        learnability = 0.0 if rewards is None else group_learnability(rewards)
        priority = (1 - LEARNING_RATE) * item.priority + LEARNING_RATE * max(learnability, LEAST_PRIORITY)
        await self._answer(self._client.update_priorities, self.table, {item.key: priority})

    async def _run_of_first_cursor(self) -> int:
        """The number `run` of the first cursor. Raises ReplayError if the table has no first cursor, or if the cursor
        belongs to other prompts."""
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
        # A cursor has priority 0, so it was drawn only because a user has raised its priority.
        await self._items.end([sample], requeue=True)


def prompt_queue_of(
    client: AsyncReplayClient,
    answer: Answer,
    prompts: Iterable[PromptSource] | PromptRows,
    config: GeneratorConfig,
    stats: GeneratorStats,
) -> PromptQueue:
    """Makes the queue for these prompts, of the kind that `config` names.

    Raises ValueError if `config` has a prompts_table, but `prompts` cannot be indexed. Also raises ValueError if
    `config` has prompts_epochs, but its other settings allow no epochs.
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
