"""Rows and files in the forms in which people have them, and what is said of a bad row."""

import gzip
import itertools
import json
import os
import subprocess
import sys
import threading
from array import array
from collections import deque
from datetime import date, datetime, time
from decimal import Decimal
from fractions import Fraction
from pathlib import PurePath
from uuid import UUID

import numpy as np
import pytest

from replay_generator.errors import PromptError
from replay_generator.prompts.prompt import (
    PreparedRows,
    Prompt,
    cycle_prompts,
    load_prompts,
    read_prompts,
    rows_in_turn,
)
from replay_generator.prompts.values import field_of
from tests.kit.processes import run_replay

pandas = pytest.importorskip("pandas")
pyarrow = pytest.importorskip("pyarrow")
datasets = pytest.importorskip("datasets")
from pyarrow import parquet  # noqa: E402

ROWS = [{"prompt": "1+1=", "answer": "2"}, {"prompt": "2+2=", "answer": "4"}]
LINES = "".join(f"{json.dumps(row)}\n" for row in ROWS).encode()


def table(path, rows=ROWS):
    path.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(pyarrow.Table.from_pylist(rows), path)


def write(path, content=LINES):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return str(path)


def texts(source, **options):
    loaded = load_prompts(str(source), **options)
    return [loaded[index].content for index in range(len(loaded))]


# ------------------------------------------------------------------------------------------ files


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.jsonl", LINES),
        ("a.json", json.dumps(ROWS).encode()),
        ("a.json", json.dumps(ROWS, indent=2).encode("utf-8-sig")),
        ("a.jsonl.gz", gzip.compress(LINES, mtime=0)),
        ("a.json.gz", gzip.compress(json.dumps(ROWS).encode(), mtime=0)),
        ("a.jsonl", gzip.compress(LINES, mtime=0)),
        ("a.txt", LINES),
        ("a", LINES),
    ],
    ids=["lines", "array", "pretty array", "gzip", "array in gzip", "gzip by another name", "txt", "no end"],
)
def test_a_file_is_read_for_what_it_holds(tmp_path, name, content):
    write(tmp_path / name, content)
    assert texts(tmp_path / name) == ["1+1=", "2+2="]
    assert [prompt.row["answer"] for prompt in read_prompts(tmp_path / name)] == ["2", "4"]


@pytest.mark.parametrize("name", ["a.parquet", "a.jsonl", "a"])
def test_a_parquet_file_is_read_whatever_its_name(tmp_path, name):
    table(tmp_path / name)
    assert texts(tmp_path / name) == ["1+1=", "2+2="]
    assert [prompt.row["answer"] for prompt in read_prompts(tmp_path / name)] == ["2", "4"]


def test_a_parquet_file_without_the_package_that_reads_it_names_the_package(tmp_path, monkeypatch):
    table(tmp_path / "a.parquet")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(
        ImportError, match=r"a\.parquet is a Parquet file, which needs the package pyarrow: pip install"
    ):
        load_prompts(str(tmp_path / "a.parquet"))


def test_prompts_without_a_name_are_refused():
    with pytest.raises(ValueError, match="the prompts have no name: give a file, a folder, or a data set"):
        load_prompts("")


@pytest.mark.parametrize(
    ("files", "others"),
    [
        (["a.jsonl"], []),
        (["train.parquet"], ["test.parquet", "README.md"]),
        (
            ["data/train-00000-of-00002.parquet", "data/train-00001-of-00002.parquet"],
            ["data/test-00000-of-00001.parquet"],
        ),
        (["train/0.parquet"], ["validation/0.parquet"]),
        (["math_train.jsonl"], ["math_val.jsonl"]),
        (["part-0.jsonl", "part-1.jsonl.gz"], ["dataset_infos.json"]),
    ],
    ids=["one", "verl", "hub", "folders", "names", "parts"],
)
def test_a_folder_is_the_files_of_a_split(tmp_path, files, others):
    for number, name in enumerate(files):
        rows = [{"prompt": f"{number}"}]
        write(tmp_path / name, b'{"prompt": "%d"}' % number) if "json" in name else table(tmp_path / name, rows)
    for name in others:
        write(tmp_path / name, b'{"prompt": "other"}') if "parquet" not in name else table(
            tmp_path / name, [{"prompt": "o"}]
        )
    assert texts(tmp_path) == [str(number) for number in range(len(files))]


