"""`export` and `import`: what a notebook reads, and what another server gets back."""

from __future__ import annotations

import gzip
import json
import math

import numpy as np
import pytest

from examples.demo.task import make_tokenizer
from replay_client import ReplayClient, group_from_rows
from replay_client.testing import make_group
from replay_server import ReplayServer, TableConfig
from tests.kit.processes import fails, run_replay


@pytest.fixture
def keys(client) -> list[int]:
    """A group whose log-probabilities are partly unknown, one of another version, and bytes that are no group."""
    first = make_group(rewards=[1.0, 0.0], version=2, prompt_id="a", finish_reasons=("stop", "length"))
    first.rollout_logprobs[:] = [-1.0, np.nan, np.nan]
    client.set_policy_version(3)
    return [
        client.insert(first, {"replay": 0.5}),
        client.insert(make_group(version=3, prompt_id="b"), {"replay": 0.25}),
        client.insert(b"no group", {"replay": 0.0}, policy_version=3),
    ]


def read_rows(path):
    if path.suffix == ".jsonl":
        return [json.loads(line) for line in path.read_text().splitlines()]
    from pyarrow import parquet

    return parquet.read_table(path).to_pylist()


@pytest.mark.parametrize("name", ["replay.jsonl", "replay.parquet"])
def test_an_exported_table_can_be_plotted_and_imported_into_another_server(replay, client, keys, tmp_path, name):
    file = tmp_path / name
    exported = replay("table", "export", "replay", str(file), "--json")
    assert json.loads(exported.stdout)["items"] == 3, exported.stderr
    first, second, other = read_rows(file)
    assert [row["key"] for row in (first, second, other)] == [str(key) for key in keys]
    assert first["rewards"] == [1.0, 0.0]
    assert first["reward_mean"] == 0.5
    assert first["staleness"] == 1
    assert first["completion_tokens"] == [1, 2]
    assert first["mean_logprobs"] == [-1.0, None]
    assert first["context_tokens"] == [0, 0]
    assert first["prompt_id"] == "a"
    assert first["finish_reasons"] == ["stop", "length"]
    assert second["group_size"] == 3
    assert second["staleness"] == 0
    assert other["rewards"] is None
    assert other["bytes"] == 8
    assert client.server_info().tables["replay"].samples == 0

    pool = TableConfig(name="elsewhere")
    with ReplayServer(tables=[pool], port=0) as target, ReplayClient(target.address) as there:
        for words in (f"3 items of {file} inserted", f"0 items of {file} inserted; 3 were there before"):
            imported = run_replay("table", "import", str(file), "--table", "elsewhere", address=target.address)
            assert imported.stdout == f"{words}\n", imported.stderr
        assert there.server_info().tables["elsewhere"].size == 3
        items = {item.key: item for item in there.list_items("elsewhere")}
        assert [items[key].priority for key in keys] == [0.5, 0.25, 0.0]
        assert [items[key].policy_version for key in keys] == [2, 3, 3]
        for mine, theirs in zip(client.get(keys), there.get(keys), strict=True):
            assert bytes(mine.payload) == bytes(theirs.payload)


