"""AsyncLeaseRenewer: renews the leases of samples in the background, until their reader has finished with them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from contextlib import AbstractAsyncContextManager, suppress

from replay_client.errors import ReplayError
from replay_client.records import MutationResult, Sample, SampleInfo
from replay_client.waits import WaitLog

RENEWALS = 4
"""The number of renewals in the time of a lease. A lease survives three renewals in a row that fail."""
_TOGETHER = 0.05
"""Seconds that the first renewal of samples waits for more new samples, so that one request renews all of them."""

OnLost = Callable[[list[SampleInfo]], None]
"""A function that is called with samples whose lease has ended, because another reader may have these samples now."""
Renew = Callable[..., Awaitable[MutationResult]]
"""The type of `AsyncReplayClient.renew`."""


class AsyncLeaseRenewer(AbstractAsyncContextManager["AsyncLeaseRenewer"]):
    """Renews the leases of samples. `AsyncReplayClient.auto_renew()` makes one, for an `async with` block.

    The end of the `async with` block ends the renewals, but not the leases. `acknowledge` ends a lease.
    """

    def __init__(self, renew: Renew, lease: float, on_lost: OnLost) -> None:
        """`renew`: the method of the client. `lease`: seconds of each lease."""
        self._renew = renew
        self._lease = lease
        self._on_lost = on_lost
        self._batches: dict[int, list[SampleInfo]] = {}
        """Id of a lease -> the `info` of its samples. These leases are renewed."""
        self._lost_at: dict[int, float] = {}
        """Id of a lease -> the time, by the clock of the event loop, at which the server first reported it missing.

        These leases are still in `_batches`, so they are still renewed.
        """
        self._new = asyncio.Event()
        """Set when samples were added."""
        self._log = WaitLog("the renewal of leases", late=True)
        self._task: asyncio.Task[None] | None = None
        """The task that renews the leases; None before the first `add`."""

    def add(self, samples: Iterable[Sample]) -> None:
        """Renews the leases of these samples from now on, the first time at once. Ignores samples without a lease."""
        for sample in samples:
            if sample.info.lease_id:
                self._batches.setdefault(sample.info.lease_id, []).append(sample.info)
        self._new.set()
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run())

    def forget(self, samples: Iterable[Sample]) -> None:
        """Stops renewing the leases of these samples. All samples of one draw share a lease."""
        for sample in samples:
            self._batches.pop(sample.info.lease_id, None)
            self._lost_at.pop(sample.info.lease_id, None)

    async def close(self) -> None:
        """Ends the renewals."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _run(self) -> None:
        """Renews all leases RENEWALS times in the time of a lease, and soon after samples were added."""
        while True:
            with suppress(TimeoutError):  # it is time for the next renewal, although no samples were added
                async with asyncio.timeout(self._lease / RENEWALS):
                    await self._new.wait()
                    await asyncio.sleep(_TOGETHER)
            self._new.clear()
            if not self._batches:
                continue
            # `renew` reads only the lease of each sample. So one sample of each lease is enough, without its payload.
            samples = [Sample(infos[0], payload=b"") for infos in self._batches.values()]
            try:
                result = await self._renew(samples, self._lease, timeout=self._lease / RENEWALS)
            except ReplayError as error:
                # This error does not say that a lease has ended. The next answer says which leases have ended.
                self._log.wait(f"leases are not renewed: {error}")
                continue
            self._log.go_on()
            requested = {sample.info.lease_id for sample in samples}
            self._note_missing(set(result.missing), requested)

    def _note_missing(self, missing: set[int], requested: set[int]) -> None:
        """Reports leases that are missing for the first time, and forgets leases that have been missing for long.

        `requested`: the leases that the last request was to renew. `missing`: those of them that the server reported
        missing. Ignores a lease that `forget` removed while the request was under way.
        """
        now = asyncio.get_running_loop().time()
        lost: list[SampleInfo] = []
        for lease in requested & self._batches.keys():
            if lease not in missing:
                self._lost_at.pop(lease, None)
            elif lease not in self._lost_at:
                self._lost_at[lease] = now
                lost += self._batches[lease]
            elif now - self._lost_at[lease] > self._lease:
                # The leases of a shard that is away count as missing, too, and the shard may come back. So a missing
                # lease is still renewed for `_lease` seconds. After this time, even a shard that was away has taken its
                # samples back, so the lease is forgotten.
                del self._batches[lease]
                del self._lost_at[lease]
        self.check()
        if lost:
            self._on_lost(lost)

    def check(self) -> None:
        """Asserts that each missing lease is still renewed, and that the samples of a lease name this lease."""
        assert self._lost_at.keys() <= self._batches.keys(), self._lost_at.keys() - self._batches.keys()
        for lease, infos in self._batches.items():
            assert all(info.lease_id == lease for info in infos), (lease, infos)