def test_a_folder_says_which_splits_and_sets_it_has(tmp_path):
    table(tmp_path / "main" / "train.parquet")
    with pytest.raises(ValueError, match="has no split 'test', only train"):
        load_prompts(str(tmp_path / "main"), split="test")
    table(tmp_path / "socratic" / "train.parquet")
    with pytest.raises(ValueError, match="several data sets, main, socratic: give the folder of one"):
        load_prompts(str(tmp_path))
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"holds no prompts: neither files \*\.parquet"):
        load_prompts(str(tmp_path / "empty"))


@pytest.mark.parametrize(
    ("names", "says"),
    [
        (["a.parquet", "b.jsonl"], "holds files of two kinds, such as a.parquet and b.jsonl: give one file"),
        (["train.csv"], r"convert train.csv: python -c .import pandas; pandas.read_csv"),
        (["train.jsonl.zst"], "unpack train.jsonl.zst"),
    ],
)
def test_a_folder_with_files_that_would_be_lost_says_what_to_do(tmp_path, names, says):
    for name in names:
        table(tmp_path / name) if "parquet" in name else write(tmp_path / name)
    with pytest.raises(ValueError, match=says):
        load_prompts(str(tmp_path))


def test_files_of_systems_are_no_data_and_names_may_be_in_capitals(tmp_path):
    write(tmp_path / "._a.jsonl", b"\0\5\26\7")
    write(tmp_path / "A.JSONL")
    assert texts(tmp_path) == ["1+1=", "2+2="]


def test_files_of_a_folder_may_have_columns_of_their_own(tmp_path):
    table(tmp_path / "a.parquet", [{"question": "1"}])
    table(tmp_path / "b.parquet", [{"prompt": "2"}])
    with pytest.raises(ValueError, match=r"a.parquet, row 1 .* needs the field 'prompt'; this one has question"):
        load_prompts(str(tmp_path))
    assert load_prompts(str(tmp_path), check=False)[1].content == "2"


@pytest.mark.parametrize("name", ["a.jsonl.zst", "a.ndjson", "folder/of/mine", "./a.txt", "a.csv"])
def test_a_path_that_is_not_there_is_not_looked_for_on_the_hub(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError, match="there is no file or folder"):
        load_prompts(name)


def test_a_name_that_the_package_datasets_cannot_read_is_an_error_in_words():
    with pytest.raises(ValueError, match="'::' is no data set that can be loaded: IndexError"):
        load_prompts("::")


@pytest.mark.parametrize(
    "content", [LINES, gzip.compress(LINES, mtime=0), json.dumps(ROWS).encode()], ids=["lines", "gzip", "array"]
)
def test_a_pipe_is_read(tmp_path, content):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_bytes, args=[content])
    writer.start()
    assert texts(pipe) == ["1+1=", "2+2="]
    writer.join()


def test_minus_is_the_standard_input():
    program = (
        "from replay_generator.prompts.prompt import read_prompts; print([each.content for each in read_prompts('-')])"
    )
    done = subprocess.run([sys.executable, "-c", program], input=LINES, capture_output=True, check=True)
    assert done.stdout == b"['1+1=', '2+2=']\n"


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("a.csv", b"prompt,answer\n1+1=,2\n", r"convert it: python -c .*pandas\.read_csv\('.*a\.csv'"),
        ("a.tsv", b"prompt\tanswer\n", r"pandas\.read_table"),
        ("a.xlsx", b"PK\x03\x04", r"pandas\.read_excel"),
        ("a.jsonl", b"BZh91AY", "bunzip2"),
        ("a.jsonl", b"\xfd7zXZ\x00", "unxz"),
        ("a.jsonl", b"ARROW1\x00\x00", "an Arrow file"),
        ("a.jsonl", b'[{"prompt": "a"}]\n[{"prompt": "b"}]\n', r"a\.jsonl, line 1: a list where an object belongs"),
        ("a.json", b'["a", "b"]', r"a\.json, row 1: a str where an object belongs"),
        ("a.jsonl", b'{"a":' * 100_000, r"a\.jsonl, line 1: it is nested too deeply"),
    ],
)
def test_another_file_is_named_with_the_remedy(tmp_path, name, content, says):
    write(tmp_path / name, content)
    with pytest.raises(ValueError, match=says):
        load_prompts(str(tmp_path / name))


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("a.json", b'[\n{"prompt": "a"},\n]', "begins as a JSON array, and is damaged: .* line 3"),
        ("a.json", b'[{"prompt": "a"}', "begins as a JSON array, and is damaged"),
        ("a.csv.gz", gzip.compress(b"prompt\n1", mtime=0), r"pandas.read_csv\('.*a.csv.gz'.*to_json\('.*a.jsonl'"),
        ("A.CSV", b"prompt\n1", "pandas.read_csv"),
        ("a", b"prompt,answer\n1,2", "line 1: .*: it is no JSON, and each line must be an object"),
        ("a.parquet", b"version https://git-lfs.github.com/spec/v1", "run git lfs pull"),
    ],
)
def test_a_file_that_is_damaged_or_another_one_says_so(tmp_path, name, content, says):
    with pytest.raises(ValueError, match=says):
        load_prompts(write(tmp_path / name, content))


