"""Memory: large blocks that are freed serve the next ones, without new pages from the system."""

import platform
import subprocess
import sys

import pytest

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
