"""Fleet: the shards of one client. It watches which of them can be reached, and sends them requests.

A shard is one server of a client that has several servers. Each shard has a watcher. The watcher keeps the connection
open, and notes when the connection is made and when it breaks. A request is sent to the shards that are up. If one of
them goes away before it answers, the result has the answers of the others.

A server can also hang while its connection is open, because its process is suspended or its memory is swapped out. So a
caller that has waited LATE_SECONDS for an answer probes the shard (`doubt`). The probe asks for the policy, because
every server can answer this at once. A shard that leaves _PROBES probes unanswered counts as away for all callers, and
the client probes it in the background until it answers. It may still carry out requests that were sent to it before.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any, Self, TypeVar

import grpc
from google.protobuf.message import Message
from grpc import ChannelConnectivity

from replay_client.access import RAY_SCHEME, Access, split_addresses
from replay_client.connection import LATE_SECONDS, Connection
from replay_client.errors import (
    GONE,
    ClientClosedError,
    DeadlineExceededError,
    ReplayError,
    ServerUnavailableError,
)
from replay_client.records import ItemPage, item_page_of
from replay_client.shards.merging import MERGES, merge_pages, read_page
from replay_client.transport import Transport
from replay_client.waits import Deadline, Patience
from replay_protos import replay_pb2 as pb

T = TypeVar("T")

SECONDS_PER_LOOK = 5.0
"""Seconds between two requests to Ray for the list of shards."""
_PROBES = 2
"""The number of successive probes that a shard must leave unanswered to count as away. One is not enough, because this
process itself may have been suspended during the first probe."""
_PROBE_SECONDS = 1.0
"""Seconds in which a shard must answer a probe."""
_FIRST_LOOK = 2.0
"""Seconds that a shard has to accept the first connection. Then it counts as away until it accepts one."""
_LOOK_AGAIN = 0.5
"""Seconds between two looks at the address and the connection of a shard that is away."""
_RAY_SECONDS = 5.0
"""Seconds in which Ray must answer with the address of a shard."""
_DRAINING_SECONDS = 30.0
"""Seconds after which new items are sent to a draining shard again: the operator may have stopped the draining."""


class Shard(Connection):
    """One server of several. `name` decides which keys belong to it, and stays the same when the address changes."""

    def __init__(self, name: str, access: Access, timeout: float | None, names: RayNames | None) -> None:
        """`names` finds the addresses of shards in Ray. None: the address of this shard is in `access`."""
        super().__init__(access, timeout)
        self.name = name
        self.is_up = False
        """True while the connection is open and the server answers. Any thread may read this attribute."""
        self.draining_until = 0.0
        """The time on time.monotonic's clock until which this client sends no new item to the shard, because the shard
        has refused an item while draining."""
        self.decided = asyncio.Event()
        """Set when the first attempt to connect has succeeded or failed."""
        self.changed: Callable[[Shard], None] = lambda _: None
        """A function that is called when `is_up` has changed, and after the first attempt to connect. Its Fleet sets
        it."""
        self._names = names
        self.has_address = names is None
        """True if this client knows the address. It has to ask Ray for the address of an actor first."""
        self._running: set[asyncio.Task[Any]] = set()
        """The tasks of `run` that have not ended. They are cancelled when the shard goes away."""
        self._watching: asyncio.Task[None] | None = None
        """The task that watches the connection; None before `watch`."""
        self._doubting: asyncio.Task[None] | None = None
        """The task that probes the shard."""
        self._waking: asyncio.Task[None] | None = None
        """The task that probes a shard that hangs, again and again, until it answers."""

    @property
    def transport(self) -> Transport:
        """As `Connection.transport`. Also raises ServerUnavailableError, while the address is not known."""
        if not self.has_address:
            raise ServerUnavailableError(f"shard {self.name} has no address yet")
        return super().transport

    @property
    def takes_inserts(self) -> bool:
        """True if new items may be sent to this shard. Any thread may read this property."""
        return self.is_up and time.monotonic() >= self.draining_until

    def is_draining(self) -> None:
        """Notes that the shard has refused a new item because it is draining.

        For _DRAINING_SECONDS, this client sends the shard only items that the shard may have already.
        """
        self.draining_until = time.monotonic() + _DRAINING_SECONDS

    def watch(self) -> None:
        """Begins to watch the connection, on the running event loop, unless it is watched already."""
        if self._watching is None:
            self._watching = asyncio.create_task(self._watch())

    async def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Awaits `work`, and returns its result. `work` is a request to this shard.

        Cancels `work` and raises ServerUnavailableError as soon as the shard counts as away, so that the caller can go
        on without this shard. So do not pass work that has to wait until the shard is back.
        """
        task = asyncio.create_task(work)
        self._running.add(task)
        try:
            with self.expected():
                await asyncio.wait({task})
        finally:
            self._running.discard(task)
            task.cancel()  # if the caller was cancelled; otherwise the task has ended, and this does nothing
        if task.cancelled():  # `_report` has cancelled the task
            raise ServerUnavailableError(f"the connection to shard {self.name} broke")
        return task.result()

    @contextmanager
    def expected(self) -> Iterator[None]:
        """Starts to probe the shard if the block lasts longer than LATE_SECONDS.

        The block is a wait for an answer of the shard.
        """
        timer = asyncio.get_running_loop().call_later(LATE_SECONDS, self.doubt)
        try:
            yield
        finally:
            timer.cancel()

    def doubt(self) -> None:
        """Starts to probe the shard, on the running event loop, unless it is being probed.

        A shard that does not answer the probes counts as away until it answers one.
        """
        if self._doubting is None or self._doubting.done():
            self._doubting = asyncio.create_task(self._doubt())

    async def answers(self) -> bool:
        """Probes the shard as `doubt` does, and waits until this has ended. Returns True if the shard is up then."""
        self.doubt()
        assert self._doubting is not None
        await asyncio.wait({self._doubting})
        return self.is_up

    async def ask(self, method: str, request: Message, timeout: float | None) -> Any:
        """Sends one request to this shard, and returns the answer. Raises the errors of `unary` and of `run`."""
        return await self.run(self.unary(method, request, timeout))

    async def close(self) -> None:
        """Ends the watching and the probes, and closes the connection."""
        tasks = [task for task in (self._watching, self._doubting, self._waking) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await super().close()

    async def _watch(self) -> None:
        """Keeps the connection open, and reports when it is made and when it breaks. Runs as a task until `close`."""
        first_look = Deadline(_FIRST_LOOK)
        while True:
            if not self.is_up and self._names is not None:  # Ray may have restarted the server at another address
                await self._find(self._names)
            if not self.has_address:  # Ray does not know the server yet
                await asyncio.sleep(_LOOK_AGAIN)
                self._report(is_up=False)
                continue
            transport = self.transport
            state = transport.state()  # starts to connect if there is no connection
            if state is ChannelConnectivity.READY:
                self._report(is_up=True)
                await transport.changed(state)  # until the connection breaks
                continue
            if state is ChannelConnectivity.TRANSIENT_FAILURE:
                self._report(is_up=False)
            try:
                async with asyncio.timeout(_LOOK_AGAIN):
                    await transport.changed(state)
            except TimeoutError:
                # The connection is neither made nor refused. Such a connection counts as broken, except during the
                # first attempt to connect, which has _FIRST_LOOK seconds.
                if first_look.passed or self.decided.is_set():
                    self._report(is_up=False)

    async def _doubt(self) -> None:
        """Probes the shard up to _PROBES times, until it answers. If it answers none of the probes, reports it as away,
        and starts the task that probes it until it answers."""
        for _ in range(_PROBES):
            if not await self._is_silent():
                return
        self._report(is_up=False)
        if self._waking is None or self._waking.done():
            self._waking = asyncio.create_task(self._until_it_answers())

    async def _until_it_answers(self) -> None:
        """Probes a shard that hangs, and reports it as up when it answers."""
        while await self._is_silent():  # each probe waits for _PROBE_SECONDS
            pass
        # If the connection is broken by now, the watcher reports the shard as up when it has connected again.
        if self.transport.state() is ChannelConnectivity.READY:
            self._report(is_up=True)

    async def _is_silent(self) -> bool:
        """Probes the shard once. Returns True if it does not answer in time although its connection is open."""
        try:
            await self.transport.call("GetPolicy", pb.GetPolicyRequest(), _PROBE_SECONDS)
        except grpc.aio.AioRpcError as error:
            # Any other error is an answer of the shard, or a broken connection, which the watcher reports.
            return error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        return False

    async def _find(self, names: RayNames) -> None:
        """Asks Ray for the address. If it is a new one, sends new calls to it."""
        address = await asyncio.to_thread(names.locate, self.name)
        if address is not None and address != self.address:
            self.move(address)
            self.has_address = True

    def _report(self, is_up: bool) -> None:
        """Sets `is_up`. Cancels the requests to a shard that is away. Calls `changed` if the shard's state is news."""
        is_first_report = not self.decided.is_set()
        is_news = is_first_report or is_up != self.is_up
        self.is_up = is_up
        self.decided.set()
        if not is_up:
            for task in self._running:
                task.cancel()
        if is_news:
            self.changed(self)


Question = Message | Callable[[Shard], Message]
"""A request that is the same for all shards, or a function that makes the request for a shard."""


class Fleet:
    """All shards of one client. Timeouts are in seconds; None: no limit."""

    def __init__(self, access: Access, timeout: float | None) -> None:
        """Raises ValueError for a ray:// address without shards."""
        self.address = access.address
        """The addresses of the shards, separated by commas; or ray://NAMESPACE/NAME."""
        self.timeout = timeout
        """The timeout of the client, in seconds; None: no limit."""
        self.changed = asyncio.Event()
        """An event for the next change. When a shard has become reachable or unreachable, the event is set, and a new
        event takes its place here."""
        self.listeners: list[Callable[[Shard], None]] = []
        """Functions that are called with each shard that has become reachable or unreachable."""
        self._access = access
        self._following: asyncio.Task[None] | None = None
        """The task that asks Ray which shards there are; None before `connect`, and if the addresses are known."""
        self._closed = False
        self._background: set[asyncio.Task[None]] = set()
        """The tasks of `spawn` that have not ended."""
        self._names = RayNames.of(access.address)
        """None if the addresses are known without Ray."""
        addresses = split_addresses(access.address)
        if self._names is None:
            self.shards = [self._make_shard(name, address) for name, address in addresses.items()]
        else:  # each shard asks Ray for its own address; until then it has the address of the fleet
            self.shards = [self._make_shard(name, access.address) for name in self._names.find()]

    def _make_shard(self, name: str, address: str) -> Shard:
        """Makes a shard of this fleet, without connecting to it."""
        shard = Shard(name, replace(self._access, address=address), self.timeout, self._names)
        shard.changed = self._changed
        return shard

    @property
    def carries(self) -> str:
        """The transport of the payloads of each shard, by its name, in one text: see `AsyncReplayClient.transport`."""
        return "; ".join(f"{shard.name}: {shard.carries}" for shard in self.shards if shard.has_address)

    async def find_transport(self) -> str:
        """As `carries`, but first finds out which servers are on this host."""
        up = await self.reachable(Deadline(self.timeout))
        await asyncio.gather(*(shard.find_transport() for shard in up))
        return self.carries

    def named(self, name: str) -> Shard | None:
        """The shard with this name; None if there is none."""
        for shard in self.shards:
            if shard.name == name:
                return shard
        return None

    def connect(self) -> None:
        """Begins to connect to all shards, on the running event loop. Raises ClientClosedError after `close`."""
        self._check_open()
        for shard in self.shards:
            shard.watch()
        if self._names is not None and self._following is None:
            self._following = asyncio.create_task(self._follow(self._names))

    def _check_open(self) -> None:
        """Raises ClientClosedError after `close`."""
        if self._closed:
            raise ClientClosedError("this client is closed")

    @property
    def decided(self) -> bool:
        """True once the fleet has tried to reach each shard, or is closed."""
        return self._closed or all(shard.decided.is_set() for shard in self.shards)

    def up(self) -> list[Shard]:
        """The shards that can be reached."""
        return [shard for shard in self.shards if shard.is_up]

    async def reachable(self, deadline: Deadline) -> list[Shard]:
        """The shards that are up, at least one. Raises ServerUnavailableError if none is up before the deadline."""
        self.connect()
        # Wait until the first attempts to connect have ended. Otherwise, a shard that is slow to connect would be left
        # out. This wait needs no deadline, because it ends after about _FIRST_LOOK seconds.
        while not self.decided:
            await self.changed.wait()
        while not (up := self.up()):
            if not await self._changes(deadline):
                raise self.unavailable()
        return up

    async def _changes(self, deadline: Deadline) -> bool:
        """Waits until a shard becomes reachable or unreachable. Returns False if the deadline passes first.

        Raises ClientClosedError if the client is closed meanwhile.
        """
        try:
            async with asyncio.timeout(deadline.seconds):
                await self.changed.wait()
        except TimeoutError:
            return False
        self._check_open()
        return True

    async def insist(
        self, attempt: Callable[[Deadline], Awaitable[T]], timeout: float | None, *also: type[ReplayError]
    ) -> T:
        """Calls `attempt` until it succeeds, for up to `timeout` seconds, and returns its result.

        Another attempt follows only after an error that means that a shard is gone, or that is one of `also`. Other
        errors are raised at once. Each attempt waits first until at least one shard is up. `attempt` gets the deadline
        of all attempts together.
        """

        async def judge(error: Exception, late: bool) -> None:
            """Raises the error of an attempt if no other attempt may follow. `late`: the time is up.

            `Patience` calls this after each attempt that failed, and tries again if it returns.
            """
            may_succeed_later = isinstance(error, (*GONE, *also))
            if late or self._closed or not may_succeed_later:
                raise error

        async def attempt_when_reachable() -> T:
            """Waits until a shard is up, and makes one attempt. `deadline` is set below, before the first attempt."""
            await self.reachable(deadline)
            return await attempt(deadline)

        # The pauses between attempts can be short, because each attempt itself waits until a shard is up.
        patience = Patience(judge, timeout, longest=0.1)
        deadline = patience.start()
        return await patience.result(attempt_when_reachable)

    def unavailable(self) -> ServerUnavailableError:
        """Makes the error of a request that no shard has answered."""
        names = ", ".join(shard.name for shard in self.shards)
        return ServerUnavailableError(f"none of the {len(self.shards)} shards answers: {names}; are they running?")

    async def ask(self, method: str, request: Message, timeout: float | None, read: Callable[[Any], T]) -> T:
        """Asks all shards that are up, and merges their answers into one record. `read` makes a record of each answer.

        Raises the errors of `answers`.
        """
        answers = await self.answers(method, request, timeout)
        records = {shard: read(answer) for shard, answer in answers.items()}
        return self._merged(method, records)

    async def pages(self, request: pb.ListItemsRequest, timeout: float | None) -> ItemPage:
        """One page of the items of all shards that are up."""
        starts = read_page(request.page)  # name of a shard -> the number of its items that are on earlier pages

        def request_for(shard: Shard) -> pb.ListItemsRequest:
            """A copy of the request that asks for the items of this shard that are not on earlier pages."""
            shard_request = pb.ListItemsRequest()
            shard_request.CopyFrom(request)
            shard_request.page = starts.get(shard.name, "")  # "": from the first item
            return shard_request

        answers = await self.answers("ListItems", request_for, timeout)
        pages = {shard.name: item_page_of(answer) for shard, answer in answers.items()}
        limit = request.limit or 100  # the server's default
        return merge_pages(pages, starts, limit, request.order_by, request.descending)

    async def answers(
        self, method: str, request: Question, timeout: float | None, shards: Sequence[Shard] | None = None
    ) -> dict[Shard, Any]:
        """Sends a request to the shards that are up, and returns their answers by the shard.

        With `shards`, only those of them that are up are asked. The result is empty if none of them is up. The result
        leaves out a shard that goes away before it answers. It also leaves out a shard that does not answer in time,
        if another shard does. Raises ServerUnavailableError or DeadlineExceededError if no shard answers in time, and
        any other error that a shard answers with.
        """

        async def attempt(deadline: Deadline) -> dict[Shard, Any]:
            """Asks each shard that is up once."""
            if shards is None:
                reachable = self.up()
            else:
                reachable = [shard for shard in shards if shard.is_up]
            answers = await self.try_to_ask(method, request, deadline.seconds, reachable)
            if reachable and not answers:  # all of them went away before they answered, so let `insist` try again
                raise self.unavailable()
            return answers

        return await self.insist(attempt, timeout)

    async def say(self, method: str, request: Message, timeout: float | None) -> None:
        """Sends a request to the shards that are up, and ignores shards that go away or do not answer in time."""
        with suppress(DeadlineExceededError):
            await self.try_to_ask(method, request, timeout, self.up())

    async def try_to_ask(
        self, method: str, request: Question, timeout: float | None, shards: Sequence[Shard]
    ) -> dict[Shard, Any]:
        """Asks each of `shards` once, and returns the answers by the shard.

        The result leaves out a shard that goes away before it answers, and a shard that does not answer in time.
        However, if no shard answers, and at least one of them did not answer in time, DeadlineExceededError is raised.
        Also raises any other error that a shard answers with.
        """
        requests = [request(shard) if callable(request) else request for shard in shards]
        calls = [
            shard.ask(method, shard_request, timeout) for shard, shard_request in zip(shards, requests, strict=True)
        ]
        results = await asyncio.gather(*calls, return_exceptions=True)
        answers: dict[Shard, Any] = {}
        late = None
        for shard, result in zip(shards, results, strict=True):
            if isinstance(result, DeadlineExceededError):
                late = result
            elif isinstance(result, GONE):  # the shard went away: the result leaves it out
                continue
            elif isinstance(result, BaseException):
                raise result
            else:
                answers[shard] = result
        if late is not None and not answers:
            raise late
        return answers

    async def ask_all(self, method: str, request: Message, timeout: float | None, read: Callable[[Any], T]) -> T:
        """Asks all shards, and merges their answers into one record. `read` makes a record of each answer.

        Raises ServerUnavailableError with the names of the shards that cannot be reached in time, if there are any.
        Also raises the error of any shard, because each shard must answer.
        """
        deadline = Deadline(timeout)
        self.connect()
        while gone := [shard.name for shard in self.shards if not shard.is_up]:
            if not await self._changes(deadline):
                raise ServerUnavailableError(f"this needs all shards, and {', '.join(gone)} cannot be reached")
        shards = list(self.shards)  # `_follow` may replace them while the shards answer
        answers = await asyncio.gather(*(shard.ask(method, request, deadline.seconds) for shard in shards))
        records = [read(answer) for answer in answers]
        return self._merged(method, dict(zip(shards, records, strict=True)))

    def _merged(self, method: str, records: Mapping[Shard, T]) -> T:
        """Merges the shards' records into one, with the function that MERGES has for the method.

        That function also gets the names of the shards without a record.
        """
        gone = [shard.name for shard in self.shards if shard not in records]
        records_by_name = {shard.name: record for shard, record in records.items()}
        merged: T = MERGES[method](records_by_name, gone)
        return merged

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Starts a task for which nobody waits.

        The fleet keeps a reference to the task until it ends. Without it, the task could be garbage-collected.
        """
        task = asyncio.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def close(self) -> None:
        """Ends the tasks that watch the shards, and closes all connections."""
        self._closed = True
        if self._following is not None:
            self._following.cancel()
            await asyncio.gather(self._following, return_exceptions=True)
        await asyncio.gather(*(shard.close() for shard in self.shards))
        for shard in self.shards:
            self._changed(shard)  # wakes the callers that wait until `decided`, which is True now

    async def _follow(self, names: RayNames) -> None:
        """Adds the shards that `replay shards resize` has added, and closes the shards that it has removed.

        Runs as a task until `close`.
        """
        while True:
            await asyncio.sleep(SECONDS_PER_LOOK)
            known = {shard.name: shard for shard in self.shards}
            listed = await names.listed()
            if not listed or set(listed) == known.keys():  # Ray does not answer, or nothing has changed
                continue
            self.shards = [known.get(name) or self._make_shard(name, self.address) for name in listed]
            for shard in self.shards:
                shard.watch()  # does nothing for a shard that is watched already
            removed = known.keys() - set(listed)
            for name in removed:
                await known[name].close()

    def _changed(self, shard: Shard) -> None:
        """Wakes all callers that wait for a change, and calls the listeners."""
        present_event = self.changed
        self.changed = asyncio.Event()  # for the next change
        present_event.set()
        for listener in self.listeners:
            listener(shard)


# --------------------------------------------------------------------------------------------------------- names in Ray


@dataclass(frozen=True)
class RayNames:
    """The names of the actors NAME-0, NAME-1, ... in a namespace of Ray. Each actor runs the server of one shard.

    This process joins the Ray cluster, so that it can ask for the addresses of the actors. Ray is imported only for an
    address that begins with ray://.
    """

    namespace: str
    name: str
    _ray: Any
    """The module `ray`."""

    @classmethod
    def of(cls, address: str) -> Self | None:
        """The names at a ray:// address; None for any other address. Joins the Ray cluster for a ray:// address.

        Raises ValueError if the ray:// address is wrong, if Ray is not installed, or if no Ray cluster is found.
        """
        if not address.startswith(RAY_SCHEME):
            return None
        namespace, _, name = address.removeprefix(RAY_SCHEME).partition("/")
        if not namespace or not name or "/" in name:
            raise ValueError(f"address must be ray://NAMESPACE/NAME, for example ray://replay/replay, not {address!r}")
        try:
            import ray
        except ImportError:
            remedy = "pip install '.[ray]' in a clone of the repository, or name host:port of each shard"
            raise ValueError(f"{address} needs Ray: {remedy}") from None
        if not ray.is_initialized():
            try:
                ray.init(address="auto", namespace=namespace, log_to_driver=False, logging_level=logging.WARNING)
            except ConnectionError as error:
                raise ValueError(f"{address}: no Ray cluster runs here, and RAY_ADDRESS names none: {error}") from None
        return cls(namespace, name, ray)

    def find(self) -> list[str]:
        """Asks Ray for the names of all shards, and returns them in the order of their numbers.

        Raises ValueError if there is no shard.
        """
        pattern = re.compile(re.escape(self.name) + r"-(\d+)")
        actors = self._ray.util.list_named_actors(all_namespaces=True)
        numbers: list[int] = []
        for actor in actors:
            if actor["namespace"] != self.namespace:
                continue
            match = pattern.fullmatch(actor["name"])
            if match:
                numbers.append(int(match[1]))
        if not numbers:
            raise ValueError(f"Ray has no {self.name}-0 in the namespace {self.namespace}: run `replay shards up`")
        return [f"{self.name}-{number}" for number in sorted(numbers)]

    async def listed(self) -> list[str]:
        """As `find`, without blocking the event loop. Empty if there is no shard, or if Ray does not answer."""
        with suppress(ValueError, self._ray.exceptions.RayError):
            return await asyncio.to_thread(self.find)
        return []

    def locate(self, name: str) -> str | None:
        """Asks Ray for host:port of the shard `name`. None: the shard is away, or Ray does not answer in time.

        May block for some seconds.
        """
        try:
            actor = self._ray.get_actor(name, namespace=self.namespace)
            return str(self._ray.get(actor.address.remote(), timeout=_RAY_SECONDS))
        except (ValueError, self._ray.exceptions.RayError):
            return None