@pytest.mark.parametrize("content", [b'{\n"prompt": "a"\n}', b'\xef\xbb\xbf{\n"prompt": "a"}\n', b'{"prompt": "a"}'])
def test_a_file_may_be_one_object(tmp_path, content):
    assert texts(write(tmp_path / "a.json", content)) == ["a"]


def test_the_line_that_converts_csv_makes_a_file_that_is_read(tmp_path, monkeypatch):
    write(tmp_path / "a.csv", b"prompt,answer\n1+1=,2\n")
    with pytest.raises(ValueError, match="convert it") as refused:
        load_prompts(str(tmp_path / "a.csv"))
    program = str(refused.value).partition('python -c "')[2].rstrip('"')
    exec(program)
    (prompt,) = read_prompts(tmp_path / "a.jsonl")
    assert prompt.row == {"prompt": "1+1=", "answer": "2"}


# ------------------------------------------------------------------------------------------ paths


NESTED = {"extra_info": {"question": "1+1=", "turns": [{"value": "2+2="}]}, "a.b": "3+3="}


@pytest.mark.parametrize(
    ("path", "found"),
    [("extra_info.question", "1+1="), ("extra_info.turns.0.value", "2+2="), ("a.b", "3+3=")],
)
def test_a_field_may_be_named_by_its_path(tmp_path, path, found):
    assert Prompt.of(NESTED, path).content == found
    assert field_of(NESTED, path) == found
    table(tmp_path / "a.parquet", [NESTED])
    assert texts(tmp_path / "a.parquet", prompt_field=path) == [found]


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("question", "needs the field 'question'; this one has extra_info, a.b"),
        ("extra_info.answer", "needs the field 'extra_info.answer'; extra_info has question, turns"),
        ("extra_info.question.text", "extra_info.question has '1[+]1=', which has no fields"),
        ("extra_info.turns.7", "extra_info.turns has"),
    ],
)
def test_a_path_that_leads_nowhere_says_what_is_there(path, says):
    with pytest.raises(ValueError, match=says):
        Prompt.of(NESTED, path)


# ------------------------------------------------------------------------------------------ bad rows

BAD = [None, "", [], 3, [{"role": "user"}], [{"role": "user", "content": [{"type": "image_url"}]}], "\ud800", [3]]


@pytest.mark.parametrize("bad", BAD, ids=lambda each: f"{each!a}"[:30])
def test_a_bad_row_is_named_and_does_not_end_the_others(tmp_path, bad):
    rows = [{"prompt": "a"}, {"prompt": bad}, {"prompt": "b"}]
    prompts = cycle_prompts(rows, epochs=1)
    drawn, errors = [], []
    while len(drawn) + len(errors) < 3:
        try:
            drawn.append(next(prompts).content)
        except PromptError as error:
            errors.append(str(error))
    assert sorted(drawn) == ["a", "b"]
    assert next(prompts, None) is None
    assert errors[0].startswith("row 2 (index 1) of the prompts: ")
    write(tmp_path / "a.jsonl", "".join(f"{json.dumps(row)}\n" for row in rows).encode())
    with pytest.raises(ValueError, match=r"a\.jsonl, line 2: "):
        load_prompts(str(tmp_path / "a.jsonl"))
    loaded = load_prompts(str(tmp_path / "a.jsonl"), check=False)
    assert loaded[2].content == "b"
    with pytest.raises(PromptError, match=r"a\.jsonl, line 2: "):
        loaded[1]


