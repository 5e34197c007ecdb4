"""The archive with real processes: a server, archivers that are killed and stopped, and readers."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from replay_cli.archive import archiver as archiving
from replay_cli.archive.archiver import Archiver
from replay_cli.archive.reading import read_groups
from replay_cli.archive.rows import GROUP_COLUMNS as group_columns
from replay_cli.archive.segments import SegmentWriter, remove_unfinished, segments
from replay_client import ReplayClient, RolloutGroup
from replay_client.errors import ServerUnavailableError
from replay_client.testing import make_group, until
from replay_server import ReplayServer, TableConfig
from tests.kit.clocks import in_a_thread
from tests.kit.groups import make_sequences
from tests.kit.processes import COMMAND, fails, free_port, run_replay, server_process, start_server

CONFIG = """
[server]
max_payload_bytes = "4MiB"
{server}
[[tables]]
name = "rollouts"
rate_limiter = {{ type = "queue", max_size = 100000 }}
forward_to = "replay"
copy_to = "archive"
[[tables]]
name = "replay"
max_size = 3
[[tables]]
name = "archive"
{archive}
"""
QUEUE = TableConfig(name="rollouts", rate_limiter={"type": "queue", "max_size": 8}, copy_to="archive")


STARTED: list[subprocess.Popen[str]] = []


def config(archive: str = "", server: str = "") -> str:
    return CONFIG.format(archive=archive, server=server)


def archiver(address: str, folder: Path, *options: str) -> subprocess.Popen[str]:
    """`replay archive run`, when it archives."""
    command = [*COMMAND, "--address", address, "archive", "run", str(folder), *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    STARTED.append(process)
    assert process.stdout is not None
    assert process.stdout.readline().startswith("archiving "), "it did not start"
    return process


@pytest.fixture(autouse=True, scope="module")
def eager(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """An archiver lets every other process of the machine go first: on a busy one nobody could wait for it. Those that
    begin here do not."""
    folder = tmp_path_factory.mktemp("eager")
    (folder / "sitecustomize.py").write_text("import os\n\nos.nice = lambda _: 0\n")
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("PYTHONPATH", str(folder), prepend=os.pathsep)
        yield


@pytest.fixture(autouse=True)
def none_is_left() -> Iterator[None]:
    """Ends the archivers of a test that fails: they would wait for their server for ever."""
    yield
    while STARTED:
        STARTED.pop().kill()


def end(process: subprocess.Popen[str], number: signal.Signals = signal.SIGTERM) -> int:
    process.send_signal(number)
    assert process.stdout is not None
    process.stdout.read()
    process.stdout.close()
    return process.wait(60)


def archived(folder: Path) -> list[int]:
    return [int(row["key"]) for row in read_groups(folder, ["key"])]


def insert_some(client: ReplayClient, n: int, **fields) -> list[int]:
    keys = []
    with client.writer() as writer:
        for number in range(n):
            group = make_group(rewards=[1.0, 0.0], prompt_id=f"p{number % 5}", seed=number, **fields)
            keys.append(writer.insert(group, {"rollouts": 1.0}, tags={"environment": "math" if number % 2 else "code"}))
    return keys


def waits(client: ReplayClient) -> int:
    table = client.server_info(tables=["archive"]).tables["archive"]
    return table.size + table.reserved


@pytest.mark.long
def test_each_group_is_archived_once_whatever_is_killed(tmp_path):
    folder, data = tmp_path / "archive", tmp_path / "data"
    address = f"127.0.0.1:{free_port()}"
    text = config(server=f'data_dir = "{data}"')
    often = ("--segment-bytes", "20000", "--lease", "2", "--segment-seconds", "0.5")
    with server_process(tmp_path, text, address=address) as server, ReplayClient(address, timeout=60.0) as client:
        keys: list[int] = []
        for _ in range(3):
            process = archiver(address, folder, *often)
            keys += insert_some(client, 150)
            until(lambda: segments(folder), "no segment")
            end(process, signal.SIGKILL)
        process = archiver(address, folder, *often)
        keys += insert_some(client, 150)
        server.kill()
        again = start_server(tmp_path / "replay.toml", address=address)
        try:
            keys += insert_some(client, 50)
            until(lambda: waits(client) == 0, "it is not archived")
            assert end(process) == 0
            assert client.server_info().tables["archive"].evicted == 0
        finally:
            again.kill()
    assert sorted(archived(folder)) == sorted(keys)
    assert list(folder.glob("*.tmp")) == []


@pytest.mark.long
def test_what_a_killed_archiver_had_in_its_hands_is_archived_once_by_the_next(tmp_path):
    folder = tmp_path / "archive"
    with server_process(tmp_path, config()) as server, ReplayClient(server.address) as client:
        process = archiver(server.address, folder, "--lease", "1", "--segment-bytes", "2000")
        keys = insert_some(client, 20)
        until(lambda: segments(folder), "no segment")
        end(process, signal.SIGKILL)
        keys += insert_some(client, 5)
        process = archiver(server.address, folder, "--segment-seconds", "0.5")
        until(lambda: waits(client) == 0, "it is not archived")
        assert end(process) == 0
    assert sorted(archived(folder)) == sorted(keys)
    assert list(folder.glob("*.tmp")) == []


@pytest.mark.long
def test_inserts_go_on_while_the_archiver_stands_still_and_what_it_misses_is_counted(tmp_path):
    folder = tmp_path / "archive"
    text = config('max_bytes = "4MiB"', 'max_bytes = "8MiB"')
    with server_process(tmp_path, text) as server, ReplayClient(server.address) as client:
        process = archiver(server.address, folder, "--segment-seconds", "0.2", "--lease", "1")
        keys = [client.insert(make_group(), {"rollouts": 1.0})]
        until(lambda: segments(folder), "no segment")
        process.send_signal(signal.SIGSTOP)
        payload = bytes(100_000)
        for _ in range(150):  # 15 MB pass through a server of 8 MB
            keys.append(client.insert(payload, {"rollouts": 1.0}))
            client.sample("rollouts", 1)
        info = client.server_info()
        assert info.tables["rollouts"].inserting.count == 0
        assert info.bytes <= 8 << 20
        process.send_signal(signal.SIGCONT)
        until(lambda: waits(client) == 0, "it is not archived")
        assert end(process) == 0
        lost = client.server_info().tables["archive"].evicted_unsampled
    there = archived(folder)
    assert lost > 0
    assert len(set(there)) == len(there)
    assert len(keys) - lost <= len(there) < len(keys)  # the archiver had some in its hands when they were let go


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """An archive of six groups and bytes that are none, and the trainer's steps that took some of them."""
    folder, place = tmp_path_factory.mktemp("archive"), tmp_path_factory.mktemp("server")
    with server_process(place, config()) as server, ReplayClient(server.address) as client:
        process = archiver(server.address, folder, "--segment-seconds", "0.2")
        keys = insert_some(client, 4, version=2)
        keys.append(client.insert(make_sequences(), {"rollouts": 0.5}))
        keys.append(client.insert(b"no group", {"rollouts": 0.0}, policy_version=7))
        keys.append(client.insert(make_group(version=8, prompt_id="late"), {"rollouts": 1.0}))
        client.sample("rollouts", 5)
        client.delete("rollouts", [keys[5]])
        until(lambda: waits(client) == 0, "it is not archived")
        assert end(process) == 0
        steps = place / "steps.jsonl"
        lines = [
            {"step": 1, "trained": [used(keys[0], "fresh"), used(keys[1], "fresh")], "left_out": [], "unusable": []},
            {
                "step": 2,
                "trained": [used(keys[0], "replayed")],
                "left_out": [used(keys[2])],
                "unusable": [{"key": keys[3], "table": "rollouts", "reason": "no tokens"}, used(77)],
            },
        ]
        steps.write_text("".join(json.dumps(line) + "\n" for line in lines))
        payloads = {item.key: bytes(item.payload) for item in client.get(keys[2:5])}
    return folder, steps, keys, payloads


