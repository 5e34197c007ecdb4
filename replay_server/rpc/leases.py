"""Leases: batches that their readers have got, and that go back unless they are acknowledged in time."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Sequence
from contextlib import ExitStack

from replay_server.limits import MAX_ROWS
from replay_server.tables.buffer import ReplayBuffer


class Leases:
    def __init__(self, buffer: ReplayBuffer) -> None:
        self._buffer = buffer
        self._open: dict[int, tuple[asyncio.TimerHandle, ExitStack]] = {}
        """By batch: what ends the lease, and its share of what clients may hold."""
        self._settled: dict[int, bool] = {}
        """The last batches that were acknowledged (False) or given back (True), so that a retry is recognised."""

    def __len__(self) -> int:
        return len(self._open)

    def begin(self, batch_id: int, seconds: float, share: ExitStack) -> None:
        """The batch goes back after so many seconds; `share` is closed when the lease ends."""
        expire = functools.partial(self._settle, batch_id, give_back=True)
        self._open[batch_id] = asyncio.get_running_loop().call_later(seconds, expire), share

    def acknowledge(self, batches: Sequence[int], give_back: bool) -> list[int]:
        """The readers keep these batches, or give them back. Returns those whose lease is over."""
        missing = []
        for batch_id in batches:
            if self._settle(batch_id, give_back):
                self._settled[batch_id] = give_back
            elif self._settled.get(batch_id) is not give_back:  # otherwise it is a retry, whose answer was lost
                missing.append(batch_id)
        while len(self._settled) > MAX_ROWS:
            del self._settled[next(iter(self._settled))]
        return missing

    def _settle(self, batch_id: int, give_back: bool) -> bool:
        lease = self._open.pop(batch_id, None)
        if lease is None:
            return False
        timer, share = lease
        timer.cancel()
        share.close()
        if give_back:
            self._buffer.give_back(batch_id)
        else:
            self._buffer.take(batch_id, sent=True)
        return True
