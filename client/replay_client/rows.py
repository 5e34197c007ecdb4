"""Rows: puts the payloads of one response together, row by row, while its messages come."""

from __future__ import annotations

from collections.abc import Sequence

import grpc
import numpy as np

from replay_client.columns.encoding import Buffer
from replay_client.errors import error_of
from replay_protos.memory import LARGE_PLACE, keep_freed_memory, large_place
from replay_protos.shared_memory import Keep

_LARGE = 128 << 10
"""Bytes of a response whose memory malloc may give back to the system, as soon as it is freed."""


class Rows:
    """The payloads of one response. No byte is copied twice.

    `keep` turns a row that lies in one message into its payload. For a row of several messages, this allocates all of
    its memory when the first bytes come, and copies each message straight to its place.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        self._sizes = sizes
        self._gap = memoryview(b"")
        """Where the bytes go that the last of `payloads` still lacks."""
        self.missing = sum(sizes)
        """The payload bytes that have not come."""
        self.payloads: list[Buffer] = []
        """One for each row; complete when nothing is missing."""
        if self.missing >= _LARGE:
            keep_freed_memory()
        self.add(b"", memoryview)  # the empty rows at the start

    def add(self, data: Buffer, keep: Keep) -> None:
        """Adds the bytes that come next. Raises ReplayError if they are more than announced, or have no room."""
        data = memoryview(data)
        end, at = len(data), min(len(self._gap), len(data))
        if end > self.missing:
            raise _wrong(f"the server sent {end - self.missing} payload bytes more than payload_sizes says")
        self.missing -= end
        if at:
            self._gap[:at] = data[:at]
            self._gap = self._gap[at:]
        sizes, row = self._sizes, len(self.payloads)
        while row < len(sizes) and (at < end or not (sizes[row] or self._gap)):
            size = sizes[row]
            if at + size <= end:
                self.payloads.append(keep(data[at : at + size]))
            else:
                self._begin(size, data[at:])
            at += size
            row += 1

    def _begin(self, size: int, start: memoryview) -> None:
        try:
            # numpy, too, asks the system for huge pages where they pay.
            place = (np.empty(size, dtype=np.uint8) if size < LARGE_PLACE else large_place(size)).data
        except (MemoryError, OSError, OverflowError, ValueError) as error:
            raise _wrong(f"the server announced a payload of {size} bytes, for which there is no memory") from error
        place[: len(start)] = start
        self._gap = place[len(start) :]
        self.payloads.append(place.toreadonly())


def _wrong(message: str) -> Exception:
    return error_of(grpc.StatusCode.UNKNOWN, message)
