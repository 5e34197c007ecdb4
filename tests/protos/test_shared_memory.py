"""Rings: what goes in comes out in order, nothing that was not put in comes out, and no file stays."""

import asyncio
import errno
import gc
import itertools
import os
import socket
import subprocess
import sys
from collections import deque
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from replay_protos.shared_memory import HEADER, Handover, RingReader, RingWriter, Segment, remove_stale

CAPACITY = 4096


def make_ring(capacity: int = CAPACITY) -> tuple[RingWriter, RingReader, Segment]:
    """Both ends of a ring, in one process."""
    made = Segment.create(capacity)
    return RingWriter(made), RingReader(made), made


@settings(max_examples=300, deadline=None)
@given(st.lists(st.one_of(st.none(), st.lists(st.integers(0, 1500), min_size=1, max_size=4)), max_size=60))
def test_payloads_come_out_as_they_went_in_whatever_the_order_of_puts_and_takes(steps):
    writer, reader, _ = make_ring()
    held: deque[tuple[int, list[bytes]]] = deque()
    for number, rows in enumerate(steps):
        if rows is None:
            if held:
                position, chunks = held.popleft()
                assert reader.take(position, sum(map(len, chunks)), [len(chunk) for chunk in chunks]) == chunks
            continue
        chunks = [bytes([(number + row) % 256]) * size for row, size in enumerate(rows)]
        if not (size := sum(rows)):
            continue
        position = writer.put(chunks, size)
        if position is None:
            assert held or size > CAPACITY, "an empty ring has room for whatever is not larger than it"
        else:
            held.append((position, chunks))
    for position, chunks in held:
        assert b"".join(reader.take(position, sum(map(len, chunks)), ())) == b"".join(chunks)
    assert writer.put([bytes(CAPACITY)], CAPACITY) is not None


@settings(deadline=None)
@given(st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1))
def test_a_position_that_no_writer_gave_is_refused_or_reads_only_the_ring(ring_of_ones, position, size):
    try:
        copies = RingReader(ring_of_ones).take(position, size, ())
    except ValueError:
        return
    assert b"".join(copies) == b"\1" * size


@pytest.fixture(scope="module")
def ring_of_ones():
    segment = Segment.create(CAPACITY)
    segment.view[HEADER:] = b"\1" * CAPACITY
    return segment


@pytest.mark.parametrize("freed", [0, 1, 99, 101, 2**63, 2**64 - 1])
def test_a_writer_never_runs_over_what_it_put_in_because_of_what_the_reader_writes(freed):
    writer, _, segment = make_ring()
    assert writer.put([bytes(100)], 100) == 0
    segment.view[64:72] = freed.to_bytes(8, "little")
    assert writer.freed() <= 100
    assert writer.put([bytes(CAPACITY)], CAPACITY) is None


def open_rings() -> set[int]:
    """The file descriptors of the rings of this process."""
    gc.collect()  # what earlier tests left in cycles
    links = {fd: os.readlink(fd) for fd in Path("/proc/self/fd").iterdir() if fd.exists()}
    return {int(fd.name) for fd, link in links.items() if "replay-ring" in link}


def ask(handover: Handover, ring_id: int) -> Segment:
    return Segment.receive(handover.path, ring_id, CAPACITY)


def run_handover(folder: Path, use) -> None:
    """Runs `use` on a thread, with a handover that serves on the event loop."""

    async def serve() -> None:
        handover = Handover(folder)
        try:
            await asyncio.to_thread(use, handover)
        finally:
            handover.close()

    asyncio.run(serve())


def test_a_segment_is_handed_over_once_to_who_knows_its_id(tmp_path):
    def use(handover: Handover) -> None:
        made, other = Segment.create(CAPACITY), Segment.create(CAPACITY)
        handover.offer(made)
        assert not made.handed_over
        assert handover.path.stat().st_mode & 0o777 == 0o600
        received = ask(handover, made.ring_id)
        assert made.handed_over
        received.view[HEADER:] = b"\1" * CAPACITY
        assert made.view[HEADER:] == b"\1" * CAPACITY
        for ring_id in (made.ring_id, other.ring_id):
            with pytest.raises(ConnectionRefusedError, match="has no ring"):
                ask(handover, ring_id)

    before = open_rings()
    run_handover(tmp_path, use)
    assert list(tmp_path.iterdir()) == []
    assert open_rings() == before


@pytest.mark.parametrize("request_", [b"", b"short", bytes(8), bytes(10_000)], ids=["empty", "short", "zero", "long"])
def test_requests_that_no_client_makes_are_dropped(tmp_path, request_):
    def use(handover: Handover) -> None:
        made = Segment.create(CAPACITY)
        handover.offer(made)
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as asking, (tmp_path / "file").open("w") as file:
            asking.connect(str(handover.path))
            asking.send(request_)
            socket.send_fds(asking, [request_], [file.fileno(), asking.fileno()])
        assert ask(handover, made.ring_id).ring_id == made.ring_id

    run_handover(tmp_path, use)


@pytest.mark.parametrize("kind", ["file", "no descriptor"])
def test_a_request_that_cannot_be_answered_costs_only_its_own_ring(tmp_path, kind):
    def use(handover: Handover) -> None:
        spoiled, made = Segment.create(CAPACITY), Segment.create(CAPACITY)
        handover.offer(spoiled)
        handover.offer(made)
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as asking, (tmp_path / "file").open("w") as file:
            asking.connect(str(handover.path))
            socket.send_fds(asking, [spoiled.ring_id.to_bytes(8, "little")], [file.fileno()] if kind == "file" else [])
        assert ask(handover, made.ring_id).ring_id == made.ring_id
        assert not spoiled.handed_over

    run_handover(tmp_path, use)


def test_a_system_without_room_is_an_error_and_leaves_nothing(monkeypatch):
    def no_room(*_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", no_room)
    before = open_rings()
    with pytest.raises(OSError, match="No space left"):
        Segment.create(CAPACITY)
    assert open_rings() == before


def test_nobody_can_change_the_size_of_the_memory():
    before = open_rings()
    made = Segment.create(CAPACITY)
    descriptors = open_rings() - before  # of the segment, and of its mapping
    assert descriptors
    for fd, size in itertools.product(descriptors, (0, HEADER, HEADER + CAPACITY - 1, HEADER + CAPACITY + 1)):
        with pytest.raises(PermissionError):
            os.ftruncate(fd, size)
        assert os.fstat(fd).st_size == len(made.view) == HEADER + CAPACITY


def test_sockets_of_killed_processes_are_removed_and_those_of_others_stay(tmp_path):
    program = (
        "import asyncio, os, signal, sys; from pathlib import Path; from replay_protos.shared_memory import Handover\n"
        "async def main(): Handover(Path(sys.argv[1])); os.kill(os.getpid(), signal.SIGKILL)\n"
        "asyncio.run(main())"
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=False)
    (left,) = tmp_path.iterdir()
    (tmp_path / "other").touch()
    (tmp_path / "replay-rings-file").touch()

    def use(handover: Handover) -> None:
        remove_stale(tmp_path)
        assert not left.exists()
        assert {path.name for path in tmp_path.iterdir()} == {handover.path.name, "other", "replay-rings-file"}

    run_handover(tmp_path, use)
