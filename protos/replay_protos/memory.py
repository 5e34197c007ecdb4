"""Memory: reuses the memory of freed payloads for the next large payloads, because new memory is slow.

The system zeroes each page before a process gets the page. A page that a virtual machine has given back to its host
takes far longer still: the first copy to such memory ran at 0.13 GB/s, and the next copy to the same memory at 9 GB/s.
After `keep_freed_memory`, malloc keeps up to 30 MiB of freed memory in each heap. Payloads of `LARGE_BUFFER` bytes or
more are read into a `large_buffer`.
"""

import functools
import mmap
import weakref
from collections import deque

import numpy as np
import numpy.typing as npt

_FREED_BLOCK = 15 << 20
"""Bytes of the block that `keep_freed_memory` frees. After that, glibc keeps up to twice as many freed bytes, which are
enough for the batches of a reader. A block of 31 MiB was no faster, and glibc ignores blocks that are larger still."""


@functools.cache
def keep_freed_memory() -> None:
    """Makes malloc keep the freed memory of large payloads, which it would otherwise return to the system each time.

    When a block that glibc mapped separately is freed, glibc raises its trim threshold to twice the size of that block.
    After this call it therefore keeps up to 30 MiB of freed memory at the end of each heap. A program that frees large
    arrays has this effect anyway. The environment variables MALLOC_TRIM_THRESHOLD_ and MALLOC_MMAP_THRESHOLD_ take
    precedence. With other C libraries than glibc, the call has no effect.
    """
    bytes(_FREED_BLOCK)  # mapped, never touched, and freed at once: it takes no memory


LARGE_BUFFER = 32 << 20
"""Bytes. malloc maps each block of this size or more separately, and returns it to the system when it is freed."""
_HUGE_PAGE = 2 << 20
"""Bytes of a huge page."""
_MOST_IDLE = 2 << 30
"""The most bytes that all idle blocks may have together."""
_idle: deque[mmap.mmap] = deque()
"""Blocks that nobody uses. A freed block is added at the end. Single operations of a deque are atomic, so any thread
may free a block without a lock."""


def large_buffer(size: int) -> npt.NDArray[np.uint8]:
    """Returns a buffer of `size` bytes with any content, if possible in the memory of an earlier buffer.

    The memory of a buffer is a block. When the last view of the buffer is gone, its block becomes idle. Idle blocks of
    up to _MOST_IDLE bytes together wait for the next buffer. The system may take their pages at any time (MADV_FREE),
    and does so when memory is short. The pages that it did not take need no page fault in the next buffer.

    Raises OSError, OverflowError or ValueError if there is no memory.
    """
    block = _idle_block(size) or _new_block(size)
    buffer = np.frombuffer(block, np.uint8, size)
    # Every view of the buffer, also through numpy or torch, keeps this array alive. Python calls the finalizer when the
    # array is freed. At exit the finalizer is not needed, because the process then loses all its memory anyway.
    weakref.finalize(buffer, _give_back, block).atexit = False
    return buffer


def copied(view: memoryview) -> bytes | memoryview:
    """Copies the view. If its size is a multiple of a huge page, like the size of the parts of a large row, the copy is
    in a `large_buffer`. Otherwise it is `bytes`."""
    if not view or len(view) % _HUGE_PAGE:  # a `large_buffer` consists of whole huge pages, and would waste a part
        return bytes(view)
    buffer = memoryview(large_buffer(len(view)))
    buffer[:] = view
    return buffer


def give_back_idle() -> None:
    """Returns the memory of all idle blocks to the system."""
    _idle.clear()


def _idle_block(size: int) -> mmap.mmap | None:
    """Takes an idle block of at least `size` bytes, and of at most twice as many; None: there is none."""
    # Looks at each idle block once, because a block that does not fit goes to the other end.
    for _ in range(len(_idle)):
        try:
            block = _idle.popleft()
        except IndexError:  # another thread was faster
            break
        if size <= len(block) <= 2 * size:  # a small buffer must not occupy a large block
            return block
        _idle.append(block)
    return None


def _new_block(size: int) -> mmap.mmap:
    """Maps a new block of whole huge pages, with at least `size` bytes."""
    bytes_of_pages = -(-size // _HUGE_PAGE) * _HUGE_PAGE  # `size`, rounded up to whole pages
    block = mmap.mmap(-1, bytes_of_pages, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    _advise(block, "MADV_HUGEPAGE")  # 32 MB take 20 page faults instead of 8,000
    return block


def _give_back(block: mmap.mmap) -> None:
    """Makes the block of a buffer idle. Drops idle blocks if they have more than _MOST_IDLE bytes together."""
    if not _advise(block, "MADV_FREE"):
        return  # the block returns to the system now, because `block` is the last reference to it
    _idle.append(block)
    while sum(map(len, list(_idle))) > _MOST_IDLE:  # `list` copies the deque, because other threads may change it
        _idle.popleft()


def _advise(block: mmap.mmap, name: str) -> bool:
    """Calls madvise with the constant of this name. Returns False if the system does not know the constant."""
    if (advice := getattr(mmap, name, None)) is None:
        return False
    try:
        block.madvise(advice)
    except OSError:  # the kernel was built without this advice
        return False
    return True
