"""Tags on the wire: who lists by them finds what has them, indexed or not, and stops nobody."""

import threading

import pytest

import replay_server.rpc.items
from replay_client import ReplayClient
from replay_client.testing import until
from replay_server import ReplayServer, TableConfig
from tests.kit.clocks import in_a_thread

TABLES = [TableConfig(name="plain"), TableConfig(name="indexed", index=["environment", "level"])]
TAGS = [
    {"environment": "math", "level": 1},
    {"environment": "math", "level": "1"},
    {"environment": "code", "level": -5},
    {"environment": "", "source": "web"},
    {},
]


@pytest.fixture
def client(monkeypatch):
    monkeypatch.setattr(replay_server.rpc.items, "ITEMS_PER_LOOK", 2)  # several looks for a few items
    with ReplayServer(TABLES, 0) as server, ReplayClient(server.address, timeout=60.0) as client:
        yield client


@pytest.fixture
def keys(client):
    return [client.insert(b"x", {"plain": 1.0, "indexed": float(row)}, tags=tags) for row, tags in enumerate(TAGS)]


@pytest.mark.parametrize("table", ["plain", "indexed"])
@pytest.mark.parametrize(
    ("tags", "rows"),
    [
        (None, [0, 1, 2, 3, 4]),
        ({"environment": "math"}, [0, 1]),
        ({"environment": "math", "level": 1}, [0, 1]),
        ({"level": "-5"}, [2]),
        ({"environment": "law"}, []),
        ({"environment": ""}, [3, 4]),
        ({"source": "web"}, [3]),
        ({"environment": "math", "source": ""}, [0, 1]),
        ({"nobody": "has this"}, []),
        ({"nobody": ""}, [0, 1, 2, 3, 4]),
    ],
    ids=str,
)
def test_a_list_by_tags_has_the_items_that_have_all_of_them(client, keys, table, tags, rows):
    found = client.list_items(table, tags=tags, descending=True)
    assert [item.key for item in found.items] == [keys[row] for row in rows]
    assert found.matching == len(rows)
    assert [item.tags for item in found.items] == [TAGS[row] for row in rows]


@pytest.mark.parametrize("table", ["plain", "indexed"])
def test_pages_orders_and_bounds_hold_for_a_list_by_tags(client, keys, table):
    client.update_priorities(table, {keys[0]: 7.0, keys[1]: 9.0, keys[2]: 8.0})
    first = client.list_items(table, tags={"environment": "math"}, order_by="priority", descending=True, limit=1)
    assert [item.key for item in first.items] == [keys[1]]
    assert first.matching == 2
    options = {"order_by": "priority", "descending": True, "limit": 1}
    second = client.list_items(table, tags={"environment": "math"}, page=first.next_page, **options)
    assert [item.key for item in second.items] == [keys[0]]
    assert second.next_page == ""
    assert not client.list_items(table, tags={"environment": "math"}, min_priority=9.5).items


def test_an_index_that_begins_while_the_server_runs_finds_the_items_of_before(client, keys):
    client.update_table("plain", index=["source"])
    assert [item.key for item in client.list_items("plain", tags={"source": "web"}).items] == [keys[3]]
    later = client.insert(b"x", {"plain": 1.0}, tags={"source": "book"})
    assert [item.key for item in client.list_items("plain", tags={"source": "book"}).items] == [later]
    client.update_table("plain", index=[])
    assert [item.key for item in client.list_items("plain", tags={"source": "web"}).items] == [keys[3]]


def test_what_leaves_while_its_tags_are_looked_at_is_left_out_and_others_are_served(client):
    with client.writer() as writer:
        for _ in range(400):
            writer.insert(b"x", {"plain": 1.0}, tags={"source": "web"})
        writer.flush()
    answers, stop = [], threading.Event()

    def list_again_and_again():
        while not stop.is_set():
            answers.append(client.list_items("plain", tags={"source": "web"}, limit=400))

    listing = in_a_thread(list_again_and_again)
    until(lambda: answers)
    for _ in range(10):
        client.delete("plain", [item.key for item in client.list_items("plain", limit=20).items])
    client.reset("plain")
    seen = len(answers)
    until(lambda: len(answers) > seen + 1)
    stop.set()
    listing.result()
    assert answers[0].matching == 400
    assert all(len(answer.items) == answer.matching for answer in answers)
    assert answers[-1].matching == 0