def hole(data: bytes) -> bytes:
    """As a disk loses a sector."""
    middle = len(data) // 3
    return data[:middle] + bytes(100) + data[middle + 100 :]


def used(key: int, source: str = "") -> dict:
    return {"key": key, "prompt_id": "p", "policy_version": 2, "rank": 0} | ({"source": source} if source else {})


def listed(stored, *options: str) -> list[int]:
    folder, steps, keys, _ = stored
    done = run_replay("archive", "list", str(folder), "--steps-path", str(steps), *options, "--json")
    assert done.returncode == 0, done.stderr
    return [keys.index(int(row["key"])) for row in json.loads(done.stdout)]


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ((), [0, 1, 2, 3, 4, 5, 6]),
        (("--prompt-id", "p1"), [1]),
        (("--policy-version", "2"), [0, 1, 2, 3]),
        (("--policy-version", "3.."), [5, 6]),
        (("--policy-version", "..2", "--tag", "environment=code"), [0, 2]),
        (("--limit", "2"), [0, 1]),
        (("--outcome", "trained"), [0, 1]),
        (("--outcome", "left-out"), [2]),
        (("--outcome", "unusable"), [3]),
        (("--outcome", "unknown"), [4, 5, 6]),
    ],
    ids=lambda value: " ".join(map(str, value)) or "all",
)
def test_list_finds_groups_by_what_they_are_and_by_what_became_of_them(stored, options, found):
    assert listed(stored, *options) == found


