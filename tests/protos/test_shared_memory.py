"""Rings: what goes in comes out in order, nothing that was not put in comes out, and no file stays."""

import errno
import gc
import itertools
import os
import socket
from collections import deque
from contextlib import ExitStack, nullcontext, suppress
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from replay_protos.shared_memory import HEADER, Mailbox, RingReader, RingWriter, Segment

CAPACITY = 4096
FOLDER = Path()
"""Where no mailbox lies."""


def make_ring(capacity: int = CAPACITY) -> tuple[RingWriter, RingReader, Segment]:
    """Both ends of a ring, in one process."""
    made = Segment.create(FOLDER, capacity)
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
    segment = Segment.create(FOLDER, CAPACITY)
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


def test_a_segment_is_handed_over_once_to_the_mailbox_of_its_client(tmp_path):
    before = open_rings()
    made = Segment.create(tmp_path, CAPACITY)
    with pytest.raises(OSError, match="runs on another host"):
        made.hand_over()
    mailbox = Mailbox(made.path)
    assert made.path.stat().st_mode & 0o777 == 0o600
    made.hand_over()
    assert made.handed_over
    received = mailbox.receive(made.ring_id, CAPACITY)
    received.view[HEADER:] = b"\1" * CAPACITY
    assert made.view[HEADER:] == b"\1" * CAPACITY
    assert list(tmp_path.iterdir()) == []
    del made, received
    assert open_rings() == before


def test_a_mailbox_to_which_nothing_came_gives_nothing_and_leaves_nothing(tmp_path):
    assert Mailbox(tmp_path / "mailbox").receive(1, CAPACITY) is None
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", ["nothing", "no id", "no descriptor", "a file", "the ring of another"])
def test_what_a_stranger_sends_to_a_mailbox_is_not_taken(tmp_path, kind):
    made, other = (Segment.create(tmp_path, CAPACITY) for _ in range(2))
    mailbox, before = Mailbox(made.path), set(os.listdir("/proc/self/fd"))
    ring_id = made.ring_id.to_bytes(8, "little")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as stranger, (tmp_path / "file").open("w") as file:
        stranger.connect(str(made.path))
        if kind == "the ring of another":  # a link at the place of his own mailbox leads his server to this one
            other.path.symlink_to(made.path)
            other.hand_over()
        elif kind in ("a file", "no id"):
            socket.send_fds(stranger, [ring_id if kind == "a file" else b""], [file.fileno()])
        else:
            stranger.send(ring_id if kind == "no descriptor" else b"")
    with pytest.raises(ValueError, match="mmap length") if kind == "a file" else nullcontext():
        assert mailbox.receive(made.ring_id, CAPACITY) is None
    assert set(os.listdir("/proc/self/fd")) < before


def unread(path: Path) -> None:
    """A mailbox that is full."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as stranger, suppress(BlockingIOError):
        stranger.setblocking(False)
        stranger.connect(str(path))
        while True:
            stranger.send(b"x")


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("nothing", "runs on another host"),
        ("left", "runs on another host"),
        ("file", "runs on another host"),
        ("folder", "runs on another host"),
        ("full", "Resource temporarily unavailable"),
        ("stream", "Protocol wrong type"),
    ],
)
def test_a_segment_for_which_there_is_no_mailbox_stays_with_its_server(tmp_path, kind, reason):
    made = Segment.create(tmp_path, CAPACITY)
    with ExitStack() as ends:
        if kind == "file":
            made.path.touch()
        elif kind == "folder":
            made.path.mkdir()
        elif kind != "nothing":
            kinds = {"stream": socket.SOCK_STREAM}
            there = ends.enter_context(socket.socket(socket.AF_UNIX, kinds.get(kind, socket.SOCK_DGRAM)))
            there.bind(str(made.path))
            if kind == "left":
                there.close()
            elif kind == "full":
                unread(made.path)
        with pytest.raises(OSError, match=reason):
            made.hand_over()
    assert not made.handed_over


@pytest.mark.parametrize(("folder", "reason"), [("missing", "is not this one's"), ("file", "Not a directory")])
def test_a_mailbox_that_cannot_be_made_is_an_error_with_the_reason(tmp_path, folder, reason):
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match=reason):
        Mailbox(tmp_path / folder / "mailbox")


def test_a_system_without_room_is_an_error_and_leaves_nothing(monkeypatch):
    def no_room(*_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", no_room)
    before = open_rings()
    with pytest.raises(OSError, match="No space left"):
        Segment.create(FOLDER, CAPACITY)
    assert open_rings() == before


def test_nobody_can_change_the_size_of_the_memory():
    before = open_rings()
    made = Segment.create(FOLDER, CAPACITY)
    descriptors = open_rings() - before  # of the segment, and of its mapping
    assert descriptors
    for fd, size in itertools.product(descriptors, (0, HEADER, HEADER + CAPACITY - 1, HEADER + CAPACITY + 1)):
        with pytest.raises(PermissionError):
            os.ftruncate(fd, size)
        assert os.fstat(fd).st_size == len(made.view) == HEADER + CAPACITY
