"""`replay copy`, and `replay serve --restore ADDRESS`: folders, and an object store that speaks the protocol of S3."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from replay_cli.archive.segments import SegmentWriter
from replay_client import ReplayClient
from replay_client.testing import PATIENCE, until
from tests.kit.processes import COMMAND, fails, free_port, run_replay, server_process

moto = pytest.importorskip("moto.server", reason="make setup-dev installs it")
fsspec = pytest.importorskip("fsspec")
CONFIG = """
[server]
data_dir = "{folder}/data"
[checkpoints]
dir = "{folder}/checkpoints"
[[tables]]
name = "plain"
"""
EAGER = "from replay_cli import main; from replay_cli import copying; copying.LOOK_SECONDS = 0.1; main()"
INTERRUPTED = """
import itertools, signal, sys, threading
from pathlib import Path
from replay_cli import copying
from replay_client import waits

copying.LOOK_SECONDS = 0.01
folder = Path(sys.argv[1])
for interrupted in range(int(sys.argv[2])):
    lines = itertools.count()
    calls = []  # those of a wait, and of what it calls

    def trace(frame, event, _):
        if frame.f_code.co_filename not in (threading.__file__, waits.__file__):
            return None
        if event == "call" and (calls or frame.f_code.co_name == "wait"):
            calls.append(frame)
        if not calls:
            return None
        if event == "line" and next(lines) == interrupted:
            signal.raise_signal(signal.SIGTERM)
        return trace

    sys.settrace(trace)
    copying.copy(folder, str(folder))
    sys.settrace(None)