def test_a_large_table_is_read_in_parts(replay, client, tmp_path):
    client.update_table("replay", max_size=100)
    with client.writer() as writer:
        keys = [writer.insert(make_group(seed=n), {"replay": 1.0}) for n in range(70)]
    file = tmp_path / "x.jsonl"
    assert replay("table", "export", "replay", str(file)).returncode == 0
    assert [row["key"] for row in read_rows(file)] == [str(key) for key in keys]
    assert (
        replay("table", "export", "replay", str(file), "--limit", "40").stdout
        == f"40 items of replay written to {file}\n"
    )
    assert len(read_rows(file)) == 40


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("bad.jsonl", b"{}\nnot json\n", "bad.jsonl, row 1: there is no key, table, priority, policy_version, payload"),
        ("text.jsonl", b"not json\n", "text.jsonl, line 1: Expecting value"),
        (
            "latin.jsonl",
            '{"prompt_id": "é"}\n'.encode("latin-1"),
            "latin.jsonl, line 1: byte 16, b'\\xe9', is not UTF-8",
        ),
        (
            "packed.jsonl",
            gzip.compress(b"{}\n", mtime=0),
            "packed.jsonl, line 1: this is a gzip file, and not lines of JSON in UTF-8: unpack it with gunzip",
        ),
        ("binary.jsonl", bytes(range(256)), "binary.jsonl, line 1: "),
        ("table.jsonl", b"PAR1" + bytes(200) + b"\xff", "table.jsonl, line 1: this is a Parquet file, "),
        ("mark.jsonl", b"\xef\xbb\xbf{}\n", "mark.jsonl, row 1: there is no key, table, priority"),
        ("packed.parquet", gzip.compress(b"{}\n", mtime=0), "packed.parquet: not a parquet file"),
        ("bad.parquet", b"PAR1", "bad.parquet: not a parquet file"),
    ],
)
def test_a_file_that_cannot_be_read_is_named(server, tmp_path, name, content, words):
    (tmp_path / name).write_bytes(content)
    said = fails("table", "import", str(tmp_path / name), address=server.address)
    assert said.startswith(f"replay: {tmp_path}/{words}")


@pytest.mark.parametrize("name", [pytest.param("replay.jsonl", marks=pytest.mark.long), "replay.parquet"])
def test_the_context_of_a_completion_stands_apart_from_what_the_policy_wrote(replay, client, tmp_path, name):
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    group = group_from_rows(
        prompts=[tokenizer(text).input_ids for text in ("1+1=", "1+23=")],
        completions=[tokenizer("2").input_ids, tokenizer("24").input_ids],
        logprobs=[[-1.0], [-2.0, np.nan]],
        rewards=[1, 0],
        advantages=[1, -1],
    )
    client.insert(group, {"replay": 1.0})
    file = tmp_path / name
    made = replay("table", "export", "replay", str(file), "--tokenizer", str(tmp_path / "tokenizer"), "--no-payloads")
    assert made.returncode == 0, made.stderr
    (row,) = read_rows(file)
    assert "payload" not in row
    assert row["prompt"] == "1+"
    assert row["contexts"] == ["1=", "23="]
    assert row["completions"] == ["2", "24"]
    assert row["context_tokens"] == [2, 3]
    assert row["completion_tokens"] == [1, 2]
    assert row["mean_logprobs"] == [-1.0, -2.0]


# ------------------------------------------------------------------------------------------------ a row a sequence


def insert_agents(client: ReplayClient, *, folder=None) -> list[int]:
    """A group of agents with all that one can have, a group without any of it, and bytes that are no group."""
    tokenizer = make_tokenizer()
    if folder is not None:
        tokenizer.save_pretrained(folder)
    words = [(("1+", "2"), ("3", "=")), (("", "7"), ("8", "9"))]
    ids = [[[tokenizer(text).input_ids if text else [] for text in part] for part in parts] for parts in words]
    rows = [row for parts in ids for row in parts]
    agents = group_from_rows(
        prompts=[tokenizer("1+2=").input_ids + context for context, _ in rows],
        completions=[written for _, written in rows],
        logprobs=[[-0.1 * (row + 1)] for row in range(4)],
        sequence_counts=[2, 2],
        rewards=[0.1, -1.0],
        advantages=[1 / 3, -1 / 3],
        prompt_id="sum",
        policy_version=2,
        policy_version_end=3,
        finish_reasons=("stop", "turns"),
        sampling={"temperature": 0.7},
        meta={"turns": [[["prompt", 4 + len(context)], ["assistant", 1]] for context, _ in rows], "bytes": b"\x00\xff"},
    )
    agents.token_advantages = np.linspace(-1, 1, agents.num_tokens, dtype=np.float32)
    agents.loss_mask = np.ones(agents.num_tokens, np.bool_)
    agents.extras = {"values": np.arange(agents.num_tokens, dtype=np.float64), "image": np.zeros((2, 2), np.uint8)}
    agents.axes = {"values": "token"}
    client.set_policy_version(3)
    keys = [
        client.insert(agents, {"replay": 1.0}, tags={"environment": "math", "level": 3}),
        client.insert(make_group(version=3, logprobs=math.nan), {"replay": 0.5}),
        client.insert(b"no group", {"replay": 0.25}, policy_version=3),
    ]
    client.extend(keys[0], {"teacher": np.zeros(agents.num_tokens, np.float32)}, axes={"teacher": "token"})
    return keys