def test_a_line_that_is_no_json_is_the_bad_row_of_its_number(tmp_path):
    write(tmp_path / "a.jsonl", b'{"prompt": "a"}\n{"prompt": \n{"prompt": "b"}\n')
    loaded = load_prompts(str(tmp_path / "a.jsonl"), check=False)
    assert loaded[0].content == "a"
    with pytest.raises(PromptError, match=r"a\.jsonl, line 2: Expecting value"):
        loaded[1]
    assert loaded[2].content == "b"


@pytest.mark.parametrize("bad", [None, ""])
def test_a_bad_row_of_a_data_set_is_found_when_its_turn_comes(tmp_path, bad):
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_list([{"prompt": "a"}, {"prompt": bad}]).save_to_disk(tmp_path)
    loaded = load_prompts(str(tmp_path))
    assert loaded[0].content == "a"
    with pytest.raises(PromptError, match=r"row 2 \(index 1\): 'prompt' must be a text"):
        loaded[1]


HALF = "\ud83d"


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"prompt_id": HALF}, "field 'prompt_id' holds half of a surrogate pair"),
        ({"answer": f"a{HALF}"}, "field 'answer' holds half"),
        ({"info": {"a": [{"b": HALF}]}}, "field 'info' holds half"),
        ({"info": {HALF: 1}}, "field 'info' holds half"),
        ({HALF: 1}, "holds half"),
        ({"tags": {"kind": HALF}}, "field 'tags' holds half"),
        ({"info": json.loads("[" * 500 + "]" * 500)}, "field 'info' is nested more than"),
        ({"tags": {"kind": 1.5}}, "tag 'kind' is 1.5"),
    ],
)
def test_what_no_store_can_hold_is_a_bad_row(row, says):
    with pytest.raises(ValueError, match=says):
        Prompt.of({"prompt": "a"} | row)


@pytest.mark.parametrize(
    ("value", "held"),
    [
        (float("nan"), None),
        (float("-inf"), None),
        ([1.0, float("nan")], [1.0, None]),
        ({"a": {"b": float("inf")}}, {"a": {"b": None}}),
        (np.float32("nan"), None),
        (np.int64(3), 3),
        (np.bool_(True), True),
        (np.str_("a"), "a"),
        (np.array([1, 2]), [1, 2]),
        (np.array(["a", None], object), ["a", None]),
        (np.array([{"a": np.array([1.5, np.nan])}], object), [{"a": [1.5, None]}]),
        (pandas.NA, None),
        (pandas.NaT, None),
        ((1, 2), [1, 2]),
        ({2, 1}, [1, 2]),
        (deque([1]), [1]),
        (Decimal("1.50"), "1.50"),
        (datetime(2020, 1, 2, 3), "2020-01-02T03:00:00"),
        (date(2020, 1, 2), "2020-01-02"),
        (time(1, 2), "01:02:00"),
        (pandas.Timestamp("2020-01-02"), "2020-01-02T00:00:00"),
        (np.datetime64("2020-01-02", "ns"), "2020-01-02T00:00:00.000000000"),
        (np.array(["2020-01-02", "NaT"], "datetime64[D]"), ["2020-01-02", None]),
        (UUID(int=3), "00000000-0000-0000-0000-000000000003"),
        (Fraction(1, 2), "1/2"),
        (PurePath("a/b"), "a/b"),
        (2**70, 2**70),
        (-(2**70), -(2**70)),
    ],
    ids=lambda each: f"{each!r:.30}",
)
def test_values_of_a_row_are_those_that_json_has(value, held):
    prompt = Prompt.of({"prompt": "a", "value": value})
    assert prompt.row["value"] == held
    assert json.loads(json.dumps(prompt.row, allow_nan=False)) == prompt.row
    assert Prompt.unpacked(prompt.packed()).row == prompt.row


@pytest.mark.parametrize(
    ("value", "named"), [(object(), "an object"), (array("d", [1.0]), "an array"), (bytearray, "a type")]
)
def test_a_value_that_no_table_stores_is_named_by_its_type(value, named):
    prompt = Prompt.of({"prompt": "a", "value": [value]})
    with pytest.raises(PromptError, match=f"cannot be stored in a table: {named} has no type there; leave out"):
        prompt.packed()


