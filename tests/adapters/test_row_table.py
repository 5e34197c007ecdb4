"""RowTable: which rows stay when they are cleared, and which come back with a checkpoint. All without TransferQueue."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from replay_adapters.row_table import RowTable
from replay_client.testing import LocalServer, server

ROWS = {"name": "tq", "when_full": "block"}


@pytest.fixture
def running() -> Iterator[LocalServer]:
    with server(tables=[ROWS]) as running:
        yield running


@pytest.fixture
def rows(running: LocalServer) -> RowTable:
    return RowTable(running.client(), "tq", checkpoints=2)


def there(rows: RowTable, keys: list[int]) -> list[int]:
    """Those of `keys` whose bytes can be read."""
    found = dict(rows.get(dict.fromkeys(keys, 1)))
    return [key for key in keys if key in found]


def save(rows: RowTable, *, completed: bool = True) -> None:
    rows.begin_save(completed=completed)
    rows.end_save()


def test_a_put_row_comes_back_bit_by_bit(rows: RowTable) -> None:
    payloads = [b"", b"one", bytes(100_000)]
    keys = rows.put(payloads)
    found = dict(rows.get(dict.fromkeys(keys, 1)))
    assert [bytes(found[key]) for key in keys] == payloads


def test_without_a_checkpoint_a_cleared_row_is_deleted(rows: RowTable) -> None:
    keys = rows.put([b"one", b"two"])
    rows.clear(keys[:1])
    assert there(rows, keys) == keys[1:]
    assert rows.client.server_info().tables["tq"].size == 1


def test_a_row_that_a_checkpoint_lists_outlives_its_clear(rows: RowTable) -> None:
    keys = rows.put([b"one"])
    save(rows)
    rows.clear(keys)
    assert there(rows, keys) == keys


def test_a_row_that_is_younger_than_the_last_checkpoint_is_deleted(rows: RowTable) -> None:
    save(rows)
    keys = rows.put([b"one"])
    rows.clear(keys)
    assert there(rows, keys) == []


def test_while_a_save_runs_every_cleared_row_stays(rows: RowTable) -> None:
    rows.begin_save(completed=False)
    keys = rows.put([b"one"])
    rows.clear(keys)
    assert there(rows, keys) == keys


def test_another_process_sees_that_a_save_has_begun(running: LocalServer, rows: RowTable) -> None:
    other = RowTable(running.client(), "tq", checkpoints=2)
    save(rows)
    young = other.put([b"one", b"two"])
    other.clear(young[:1])  # now the other process knows the mark of the first save
    rows.begin_save(completed=True)
    other.clear(young[1:])
    assert there(rows, young) == young[1:]


def test_a_retained_row_stays_until_as_many_newer_checkpoints_are_complete(rows: RowTable) -> None:
    keys = rows.put([b"one"])
    save(rows)  # lists the row
    rows.clear(keys)
    save(rows)
    save(rows)
    assert there(rows, keys) == keys
    save(rows)  # before it, two newer checkpoints were complete
    assert there(rows, keys) == []


def test_checkpoints_that_failed_do_not_count(rows: RowTable) -> None:
    keys = rows.put([b"one"])
    save(rows)
    rows.clear(keys)
    for _ in range(5):
        save(rows, completed=False)
    assert there(rows, keys) == keys


def test_a_loaded_checkpoint_brings_back_its_rows_and_clears_the_others(rows: RowTable) -> None:
    listed = rows.put([b"one", b"two"])
    save(rows)
    rows.clear(listed[:1])
    younger = rows.put([b"three"])
    assert rows.restore(listed) == []
    assert there(rows, [*listed, *younger]) == listed
    for _ in range(4):
        save(rows)
    assert there(rows, listed) == listed, "rows that came back are in use again"


def test_a_loaded_checkpoint_says_which_rows_are_missing(rows: RowTable) -> None:
    keys = rows.put([b"one"])
    assert rows.restore([*keys, 5]) == [5]


def test_a_job_that_died_while_it_saved_can_go_on(rows: RowTable) -> None:
    listed = rows.put([b"one"])
    save(rows)
    rows.begin_save(completed=True)
    assert rows.restore(listed) == []
    younger = rows.put([b"two"])
    rows.clear(younger)
    assert there(rows, younger) == [], "no save runs any more"


def test_a_new_controller_clears_all_rows_and_keeps_those_of_the_checkpoint(rows: RowTable) -> None:
    listed = rows.put([b"one"])
    save(rows)
    younger = rows.put([b"two"])
    assert rows.clear_all() == 2
    assert there(rows, [*listed, *younger]) == listed


def test_a_put_waits_while_the_table_is_full_and_says_why(caplog: pytest.LogCaptureFixture) -> None:
    with server(tables=[ROWS | {"max_size": 1}]) as running:
        rows = RowTable(running.client(timeout=0.2), "tq", checkpoints=2)
        [first] = rows.put([b"one"])
        cleared = False

        def clear_when_waiting() -> None:
            """Makes room as soon as the wait was logged."""
            nonlocal cleared
            if not cleared and "max_size" in caplog.text:
                cleared = True
                RowTable(running.client(), "tq", checkpoints=2).clear([first])

        waiting = rows._requests.log.wait
        rows._requests.log.wait = lambda reason, **more: (waiting(reason, **more), clear_when_waiting())[0]
        assert len(rows.put([b"two"])) == 1
    assert cleared
    assert "TransferQueue waits: tq: inserting blocked" in caplog.text


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ({"when_full": "evict"}, "write when_full = 'block'"),
        ({"max_times_sampled": 1}, "max_times_sampled is 1"),
        ({"max_staleness": 3}, "max_staleness is 3"),
        ({"rate_limiter": {"type": "queue", "max_size": 5}}, "its rate_limiter is 'queue'"),
    ],
)
def test_a_table_that_could_lose_rows_is_refused(setting: dict, words: str) -> None:
    with server(tables=[ROWS | setting]) as running, pytest.raises(ValueError, match=words):
        RowTable(running.client(), "tq", checkpoints=2)