"""
"""A copier that ends at a signal, so many times. Each time the signal interrupts another line of its waits."""
STARTED: list[subprocess.Popen[str]] = []


class ObjectStore:
    """A server of S3, which may be away for a while."""

    def __init__(self) -> None:
        self.port = free_port()
        self.environment = {
            "AWS_ACCESS_KEY_ID": "us",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.port}",
            "AWS_MAX_ATTEMPTS": "1",
        }
        self.start()

    def start(self) -> None:
        self._server = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=self.port, verbose=False)
        self._server.start()

    def stop(self) -> None:
        self._server.stop()


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectStore]:
    store = ObjectStore()
    for name, value in store.environment.items():
        monkeypatch.setenv(name, value)
    request = urllib.request.Request(store.environment["AWS_ENDPOINT_URL"] + "/moto-api/reset", method="POST")
    urllib.request.urlopen(request).close()
    files_at("s3://bucket")[0].mkdir("bucket")
    yield store
    store.stop()
    while STARTED:
        STARTED.pop().kill()


def files_at(address: str):
    fs, path = fsspec.core.url_to_fs(address, skip_instance_cache=True)
    return fs, path


def names_at(address: str) -> list[str]:
    fs, path = files_at(address)
    fs.invalidate_cache()
    return sorted(Path(name).name for name in fs.ls(path, detail=False)) if fs.exists(path) else []


def copier(folder: Path, address: str, **environment: str) -> subprocess.Popen[str]:
    """`replay copy`, which looks often."""
    command = [COMMAND[0], "-c", EAGER, "copy", str(folder), address]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(command, env=os.environ | environment, **pipes)
    STARTED.append(process)
    assert process.stdout is not None
    assert process.stdout.readline() == f"copying {folder} to {address}\n"
    return process


def ended(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    process.send_signal(signal.SIGTERM)
    assert process.stdout is not None
    assert process.stderr is not None
    said, complained = process.stdout.read(), process.stderr.read()
    return process.wait(200), said, complained


@pytest.mark.parametrize("at", ["s3://bucket/run", "file://{folder}/elsewhere/run"])
def test_a_server_whose_disk_is_gone_starts_again_with_its_last_checkpoint_by_one_command(tmp_path, store, at):
    first, second = tmp_path / "first", tmp_path / "second"
    for folder in (first, second):
        (folder / "checkpoints").mkdir(parents=True)
    address = at.format(folder=tmp_path)
    with server_process(first, CONFIG.format(folder=first)) as server, ReplayClient(server.address) as client:
        copying = copier(first / "checkpoints", address)
        keys = []
        for _ in range(3):
            keys.append(client.insert(os.urandom(3000), {"plain": 1.0}))
            client.create_checkpoint()
            made = sorted(path.name for path in (first / "checkpoints").iterdir())
            until(lambda made=made: names_at(address) == made)
        payloads = [bytes(item.payload) for item in client.get(keys)]
        client.insert(b"after the last checkpoint", {"plain": 1.0})
        status, said, complained = ended(copying)
    assert status == 0
    assert said.count(" bytes copied\n") == 3
    assert complained == ""
    restored = server_process(second, CONFIG.format(folder=second), options=["--restore", address])
    with restored as server, ReplayClient(server.address) as client:
        assert [bytes(item.payload) for item in client.get(keys)] == payloads
        assert client.server_info().items == 3
    assert [path.name for path in (second / "checkpoints").iterdir()] == [made[-1]]


def test_a_store_that_is_away_is_said_once_and_what_it_lacks_follows(tmp_path, store):
    heartbeat = tmp_path / "heartbeat"
    folder = tmp_path / "archive"
    folder.mkdir()

    def finish() -> str:
        return SegmentWriter(folder).finish().name

    names = [finish()]
    writer = SegmentWriter(folder)  # is not finished
    copying = copier(folder, "s3://bucket/archive", REPLAY_HEARTBEAT=str(heartbeat))
    until(lambda: names_at("s3://bucket/archive") == names)
    until(heartbeat.exists)
    store.stop()
    names.append(finish())
    assert copying.stderr is not None
    line = copying.stderr.readline()
    assert line.startswith(f"replay: {folder} is not copied: ")
    assert "Could not connect" in line
    assert line.endswith("; it is tried again\n")
    heartbeat.unlink()  # it does not count as healthy meanwhile
    names.append(finish())
    store.start()
    until(heartbeat.exists)
    until(lambda: names_at("s3://bucket/archive") == sorted(names))
    names.append(writer.finish().name)
    status, said, complained = ended(copying)
    assert status == 0
    assert complained == ""
    assert said.splitlines()[-1].startswith(names[-1]) or "copying goes on" in said
    assert names_at("s3://bucket/archive") == sorted(names)
    assert sorted(path.name for path in folder.iterdir()) == sorted(names)


def test_a_copier_that_has_nothing_to_copy_counts_as_healthy(tmp_path):
    heartbeat = tmp_path / "heartbeat"
    folder = tmp_path / "archive"
    folder.mkdir()
    copying = copier(folder, str(tmp_path / "copies"), REPLAY_HEARTBEAT=str(heartbeat))
    until(heartbeat.exists)
    status, _, complained = ended(copying)
    assert status == 0
    assert complained == ""


def test_a_signal_ends_a_copier_whichever_line_of_its_wait_is_interrupted(tmp_path):
    times = 39
    command = [COMMAND[0], "-c", INTERRUPTED, str(tmp_path), str(times)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=PATIENCE)
    begun = done.stdout.splitlines()
    assert begun == [f"copying {tmp_path} to {tmp_path}"] * times


@pytest.mark.parametrize("address", ["s3://bucket/run", "{folder}/copies"])
def test_what_is_there_is_copied_again_only_if_it_differs(tmp_path, store, address):
    folder, address = tmp_path / "checkpoints", address.format(folder=tmp_path)
    folder.mkdir()
    rng, fs_and_path = random.Random(0), files_at(address)

    def copied() -> str:
        return ended(copier(folder, address))[1]

    for name in ("a.checkpoint", "b.checkpoint", "c.checkpoint.partial", "notes.txt"):
        (folder / name).write_bytes(rng.randbytes(1000))
    assert copied() == "a.checkpoint: 1000 bytes copied\nb.checkpoint: 1000 bytes copied\n"
    assert copied() == ""
    (folder / "a.checkpoint").write_bytes(rng.randbytes(1000))  # one of the same name, as large
    (folder / "b.checkpoint").unlink()  # the server keeps the last few
    assert copied() == "a.checkpoint: 1000 bytes copied\n"
    assert names_at(address) == ["a.checkpoint", "b.checkpoint"]
    fs, path = fs_and_path
    assert fs.cat_file(f"{path}/a.checkpoint") == (folder / "a.checkpoint").read_bytes()


def test_a_restore_from_an_address_says_why_it_is_impossible(tmp_path, store):
    (tmp_path / "replay.toml").write_text(CONFIG.format(folder=tmp_path))
    (tmp_path / "checkpoints").mkdir()

    def refusal(address: str) -> str:
        quietly = ("--log-level", "error")  # the packages of the stores say much
        said = fails("serve", "--config", str(tmp_path / "replay.toml"), "--restore", address, *quietly)
        return said.removeprefix(f"replay: {address}: ")

    assert refusal("s3://bucket/nothing") == "there is no checkpoint\n"
    assert refusal("ftps://host/run") == "replay: Protocol not known: ftps\n"
    (tmp_path / "theirs").mkdir()
    config = CONFIG.format(folder=tmp_path / "theirs")
    with server_process(tmp_path, config) as server, ReplayClient(server.address) as client:
        client.create_checkpoint("mine")
    (tmp_path / "replay.toml").write_text(CONFIG.format(folder=tmp_path))
    fs, path = files_at("s3://bucket/run")
    fs.put_file(str(tmp_path / "theirs/checkpoints/mine.checkpoint"), f"{path}/mine.checkpoint")
    (tmp_path / "checkpoints" / "mine.checkpoint").write_bytes(b"mine")
    assert "mine.checkpoint is another one of its name: move it away" in refusal("s3://bucket/run")
    assert (tmp_path / "checkpoints" / "mine.checkpoint").read_bytes() == b"mine"
    store.stop()
    assert "Could not connect" in refusal("s3://bucket/run")


def test_a_copy_that_was_cut_off_is_no_checkpoint_to_start_from(tmp_path, store):
    with server_process(tmp_path, CONFIG.format(folder=tmp_path)) as server, ReplayClient(server.address) as client:
        client.insert(bytes(3000), {"plain": 1.0})
        client.create_checkpoint("whole")
    (tmp_path / "checkpoints").rename(tmp_path / "before")
    fs, path = files_at("s3://bucket/run")
    fs.pipe_file(f"{path}/whole.checkpoint", (tmp_path / "before" / "whole.checkpoint").read_bytes()[:-100])
    (tmp_path / "data").rename(tmp_path / "data-before")
    done = run_replay("serve", "--config", str(tmp_path / "replay.toml"), "--restore", "s3://bucket/run")
    said = done.stderr.splitlines()[-1]
    assert done.returncode == 1
    assert "no checkpoint that can be restored" in said
    assert "its end is missing" in said


ORDERS = [("1", "2", "3"), ("3", "2", "1"), ("2", "3", "1")]


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """The folder of the checkpoints 1, 2 and 3, with so many items; 10 is the oldest, and has none."""
    folder = tmp_path_factory.mktemp("made")
    with server_process(folder, CONFIG.format(folder=folder)) as server, ReplayClient(server.address) as client:
        client.create_checkpoint("10")
        for name in ("1", "2", "3"):
            client.insert(os.urandom(3000), {"plain": 1.0})
            client.create_checkpoint(name)
    return folder / "checkpoints"


def restored(folder: Path, address: str) -> tuple[int, str]:
    """The items of a server that starts from the newest checkpoint there, and what it said."""
    folder.mkdir(exist_ok=True)
    log = folder / "log"
    options = ["--restore", address, "--log-level", "error"]
    with (
        log.open("w") as stderr,
        server_process(folder, CONFIG.format(folder=folder), options=options, stderr=stderr) as server,
        ReplayClient(server.address) as client,
    ):
        return client.server_info().items, log.read_text()


def upload(made: Path, address: str, *names: str) -> None:
    """One after the other: the last one is the newest object."""
    fs, path = files_at(address)
    fs.makedirs(path, exist_ok=True)
    for number, name in enumerate(names):
        fs.put_file(str(made / f"{name}.checkpoint"), f"{path}/{name}.checkpoint")
        local = Path(path) / f"{name}.checkpoint"
        if local.exists():
            os.utime(local, (1e9 + number, 1e9 + number))


@pytest.mark.parametrize("order", ORDERS, ids=str)
@pytest.mark.parametrize("at", ["s3://bucket/run", "{folder}/store"])
def test_the_checkpoint_that_was_made_last_is_restored_whenever_it_was_copied(tmp_path, store, made, at, order):
    address = at.format(folder=tmp_path)
    upload(made, address, *order, "10")
    items, _ = restored(tmp_path / "server", address)
    assert items == 3


@pytest.mark.parametrize("damage", ["the end", "the middle"])
@pytest.mark.parametrize("at", ["s3://bucket/run", "{folder}/store"])
def test_a_damaged_newest_checkpoint_gives_way_to_the_next_whole_one_and_that_is_said(
    tmp_path, store, made, at, damage
):
    address = at.format(folder=tmp_path)
    upload(made, address, "1", "2", "3")
    fs, path = files_at(address)
    whole = (made / "3.checkpoint").read_bytes()
    half = len(whole) // 2
    damaged = whole[:half] if damage == "the end" else whole[:half] + bytes([whole[half] ^ 1]) + whole[half + 1 :]
    fs.pipe_file(f"{path}/3.checkpoint", damaged)
    items, said = restored(tmp_path / "server", address)
    assert items == 2
    assert "2.checkpoint is taken, the newest whole checkpoint, for 3.checkpoint cannot be restored: its" in said
    assert not (tmp_path / "server/checkpoints/3.checkpoint").exists()


def test_a_restore_from_an_address_needs_a_folder_for_the_checkpoint(tmp_path, store):
    (tmp_path / "replay.toml").write_text('[[tables]]\nname = "plain"\n')
    said = fails("serve", "--config", str(tmp_path / "replay.toml"), "--restore", "/backup/run")
    assert "--restore /backup/run needs data_dir, or dir in [checkpoints]" in said
