"""Memory: lets the next large payloads use the memory of those before.

The system zeroes each page that it gives, and a page that a virtual machine has given back to its host takes far
longer still: the first copy to such memory ran at 0.13 GB/s, and the next one to the same memory at 9 GB/s. malloc
keeps what is freed up to `_LARGEST` after `keep_freed_memory`. What is larger comes from `large_buffer`.
"""

import functools
import mmap
import weakref
from collections import deque

import numpy as np
import numpy.typing as npt

_LARGEST = 15 << 20
"""Bytes. Batches of a reader fit into twice as much. A block of 31 MiB gave no more, and glibc ignores larger ones."""


@functools.cache
def keep_freed_memory() -> None:
    """Makes malloc reuse the memory of large payloads, where it would give it back and ask for it again.

    The system zeroes each page that it gives, and this costs more than to copy a payload. glibc keeps twice as much
    freed memory at the end of a heap as the largest block has that it mapped by itself and that was freed. So it keeps
    up to 30 MiB a heap after this call. Programs that free large arrays do the same without knowing. The variables
    MALLOC_TRIM_THRESHOLD_ and MALLOC_MMAP_THRESHOLD_ take precedence, and other C libraries take no notice.
    """
    bytes(_LARGEST)  # mapped, never touched, and freed at once: it takes no memory


LARGE_BUFFER = 32 << 20
"""Bytes from which on malloc maps each block by itself, and gives it back as soon as it is freed."""
_HUGE = 2 << 20
_MOST_IDLE = 2 << 30
"""Bytes."""
_idle: deque[mmap.mmap] = deque()
"""Blocks that nobody uses. Whole operations of a deque are atomic, so that any thread may free a block."""


def large_buffer(size: int) -> npt.NDArray[np.uint8]:
    """`size` bytes, of any content, in memory of a buffer before that no view holds any more, if there is such memory.

    Blocks of up to _MOST_IDLE bytes wait for the next buffer. The system may take their pages at any time (MADV_FREE),
    and does when memory is short; otherwise the next buffer has them as they are, without a fault. Raises OSError,
    OverflowError or ValueError if there is no memory.
    """
    block = _idle_block(size) or _new_block(size)
    buffer = np.frombuffer(block, np.uint8, size)
    # Every view of the buffer, also through numpy or torch, keeps this array alive.
    weakref.finalize(buffer, _give_back, block).atexit = False
    return buffer


def copied(view: memoryview) -> bytes | memoryview:
    """A copy: of whole huge pages, as large rows are cut, in a large buffer."""
    if not view or len(view) % _HUGE:
        return bytes(view)
    buffer = memoryview(large_buffer(len(view)))
    buffer[:] = view
    return buffer


def give_back_idle() -> None:
    """Gives all idle blocks back to the system."""
    _idle.clear()


def _idle_block(size: int) -> mmap.mmap | None:
    for _ in range(len(_idle)):
        try:
            block = _idle.popleft()
        except IndexError:  # another thread was faster
            break
        if size <= len(block) <= 2 * size:
            return block
        _idle.append(block)
    return None


def _new_block(size: int) -> mmap.mmap:
    block = mmap.mmap(-1, -(-size // _HUGE) * _HUGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    _advise(block, "MADV_HUGEPAGE")  # 32 MB take 20 page faults instead of 8,000
    return block


def _give_back(block: mmap.mmap) -> None:
    if _advise(block, "MADV_FREE"):  # otherwise the block goes back to the system now, with its last reference
        _idle.append(block)
        while sum(map(len, list(_idle))) > _MOST_IDLE:
            _idle.popleft()


def _advise(block: mmap.mmap, name: str) -> bool:
    if (advice := getattr(mmap, name, None)) is None:
        return False
    try:
        block.madvise(advice)
    except OSError:  # a kernel that was built without it
        return False
    return True