def test_a_list_says_what_is_known_of_a_group(stored):
    folder, steps, keys, _ = stored
    said = run_replay("archive", "list", str(folder), "--steps-path", str(steps), "--key", str(keys[0])).stdout
    assert "step 1 (fresh); step 2 (replayed)" in said
    assert "environment=code" in said


def test_a_step_shows_what_the_steps_of_the_trainer_say(stored):
    folder, steps, keys, _ = stored
    done = run_replay("archive", "step", str(folder), "2", "--steps-path", str(steps), "--json")
    document = json.loads(done.stdout)
    assert [int(each["key"]) for each in document["trained"]] == [keys[0]]
    assert [int(each["key"]) for each in document["left_out"]] == [keys[2]]
    assert [(int(each["key"]), each["archived"]) for each in document["unusable"]] == [(keys[3], True), (77, False)]
    assert document["trained"][0]["source"] == "replayed"
    shown = run_replay("archive", "step", str(folder), "2", "--steps-path", str(steps)).stdout
    assert shown.splitlines()[0] == "trained: 1"
    assert shown.splitlines()[-1] == "in no finished file: 1"
    (being_written := folder / "groups-9.parquet.tmp").touch()
    shown = run_replay("archive", "step", str(folder), "2", "--steps-path", str(steps)).stdout
    being_written.unlink()
    assert shown.splitlines()[-1] == "in no finished file: 1; 1 file not finished yet"


@pytest.mark.parametrize("ending", ["parquet", "jsonl"])
def test_what_an_archive_exports_is_imported_bit_by_bit(stored, tmp_path, ending):
    folder, _, keys, payloads = stored
    file = tmp_path / f"out.{ending}"
    done = run_replay("archive", "export", str(folder), str(file))
    assert done.returncode == 0, done.stderr
    assert done.stdout[:8] == "7 items ", done.stderr
    with server_process(tmp_path) as server, ReplayClient(server.address) as client:
        done = run_replay("table", "import", str(file), address=server.address)
        assert done.returncode == 0, done.stderr
        items = {item.key: item for item in client.get(keys)}
        assert items.keys() == set(keys)
        assert {key: bytes(items[key].payload) for key in payloads} == payloads
        assert bytes(items[keys[5]].payload) == b"no group"
        assert items[keys[4]].tables["rollouts"].priority == 0.5
        assert items[keys[1]].tags == {"environment": "math"}
        assert np.array_equal(items[keys[6]].group.rewards, make_group().rewards)


