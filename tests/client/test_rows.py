"""Rows: the payloads of a response come out as they went in, however messages cut them."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from replay_client.errors import ReplayError
from replay_client.transport import Rows


@settings(deadline=None)
@given(st.lists(st.integers(0, 40), max_size=12), st.lists(st.integers(0, 60), max_size=30), st.booleans())
def test_rows_come_out_as_they_went_in_however_messages_cut_them(sizes, cuts, lent):
    sent = [bytes([row % 251]) * size for row, size in enumerate(sizes)]
    data, rows = b"".join(sent), Rows(sizes)
    for cut in [*cuts, len(data)]:
        chunk, data = bytearray(data[:cut]), data[cut:]
        rows.add(memoryview(chunk), bytes if lent else memoryview)
        if lent:
            chunk[:] = b"\xff" * len(chunk)  # as the writer of a ring does with what is free
    assert rows.missing == 0
    assert [bytes(payload) for payload in rows.payloads] == sent


def test_a_row_of_one_message_is_kept_and_a_row_of_several_has_its_own_read_only_memory():
    first, second = b"a" * 10 + b"b" * 5, b"b" * 5
    rows = Rows([10, 10])
    rows.add(first, memoryview)
    assert rows.missing == 5
    rows.add(second, memoryview)
    one, several = rows.payloads
    assert one.obj is first
    assert several == b"b" * 10
    assert several.readonly


def test_more_bytes_than_announced_are_an_error_that_counts_them():
    rows = Rows([3, 4])
    rows.add(b"123", memoryview)
    with pytest.raises(ReplayError, match="sent 2 payload bytes more than payload_sizes says"):
        rows.add(b"456789", memoryview)


@pytest.mark.parametrize("size", [2**60, 2**64 - 1])
def test_a_payload_for_which_there_is_no_memory_is_an_error_that_names_its_size(size):
    with pytest.raises(ReplayError, match=f"a payload of {size} bytes, for which there is no memory"):
        Rows([size]).add(b"1", memoryview)