def test_rows_of_pandas_are_rows(tmp_path):
    messages = [{"role": "user", "content": "1+1="}]
    table(tmp_path / "a.parquet", [{"prompt": messages, "answer": 2}])
    frame = pandas.read_parquet(tmp_path / "a.parquet")
    for row in (frame.iloc[0], frame.to_dict("records")[0]):
        prompt = Prompt.of(row)
        assert prompt.content == tuple(messages)
        assert prompt.row["answer"] == 2


def in_a_table(rows):
    return pyarrow.Table.from_pylist(rows)


def in_a_data_set(rows):
    return datasets.Dataset.from_list(rows)


@pytest.mark.parametrize("hold", [in_a_table, in_a_data_set])
@pytest.mark.parametrize("ask", [cycle_prompts, PreparedRows, rows_in_turn])
def test_rows_of_arrow_that_a_program_gives_have_no_nulls_of_arrow(hold, ask):
    calls = [{"function": {"name": "f", "arguments": {"a": 1}}}, {"function": {"name": "f", "arguments": {"b": 2}}}]
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "tool_calls": calls}]
    rows = [{"prompt": [*messages, {"role": "tool", "content": "b"}], "tools": [{"name": "f", "x": {"y": 1}}]}]
    other = {"prompt": [{"role": "user", "content": "c"}], "tools": [{"name": "g", "x": {"z": 1}}]}
    prompts = ask(hold([*rows, other]))
    found = {prompt.prompt_id: prompt for prompt in itertools.islice(iter(prompts), 2)}
    for row in (*rows, other):
        expected = Prompt.of(row)
        assert found[expected.prompt_id].content == expected.content
        assert found[expected.prompt_id].tools() == expected.tools()


def test_a_row_of_a_streamed_data_set_that_is_nested_too_deeply_is_one_bad_prompt():
    def rows():
        deep: list = []
        for _ in range(1000):
            deep = [deep]
        yield {"prompt": "a"}
        yield {"prompt": "b", "tools": deep}
        yield {"prompt": "c"}

    prompts = iter(rows_in_turn(datasets.IterableDataset.from_generator(rows)))
    assert next(prompts)["prompt"] == "a"
    with pytest.raises(PromptError, match=r"row 2 of the streamed data set: .*nested"):
        next(prompts)
    assert next(prompts)["prompt"] == "c"


def test_a_frame_of_pandas_is_rows_and_a_data_set_in_splits_says_to_choose_one():
    frame = pandas.DataFrame([{"prompt": "a", "answer": 1}, {"prompt": "b", "answer": 2}])
    assert sorted(prompt.content for prompt in cycle_prompts(frame, epochs=1)) == ["a", "b"]
    splits = datasets.DatasetDict({"train": in_a_data_set([{"prompt": "a"}])})
    with pytest.raises(ValueError, match=r"in splits, train: choose one, such as rows\['train'\]"):
        cycle_prompts(splits)


def test_a_row_may_hold_an_object_that_nothing_knows():
    thing = object()
    assert Prompt.of({"prompt": "a", "thing": thing}).row["thing"] is thing


# ------------------------------------------------------------------------------------------ names of prompts


def test_rows_that_ask_the_same_and_want_another_answer_have_names_of_their_own():
    rows = [{"prompt": "a", "answer": answer} for answer in ("1", "2")]
    first, second = map(Prompt.of, rows)
    assert first.prompt_id != second.prompt_id
    assert [Prompt.of(row).prompt_id for row in rows] == [first.prompt_id, second.prompt_id]


def test_a_row_has_one_name_however_it_was_stored(tmp_path):
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "name": "x"}]
    rows = [{"prompt": messages, "answer": "1", "more": {"x": 1}}, {"prompt": messages[:1], "answer": "2"}]
    table(tmp_path / "a.parquet", rows)
    write(tmp_path / "a.jsonl", "".join(f"{json.dumps(row)}\n" for row in rows).encode())
    names = [[prompt.prompt_id for prompt in read_prompts(tmp_path / name)] for name in ("a.parquet", "a.jsonl")]
    assert names[0] == names[1]
    turned = dict(reversed(rows[0].items()))
    assert Prompt.of(turned | {"none": None, "thing": object(), "nan": float("nan")}).prompt_id == names[0][0]


