"""`export` and `import`: what a notebook reads, and what another server gets back."""

from __future__ import annotations

import gzip
import json
import math

import numpy as np
import pytest

from replay_client import ReplayClient, group_from_rows
from replay_server import ReplayServer, TableConfig
from replay_trainer.demo.task import make_tokenizer
from tests.commands import fails, run_replay
from tests.factories import make_group, make_sequences


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
    exported = replay("export", "replay", str(file), "--json")
    assert json.loads(exported.stdout)["items"] == 3, exported.stderr
    first, second, other = read_rows(file)
    assert [row["key"] for row in (first, second, other)] == [str(key) for key in keys]
    assert (first["rewards"], first["reward_mean"], first["staleness"]) == ([1.0, 0.0], 0.5, 1)
    assert (first["completion_tokens"], first["mean_logprobs"]) == ([1, 2], [-1.0, None])
    assert first["context_tokens"] == [0, 0]
    assert (first["prompt_id"], first["finish_reasons"]) == ("a", ["stop", "length"])
    assert (second["group_size"], second["staleness"]) == (3, 0)
    assert (other["rewards"], other["bytes"]) == (None, 8)
    assert client.server_info().tables["replay"].samples == 0

    pool = TableConfig(name="elsewhere")
    with ReplayServer(tables=[pool], port=0) as target, ReplayClient(target.address) as there:
        for _ in range(2):  # the second time changes nothing
            imported = run_replay("import", str(file), "--table", "elsewhere", address=target.address)
            assert imported.stdout == f"3 items of {file} inserted\n", imported.stderr
        assert there.server_info().tables["elsewhere"].size == 3
        items = {item.key: item for item in there.list_items("elsewhere")}
        assert [items[key].priority for key in keys] == [0.5, 0.25, 0.0]
        assert [items[key].policy_version for key in keys] == [2, 3, 3]
        for mine, theirs in zip(client.get(keys), there.get(keys), strict=True):
            assert bytes(mine.payload) == bytes(theirs.payload)


def test_a_tokenizer_adds_texts_and_payloads_may_be_left_out(replay, client, tmp_path):
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    prompt, answer = tokenizer("1+1=").input_ids, tokenizer("2").input_ids
    client.insert(make_group(prompt=prompt, completions=[answer, answer]), {"replay": 1.0})
    file = tmp_path / "x.jsonl"
    made = replay("export", "replay", str(file), "--tokenizer", str(tmp_path / "tokenizer"), "--no-payloads")
    assert made.returncode == 0, made.stderr
    (row,) = read_rows(file)
    assert (row["prompt"], row["contexts"], row["completions"]) == ("1+1=", ["", ""], ["2", "2"])
    assert "payload" not in row
    said = fails("import", str(file), address=client.address)
    assert said == f"replay: {file}, row 1: there is no payload; export it with payloads\n"


def test_a_large_table_is_read_in_parts(replay, client, tmp_path):
    client.update_table("replay", max_size=100)
    with client.writer() as writer:
        keys = [writer.insert(make_group(seed=n), {"replay": 1.0}) for n in range(70)]
    file = tmp_path / "x.jsonl"
    assert replay("export", "replay", str(file)).returncode == 0
    assert [row["key"] for row in read_rows(file)] == [str(key) for key in keys]
    assert replay("export", "replay", str(file), "--limit", "40").stdout == f"40 items of replay written to {file}\n"
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
    said = fails("import", str(tmp_path / name), address=server.address)
    assert said.startswith(f"replay: {tmp_path}/{words}")


def test_numbers_that_json_does_not_have_become_null(replay, client, tmp_path):
    group = make_group(rewards=[0.0, 0.0])
    group.rollout_logprobs[:] = math.nan
    client.insert(group, {"replay": 1.0})
    file = tmp_path / "x.jsonl"
    replay("export", "replay", str(file))
    assert read_rows(file)[0]["mean_logprobs"] == [None, None]


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
    key = client.insert(group, {"replay": 1.0})
    file = tmp_path / name
    made = replay("export", "replay", str(file), "--tokenizer", str(tmp_path / "tokenizer"))
    assert made.returncode == 0, made.stderr
    (row,) = read_rows(file)
    assert (row["prompt"], row["contexts"], row["completions"]) == ("1+", ["1=", "23="], ["2", "24"])
    assert (row["context_tokens"], row["completion_tokens"], row["mean_logprobs"]) == ([2, 3], [1, 2], [-1.0, -2.0])
    with ReplayServer(tables=[TableConfig(name="replay")], port=0) as target, ReplayClient(target.address) as there:
        run_replay("import", str(file), address=target.address)
        assert there.get([key])[0].group == group


@pytest.mark.parametrize("name", ["replay.jsonl", "replay.parquet"])
def test_rollouts_of_several_sequences_are_imported_with_their_tags_and_columns(replay, client, tmp_path, name):
    group = make_sequences(extras={"values": np.arange(6, dtype=np.float32)}, axes={"values": "token"})
    tags = {"environment": "math", "level": 3, "7": "7"}
    key = client.insert(group, {"replay": 1.0}, tags=tags)
    raw = client.insert(b"no group", {"replay": 0.5}, tags={"environment": "code"})
    file = tmp_path / name
    made = replay("export", "replay", str(file))
    assert made.returncode == 0, made.stderr
    row = read_rows(file)[0]
    assert (row["group_size"], row["sequence_counts"], row["rewards"]) == (2, [2, 1], [1.0, 0.0])
    assert (row["completion_tokens"], row["context_tokens"]) == ([1, 2, 2], [0, 0, 1])
    assert (json.loads(row["tags"]) if name.endswith("parquet") else row["tags"]) == tags
    with ReplayServer(tables=[TableConfig(name="replay")], port=0) as target, ReplayClient(target.address) as there:
        imported = run_replay("import", str(file), address=target.address)
        assert imported.returncode == 0, imported.stderr
        for mine, theirs in zip(client.get([key, raw]), there.get([key, raw]), strict=True):
            assert bytes(mine.payload) == bytes(theirs.payload)
            assert mine.labels == theirs.labels
        assert there.get([key])[0].group == group
        assert there.get([key])[0].labels.columns == {"values"}


def test_tags_that_no_item_can_have_are_refused_by_file_and_row(replay, client, tmp_path):
    file = tmp_path / "x.jsonl"
    client.insert(make_group(), {"replay": 1.0}, tags={"environment": "math"})
    assert replay("export", "replay", str(file)).returncode == 0
    file.write_text(file.read_text().replace('"math"', "[1]"))
    said = fails("import", str(file), address=client.address)
    assert said == f"replay: {file}, row 1: tag 'environment' is [1]: a tag is a string, or an integer of 64 bits\n"
