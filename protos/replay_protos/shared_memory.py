"""Shared memory: rings through which payloads pass between two processes of one machine, beside the gRPC messages.

* A ring carries the payloads of one stream in one direction: one side puts them in, the other takes them out in order.
* A message names the bytes by position. The reader checks the position and copies the bytes before anything uses them.
* The reader frees bytes by moving `_FREED` in the segment. Nobody waits for a message in order to free a ring.
* The server makes each segment, in memory that has no name. Its size is sealed: no process can cut the memory under
  another one, which would end that one with SIGBUS.
* The server sends the memory to a socket of the client (`Mailbox`), and never takes a descriptor from anybody. So
  containers of one host have rings if they share a folder.

Neither side trusts what it reads in a segment.
"""

from __future__ import annotations

import asyncio
import ctypes
import errno
import fcntl
import mmap
import os
import secrets
import socket
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

from replay_protos.framing import Frame, M, SharedFrame
from replay_protos.memory import copied

HEADER = 4096
"""Bytes of a segment before its ring."""
MAX_CAPACITY = 64 << 20
"""Bytes of the largest ring."""
_FREED = 64
"""Where the header says up to which position the reader has taken everything."""
_ALIGNMENT = 64
"""Payloads of a frame start at a multiple of this, where memory is copied fastest."""
_JOIN_BELOW = 8192
"""Mean bytes of chunks below which they are joined first: Python costs more for each chunk than a second copy."""
_POPULATE = getattr(mmap, "MAP_POPULATE", 0)
"""Maps all pages at once, where the system can. Otherwise each page is a fault at its first access."""
_RING_ID = 8
"""Bytes of a ring's id in the message that brings its memory."""
# Numbers of Linux.
_MFD_CLOEXEC, _MFD_ALLOW_SEALING = 1, 2
_F_ADD_SEALS, _F_SEAL_SEAL, _F_SEAL_SHRINK, _F_SEAL_GROW = 1033, 1, 2, 4
_fence = threading.Lock()


class Segment:
    """The memory of one ring. It is given back when the last reference to the segment goes."""

    def __init__(self, path: Path, ring_id: int, fd: int, capacity: int) -> None:
        """`path` is that of the client's mailbox."""
        self.path = path
        self.ring_id = ring_id
        self.capacity = capacity
        self._fd: int | None = None
        self.view = memoryview(mmap.mmap(fd, HEADER + capacity, mmap.MAP_SHARED | _POPULATE))

    @classmethod
    def create(cls, folder: Path, capacity: int) -> Segment:
        """Makes the memory. Raises OSError if the system has too little of it."""
        fd = _unnamed_file()
        try:
            # Reserves the memory. Otherwise the first access to a page could find that there is none.
            os.posix_fallocate(fd, 0, HEADER + capacity)
            fcntl.fcntl(fd, _F_ADD_SEALS, _F_SEAL_SHRINK | _F_SEAL_GROW | _F_SEAL_SEAL)
            ring_id = secrets.randbits(63) | 1
            segment = cls(folder / f"replay-rings-{ring_id:016x}", ring_id, fd, capacity)
        except BaseException:
            os.close(fd)
            raise
        segment._fd = fd
        assert len(segment.view) == HEADER + capacity, (len(segment.view), capacity)
        return segment

    def hand_over(self) -> None:
        """Sends the memory to its client's mailbox. Raises OSError with the reason if that does not take it at once."""
        assert self._fd is not None, "the memory was handed over, or closed"
        # This socket has no address, and is never read from: so nobody can send anything to it.
        with _address_of(self.path) as address, socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sending:
            sending.setblocking(False)
            sending.connect(address)
            socket.send_fds(sending, [self.ring_id.to_bytes(_RING_ID, "little")], [self._fd])
        self.close_fd()

    @property
    def handed_over(self) -> bool:
        return self._fd is None

    def close_fd(self) -> None:
        """Closes the file descriptor by which the memory could be handed over. The mapping stays."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def close(self) -> None:
        """Gives the memory back, of which nobody has another view: the segment was not handed over."""
        memory = self.view.obj
        self.view.release()
        memory.close()
        self.close_fd()

    def __del__(self) -> None:
        self.close_fd()  # the request for this segment may have ended while a thread made it


def _unnamed_file() -> int:
    """A file in memory that can be sealed."""
    # The module `os` of a Python that was built for an old C library lacks the function, though the system has it.
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "memfd_create"):
        raise OSError(errno.ENOSYS, "this system has no memfd_create")
    if (fd := int(libc.memfd_create(b"replay-ring", _MFD_CLOEXEC | _MFD_ALLOW_SEALING))) < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return fd


class Mailbox:
    """The socket of a client, to which its server sends the memory of one ring. The server has no such socket.

    A stranger could send it a TCP socket with SO_LINGER. Whoever closes or drops that one last, by `recv` too, waits in
    the system for as long as the stranger chose. So `receive` belongs on a thread.
    """

    def __init__(self, path: Path) -> None:
        """Makes the socket. Raises OSError with the reason if it cannot."""
        self.path = path
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            self._socket.setblocking(False)
            os.fchmod(self._socket.fileno(), 0o600)  # bind gives this mode to the file
            with _address_of(path) as address:
                self._socket.bind(address)
        except BaseException:
            self._socket.close()
            raise

    def receive(self, ring_id: int, capacity: int) -> Segment | None:
        """Maps the memory that the server has sent, and ends the mailbox. None: nothing came."""
        with self._socket, suppress(BlockingIOError):
            self.path.unlink(missing_ok=True)
            sent_id, fds, _, _ = socket.recv_fds(self._socket, _RING_ID, 1)
            for fd in fds:
                try:
                    # Another client's link at the path of its own mailbox could lead the server to this one.
                    if int.from_bytes(sent_id, "little") == ring_id:
                        return Segment(self.path, ring_id, fd, capacity)
                finally:
                    os.close(fd)
        return None


@contextmanager
def _address_of(path: Path) -> Iterator[str]:
    """A name for the socket that fits into the 107 bytes that the system takes, however deep its folder lies.

    Turns what the system says of the socket into a sentence.
    """
    try:
        folder = os.open(path.parent, getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY)
        try:
            yield f"/proc/self/fd/{folder}/{path.name}"
        finally:
            os.close(folder)
    except (FileNotFoundError, ConnectionRefusedError):
        # A folder that two hosts share shows the socket to both, but only the client's host has somebody behind it.
        where = f"the server runs on another host, or in a container whose {path.parent} is not this one's"
        raise OSError(where) from None
    except PermissionError as error:
        raise OSError(f"client and server run as different users ({error.strerror})") from None
    except OSError as error:
        raise OSError(f"{path.parent} cannot hold a socket: {error.strerror or error}") from None


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
        assert at == place + size, f"the chunks have {at - place} bytes, and the reader is told of {size}"
        assert start >= self._end, "a payload would lie before the one before it"
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

    def take(self, position: int, size: int, rows: Sequence[int]) -> list[bytes | memoryview]:
        """Copies `size` bytes out and frees them. One chunk for each of `rows` if these are sizes that add up to it.

        Raises ValueError if no writer can have put them there.
        """
        if sum(rows) != size:
            rows = (size,)
        copies: list[bytes | memoryview] = []
        self.lend(
            position,
            size,
            lambda lent: copies.extend(copied(lent[start:end]) for start, end in pairwise(accumulate(rows, initial=0))),
        )
        assert len(copies) == len(rows), (len(copies), len(rows))
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
        assert position + size > self._end, "the writer would take bytes back"
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