@pytest.mark.parametrize("damage", [lambda data: b"", lambda data: data[:-9], hole], ids=["empty", "cut", "hole"])
def test_one_damaged_file_is_named_and_hides_no_other_file(stored, tmp_path, damage):
    folder, _, keys, _ = stored
    again = shutil.copytree(folder, tmp_path / "archive")
    whole = segments(again)[0]
    damaged = whole.with_name(whole.name.replace("-", "-0", 1))  # it comes before all others
    damaged.write_bytes(damage(whole.read_bytes()))
    done = run_replay("archive", "list", str(again), "--json")
    assert done.returncode == 0
    assert [keys.index(int(row["key"])) for row in json.loads(done.stdout)] == [*range(7)]
    assert done.stderr.count("\n") == 1, done.stderr
    assert f"{damaged} is damaged" in done.stderr, done.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("list", "{folder}/none"), "is no folder"),
        (("list", "{folder}", "--outcome", "eaten"), "'eaten' is not one of 'trained'"),
        (("list", "{folder}", "--policy-version", "new"), "'new' is not a policy version"),
        (("list", "{folder}", "--key", "k"), "'k' is not a key"),
        (("step", "{folder}", "9", "--steps-path", "{steps}"), "has no step 9"),
        (("step", "{folder}", "9", "--steps-path", "{folder}/none"), "none: No such file"),
        (("export", "{folder}", "groups.csv"), "must end with .jsonl or .parquet"),
    ],
    ids=["folder", "outcome", "version", "key", "step", "steps", "format"],
)
def test_a_mistake_is_answered_with_one_line(stored, words, said):
    folder, steps, *_ = stored
    given = [word.format(folder=folder, steps=steps) for word in words]
    status = 2 if "is not one of" in said or "is not a" in said or "end with" in said else 1
    assert said in fails("archive", *given, status=status)


@pytest.mark.long
def test_a_server_that_comes_back_is_archived_on_and_one_that_stays_away_ends_its_archiver(tmp_path, monkeypatch):
    monkeypatch.setattr(archiving, "MOST_SILENCE", 10.0)
    folder, address = tmp_path / "archive", f"127.0.0.1:{free_port()}"

    def archive() -> None:
        with ReplayClient(address, timeout=2.0) as client:
            Archiver(client, folder, print, segment_seconds=0.1).run(lambda: False)

    def insert_and_see() -> None:
        with ReplayClient(address, timeout=60.0) as client:
            keys = insert_some(client, 3)
            until(lambda: set(keys) <= set(archived(folder)), "it is not archived")
        assert not running.done()

    with server_process(tmp_path, config(), address=address):
        folder.mkdir()
        running = in_a_thread(archive)
        insert_and_see()
    with server_process(tmp_path, config(), address=address):
        insert_and_see()
    assert type(running.exception(60)) is ServerUnavailableError


def test_an_archiver_ends_when_there_are_no_copies_any_more(tmp_path):
    folder, address = tmp_path / "archive", f"127.0.0.1:{free_port()}"
    with server_process(tmp_path, config(), address=address):
        process = archiver(address, folder, "--segment-seconds", "0.2")
    with server_process(tmp_path, "[[tables]]\nname = 'rollouts'\n", address=address):
        assert process.wait(60) == 1


def test_a_restart_keeps_what_is_not_archived_and_lets_it_go_first(tmp_path):
    queue = QUEUE.model_copy(update={"when_full": "block"})
    settings = {"tables": [queue], "port": 0, "max_bytes": "100KB", "data_dir": tmp_path / "data"}
    with ReplayServer(**settings) as server, ReplayClient(server.address) as client:
        keys = [client.insert(bytes(30_000), {"rollouts": 1.0}) for _ in range(3)]
        client.sample("rollouts", 3)
    with ReplayServer(**settings) as server, ReplayClient(server.address) as client:
        assert [item.key for item in client.list_items("archive", descending=True)] == keys
        keys += [client.insert(bytes(30_000), {"rollouts": 1.0}) for _ in range(2)]
        assert [item.key for item in client.list_items("archive", descending=True)] == keys[2:]
        assert client.server_info().tables["archive"].evicted_unsampled == 2


