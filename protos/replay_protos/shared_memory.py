"""Shared memory: rings through which payloads pass between two processes of one machine, beside the gRPC messages.

* A ring carries the payloads of one stream in one direction: one side puts them in, the other takes them out in order.
* A message names the bytes by position. The reader checks the position and copies the bytes before anything uses them.
* The reader frees bytes by moving `_FREED` in the segment. Nobody waits for a message in order to free a ring.
* A segment is a file of one user (0600). All of its memory is reserved when it is made, so no access to it can fail.
* The file has a name only until both sides have mapped it.

Both sides belong to one user, who may stop either process anyway. The rings do not protect one side from a program that
this user runs, except that neither side ever trusts what it reads here.
"""

from __future__ import annotations

import asyncio
import fcntl
import mmap
import os
import secrets
import stat
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

from replay_protos.framing import Frame, M, SharedFrame

HEADER = 4096
"""Bytes of a segment before its ring."""
MAX_CAPACITY = 64 << 20
"""Bytes of the largest ring."""
_PREFIX = "replay-ring-"
_MAKING = "replay-new-ring-"
_MAGIC = b"replay ring 1\n\0\0"
# Positions in the header.
_RING_ID, _NONCE, _PROOF, _FREED = 16, 24, 40, 64
_NONCE_BYTES = 16
_ALIGNMENT = 64
"""Payloads of a frame start at a multiple of this, where memory is copied fastest."""
_JOIN_BELOW = 8192
"""Mean bytes of chunks below which they are joined first: Python costs more for each chunk than a second copy."""
_POPULATE = getattr(mmap, "MAP_POPULATE", 0)
"""Maps all pages at once, where the system can. Otherwise each page is a fault at its first access."""
_MAKING_SECONDS = 60.0
"""Seconds after which a file that has no lock yet is one of a process that was killed."""
_fence = threading.Lock()


class Segment:
    """The file and the memory of one ring. The memory is given back when the last reference to the segment goes."""

    def __init__(self, ring_id: int, path: Path, fd: int, capacity: int) -> None:
        self.ring_id = ring_id
        self.path = path
        self.capacity = capacity
        self._fd = fd
        self._named = False
        self.view = memoryview(mmap.mmap(fd, HEADER + capacity, mmap.MAP_SHARED | _POPULATE))
        self._named = True

    @classmethod
    def create(cls, folder: Path, capacity: int) -> Segment:
        """Makes a file in `folder`. Raises OSError if the folder is missing, or has no room for all of the segment."""
        ring_id = secrets.randbits(63) | 1
        path = folder / f"{_PREFIX}{os.getpid()}-{ring_id:016x}"
        making = folder / f"{_MAKING}{os.getpid()}-{ring_id:016x}"
        fd = os.open(making, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            # A server that starts later sees by this lock that the file is in use (remove_stale). The file gets its
            # name after the lock: a server that starts in between would take it for stale.
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            making.rename(path)
            # Without this a full file system would end the process with SIGBUS at the first access.
            os.posix_fallocate(fd, 0, HEADER + capacity)
            os.pwrite(fd, _MAGIC + ring_id.to_bytes(8, "little") + secrets.token_bytes(_NONCE_BYTES), 0)
            return cls(ring_id, path, fd, capacity)
        except BaseException:
            os.close(fd)
            making.unlink(missing_ok=True)
            path.unlink(missing_ok=True)
            raise

    @classmethod
    def attach(cls, path: Path, ring_id: int, capacity: int) -> Segment:
        """Maps the segment that the other side has made, proves it, and removes the name of the file.

        Raises OSError or ValueError with the reason if the file cannot be used. A file that is not such a segment
        remains as it is, whatever the other side says.
        """
        if not path.name.startswith(_PREFIX):
            raise ValueError(f"{path} is not named as a ring")
        found = path.lstat()
        if not stat.S_ISREG(found.st_mode) or stat.S_IMODE(found.st_mode) != 0o600:
            raise ValueError(f"{path} is not a private file")
        if found.st_uid != os.geteuid():
            raise PermissionError(f"{path} belongs to user {found.st_uid}, and this process to user {os.geteuid()}")
        fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            if os.pread(fd, _NONCE, 0) != _MAGIC + ring_id.to_bytes(8, "little"):
                raise ValueError(f"{path} is not the ring that the server made")
            if os.fstat(fd).st_size != HEADER + capacity:
                raise ValueError(f"{path} does not have the size of the ring")
            segment = cls(ring_id, path, fd, capacity)
        except BaseException:
            os.close(fd)
            raise
        # Through the memory and not through the file: two machines may share a folder, but never memory.
        segment.view[_PROOF : _PROOF + _NONCE_BYTES] = segment.view[_NONCE : _NONCE + _NONCE_BYTES]
        segment.forget_name()
        return segment

    def proven(self) -> bool:
        """Whether the other side has this memory too."""
        return self.view[_PROOF : _PROOF + _NONCE_BYTES] == self.view[_NONCE : _NONCE + _NONCE_BYTES]

    def forget_name(self) -> None:
        """Removes the name of the file. Both sides do this, so that none is left if the other side is killed."""
        if self._named:
            self._named = False
            self.path.unlink(missing_ok=True)
            os.close(self._fd)

    def __del__(self) -> None:
        # The request for this segment may have ended while a thread made it.
        self.forget_name()


def remove_stale(folder: Path) -> None:
    """Removes segments whose process was killed in the few milliseconds in which they had a name."""
    for path in [*folder.glob(f"{_PREFIX}*"), *folder.glob(f"{_MAKING}*")]:
        with suppress(OSError):
            found = path.lstat()
            fresh = path.name.startswith(_MAKING) and abs(time.time() - found.st_mtime) < _MAKING_SECONDS
            if found.st_uid != os.geteuid() or fresh:
                continue
            fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)  # OSError: its process lives
                path.unlink()
            finally:
                os.close(fd)


