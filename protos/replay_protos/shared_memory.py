"""Shared memory: rings through which payloads pass between two processes of one machine, beside the gRPC messages.

* A ring carries the payloads of one stream in one direction: one side puts them in, the other takes them out in order.
* A message names the position of its payload bytes in the ring. The reader checks the position and copies the bytes
  before anything uses them.
* The reader frees bytes: at `_FREED_OFFSET` in the segment, it writes how far it has read. This needs no message.
* The server makes each segment, in memory that has no name. The size of the memory is sealed, because a process that
  shrinks a mapped file would end the other process with SIGBUS.
* The server sends the file descriptor of the memory to a socket of the client (`Mailbox`), and never receives a
  descriptor. Containers of one host can therefore share rings if they share a folder.

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
_FREED_OFFSET = 64
"""Offset in the header of a number of 8 bytes: the position up to which the reader has taken everything."""
_ALIGNMENT = 64
"""Bytes. The payloads of a frame start at a multiple of this, because memory is copied fastest from there."""
_JOIN_BELOW = 8192
"""Bytes. Chunks whose mean size is below this are joined first: a second copy costs less than Python's work for each
chunk."""
_POPULATE = getattr(mmap, "MAP_POPULATE", 0)
"""The flag that maps all pages at once; 0 if the system has none. Without it, the first access to each page is a page
fault."""
_RING_ID_BYTES = 8
"""Bytes of a ring's id in the message that brings the ring's memory."""
# Constants of Linux's C headers, for memfd_create and for fcntl.
_MFD_CLOEXEC, _MFD_ALLOW_SEALING = 1, 2
_F_ADD_SEALS, _F_SEAL_SEAL, _F_SEAL_SHRINK, _F_SEAL_GROW = 1033, 1, 2, 4
_fence = threading.Lock()
"""A lock that protects nothing. Acquiring it and releasing it are memory barriers, and Python offers no others."""


class Segment:
    """The memory of one ring. The memory is freed when the last reference to the segment is gone."""

    def __init__(self, path: Path, ring_id: int, fd: int, capacity: int) -> None:
        """Maps the memory behind the file descriptor, which the caller closes. `path` is the client's mailbox."""
        self.path = path
        self.ring_id = ring_id
        self.capacity = capacity
        self._fd: int | None = None
        """On the server, until the memory is handed over: the descriptor of the memory."""
        self.view = memoryview(mmap.mmap(fd, HEADER + capacity, mmap.MAP_SHARED | _POPULATE))

    @classmethod
    def create(cls, folder: Path, capacity: int) -> Segment:
        """Makes the memory of a new ring. The client's mailbox will be in `folder`.

        Raises OSError if the system has too little memory.
        """
        fd = _unnamed_file()
        try:
            # Reserves the memory now. Otherwise memory could run out at the first access to a page.
            os.posix_fallocate(fd, 0, HEADER + capacity)
            fcntl.fcntl(fd, _F_ADD_SEALS, _F_SEAL_SHRINK | _F_SEAL_GROW | _F_SEAL_SEAL)
            ring_id = secrets.randbits(63) | 1  # never 0, which means "no ring"
            segment = cls(folder / f"replay-rings-{ring_id:016x}", ring_id, fd, capacity)
        except BaseException:
            os.close(fd)
            raise
        segment._fd = fd  # `__init__` leaves it None, because a client closes its descriptor
        assert len(segment.view) == HEADER + capacity, (len(segment.view), capacity)
        return segment

    def hand_over(self) -> None:
        """Sends the file descriptor of the memory to the client's mailbox.

        Raises OSError if the mailbox does not accept it at once.
        """
        assert self._fd is not None, "the memory was handed over, or closed"
        # This socket has no address, so nobody can send anything to it.
        with _address_of(self.path) as address, socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sending:
            sending.setblocking(False)
            sending.connect(address)
            socket.send_fds(sending, [self.ring_id.to_bytes(_RING_ID_BYTES, "little")], [self._fd])
        self.close_fd()

    @property
    def handed_over(self) -> bool:
        """True after `hand_over` has sent the memory. Ask only a segment that `create` made."""
        return self._fd is None

    def close_fd(self) -> None:
        """Closes the file descriptor by which the memory could be handed over. The mapping stays."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def close(self) -> None:
        """Frees the memory at once. Call this only if the segment was not handed over, so that it has no other view."""
        memory = self.view.obj
        self.view.release()
        memory.close()
        self.close_fd()

    def __del__(self) -> None:
        self.close_fd()  # the request for this segment may have ended while a thread made it


def _unnamed_file() -> int:
    """The descriptor of a new file in memory that can be sealed."""
    # `os.memfd_create` is missing in a Python that was built for an old C library, although the system may have it.
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "memfd_create"):
        raise OSError(errno.ENOSYS, "this system has no memfd_create")
    fd = int(libc.memfd_create(b"replay-ring", _MFD_CLOEXEC | _MFD_ALLOW_SEALING))  # the name is only shown in /proc
    if fd < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return fd


class Mailbox:
    """The socket of a client, to which the server sends the memory of one ring. The server has no such socket.

    Call `receive` on a thread of its own, because a stranger could block this thread: he could send the mailbox a TCP
    socket with SO_LINGER. The thread that closes the last descriptor of such a socket is blocked for as long as the
    stranger chose. This holds even for a descriptor that `recv` dropped.
    """

    def __init__(self, path: Path) -> None:
        """Makes the socket. Raises OSError with the reason if it cannot."""
        self.path = path
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            self._socket.setblocking(False)
            os.fchmod(self._socket.fileno(), 0o600)  # `bind` makes the file at the path with this mode
            with _address_of(path) as address:
                self._socket.bind(address)
        except BaseException:
            self._socket.close()
            raise

    def receive(self, ring_id: int, capacity: int) -> Segment | None:
        """Maps the memory that the server has sent, and closes the mailbox. None: the ring's memory did not come."""
        with self._socket, suppress(BlockingIOError):  # the error means that nothing was sent
            self.path.unlink(missing_ok=True)  # the mailbox is for one ring: nobody is to send anything more
            sent_id, fds, _, _ = socket.recv_fds(self._socket, _RING_ID_BYTES, maxfds=1)
            for fd in fds:
                try:
                    # The id differs if another client has linked the path of its own mailbox to this one.
                    if int.from_bytes(sent_id, "little") == ring_id:
                        return Segment(self.path, ring_id, fd, capacity)
                finally:
                    os.close(fd)
        return None


