"""Rings: what goes in comes out in order, nothing that was not put in comes out, and no file stays."""

import errno
import os
import subprocess
import sys
from collections import deque
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from replay_protos.shared_memory import HEADER, RingReader, RingWriter, Segment, remove_stale

CAPACITY = 4096


def make_ring(folder: Path, capacity: int = CAPACITY) -> tuple[RingWriter, RingReader, Segment]:
    """Both ends of a ring, in one process and through two mappings."""
    made = Segment.create(folder, capacity)
    attached = Segment.attach(made.path, made.ring_id, capacity)
    assert made.proven()
    made.forget_name()
    return RingWriter(made), RingReader(attached), made


@settings(max_examples=300, deadline=None)
@given(st.lists(st.one_of(st.none(), st.lists(st.integers(0, 1500), min_size=1, max_size=4)), max_size=60))
def test_payloads_come_out_as_they_went_in_whatever_the_order_of_puts_and_takes(tmp_path_factory, steps):
    writer, reader, _ = make_ring(tmp_path_factory.mktemp("ring"))
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
def ring_of_ones(tmp_path_factory):
    segment = Segment.create(tmp_path_factory.mktemp("ring"), CAPACITY)
    segment.view[HEADER:] = b"\1" * CAPACITY
    return segment


@pytest.mark.parametrize("freed", [0, 1, 99, 101, 2**63, 2**64 - 1])
def test_a_writer_never_runs_over_what_it_put_in_because_of_what_the_reader_writes(tmp_path, freed):
    writer, _, segment = make_ring(tmp_path)
    assert writer.put([bytes(100)], 100) == 0
    segment.view[64:72] = freed.to_bytes(8, "little")
    assert writer.freed() <= 100
    assert writer.put([bytes(CAPACITY)], CAPACITY) is None


def test_a_file_has_no_name_once_both_sides_have_it(tmp_path):
    made = Segment.create(tmp_path, CAPACITY)
    assert [path.stat().st_mode & 0o777 for path in tmp_path.iterdir()] == [0o600]
    assert not made.proven()
    Segment.attach(made.path, made.ring_id, CAPACITY)
    assert made.proven()
    assert list(tmp_path.iterdir()) == []
    made.forget_name()  # the other side was faster: nothing to remove


def test_a_segment_that_nobody_took_leaves_no_file(tmp_path):
    Segment.create(tmp_path, CAPACITY)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_without_room_is_an_error_and_leaves_no_file(tmp_path, monkeypatch):
    def no_room(*_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", no_room)
    with pytest.raises(OSError, match="No space left"):
        Segment.create(tmp_path, CAPACITY)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda path: path.chmod(0o644), "not a private file"),
        (lambda path: os.truncate(path, HEADER), "does not have the size"),
        (lambda path: path.write_bytes(b"something else"), "is not the ring"),
        (lambda path: (path.unlink(), path.symlink_to("/etc/hostname")), "not a private file"),
        (lambda path: path.unlink(), "No such file"),
    ],
)
def test_a_client_neither_maps_nor_removes_a_file_that_is_no_ring_for_it(tmp_path, spoil, reason):
    made = Segment.create(tmp_path, CAPACITY)
    spoil(made.path)
    before = list(tmp_path.iterdir())
    with pytest.raises((OSError, ValueError), match=reason):
        Segment.attach(made.path, made.ring_id, CAPACITY)
    assert list(tmp_path.iterdir()) == before


def test_a_file_of_another_name_or_ring_is_not_touched(tmp_path):
    made = Segment.create(tmp_path, CAPACITY)
    with pytest.raises(ValueError, match="is not the ring"):
        Segment.attach(made.path, made.ring_id + 2, CAPACITY)
    other = made.path.rename(tmp_path / "precious")
    with pytest.raises(ValueError, match="not named as a ring"):
        Segment.attach(other, made.ring_id, CAPACITY)
    assert other.exists()


def test_files_of_killed_processes_are_removed_and_those_of_others_stay(tmp_path):
    program = (
        "import os, signal, sys; from pathlib import Path; from replay_protos.shared_memory import Segment;"
        "ring = Segment.create(Path(sys.argv[1]), 4096); os.kill(os.getpid(), signal.SIGKILL)"
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=False)
    (left,) = tmp_path.iterdir()
    mine = Segment.create(tmp_path, CAPACITY)
    (tmp_path / "other").touch()
    remove_stale(tmp_path)
    assert set(tmp_path.iterdir()) == {mine.path, tmp_path / "other"}
    assert left != mine.path
