"""Memory: large blocks that are freed serve the next ones, without new pages from the system."""

import mmap
import platform
import subprocess
import sys

import numpy as np
import pytest

from replay_protos.memory import LARGE_BUFFER, copied, give_back_idle, large_buffer

_PROGRAM = """
import resource
from replay_protos.memory import keep_freed_memory

keep_freed_memory()
for turn in range(20):
    if turn == 10:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    blocks = [bytes([turn]) * (1 << 20) for _ in range(8)]
    del blocks
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries decide by themselves what they keep")
def test_blocks_that_are_freed_serve_the_next_ones(monkeypatch):
    for name in ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_", "GLIBC_TUNABLES"):
        monkeypatch.delenv(name, raising=False)
    done = subprocess.run([sys.executable, "-c", _PROGRAM], capture_output=True, text=True, check=True)
    # 80 MB in pages of 4 KB are 20,480 faults, if malloc gives each block back.
    assert int(done.stdout) < 1000


@pytest.mark.skipif(not hasattr(mmap, "MADV_FREE"), reason="this system gives freed memory back at once")
def test_a_large_place_serves_again_when_its_last_view_is_gone_and_not_before():
    size = 5 * LARGE_BUFFER  # of which few pages are touched
    first = large_buffer(size)
    address = first.ctypes.data
    view = np.frombuffer(memoryview(first).toreadonly()[size // 2 :], np.uint8)
    first[-1] = 7
    del first
    second = large_buffer(size)
    second[-1] = 8
    assert second.ctypes.data != address
    assert view[-1] == 7
    del view
    third = large_buffer(size - 1000)
    assert third.ctypes.data == address
    assert second[-1] == 8


@pytest.mark.skipif(not hasattr(mmap, "MADV_FREE"), reason="this system gives freed memory back at once")
def test_a_much_smaller_place_leaves_a_freed_one_alone():
    first = large_buffer(9 * LARGE_BUFFER)
    address = first.ctypes.data
    del first
    assert large_buffer(3 * LARGE_BUFFER).ctypes.data != address


@pytest.mark.skipif(not hasattr(mmap, "MADV_FREE"), reason="this system gives freed memory back at once")
def test_a_part_of_a_large_row_is_copied_to_where_an_earlier_one_was_and_never_over_one_that_is_held():
    give_back_idle()  # of tests before
    parts = [bytes([number]) * (4 << 20) for number in range(3)]
    held, freed = copied(memoryview(parts[0])), copied(memoryview(parts[1]))
    address = np.frombuffer(freed, np.uint8).ctypes.data
    del freed
    again = copied(memoryview(parts[2]))
    assert np.frombuffer(again, np.uint8).ctypes.data == address
    assert held == parts[0]
    assert again == parts[2]
    assert [copied(memoryview(parts[1])[:size]) for size in (0, 1, 1 << 20)] == [b"", b"\x01", parts[1][: 1 << 20]]