def write_rows(path, rows) -> None:
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return
    import pyarrow
    from pyarrow import parquet

    parquet.write_table(pyarrow.Table.from_pylist(rows, schema=parquet.read_schema(path)), path)


@pytest.mark.parametrize("name", [pytest.param("replay.jsonl", marks=pytest.mark.long), "replay.parquet"])
def test_a_row_a_sequence_has_what_data_sets_have(replay, client, tmp_path, name):
    keys = insert_agents(client, folder=tmp_path / "tokenizer")
    file = tmp_path / name
    made = replay(
        "table", "export", "replay", str(file), "--rows", "sequences", "--tokenizer", str(tmp_path / "tokenizer")
    )
    assert made.stdout == f"3 items of replay written to {file}, in 8 rows\n", made.stderr
    rows = read_rows(file)
    assert [row["key"] for row in rows] == [str(keys[0])] * 4 + [str(keys[1])] * 3 + [str(keys[2])]
    assert [(row["rollout"], row["sequence"]) for row in rows] == [
        *((0, 0), (0, 1), (1, 0), (1, 1)),
        *((0, 0), (1, 0), (2, 0)),
        (None, None),
    ]
    group, second = client.get(keys[:1])[0].group, rows[1]
    assert second["prompt"] == "1+2="
    assert second["context"] == "3"
    assert second["completion"] == "="
    assert second["prompt_ids"] == group.prompt_ids.tolist()
    assert second["context_ids"] + second["completion_ids"] == group.completions()[1].tolist()
    span = group.sampled_spans()[1]
    assert second["loss_mask"] == [True]
    assert second["logprobs"] == group.rollout_logprobs[span].tolist()
    assert second["token_advantages"] == group.token_advantages[span].tolist()
    assert second["reward"] == float(group.rewards[0])
    assert second["advantage"] == float(group.advantages[0])
    assert second["finish_reason"] == "stop"
    assert second["policy_version"] == 2
    assert second["policy_version_end"] == 3

    def objects(row, *names):
        return [json.loads(row[name]) if isinstance(row[name], str) else row[name] for name in names]

    assert objects(second, "tags", "sampling", "meta") == [
        {"environment": "math", "level": 3},
        {"temperature": 0.7},
        {"bytes": "00ff"},
    ]
    assert objects(second, "turns") == [
        [
            {"role": "prompt", "start": 0, "stop": 1, "trained": 0},
            {"role": "assistant", "start": 1, "stop": 2, "trained": 1},
        ]
    ]
    assert all(value is None or math.isnan(value) for value in rows[4]["logprobs"])
    assert "payload" not in second
    said = fails("table", "import", str(file), address=client.address)
    assert said == f"replay: {file}, row 1: there is no payload; export it with payloads, a row for each item\n"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"key": "x"}, "key is 'x', not a whole number below 2^64"),
        ({"priority": None}, "there is no priority"),
        ({"payload": None}, "there is no payload; export it with payloads, a row for each item"),
        ({"key": 1.5}, "key is 1.5, not a whole number below 2^64"),
        ({"key": [1]}, "key is [1], not a whole number below 2^64"),
        ({"table": 3}, "table is 3, not a name"),
        ({"priority": "high"}, "priority is 'high', not a number"),
        ({"priority": [1]}, "priority is [1], not a number"),
        ({"policy_version": "new"}, "policy_version is 'new', not a number"),
        ({"policy_version": {}}, "policy_version is {}, not a number"),
        ({"payload": "no base64!"}, "payload is no base64, as `export` writes it: 'no base64!'"),
        ({"payload": 7}, "payload is 7, not base64 or bytes"),
        ({"payload": "UlBMWUdSUAEAAAAA"}, "payload is damaged: "),
        ({"payload": "AAAA"}, "payload is damaged: "),
        ({"tags": "[1]"}, "tags are '[1]', not an object"),
        ({"tags": [1]}, "tags are [1], not an object"),
        ({"tags": {"environment": [1]}}, "tag 'environment' is [1]: a tag is a string, or an integer of 64 bits"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_row_that_is_no_item_is_refused(replay, client, tmp_path, change, words):
    client.insert(make_group(rewards=[0.1]), {"replay": 1.0})
    file = tmp_path / "x.jsonl"
    assert replay("table", "export", "replay", str(file)).returncode == 0
    write_rows(file, [row | change for row in read_rows(file)])
    with ReplayServer(tables=[TableConfig(name="replay")], port=0) as target, ReplayClient(target.address) as there:
        said = fails("table", "import", str(file), address=target.address)
        assert said.startswith(f"replay: {file}, row 1: ")
        assert words in said
        assert there.server_info().items == 0


# ------------------------------------------------------------------------------------------------ several files


def test_an_item_of_two_tables_comes_back_into_both_from_the_files_of_both(replay, client, tmp_path):
    keys = [
        client.insert(make_group(), {"rollouts": 1.0, "replay": 0.7}),
        client.insert(make_group(), {"replay": 0.5}),
    ]
    files = [tmp_path / "rollouts.jsonl", tmp_path / "replay.parquet"]
    for file in files:
        assert replay("table", "export", file.stem, str(file)).returncode == 0
    tables = [TableConfig(name="rollouts"), TableConfig(name="replay")]
    with ReplayServer(tables=tables, port=0) as target, ReplayClient(target.address) as there:
        assert run_replay("table", "import", str(files[0]), address=target.address).returncode == 0
        said = fails("table", "import", str(files[1]), address=target.address)
        assert said == (
            f"replay: {files[1]}, row 1: item {keys[0]} is there, in rollouts, and cannot join replay: delete it and "
            f"give the files of all its tables to one `replay table import`\n"
        )
    with ReplayServer(tables=tables, port=0) as target, ReplayClient(target.address) as there:
        imported = run_replay("table", "import", *map(str, files), address=target.address)
        assert imported.stdout == f"2 items of {files[0]}, {files[1]} inserted\n", imported.stderr
        found = {item.key: {name: held.priority for name, held in item.tables.items()} for item in there.get(keys)}
        assert found == {keys[0]: {"rollouts": 1.0, "replay": 0.7}, keys[1]: {"replay": 0.5}}


def test_items_that_the_server_remembers_as_gone_do_not_count_as_inserted(replay, client, tmp_path):
    keys = [client.insert(make_group(), {"replay": 1.0}) for _ in range(3)]
    file = tmp_path / "x.jsonl"
    assert replay("table", "export", "replay", str(file)).returncode == 0
    client.delete("replay", keys[:2])
    imported = replay("table", "import", str(file))
    gone = (
        "2 not there: taken or deleted, before or meanwhile, or evicted at once by a full table "
        "(--new-keys inserts what was taken or deleted)"
    )
    assert imported.stdout == f"0 items of {file} inserted; 1 was there before; {gone}\n", imported.stderr
    assert imported.returncode == 1
    assert json.loads(replay("table", "import", str(file), "--json").stdout) == {
        "files": [str(file)],
        "items": 0,
        "present": 1,
        "gone": 2,
    }


def test_what_was_exported_and_reset_comes_back_under_new_keys(replay, client, tmp_path):
    groups = [make_group(rewards=[float(number), 0.5]) for number in range(3)]
    keys = [client.insert(group, {"replay": 1.0 + number}) for number, group in enumerate(groups)]
    file = tmp_path / "x.jsonl"
    assert replay("table", "export", "replay", str(file)).returncode == 0
    client.reset("replay")
    assert replay("table", "import", str(file)).returncode == 1
    assert client.server_info().items == 0
    imported = replay("table", "import", str(file), "--new-keys")
    assert imported.stdout == f"3 items of {file} inserted\n"
    assert imported.returncode == 0
    items = client.list_items("replay", limit=10).items
    assert {item.key for item in items}.isdisjoint(keys)
    assert sorted(item.priority for item in items) == [1.0, 2.0, 3.0]
    stored = client.get([item.key for item in items])
    assert sorted(bytes(item.payload) for item in stored) == sorted(bytes(group.encode()) for group in groups)