def test_an_archiver_says_which_copies_there_are(tmp_path):
    one = "[[tables]]\nname = 'a'\n"
    two = one + "copy_to = 'b'\n[[tables]]\nname = 'c'\ncopy_to = 'd'\n"
    for text, options, said in (
        (one, (), "none, so set copy_to"),
        (two, (), "b, d"),
        (two, ("--table", "a"), "b, d"),
    ):
        with server_process(tmp_path, text) as server:
            options = (str(tmp_path / "archive"), *options)
            assert said in fails("archive", "run", *options, address=server.address)


def test_what_a_killed_archiver_left_unfinished_is_removed_and_what_another_one_writes_stays(tmp_path):
    left = tmp_path / "groups-1-a.parquet.tmp"
    left.write_bytes(b"half")
    mine = SegmentWriter(tmp_path)
    assert remove_unfinished(tmp_path) == 1
    assert mine.finish() == segments(tmp_path)[0]
    assert os.listdir(tmp_path) == [segments(tmp_path)[0].name]


def test_a_segment_that_another_archiver_removes_before_it_is_locked_is_begun_anew(tmp_path, monkeypatch):
    flock = fcntl.flock
    removed = []

    def flock_after_another_archiver_has_begun(file, operation):
        monkeypatch.setattr(fcntl, "flock", flock)
        removed.append(remove_unfinished(tmp_path))
        flock(file, operation)

    monkeypatch.setattr(fcntl, "flock", flock_after_another_archiver_has_begun)
    mine = SegmentWriter(tmp_path)
    assert removed == [1]
    assert remove_unfinished(tmp_path) == 0
    assert mine.finish() == segments(tmp_path)[0]


def test_an_archiver_minds_only_files(tmp_path):
    folder = tmp_path / "archive"
    folder.mkdir()
    for name in ("x.parquet.tmp", "groups-1.parquet"):
        os.mkfifo(folder / name)
    (folder / "groups-2.parquet").mkdir()
    with server_process(tmp_path, config()) as server, ReplayClient(server.address) as client:
        process = archiver(server.address, folder, "--segment-seconds", "0.2")
        keys = insert_some(client, 3)
        until(lambda: waits(client) == 0, "it is not archived")
        assert end(process) == 0
    done = run_replay("archive", "list", str(folder), "--json")
    assert [int(row["key"]) for row in json.loads(done.stdout)] == keys


def test_a_group_is_archived_without_the_columns_that_cannot_be_written(tmp_path, monkeypatch, caplog):
    for name, wrong in {"finish_reasons": [1, 2], "reward_mean": "high", "group_size": 1 << 80}.items():
        kind, right = group_columns[name]
        monkeypatch.setitem(
            group_columns,
            name,
            (kind, lambda group, right=right, wrong=wrong: wrong if group.prompt_id == "p1" else right(group)),
        )
    folder = tmp_path / "archive"
    with ReplayServer(tables=[QUEUE], port=0) as server, ReplayClient(server.address) as client:
        keys = insert_some(client, 7)
        Archiver(client, folder, lambda _: None).run(lambda: True)
        assert waits(client) == 0
    rows = list(read_groups(folder))
    assert [int(row["key"]) for row in rows] == keys
    assert [row["reward_mean"] for row in rows] == [0.5, None, 0.5, 0.5, 0.5, 0.5, None]
    odd = rows[1]
    assert odd["finish_reasons"] is None
    assert odd["group_size"] is None
    assert odd["prompt_id"] == "p1"
    assert odd["rewards"] == [1.0, 0.0]
    assert RolloutGroup.decode(odd["payload"]).prompt_id == "p1"
    [said] = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert "2 items without columns that could not be written" in said
    assert f"the first is {keys[1]} without group_size, finish_reasons, reward_mean: " in said
