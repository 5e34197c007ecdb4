"""Memory: lets the C library keep freed memory for the next large payloads."""

import functools

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
