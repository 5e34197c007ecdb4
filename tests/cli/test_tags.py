"""`--tag` of `items`, `export` and `delete`, and tags in what `items`, `show` and `tables` print."""

from __future__ import annotations

import json

import pytest

from replay_client import ReplayClient
from replay_server import ReplayServer, TableConfig
from tests.kit.processes import fails, run_replay


@pytest.fixture
def keys(client) -> list[int]:
    tags = [{"environment": "math", "level": 3}, {"environment": "code"}, {}]
    return [client.insert(b"x", {"replay": 1.0}, tags=each) for each in tags]


def test_items_shows_and_finds_tags(replay, client, keys):
    shown = replay("items", "replay").stdout
    assert "environment=math, level=3" in shown
    found = replay("items", "replay", "--tag", "environment=math", "--tag", "level=3").stdout
    assert str(keys[0]) in found
    assert "1 of 1 item" in found
    (item,) = json.loads(replay("items", "replay", "--tag", "environment=code", "--json").stdout)["items"]
    assert item["key"] == str(keys[1])
    assert item["tags"] == {"environment": "code"}
    assert item["columns"] == []
    assert "tags environment=math, level=3" in replay("show", str(keys[0])).stdout
    assert json.loads(replay("show", str(keys[0]), "--json").stdout)["tags"] == {"environment": "math", "level": 3}


def test_items_without_tags_have_no_column_for_them(replay, client):
    client.insert(b"x", {"replay": 1.0})
    assert "tags" not in replay("items", "replay").stdout


@pytest.mark.parametrize("name", ["some.jsonl", "some.parquet"])
def test_export_writes_the_items_with_a_tag_and_import_brings_their_tags_back(replay, client, keys, tmp_path, name):
    file = tmp_path / name
    written = replay("table", "export", "replay", str(file), "--tag", "environment=math")
    assert written.stdout == f"1 item of replay written to {file}\n", written.stderr
    with ReplayServer([TableConfig(name="there")], port=0) as target, ReplayClient(target.address) as there:
        imported = run_replay("table", "import", str(file), "--table", "there", address=target.address)
        assert imported.stdout == f"1 item of {file} inserted\n", imported.stderr
        (item,) = there.list_items("there").items
        assert item.key == keys[0]
        assert item.tags == {"environment": "math", "level": 3}


def test_delete_by_tag_takes_exactly_those_items_and_asks_first(replay, client, keys):
    asked = replay("table", "delete", "replay", "--tag", "environment=math")
    assert "say --yes to do it" in asked.stderr
    assert client.server_info().tables["replay"].size == 3
    assert replay("table", "delete", "replay", "--tag", "environment=math", "--yes").stdout == "1 deleted from replay\n"
    assert {item.key for item in client.list_items("replay").items} == set(keys[1:])
    assert replay("table", "delete", "replay", "--tag", "environment=math", "--yes").stdout == "0 deleted from replay\n"


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("items replay --tag environment", "--tag 'environment' is not NAME=VALUE"),
        ("items replay --tag a=1 --tag a=2", "--tag names 'a' twice"),
        ("table delete replay --yes", "name the items to delete by their keys, or by --tag NAME=VALUE"),
        ("table delete replay 5 --tag a=1 --yes", "name the items to delete by their keys, or by --tag NAME=VALUE"),
    ],
)
def test_a_tag_that_makes_no_sense_is_one_line(command, words):
    assert fails(*command.split(), status=2, address="127.0.0.1:1") == f"replay: {words}\n"


def test_tables_shows_the_share_of_each_value_of_a_balanced_table(replay, client, keys):
    weights = {"math": 3.0, "law": 5.0}
    client.update_table("replay", balance={"tag": "environment", "weights": weights})
    line = "replay balances environment: math 60 % (1 item), without the tag 20 % (1 item), code 20 % (1 item)"
    assert line in replay("tables").stdout.splitlines()
    values = json.loads(replay("tables", "--json").stdout)["tables"]["replay"]["values"]
    assert {value["name"]: (value["items"], value["weight"]) for value in values} == {
        "math": (1, 3.0),
        "code": (1, 1.0),
        "": (1, 1.0),
    }
    changed = replay("table", "update", "replay", "balance=null")
    assert changed.returncode == 0, changed.stderr
    assert "balances" not in replay("tables").stdout


def test_tables_shows_what_became_of_the_groups_of_each_environment(replay, client, keys):
    client.sample("replay", 2)
    client.update_table("replay", max_staleness=0)
    client.set_policy_version(1)
    lines = replay("tables").stdout.splitlines()
    (line,) = [line for line in lines if line.startswith("replay by environment: ")]
    counts = {value.name: value for value in client.server_info().tables["replay"].tags[0].values}
    for name in ("math", "code"):
        value = counts[name]
        assert f"{name} 1 generated, {value.stale} lost as stale, {value.sampled} trained on" in line
    (tag,) = json.loads(replay("tables", "--json").stdout)["tables"]["replay"]["tags"]
    assert tag["name"] == "environment"
    assert [value["generated"] for value in tag["values"]] == [1, 1]


def test_tables_shows_the_most_frequent_values_of_a_tag(replay, client):
    for number in range(9):
        client.insert(b"x", {"replay": 1.0}, tags={"environment": f"e{number}"})
    client.insert(b"x", {"replay": 1.0}, tags={"environment": "e8"})
    (line,) = [line for line in replay("tables").stdout.splitlines() if "by environment" in line]
    assert line.startswith("replay by environment: e8 2 generated, 0 lost as stale, 0 trained on; ")
    assert line.endswith("; and 3 more values")


def test_tables_shows_all_values_of_a_tag_that_has_six(replay, client):
    for number in range(6):
        client.insert(b"x", {"replay": 1.0}, tags={"environment": f"e{number}"})
    (line,) = [line for line in replay("tables").stdout.splitlines() if "by environment" in line]
    assert line.count(" 1 generated") == 6
    assert "more value" not in line