class RingWriter:
    """Puts payloads into a ring. Positions count all bytes since the start; a position's place is its remainder."""

    def __init__(self, segment: Segment) -> None:
        self.segment = segment
        self.ring_id = segment.ring_id
        self.capacity = segment.capacity
        self._bytes = segment.view[HEADER:]
        self._freed = segment.view[_FREED : _FREED + 8].cast("Q")
        self._end = 0
        """The position behind the last payload."""
        self._last_freed = 0

    def put(self, chunks: Sequence[bytes | memoryview], size: int) -> int | None:
        """Copies the chunks, `size` bytes in all, and returns their position. None: there is no room now."""
        start = -(-self._end // _ALIGNMENT) * _ALIGNMENT
        place = start % self.capacity if self.capacity else 0
        if place + size > self.capacity:  # the bytes of a frame lie in one stretch
            start, place = start + self.capacity - place, 0
        freed = self.freed()
        if size > self.capacity or (freed != self._end and start + size - freed > self.capacity):
            return None
        at = place
        for chunk in _few(chunks, size):
            self._bytes[at : at + len(chunk)] = chunk
            at += len(chunk)
        self._end = start + size
        return start

    def freed(self) -> int:
        """The position before which the reader has taken everything.

        The other side can write anything there. A position that cannot be is passed over: then nothing is free.
        """
        freed = self._freed[0]
        if self._last_freed <= freed <= self._end:
            self._last_freed = freed
        return self._last_freed


class RingReader:
    """Takes payloads out of a ring, in the order in which they were put in."""

    def __init__(self, segment: Segment) -> None:
        self.segment = segment
        self.ring_id = segment.ring_id
        self.capacity = segment.capacity
        self._bytes = segment.view[HEADER:].toreadonly()
        self._freed = segment.view[_FREED : _FREED + 8].cast("Q")
        self._end = 0

    def take(self, position: int, size: int, rows: Sequence[int]) -> list[bytes]:
        """Copies `size` bytes out and frees them. One chunk for each of `rows` if these are sizes that add up to it.

        Raises ValueError if no writer can have put them there.
        """
        if sum(rows) != size:
            rows = (size,)
        copies: list[bytes] = []
        self.lend(
            position,
            size,
            lambda lent: copies.extend(bytes(lent[start:end]) for start, end in pairwise(accumulate(rows, initial=0))),
        )
        return copies

    def lend(self, position: int, size: int, copy: Callable[[memoryview], None]) -> None:
        """Calls `copy` with a view of the `size` bytes, and frees them. The view must not be used after the call.

        Raises ValueError if no writer can have put them there.
        """
        place = position % self.capacity if self.capacity else 0
        if not 0 < size <= self.capacity - place or not self._end <= position <= self._end + 2 * self.capacity:
            raise ValueError(
                f"{size} bytes at {position} are not in a ring of {self.capacity} bytes read to {self._end}"
            )
        copy(self._bytes[place : place + size])
        self._end = position + size
        # On processors that reorder memory accesses: all copies are read before the writer may overwrite them.
        with _fence:
            pass
        with _fence:
            self._freed[0] = self._end


def _few(chunks: Sequence[bytes | memoryview], size: int) -> Iterable[bytes | memoryview]:
    if len(chunks) > 1 and size < _JOIN_BELOW * len(chunks):
        return (b"".join(chunks),)
    return (memoryview(chunk).cast("B") for chunk in chunks)


# ---------------------------------------------------------------------------------------------------- frames

MIN_SHARED = 16 << 10
"""Payload bytes from which on a frame goes through a ring. Fewer bytes are as fast in the message."""
BYTES_PER_FRAME = 4 << 20
"""Payload bytes in one frame that goes through a ring, about. A message costs gRPC the same, however much it names."""
_PAUSE = 0.001
"""Seconds between two looks at a full ring."""
_PATIENCE = 0.1
"""Seconds without progress of the reader after which payloads go into messages until it has made room."""


ReaderOf = Callable[[int], RingReader | None]
"""The ring with an id; None: there is none."""
Keep = Callable[[memoryview], bytes | memoryview]
"""Turns received bytes into a payload. `bytes` copies them; `memoryview` does not, so they must stay as they are."""


def is_large(payloads: Iterable[bytes | memoryview]) -> bool:
    """Whether a ring carries these payloads at less cost than a message does."""
    return sum(map(len, payloads)) >= MIN_SHARED


class FrameWriter:
    """Moves the payloads of one stream's frames into a ring. A frame for which there is no room stays as it is."""

    def __init__(self, segment: Segment) -> None:
        self.segment = segment
        self._ring = RingWriter(segment)
        self.stalled = False
        """Whether the reader made no room for the last frame."""
        self._head: Any = None
        self._chunks: list[bytes | memoryview] = []
        self._gathered = self._missing = 0

    async def place(self, frame: Frame[M]) -> Frame[M] | SharedFrame[M]:
        """The frame for gRPC. Waits for a reader that makes progress; one that does not is gRPC's to hold back."""
        size = sum(map(len, frame.payloads))
        if size < MIN_SHARED:
            return frame
        position = self._ring.put(frame.payloads, size)
        if position is None and not self.stalled and size <= self._ring.capacity:
            position = await self._put_in_turn(frame.payloads, size)
        self.stalled = position is None
        return frame if position is None else SharedFrame(frame.head, self._ring.ring_id, position, size)

    def gather(self, frame: Frame[M]) -> Frame[M] | None:
        """Joins the frames of one response while they are short. None: keep this one, more of the response follows."""
        sizes: Sequence[int] = getattr(frame.head, "payload_sizes", ())
        if self._head is None:
            self._head, self._missing = frame.head, sum(sizes) or self._missing
        size = sum(map(len, frame.payloads))
        self._chunks += frame.payloads
        self._gathered += size
        self._missing -= size
        if self._missing > 0 and self._gathered < BYTES_PER_FRAME:
            return None
        gathered = Frame(self._head, self._chunks)
        self._head, self._chunks, self._gathered = None, [], 0
        return gathered

    async def _put_in_turn(self, chunks: Sequence[bytes | memoryview], size: int) -> int | None:
        freed, waited = self._ring.freed(), 0.0
        while waited < _PATIENCE:
            await asyncio.sleep(_PAUSE)
            if (position := self._ring.put(chunks, size)) is not None:
                return position
            waited += _PAUSE
            if (now := self._ring.freed()) != freed:
                freed, waited = now, 0.0
        return None


def take_frame(frame: Frame[M], reader_of: ReaderOf) -> Frame[M]:
    """The frame with its payload bytes, copied out of the ring if they are in one: a chunk for each row, if possible.

    Raises LookupError if there is no ring of its id, and ValueError if no writer can have put the bytes there.
    """
    # Every message that is read as a frame has these fields; mypy knows only the base class.
    head: Any = frame.head
    if not head.HasField("shared"):
        return frame
    return Frame(frame.head, _reader(head, reader_of).take(head.shared.position, head.shared.size, head.payload_sizes))


def pass_on(frame: Frame[Any], reader_of: ReaderOf, add: Callable[[bytes | memoryview, Keep], None]) -> None:
    """Gives the payload bytes of the frame to `add`, with what makes them last: those of a ring must be copied.

    Raises as `take_frame`.
    """
    head = frame.head
    if not head.HasField("shared"):
        for chunk in frame.payloads:
            add(chunk, memoryview)
        return
    _reader(head, reader_of).lend(head.shared.position, head.shared.size, lambda lent: add(lent, bytes))


def _reader(head: Any, reader_of: ReaderOf) -> RingReader:
    if (reader := reader_of(head.shared.ring)) is None:
        raise LookupError(f"ring {head.shared.ring} is not one of this stream's")
    return reader