@contextmanager
def _address_of(path: Path) -> Iterator[str]:
    """Yields an address of the socket at `path` that fits into the 107 bytes that the system allows.

    If the block that uses the address fails, replaces its error by an OSError with a sentence about the cause.
    """
    try:
        # The path through the folder's descriptor is short, however long the path of the folder is.
        folder = os.open(path.parent, getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY)
        try:
            yield f"/proc/self/fd/{folder}/{path.name}"
        finally:
            os.close(folder)
    except (FileNotFoundError, ConnectionRefusedError):
        # If two hosts share a folder, both see the socket, but only processes of the client's host can connect to it.
        where = f"the server runs on another host, or in a container whose {path.parent} is not this one's"
        raise OSError(where) from None
    except PermissionError as error:
        raise OSError(f"client and server run as different users ({error.strerror})") from None
    except OSError as error:
        raise OSError(f"{path.parent} cannot hold a socket: {error.strerror or error}") from None


class RingWriter:
    """Puts payloads into a ring.

    A position is a number of bytes: all that were put into the ring or skipped before it, since the ring was made. So
    positions never decrease. The place of a position is its offset in the memory: position % capacity.
    """

    def __init__(self, segment: Segment) -> None:
        self.segment = segment
        self.ring_id = segment.ring_id
        self.capacity = segment.capacity
        self._bytes = segment.view[HEADER:]
        """The memory of the ring, without the header."""
        self._freed = segment.view[_FREED_OFFSET : _FREED_OFFSET + 8].cast("Q")
        """One number, which the reader writes: the position before which it has taken everything."""
        self._end = 0
        """The position behind the last payload."""
        self._last_freed = 0
        """The last position that `freed` accepted."""

    def put(self, chunks: Sequence[bytes | memoryview], size: int) -> int | None:
        """Copies the chunks, `size` bytes in all, into the ring. Returns their position; None: there is no room now.

        `place` and `offset` below are offsets in the memory, and `start` and `freed` are positions.
        """
        start = -(-self._end // _ALIGNMENT) * _ALIGNMENT  # rounded up
        place = start % self.capacity if self.capacity else 0
        # The bytes of a frame lie in one stretch. If they do not fit before the end of the ring, its rest is skipped.
        if place + size > self.capacity:
            start += self.capacity - place
            place = 0
        freed = self.freed()
        # If the ring is empty, any payload fits that is not larger than the ring, wherever it starts.
        is_empty = freed == self._end
        if size > self.capacity or (not is_empty and start + size - freed > self.capacity):
            return None
        offset = place
        for chunk in _joined_if_small(chunks, size):
            self._bytes[offset : offset + len(chunk)] = chunk
            offset += len(chunk)
        assert offset == place + size, f"the chunks have {offset - place} bytes, and the reader is told of {size}"
        assert start >= self._end, "a payload would lie before the one before it"
        self._end = start + size
        return start

    def freed(self) -> int:
        """The position before which the reader has taken everything.

        The reader's process can write any number into the segment. An impossible number is ignored, and the last
        possible one stays valid.
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
        """The memory of the ring, without the header."""
        self._freed = segment.view[_FREED_OFFSET : _FREED_OFFSET + 8].cast("Q")
        """One number, which this reader writes for the writer: the position before which it has taken everything."""
        self._end = 0
        """The position behind the last payload that was taken."""

    def take(self, position: int, size: int, row_sizes: Sequence[int]) -> list[bytes | memoryview]:
        """Copies the `size` bytes at `position`, and frees them in the ring.

        Returns one chunk for each row if `row_sizes` add up to `size`, else one chunk of all bytes. Raises ValueError
        if no writer can have put a payload there.
        """
        if sum(row_sizes) != size:  # the bytes are a part of a larger payload, or begin in the middle of a row
            row_sizes = (size,)
        copies: list[bytes | memoryview] = []

        def copy_rows(lent: memoryview) -> None:
            for start, end in pairwise(accumulate(row_sizes, initial=0)):
                copies.append(copied(lent[start:end]))

        self.lend(position, size, copy_rows)
        assert len(copies) == len(row_sizes), (len(copies), len(row_sizes))
        return copies

    def lend(self, position: int, size: int, copy: Callable[[memoryview], None]) -> None:
        """Calls `copy` with a view of the `size` bytes at `position`, then frees the bytes in the ring.

        `copy` must not keep the view. Raises ValueError if no writer can have put a payload there.
        """
        place = position % self.capacity if self.capacity else 0
        is_in_one_stretch = 0 < size <= self.capacity - place
        # Between two payloads, a writer skips at most _ALIGNMENT bytes and the rest of the ring. Together these bytes
        # are fewer than those of two rings.
        follows = self._end <= position <= self._end + 2 * self.capacity
        if not is_in_one_stretch or not follows:
            raise ValueError(
                f"{size} bytes at {position} are not in a ring of {self.capacity} bytes read to {self._end}"
            )
        copy(self._bytes[place : place + size])
        assert position + size > self._end, "the writer would take bytes back"
        self._end = position + size
        # All bytes must be read before the writer learns that it may overwrite them. A processor may move memory
        # accesses into a locked section, but not out of one. So the reads above happen before the end of the first
        # section, and the write happens after the start of the second section.
        with _fence:
            pass
        with _fence:
            self._freed[0] = self._end


def _joined_if_small(chunks: Sequence[bytes | memoryview], size: int) -> Iterable[bytes | memoryview]:
    """Joins the chunks, `size` bytes together, into one chunk if they are small. Otherwise returns a view of the bytes
    of each chunk."""
    if len(chunks) > 1 and size < _JOIN_BELOW * len(chunks):
        return (b"".join(chunks),)
    return (memoryview(chunk).cast("B") for chunk in chunks)


# ---------------------------------------------------------------------------------------------------- frames

MIN_SHARED = 16 << 10
"""Bytes. A payload of this size or more goes through a ring. Smaller payloads are as fast in the message."""
BYTES_PER_FRAME = 4 << 20
"""About the number of payload bytes in one frame that goes through a ring. Larger frames need fewer messages, and a
message costs gRPC the same, whatever the size of the payload that it names."""
_PAUSE = 0.001
"""Seconds between two attempts to put a payload into a full ring."""
_PATIENCE = 0.1
"""Seconds. If the reader makes no progress for so long, payloads go into messages until the reader has made room."""


ReaderOf = Callable[[int], RingReader | None]
"""Returns the ring with an id; None: the stream has no such ring."""
Keep = Callable[[memoryview], bytes | memoryview]
"""Turns received bytes into a payload that lasts: `bytes` copies them. `memoryview` does not copy, so it is only for
bytes that nobody overwrites."""


def is_large(payloads: Iterable[bytes | memoryview]) -> bool:
    """True if a ring carries these payloads at less cost than a message does."""
    return sum(map(len, payloads)) >= MIN_SHARED


class FrameWriter:
    """Moves the payloads of one stream's frames into a ring. A frame for which there is no room stays as it is."""

    def __init__(self, segment: Segment) -> None:
        self.segment = segment
        self._ring = RingWriter(segment)
        self.stalled = False
        """True if the ring had no room for the last large frame. Then the next frame does not wait for room."""
        self._head: Any = None
        """The head of the frame that `gather` is building; None: the next frame begins one."""
        self._chunks: list[bytes | memoryview] = []
        """The payloads of the frames that `gather` has joined so far."""
        self._gathered_bytes = 0
        """Bytes of `_chunks`."""
        self._missing_bytes = 0
        """Payload bytes of the response that have not come yet."""

    async def place(self, frame: Frame[M]) -> Frame[M] | SharedFrame[M]:
        """Puts the payload of the frame into the ring if there is room. Returns the frame to send: one that names the
        place in the ring, or `frame` as it is.

        Waits for room as long as the reader makes progress. After that, payloads stay in the messages, and gRPC's flow
        control has to slow the sender down.
        """
        size = sum(map(len, frame.payloads))
        if size < MIN_SHARED:
            return frame
        position = self._ring.put(frame.payloads, size)
        # Waits, unless the last wait was in vain, or the ring is too small for the frame.
        if position is None and not self.stalled and size <= self._ring.capacity:
            position = await self._put_when_free(frame.payloads, size)
        self.stalled = position is None
        return frame if position is None else SharedFrame(frame.head, self._ring.ring_id, position, size)

    def gather(self, frame: Frame[M]) -> Frame[M] | None:
        """Joins the frames of one response until they have BYTES_PER_FRAME together, or the response is complete.

        Returns the joined frame, or None while more of the response follows.
        """
        sizes: Sequence[int] = getattr(frame.head, "payload_sizes", ())
        if self._head is None:
            self._head = frame.head
            # The first message of a response has the sizes of all its payloads. Later messages have no sizes, and
            # `_missing_bytes` has been counted down since the first message.
            response_bytes = sum(sizes)
            if response_bytes:
                self._missing_bytes = response_bytes
        size = sum(map(len, frame.payloads))
        self._chunks += frame.payloads
        self._gathered_bytes += size
        self._missing_bytes -= size
        if self._missing_bytes > 0 and self._gathered_bytes < BYTES_PER_FRAME:
            return None
        joined = Frame(self._head, self._chunks)
        self._head = None
        self._chunks = []
        self._gathered_bytes = 0
        return joined

    async def _put_when_free(self, chunks: Sequence[bytes | memoryview], size: int) -> int | None:
        """Waits until the ring has room, puts the chunks into it, and returns their position.

        Tries every _PAUSE seconds. Returns None if the reader has freed nothing for _PATIENCE seconds.
        """
        freed = self._ring.freed()
        waited = 0.0
        while waited < _PATIENCE:
            await asyncio.sleep(_PAUSE)
            position = self._ring.put(chunks, size)
            if position is not None:
                return position
            waited += _PAUSE
            now = self._ring.freed()
            if now != freed:  # the reader makes progress: the patience begins anew
                freed = now
                waited = 0.0
        return None


def take_frame(frame: Frame[M], reader_of: ReaderOf) -> Frame[M]:
    """The frame with its payload bytes. Bytes that are in a ring are copied out, as a chunk for each row if possible.

    Raises LookupError if the stream has no such ring, and ValueError if no writer can have put a payload there.
    """
    # Every message that is read as a frame has these fields; mypy knows only the base class.
    head: Any = frame.head
    if not head.HasField("shared"):
        return frame
    reader = _reader(head, reader_of)
    chunks = reader.take(head.shared.position, head.shared.size, head.payload_sizes)
    return Frame(frame.head, chunks)


def pass_on(frame: Frame[Any], reader_of: ReaderOf, add: Callable[[bytes | memoryview, Keep], None]) -> None:
    """Calls `add` with the payload bytes of the frame, and with the function that makes these bytes last (`Keep`).

    If the bytes are in a ring, `add` must copy them before it returns, because the writer may overwrite them after
    that. Raises the errors of `take_frame`.
    """
    head = frame.head
    if not head.HasField("shared"):
        for chunk in frame.payloads:
            add(chunk, memoryview)
        return
    reader = _reader(head, reader_of)
    reader.lend(head.shared.position, head.shared.size, lambda lent: add(lent, bytes))


def _reader(head: Any, reader_of: ReaderOf) -> RingReader:
    """The ring that the message names. Raises LookupError if the stream has no such ring."""
    reader = reader_of(head.shared.ring)
    if reader is None:
        raise LookupError(f"ring {head.shared.ring} is not one of this stream's")
    return reader