@pytest.mark.parametrize(
    ("given", "name"), [(1, "1"), (1.0, "1"), (2.5, "2.5"), (True, "True"), ("a", "a"), (np.int64(4), "4")]
)
def test_a_prompt_id_is_a_text_or_a_number(given, name):
    assert Prompt.of({"prompt": "a", "prompt_id": given}).prompt_id == name


@pytest.mark.parametrize("given", [None, "", float("nan"), pandas.NA])
def test_rows_without_a_prompt_id_have_names_of_their_own(given):
    names = {Prompt.of({"prompt": text, "prompt_id": given}).prompt_id for text in "ab"}
    assert len(names - {""}) == 2


@pytest.mark.parametrize("given", [[], {}, ["a"], b"a", "x" * 257, "x" * 1_000_000])
def test_what_is_no_name_is_refused(given):
    with pytest.raises(ValueError, match=r"^'prompt_id' ") as caught:
        Prompt.of({"prompt": "a", "prompt_id": given})
    assert len(str(caught.value)) < 200


def test_numbers_that_arrow_makes_floats_name_the_same_prompt():
    assert Prompt.of({"prompt": "a", "x": 1}).prompt_id == Prompt.of({"prompt": "a", "x": 1.0}).prompt_id


@pytest.mark.parametrize("depth", [64, 65, 100_000])
@pytest.mark.parametrize("field", ["more", "prompt"])
def test_a_row_may_be_nested_64_deep_and_says_its_field_beyond(depth, field):
    value = "x"
    for _ in range(depth):
        value = [value]
    if (depth, field) == (64, "more"):
        assert Prompt.of({"prompt": "a", "more": value}).row["more"] == value
        return
    with pytest.raises(ValueError, match=r"each message needs|field '(more|prompt)' is nested more than 64 deep"):
        Prompt.of({"prompt": "a"} | {field: value})


def test_a_prompt_keeps_its_name_when_the_others_of_its_file_change():
    row = {"prompt": "a", "answer": "1"}
    alone = next(cycle_prompts([row])).prompt_id
    among = {prompt.prompt_id for prompt in itertools.islice(cycle_prompts([row, {"prompt": "b"}]), 2)}
    assert alone in among


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ([], "a.jsonl, line 1: a row needs the field 'prompt'"),
        (
            ["--set", 'evaluation={"chat_template_kwargs": [1]}'],
            "[evaluation] chat_template_kwargs must be a dict, not [1]",
        ),
        (["--set", 'evaluation={"chatt": true}'], "[evaluation]: "),
        (["--set", "evaluation=chat"], "evaluation is a section of the file"),
        (["--set", 'evaluation={"system": "Be brief."}'], "[evaluation] system is a text, and needs chat = true"),
        (
            ["--set", 'evaluation={"prompt_field": "q.text"}', "--eval-reward", "no"],
            "reward must be 'exact_match' or 'math_answer' or",
        ),
    ],
)
def test_replay_train_reads_held_out_prompts_as_generators_read_theirs(tmp_path, options, says):
    status = 2 if options else 1  # a setting is misused, or a row is bad
    write(tmp_path / "a.jsonl", b'{"q": {"text": "1+1="}, "answer": "2"}')
    command = ["train", "--model", str(tmp_path), "--output-dir", str(tmp_path / "out")]
    done = run_replay(*command, "--eval-prompts", str(tmp_path / "a.jsonl"), *options)
    assert done.returncode == status
    assert says in done.stderr


def test_a_column_of_tools_that_chat_tells_a_template_is_a_bad_row_by_its_line(tmp_path):
    path = write(tmp_path / "a.jsonl", b'{"prompt": "a"}\n{"prompt": "b", "tools": ["hammer"]}\n')
    rows = PreparedRows(load_prompts(path), chat=True)
    with pytest.raises(PromptError, match=r"a\.jsonl, line 2: 'tools' is a text that is no JSON"):
        rows[1]
    done = run_replay("generate", "--model", str(tmp_path), "--prompts", path, "--chat", "--reward", "exact_match")
    assert done.returncode == 1
    assert "a.jsonl, line 2: 'tools' is a text that is no JSON" in done.stderr
